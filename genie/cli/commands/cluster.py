"""Commands that start and stop a cluster (up, join, down) and remove a node (forget).

In the foreground, `up` and `join` supervise their processes and stop them at Ctrl-C. With `--detach` they
start themselves in the background, wait until the background process is ready, and return. The processes
are supervised by supervisor/local_cluster.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from genie.cli import output
from genie.cli.app import INTERRUPTED_EXIT_CODE, Invocation, app, command, read_token_file
from genie.cli.quantities import format_count, parse_labels
from genie.errors import GenieError, UsageError
from genie.model.names import address_text, parse_address

if TYPE_CHECKING:
    from genie.cluster.client import ClusterClient
    from genie.config import Settings
    from genie.model.job import Job
    from genie.supervisor.local_cluster import Supervisor

_LIST_JOBS_TIMEOUT_S = 3.0
_TERMINATED_JOBS_SHOWN_MAX = 100

NodeIdArgument = Annotated[str, typer.Argument(metavar="NODE", help="Node ID, as listed by 'genie nodes'.")]
LabelsOption = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="K=V", help="Label of this node; jobs can select it; repeatable."),
]
RackOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Rack name; nodes of one rack count as close.")
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        metavar="STORE",
        help="Store: sqlite, sqlite:/PATH, etcd (run by Genie) or etcd://HOST:PORT,... (default: sqlite).",
    ),
]
ServerOption = Annotated[
    bool, typer.Option("--server", help="Join as a server: run an etcd member and a controller here, too.")
]
ServerBindOption = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="With --server: address to listen on (default: 127.0.0.1)."),
]
ServerPortOption = Annotated[
    str | None, typer.Option(metavar="N", help="With --server: port to listen on (default: 5555).")
]
NoAgentOption = Annotated[
    bool, typer.Option("--no-agent", help="With --server: run no agent, so that no job runs here.")
]
AgentOption = Annotated[
    bool | None,
    typer.Option(
        "--agent/--no-agent",
        help="Run an agent, so that jobs run here (default: as before with etcd, else --agent).",
    ),
]
JoinTokenOption = Annotated[
    str | None,
    typer.Option(
        metavar="T",
        help="Join token ('genie token create --join'); - reads standard input. "
        "Visible in the process list; --token-file is not.",
    ),
]
DetachOption = Annotated[bool, typer.Option("--detach", "-d", help="Run in the background.")]


@command(
    app,
    "up",
    example="genie up --detach",
    no_address_hint="it starts a cluster on this machine; to choose where it listens, use --bind and --port",
)
def up(
    invocation: Invocation,
    *,
    detach: DetachOption = False,
    bind: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on (default: 127.0.0.1).")
    ] = None,
    port: Annotated[
        str | None, typer.Option(metavar="N", help="Port to listen on; 0 picks a free port (default: 5555).")
    ] = None,
    store: StoreOption = None,
    tls: Annotated[
        str | None,
        typer.Option(metavar="on|off", help="Use TLS; off is allowed on loopback only (default: on)."),
    ] = None,
    agent: AgentOption = None,
    rejoin: Annotated[
        bool, typer.Option("--rejoin", help="Add the node of this machine again after 'genie forget'.")
    ] = False,
    label: LabelsOption = None,
    rack: RackOption = None,
) -> None:
    """Start a cluster on this machine: a controller, and an agent for its accelerators.

    Without --detach, runs until Ctrl-C and then stops controller and agent. A server waits until a majority
    of the servers has started; with --detach, the command fails after 30 s, and the server goes on waiting.
    """
    given = {"controller.bind": bind, "controller.port": port, "controller.store": store}
    settings = invocation.load_settings(
        {**given, "controller.tls": tls, **_label_and_rack_settings(label, rack)}, keep_info_logs=True
    )
    from genie.controller.nodes.admission import check_bind_address
    from genie.supervisor import machine_role
    from genie.supervisor.etcd_member import with_settings_of_local_member

    machine_role.check_may_start_cluster(settings.paths.state_dir)  # before its options are checked
    settings = with_settings_of_local_member(settings)
    machine_role.check_etcd_address(settings)
    check_bind_address(settings.controller)
    if detach:
        flags = {"--bind": bind, "--port": port, "--store": store, "--tls": tls}
        arguments = [f"{name}={value}" for name, value in flags.items() if value is not None]
        arguments += [] if agent is None else ["--agent" if agent else "--no-agent"]
        arguments += ["--rejoin"] if rejoin else []
        arguments += _label_and_rack_arguments(label, rack)
        _start_cluster_in_background(arguments, settings=settings, invocation=invocation)
        return
    from genie.supervisor import local_cluster

    supervision = local_cluster.run_local_cluster(
        settings,
        progress=output.ProgressPrinter(),
        agent=agent,
        rejoin=rejoin,
        timeout_s=local_cluster.start_timeout_s(settings),
        is_program=True,
    )
    raise typer.Exit(_run_supervisor_and_get_exit_code(supervision, settings))


@command(
    app,
    "join",
    example="genie join 10.0.0.5 --token-file join.token --detach",
    no_address_hint="give the address of the controller as an argument: genie join ADDR[:PORT]",
)
def join(
    invocation: Invocation,
    *,
    controller: Annotated[str, typer.Argument(metavar="ADDR[:PORT]", help="Address of the controller.")],
    token: JoinTokenOption = None,
    server: ServerOption = False,
    no_agent: NoAgentOption = False,
    bind: ServerBindOption = None,
    port: ServerPortOption = None,
    node_id: Annotated[str | None, typer.Option(metavar="NAME", help="Node ID (default: host name).")] = None,
    label: LabelsOption = None,
    rack: RackOption = None,
    detach: DetachOption = False,
) -> None:
    """Add this machine and its accelerators to a cluster on another machine.

    The token is needed only the first time; after that, the machine has its own credentials. A server is
    started again with 'genie up'.
    """
    text = _read_join_token(token, token_file=invocation.token_file, server=server)
    if not server and (bind is not None or port is not None):
        raise UsageError("--bind and --port require --server", hint="an agent listens on no fixed port")
    if not server and no_agent:
        raise UsageError("--no-agent requires --server", hint="without an agent, a node runs nothing")
    given = {"controller.bind": bind, "controller.port": port, **_label_and_rack_settings(label, rack)}
    given |= _join_settings(controller, token=text, node_id=node_id)
    settings = invocation.load_settings(given, keep_info_logs=True)
    _validate_token_and_node_id(settings)
    from genie.supervisor import local_cluster

    if detach:
        from genie.cli import background
        from genie.supervisor import machine_role

        if not server:
            machine_role.check_may_start_as_node(
                settings.paths.state_dir
            )  # before the start in the background

        flags = {"--node-id": node_id, "--bind": bind, "--port": port}
        join_command = ["join", controller]
        join_command += [name for name, value in (("--server", server), ("--no-agent", no_agent)) if value]
        join_command += [f"{name}={value}" for name, value in flags.items() if value is not None]
        join_command += _label_and_rack_arguments(label, rack)
        background.start_in_background(
            join_command,
            settings=settings,
            invocation=invocation,
            token=settings.cluster.token,
            extra_timeout_s=local_cluster.SERVER_JOIN_TIMEOUT_S if server else 0.0,
        )
        running = local_cluster.find_running_cluster(settings.paths.state_dir)
        name = "a server without an agent" if no_agent else running.node_id if running else "-"
        _print_joined(settings, name)
        return
    start = local_cluster.run_local_agent
    if server:
        start = partial(local_cluster.run_joining_server, agent=not no_agent)
    supervision = start(settings, settings.cluster, progress=output.ProgressPrinter(), is_program=True)
    raise typer.Exit(_run_supervisor_and_get_exit_code(supervision, settings))


@command(
    app,
    "down",
    example="genie down",
    no_address_hint="it stops the cluster or agent on this machine; run 'genie down' on the machine to stop",
)
def down(
    invocation: Invocation,
    *,
    keep_jobs: Annotated[
        bool, typer.Option("--keep-jobs", help="Leave the jobs of this machine running, for an upgrade.")
    ] = False,
) -> None:
    """Stop the cluster or agent on this machine. Jobs that run on it are terminated.

    With --keep-jobs they continue, and the next 'genie up' or 'genie join' takes them over. Restartable jobs
    are queued again if that takes longer than 0.7 x controller.node_ttl_s.
    """
    from genie.supervisor import etcd_majority, local_cluster, machine_role
    from genie.supervisor.etcd_member import ETCD

    settings = invocation.load_settings()
    state_dir = settings.paths.state_dir
    found = local_cluster.find_running_cluster(state_dir)
    if found is None:
        if not keep_jobs and (count := asyncio.run(local_cluster.kill_leftover_jobs(state_dir))):
            output.print_message(f"ended processes of jobs that an agent had left running: {count}")
        output.write_line("nothing to stop: no cluster or agent is running on this machine")
        return
    progress: Callable[[str], None] = output.print_message
    is_member = ETCD in found.pids  # not after its removal
    remaining = asyncio.run(etcd_majority.describe_remaining_servers(state_dir)) if is_member else ""
    if remaining:
        output.print_message(remaining)
    if local_cluster.CONTROLLER in found.pids:
        if not keep_jobs:
            _print_jobs_to_terminate(settings, found.node_id, has_other_servers=bool(remaining))
    elif found.node_id:
        progress = _ignore_progress
        output.print_message(f"stopping the agent of node {found.node_id}")
    asyncio.run(
        local_cluster.stop_running_cluster(
            state_dir, progress=progress, agent_grace_s=settings.agent.stop_grace_s, keep_jobs=keep_jobs
        )
    )
    start_again = machine_role.describe_how_to_start(state_dir, found.node_id)
    if keep_jobs and found.node_id:
        output.write_line(f"stopped; its jobs continue: {start_again}")
        return
    output.write_line("stopped")
    output.print_message(start_again)


@command(app, "forget", example="genie forget gpu-box-3")
def forget(
    invocation: Invocation,
    *,
    node_id: NodeIdArgument,
) -> None:
    """Remove a node from the cluster and revoke its credentials.

    Its jobs are recorded as lost; restartable ones are queued again. If the machine is only isolated, other
    jobs may still be running there; they end when it reaches the cluster again and is rejected.

    Fails while the node is connected. To rejoin, the machine needs a new join token.
    """
    send_node_request(invocation, node_id, lambda client: client.forget_node(node_id))
    output.write_line(f"{node_id}: removed")
    output.print_message(
        f"if {node_id} is only isolated, its jobs may still be running; its agent ends them when it reaches "
        "a controller, or run 'genie down' on it"
    )


def send_node_request(
    invocation: Invocation, node_id: str, send: Callable[[ClusterClient], Awaitable[None]]
) -> None:
    """Send a request about a node, after a check of its ID."""
    from genie.cluster.client import open_client
    from genie.model.names import validate_node_id

    validate_node_id(node_id, what="NODE")
    settings = invocation.load_settings()

    async def work() -> None:
        async with open_client(settings) as client:
            await send(client)

    asyncio.run(work())


def _label_and_rack_settings(label: list[str] | None, rack: str | None) -> dict[str, object]:
    """Return --label and --rack as settings; None leaves a setting to its other sources."""
    from genie.config.labels import validate_label

    labels = parse_labels(label)
    if rack is not None:
        validate_label(rack, what="--rack")
    return {"agent.labels": labels or None, "agent.rack": rack}


def _label_and_rack_arguments(label: list[str] | None, rack: str | None) -> list[str]:
    """Return --label and --rack as command-line arguments, for `--detach`."""
    return [*(f"--label={text}" for text in label or ()), *(() if rack is None else (f"--rack={rack}",))]


def _join_settings(controller: str, *, token: str | None, node_id: str | None) -> dict[str, object]:
    host, port = parse_address(controller, what="ADDR")
    return {
        "cluster.discovery_method": "address",
        "cluster.master_addr": host,
        "cluster.master_port": port,
        "cluster.node_id": node_id,
        **({} if token is None else {"cluster.token": token}),
    }


def _read_join_token(token: str | None, *, token_file: str | None, server: bool) -> str | None:
    """Returns --token, or standard input for `-`; None if it is not given."""
    if token is not None and token_file is not None:
        raise UsageError("--token and --token-file are mutually exclusive", hint="give one of them")
    if server and token not in (None, "-"):
        raise UsageError(
            "--token of a server would be visible in the process list, and it hands over the cluster's CA",
            hint="use --token-file FILE, or --token - to read standard input",
        )
    return read_token_file("-", what="--token") if token == "-" else token


def _validate_token_and_node_id(settings: Settings) -> None:
    """Reject a malformed token or node ID here instead of in the agent's log."""
    from genie.model.names import validate_node_id
    from genie.tenancy.access import parse_token

    if settings.cluster.node_id is not None:
        validate_node_id(settings.cluster.node_id, what="--node-id")
    if settings.cluster.token is not None:
        parse_token(settings.cluster.token)


