"""Starting and stopping: up, join, down; draining a node, and forgetting one that is gone.

In the foreground a command keeps its processes and stops them at Ctrl-C. With `--detach` it starts itself
again in the background, waits until that one is ready, and leaves. Not for: the processes
themselves (cluster/local.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Annotated

import typer

from genie.cli import output
from genie.cli.app import INTERRUPTED, Invocation, app, command, read_token_file
from genie.errors import GenieError, UsageError
from genie.model.names import address_text, parse_address

if TYPE_CHECKING:
    from pathlib import Path

    from genie.cluster.client import ClusterClient
    from genie.cluster.local import Supervisor
    from genie.config import Settings
    from genie.model.job import Job

_LIST_S = 3.0

NodeId = Annotated[str, typer.Argument(metavar="NODE", help="Id of the node, as 'genie nodes' shows it.")]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="K=V", help="Label of this node that jobs can ask for; repeatable."),
]
Rack = Annotated[
    str | None, typer.Option(metavar="NAME", help="Where this machine stands; a rack's nodes are near.")
]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Go on in the background, and return.")]


@command(app, "up", example="genie up --detach")
def up(
    invocation: Invocation,
    *,
    detach: Detach = False,
    bind: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on (default: 127.0.0.1).")
    ] = None,
    port: Annotated[
        str | None, typer.Option(metavar="N", help="Port to listen on (default: 5555; 0: a free one).")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(metavar="STORE", help="sqlite (default), sqlite:/PATH or etcd://HOST:PORT,..."),
    ] = None,
    tls: Annotated[
        str | None, typer.Option(metavar="on|off", help="off is for loopback only (default: on).")
    ] = None,
    no_agent: Annotated[
        bool, typer.Option("--no-agent", help="Only the controller; this machine offers nothing.")
    ] = False,
    label: Labels = None,
    rack: Rack = None,
) -> None:
    """Start a cluster on this machine: a controller, and an agent that offers its accelerators.

    Without --detach it runs until Ctrl-C and then stops everything that it started.
    """
    given = {"controller.bind": bind, "controller.port": port, "controller.store": store}
    settings = invocation.load_settings(
        {**given, "controller.tls": tls, **_place_settings(label, rack)}, keep_logs=True
    )
    from genie.controller.admission import check_bind

    check_bind(settings.controller)
    if detach:
        from genie.cli import background

        flags = {"--bind": bind, "--port": port, "--store": store, "--tls": tls}
        arguments = [f"{name}={value}" for name, value in flags.items() if value is not None]
        arguments += ["--no-agent"] if no_agent else []
        arguments += _place_arguments(label, rack)
        background.start(["up", *arguments], settings=settings, invocation=invocation)
        asyncio.run(_report(settings))
        return
    from genie.cluster import local

    keeping = local.up(settings, progress=output.say, agent=not no_agent)
    raise typer.Exit(_keep(keeping, settings))


@command(app, "join", example="genie join 10.0.0.5 --token-file join.token --detach")
def join(
    invocation: Invocation,
    *,
    controller: Annotated[str, typer.Argument(metavar="ADDR[:PORT]", help="The cluster's controller.")],
    token: Annotated[
        str | None,
        typer.Option(
            metavar="T",
            help="A join token ('genie token create --join'), '-' for standard input. "
            "Others on this machine can see it in the list of processes; --token-file hides it.",
        ),
    ] = None,
    node_id: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of this node; the host name when not given.")
    ] = None,
    label: Labels = None,
    rack: Rack = None,
    detach: Detach = False,
) -> None:
    """Offer this machine's accelerators to a cluster elsewhere.

    The token is needed the first time only; after that this machine has an identity of its own.
    """
    host, port = parse_address(controller, what="ADDR")
    if token is not None and invocation.token_file is not None:
        raise UsageError("--token and --token-file exclude each other", hint="give one of them")
    text = read_token_file("-", what="--token") if token == "-" else token
    arguments = {
        "cluster.discovery_method": "address",
        "cluster.master_addr": host,
        "cluster.master_port": port,
        "cluster.node_id": node_id,
        **({} if text is None else {"cluster.token": text}),
        **_place_settings(label, rack),
    }
    settings = invocation.load_settings(arguments, keep_logs=True)
    _check_join_token(settings)
    from genie.cluster import local

    if detach:
        from genie.cli import background

        again = ["join", controller, *(() if node_id is None else (f"--node-id={node_id}",))]
        again += _place_arguments(label, rack)
        background.start(again, settings=settings, invocation=invocation, token=settings.cluster.token)
        running = local.find_running(settings.paths.state_dir)
        output.write_line(_joined_text(settings, running.node_id if running else "-"))
        return
    keeping = local.up_agent(settings, settings.cluster, progress=output.say)
    raise typer.Exit(_keep(keeping, settings))


@command(app, "down", example="genie down")
def down(invocation: Invocation) -> None:
    """Stop what 'genie up' or 'genie join' started on this machine. Running jobs end with it."""
    from genie.cluster import local

    settings = invocation.load_settings()
    found = local.find_running(settings.paths.state_dir)
    if found is None:
        output.write_line("nothing to stop: no cluster and no agent runs here")
        return
    state_dir = settings.paths.state_dir
    progress: Callable[[str], None] = output.say
    if local.CONTROLLER in found.pids:
        _say_jobs_that_end(settings)
    elif found.node_id:
        progress = _nothing_said
        output.say(f"stopping the agent of node {found.node_id}")
    asyncio.run(local.stop_running(state_dir, progress=progress, agent_grace_s=settings.agent.stop_grace_s))
    output.write_line("stopped")


@command(app, "forget", example="genie forget gpu-box-3")
def forget(
    invocation: Invocation,
    *,
    node_id: NodeId,
) -> None:
    """Remove a node that is gone for good from the cluster. Its identity opens nothing from now on.

    Refused while the node is connected. To come back, the machine joins again with a new token.
    """
    _change_node(invocation, node_id, lambda client: client.forget_node(node_id))
    output.write_line(f"{node_id}  forgotten")


@command(app, "drain", example='genie drain gpu-box-3 --reason "new fans on Friday"')
def drain(
    invocation: Invocation,
    *,
    node_id: NodeId,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why; 'genie nodes' and waiting jobs show it.")
    ] = "",
) -> None:
    """Place nothing new on a node; what runs there goes on. It stays drained until 'genie undrain'."""
    _change_node(invocation, node_id, lambda client: client.drain_node(node_id, reason=reason))
    output.write_line(f"{node_id}  draining")


@command(app, "undrain", example="genie undrain gpu-box-3")
def undrain(
    invocation: Invocation,
    *,
    node_id: NodeId,
) -> None:
    """Place work on a drained node again."""
    _change_node(invocation, node_id, lambda client: client.undrain_node(node_id))
    output.write_line(f"{node_id}  open")


def _change_node(
    invocation: Invocation, node_id: str, change: Callable[[ClusterClient], Awaitable[None]]
) -> None:
    from genie.cluster.client import open_client
    from genie.model.names import checked_node_id

    checked_node_id(node_id, what="NODE")
    settings = invocation.load_settings()

    async def work() -> None:
        async with open_client(settings) as client:
            await change(client)

    asyncio.run(work())


def _place_settings(label: list[str] | None, rack: str | None) -> dict[str, object]:
    """What the options say of this machine, as settings; what they do not say is left to the others."""
    from genie.model.names import checked_label, checked_labels

    pairs = [text.partition("=") for text in label or ()]
    for key, sign, value in pairs:
        if not sign:
            raise UsageError(f"--label {key!r} has no '='", hint="write --label KEY=VALUE")
        if sum(key == other for other, _, _ in pairs) > 1:
            raise UsageError(f"--label {key}={value}: {key} is given twice", hint="give each name one value")
    labels = checked_labels({key: value for key, _, value in pairs}, what="--label")
    if rack is not None:
        checked_label(rack, what="--rack")
    return {"agent.labels": labels or None, "agent.rack": rack}


def _place_arguments(label: list[str] | None, rack: str | None) -> list[str]:
    """The same options once more, for `--detach`."""
    return [*(f"--label={text}" for text in label or ()), *(() if rack is None else (f"--rack={rack}",))]


def _check_join_token(settings: Settings) -> None:
    """A token that cannot be one is an error now, and not in the log of the agent."""
    from genie.model.names import checked_node_id
    from genie.tenancy.access import parse_token

    if settings.cluster.node_id is not None:
        checked_node_id(settings.cluster.node_id, what="--node-id")
    if settings.cluster.token is not None:
        parse_token(settings.cluster.token)


def _keep(keeping: AbstractAsyncContextManager[Supervisor], settings: Settings) -> int:
    return asyncio.run(_keep_until_stopped(keeping, settings))


async def _keep_until_stopped(keeping: AbstractAsyncContextManager[Supervisor], settings: Settings) -> int:
    """Starts, reports, and waits for Ctrl-C, SIGTERM or the end of the children. Stops all in order."""
    ready = False
    with _stop_signals() as stopped:
        try:
            async with keeping as supervisor:
                with _recorded(settings.paths.state_dir):
                    ready = True
                    if supervisor.cluster is not None:
                        await _report(settings)
                    else:
                        output.write_line(_joined_text(settings, supervisor.node_id))
                    output.say("running; press Ctrl-C to stop")
                    await supervisor.wait()
                    output.say("it was stopped from outside")
        except asyncio.CancelledError:
            if not stopped:
                raise
    return 0 if ready else INTERRUPTED


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """The first Ctrl-C or SIGTERM cancels the task inside; more of them change nothing: it is stopping."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    seen: list[int] = []

    def stop(number: int) -> None:
        seen.append(number)
        if len(seen) == 1:
            output.say("stopping")
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        yield seen
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _recorded(state_dir: Path) -> Iterator[None]:
    """Lets 'genie down' and `--detach` find this process, as the one that keeps the others."""
    from genie.cluster import local, processes

    processes.record_process(state_dir, local.KEEPER, os.getpid(), ready=True)
    try:
        yield
    finally:
        processes.forget_record(state_dir, local.KEEPER)


