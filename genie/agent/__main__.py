"""`python -m genie.agent`: joins a cluster if asked to, then runs as its node until SIGTERM.

The command line of people is `genie join` (cli/); this is what it and `genie up` start. A token
is better given in a file or in GENIE_TOKEN: arguments can be seen by everyone on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import signal
import socket
import sys
from pathlib import Path

from genie import config, hardware
from genie.agent.agent import Agent
from genie.agent.identity import find_node_dir, read_identity
from genie.agent.joining import join
from genie.agent.launcher import ShimLauncher
from genie.config import Settings
from genie.errors import GenieError, TlsError, TokenMissingError, UsageError
from genie.model.names import node_id_from, parse_endpoint
from genie.runtime.building import build_ahead, command_for
from genie.runtime.clock import SystemClock
from genie.runtime.credentials import Access, is_loopback
from genie.runtime.network import TcpNetwork, address_towards
from genie.runtime.tasks import file_thread, first_error, loop_factory
from genie.telemetry import log

_log = logging.getLogger("genie.agent")


def main(arguments: list[str] | None = None) -> int:
    """The exit code. Errors of Genie are said in words; anything else is a bug and shows its traceback."""
    given = _parser().parse_args(arguments)
    try:
        settings = config.load(
            {"paths.state_dir": given.state_dir, "agent.labels": given.labels, "agent.rack": given.rack}
        )
        log.configure(settings.log)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_run(given, settings))
    except GenieError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


async def _run(given: argparse.Namespace, settings: Settings) -> None:
    state_dir = settings.paths.state_dir
    controller = parse_endpoint(given.controller) if given.controller else None
    if given.join:
        host, port = parse_endpoint(given.join, port=settings.cluster.master_port)
        node_dir = await join(
            host,
            port,
            _join_token(given, settings),
            state_dir=state_dir,
            node_id_wish=given.node_id or node_id_from(socket.gethostname()),
            network=TcpNetwork(),
            exact=given.node_id is not None,
        )
        _log.info("joined %s:%d as %s", host, port, node_dir.name)
    else:
        node_dir = find_node_dir(state_dir, given.node_id)
    await _be_node(settings, node_dir, read_identity(node_dir, controller=controller))


async def _be_node(settings: Settings, node_dir: Path, access: Access) -> None:
    with (
        file_thread("genie-agent-files") as offload,
        hardware.Inventory(settings.agent.cpu_accelerators) as inventory,
    ):
        agent = Agent(
            settings.agent,
            node_dir=node_dir,
            access=access,
            network=TcpNetwork(),
            clock=SystemClock(),
            rng=random.Random(),  # noqa: S311 - spreads reconnections, hides nothing
            inventory=inventory,
            launcher=ShimLauncher(),
            base_env=config.inherited_by_jobs(),
            listen_host=_listen_host(access, settings.agent.host),
            offload=offload,
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, agent.stop)
        await _run_beside_build(agent, compile_ahead=settings.agent.compile_ahead)


async def _run_beside_build(agent: Agent, *, compile_ahead: bool) -> None:
    if not compile_ahead:
        await agent.run()
        return
    try:
        async with asyncio.TaskGroup() as group:
            ahead = build_ahead(
                command_for("genie_executor"),
                what="the executors' library",
                without="remote_accelerator will not work on this node",
            )
            building = group.create_task(ahead)
            await agent.run()
            building.cancel()
    except* GenieError as several:
        raise first_error(several) from None


def _join_token(given: argparse.Namespace, settings: Settings) -> str:
    if given.token and given.token_file:
        raise UsageError("--token and --token-file are both given", hint="give one of them")
    if given.token:
        return str(given.token)
    if given.token_file:
        try:
            return Path(given.token_file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenMissingError(f"the token file cannot be read: {error}") from error
    if settings.cluster.token is not None:
        return settings.cluster.token
    raise TokenMissingError(
        "joining needs a token, and none was given",
        hint="on the cluster's machine run 'genie token create --join'; pass it with --token-file",
    )


def _listen_host(access: Access, host: str | None) -> str:
    """Where executors listen: where clients are told to go if that is here, else towards the controller."""
    if host is not None and _is_ours(host):
        chosen = host
    elif is_loopback(access.host):
        chosen = "127.0.0.1"
    else:
        found = address_towards(access.host, access.port)
        if found is None:
            raise UsageError(
                f"there is no way from here to {access.host}",
                hint="check the address, or set GENIE_AGENT_HOST",
            )
        chosen = found
    if access.tls is None and not is_loopback(chosen):
        raise TlsError(
            f"executors cannot listen on {chosen} in a cluster without TLS",
            hint="unset agent.host, or start the cluster with TLS (the default)",
        )
    return chosen


def _is_ours(host: str) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m genie.agent", description="Runs a node of a cluster.")
    parser.add_argument("--state-dir", help="where the node's files are (default: GENIE_STATE_DIR)")
    parser.add_argument("--node-id", help="which node to be, or the wish when joining")
    parser.add_argument("--join", metavar="HOST[:PORT]", help="join this cluster first")
    parser.add_argument("--token", help="join token; visible to others on this machine")
    parser.add_argument("--token-file", help="file that holds the join token")
    parser.add_argument("--controller", metavar="HOST:PORT", help="where the controller is now")
    parser.add_argument("--labels", metavar="K=V,K=V", help="labels of the node that jobs can ask for")
    parser.add_argument("--rack", metavar="NAME", help="where the machine stands")
    return parser


if __name__ == "__main__":
    sys.exit(main())