def _start_cluster_in_background(arguments: list[str], *, settings: Settings, invocation: Invocation) -> None:
    from genie.cli import background
    from genie.supervisor.local_cluster import START_TIMEOUT_S, start_timeout_s

    background.start_in_background(
        ["up", *arguments],
        settings=settings,
        invocation=invocation,
        extra_timeout_s=max(start_timeout_s(settings) - START_TIMEOUT_S, 0.0),
    )
    asyncio.run(_print_started_cluster(settings))


def _run_supervisor_and_get_exit_code(
    supervision: AbstractAsyncContextManager[Supervisor], settings: Settings
) -> int:
    return asyncio.run(_supervise_until_signal_or_exit(supervision, settings))


async def _supervise_until_signal_or_exit(
    supervision: AbstractAsyncContextManager[Supervisor], settings: Settings
) -> int:
    """Start the processes and wait for Ctrl-C, SIGTERM or their exit. Return the exit code."""
    from genie.agent import KEEP_JOBS_SIGNAL

    ready = False
    with _cancel_current_task_on_signal(signal.SIGINT, signal.SIGTERM, KEEP_JOBS_SIGNAL) as received:
        try:
            async with supervision as supervisor:
                supervisor.record_ready()
                ready = True
                try:
                    await _report_start_and_wait(supervisor, settings)
                finally:
                    # Without a signal, what has stopped the agent has decided about its jobs.
                    if not received or received[0] == KEEP_JOBS_SIGNAL:
                        supervisor.keep_jobs_on_stop()
        except asyncio.CancelledError:
            if not received:
                raise
    return 0 if ready else INTERRUPTED_EXIT_CODE