async def _report(settings: Settings) -> None:
    """What a person needs to know of a cluster that has just started."""
    from genie.cli.view_commands import standby_facts, write_nodes
    from genie.cluster.client import open_client
    from genie.cluster.local import owner_access
    from genie.runtime.credentials import OWNER_TOKEN_FILE, LocalCluster, is_loopback

    state_dir = settings.paths.state_dir
    found = LocalCluster.read(state_dir)
    assert found is not None, "the controller writes this before it answers"
    where = address_text(found.host, found.port)
    if not (state_dir / OWNER_TOKEN_FILE).exists():  # only a standby has none: see the guide
        output.write_facts([("address", where), ("role", "standby"), ("stop", "genie down")])
        return
    access = owner_access(state_dir, found)
    async with open_client(dataclasses.replace(settings, cluster=access)) as client:
        status = await client.status()
        if not status.leading:
            output.write_facts([("address", where), *standby_facts(status), ("stop", "genie down")])
            return
        views = await client.nodes()
    if views:
        write_nodes(views)
        output.write_line("")
    there = f'"{found.host}", master_port={found.port}' if found.port != 5555 else f'"{found.host}"'
    output.write_facts(
        [
            ("address", where),
            ("token", f"{state_dir / OWNER_TOKEN_FILE} (commands on this machine find it by themselves)"),
            ("python", f"await genie.init(master_addr={there})"),
            ("job", "genie submit --wait -- echo hello"),
            ("join", _join_text(where, loopback=is_loopback(found.host))),
            ("stop", "genie down"),
        ]
    )