async def _report_start_and_wait(supervisor: Supervisor, settings: Settings) -> None:
    if supervisor.cluster is not None:
        await _print_started_cluster(settings)
    else:
        _print_joined(settings, supervisor.node_id)
    output.print_message("running; press Ctrl-C to stop")
    await supervisor.wait()
    output.print_message("stopped by another process")


@contextlib.contextmanager
def _cancel_current_task_on_signal(*numbers: signal.Signals) -> Iterator[list[signal.Signals]]:
    """Cancel the current task at the first of these signals; ignore further ones. The list contains those
    that were received."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1:
            output.print_message("stopping")
            task.cancel()

    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield received
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _print_started_cluster(settings: Settings) -> None:
    """Print nodes, addresses and next commands of a cluster that has just started."""
    from genie.cli.commands.status import standby_fields, write_node_and_gpu_tables
    from genie.cluster.client import open_client
    from genie.controller.nodes.admission import advertised_host
    from genie.model.names import is_loopback
    from genie.runtime.credentials import OWNER_TOKEN_FILE, LocalCluster
    from genie.supervisor.local_cluster import make_owner_access

    state_dir = settings.paths.state_dir
    found = LocalCluster.read(state_dir)
    assert found is not None, "the controller writes local.json before it accepts connections"
    where = address_text(found.host, found.port)
    if not (state_dir / OWNER_TOKEN_FILE).exists():  # only a standby has none
        output.write_fields([("address", where), ("role", "standby"), ("stop", "genie down")])
        return
    access = make_owner_access(state_dir, found)
    async with open_client(dataclasses.replace(settings, cluster=access)) as client:
        status = await client.status()
        if not status.leading:
            output.write_fields([("address", where), *standby_fields(status), ("stop", "genie down")])
            return
        views = await client.nodes()
    if views:
        write_node_and_gpu_tables(views)
        output.write_line("")
    public_host = advertised_host(settings.controller)
    init_address = f'"{found.host}", master_port={found.port}' if found.port != 5555 else f'"{found.host}"'
    output.write_fields(
        [
            ("address", where),
            ("token", f"{state_dir / OWNER_TOKEN_FILE} (read by commands on this machine)"),
            ("python", f"await genie.init(master_addr={init_address})"),
            ("job", "genie submit --wait -- echo hello"),
            *_join_and_login_commands(
                address_text(public_host, found.port), loopback=is_loopback(public_host)
            ),
            ("stop", "genie down"),
        ]
    )


def _join_and_login_commands(where: str, *, loopback: bool) -> list[tuple[str, str]]:
    """Return the commands with which other machines join and log in."""
    from genie.supervisor.hosting import JOIN_TOKEN_COMMAND

    if loopback:
        return [
            (
                "join",
                "not possible: the cluster listens on loopback only; restart with: genie up --bind ADDRESS",
            )
        ]
    return [
        ("join", f"{JOIN_TOKEN_COMMAND}; on the other machine: genie join {where} --token-file join.token"),
        ("login", f"genie token create; on the other machine: genie login {where}"),
    ]


def _print_joined(settings: Settings, node_id: str) -> None:
    """Print what was joined; of a server also where it listens, and what two servers lack."""
    from genie.controller.etcd.local_member import LocalMember
    from genie.runtime.credentials import LocalCluster

    where = address_text(settings.cluster.master_addr or "", settings.cluster.master_port)
    own, member = LocalCluster.read(settings.paths.state_dir), LocalMember.read(settings.paths.state_dir)
    listening = f"; it listens on {address_text(own.host, own.port)}" if own and member else ""
    output.write_line(f"joined {where} as {node_id}{listening}")
    if own and member and len(member.endpoints) == 1:
        output.print_message(
            "two servers are less available than one: the loss of either stops all changes; join a third one"
        )


def _ignore_progress(_line: str) -> None:
    """Progress callback that prints nothing."""


def _print_jobs_to_terminate(settings: Settings, node_id: str, *, has_other_servers: bool = False) -> None:
    """`node_id` is that of the agent on this machine; empty without one."""
    try:
        jobs = asyncio.run(_fetch_running_jobs(settings))
    except (GenieError, TimeoutError) as error:
        output.print_message(
            f"could not list the running jobs: {output.to_one_line(str(error)) or 'no reply'}"
        )
        return
    ending = [job for job in jobs if any(place.node_id == node_id for place in job.placements)]
    for job in ending[:_TERMINATED_JOBS_SHOWN_MAX]:
        output.print_message(f"job {job.job_id} ({job.spec.name}) is {job.state} and will be terminated")
    if (more := len(ending) - _TERMINATED_JOBS_SHOWN_MAX) > 0:
        output.print_message(f"{format_count(more, 'more job')} on this machine will be terminated")
    if elsewhere := len(jobs) - len(ending):
        jobs_elsewhere = f"{format_count(elsewhere, 'job')} on other machines"
        output.print_message(
            f"{jobs_elsewhere} will not be terminated"
            if has_other_servers
            else f"{jobs_elsewhere} will continue without this controller; 'genie up' lists and manages them "
            "again"
        )


async def _fetch_running_jobs(settings: Settings) -> list[Job]:
    from genie.cluster.client import open_client
    from genie.model.job import JobState
    from genie.model.limits import LIST_MAX
    from genie.runtime.credentials import LocalCluster
    from genie.supervisor.local_cluster import make_owner_access

    state_dir = settings.paths.state_dir
    found = LocalCluster.read(state_dir)
    if found is None:
        return []
    ours = dataclasses.replace(settings, cluster=make_owner_access(state_dir, found))
    async with (
        asyncio.timeout(_LIST_JOBS_TIMEOUT_S),
        open_client(ours, timeout_s=_LIST_JOBS_TIMEOUT_S) as client,
    ):
        jobs: list[Job] = []
        more, before = True, None
        while more:
            page, more = await client.list_jobs(
                states=(JobState.PLACING, JobState.RUNNING), limit=LIST_MAX, before_sequence=before
            )
            jobs += page
            before = page[-1].sequence if page else None
            more = more and before is not None
        return jobs