def _join_text(where: str, *, loopback: bool) -> str:
    if loopback:
        return "this cluster listens on loopback only; genie up --bind ADDRESS lets other machines in"
    made = "(umask 077; genie token create --join > join.token)"
    return f"{made}; there: genie join {where} --token-file join.token"


def _joined_text(settings: Settings, node_id: str) -> str:
    where = address_text(settings.cluster.master_addr or "", settings.cluster.master_port)
    return f"joined {where} as {node_id}"


def _nothing_said(_line: str) -> None:
    """For progress that would speak of a cluster where there is only an agent."""


def _say_jobs_that_end(settings: Settings) -> None:
    try:
        jobs = asyncio.run(_running_jobs(settings))
    except (GenieError, TimeoutError) as error:
        output.say(f"which jobs run is not known: {output.one_line(str(error)) or 'no answer'}")
        return
    for job in jobs:
        output.say(f"job {job.job_id} ({job.spec.name}) is {job.state} and will end")


async def _running_jobs(settings: Settings) -> list[Job]:
    from genie.cluster.client import open_client
    from genie.cluster.local import owner_access
    from genie.model.job import JobState
    from genie.runtime.credentials import LocalCluster

    state_dir = settings.paths.state_dir
    found = LocalCluster.read(state_dir)
    if found is None:
        return []
    ours = dataclasses.replace(settings, cluster=owner_access(state_dir, found))
    async with asyncio.timeout(_LIST_S), open_client(ours, timeout_s=_LIST_S) as client:
        jobs, _more = await client.list_jobs(states=(JobState.PLACING, JobState.RUNNING))
        return jobs
