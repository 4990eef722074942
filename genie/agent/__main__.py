"""`python -m genie.agent`: joins a cluster with --join, then runs the agent until SIGTERM, which ends its
jobs, or until KEEP_JOBS_SIGNAL, which does not.

Users run `genie join` or `genie up`, which start this process. Prefer --token-file or GENIE_TOKEN to --token:
every user of the machine can read the arguments of a process.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import random
import signal
import socket
import sys
from functools import partial
from pathlib import Path

from genie import config, hardware
from genie.agent import KEEP_JOBS_SIGNAL
from genie.agent.agent import Agent
from genie.agent.disk import DiskAccess
from genie.agent.identity import find_node_dir, read_identity
from genie.agent.joining import join_cluster
from genie.agent.launcher import ShimLauncher, kill_jobs_of_stopped_agents
from genie.agent.leftovers import CONTROL_GROUP_PREFIX
from genie.config import Settings
from genie.errors import GenieError, TlsError, TokenMissingError, UsageError
from genie.model.names import address_text, is_loopback, node_id_from, parse_endpoint
from genie.native.prebuild import prebuild_command, try_build_in_background
from genie.processes import cgroups, process_table
from genie.processes.clock import SystemClock
from genie.processes.tasks import file_io_threads, loop_factory, unwrapped_task_group
from genie.runtime.credentials import Access
from genie.runtime.gossip.kinship_gossip import find_kinship_support
from genie.runtime.network import TcpNetwork, local_address_towards
from genie.telemetry import log

_log = logging.getLogger("genie.agent")

JOB_FILE_THREADS = 4


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code. Prints a GenieError as one message; any other error is a bug and propagates."""
    args = _make_argument_parser().parse_args(arguments)
    try:
        settings = config.load(
            {"paths.state_dir": args.state_dir, "agent.labels": args.labels, "agent.rack": args.rack}
        )
        log.configure(settings.log)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_join_and_run_agent(args, settings))
    except GenieError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


async def _join_and_run_agent(args: argparse.Namespace, settings: Settings) -> None:
    state_dir = settings.paths.state_dir
    controller = parse_endpoint(args.controller) if args.controller else None
    if args.join:
        host, port = parse_endpoint(args.join, port=settings.cluster.master_port)
        node_dir = await join_cluster(
            host,
            port,
            _get_join_token(args, settings),
            state_dir=state_dir,
            requested_node_id=args.node_id or node_id_from(socket.gethostname()),
            network=TcpNetwork(),
            is_node_id_fixed=args.node_id is not None,
        )
        _log.info("joined the cluster at %s as node %s", address_text(host, port), node_dir.name)
    else:
        node_dir = find_node_dir(state_dir, args.node_id)
    await _run_agent_until_stopped(settings, node_dir, read_identity(node_dir, controller=controller))


async def _run_agent_until_stopped(settings: Settings, node_dir: Path, access: Access) -> None:
    with (
        file_io_threads("genie-agent-journal") as journal,
        file_io_threads("genie-agent-files", threads=JOB_FILE_THREADS) as bulk,
        hardware.Inventory(settings.agent.cpu_accelerators) as inventory,
    ):
        listen_host, clock = _choose_executor_listen_host(access, settings.agent.host), SystemClock()
        await _kill_jobs_of_other_nodes(node_dir)
        agent = Agent(
            settings.agent,
            node_dir=node_dir,
            access=access,
            network=TcpNetwork(),
            clock=clock,
            rng=random.Random(),  # noqa: S311 - jitter for reconnections, no secret
            inventory=inventory,
            launcher=ShimLauncher(
                _find_control_group_for_jobs(node_dir), adopts_orphans=process_table.become_subreaper()
            ),
            base_env=config.environment_for_jobs(),
            listen_host=listen_host,
            disk=DiskAccess(run_journal_call=journal, run_job_file_call=bulk),
            gossip=find_kinship_support(
                settings.gossip,
                host=listen_host,
                port=settings.gossip.node_port,
                advertised_host=settings.agent.host or "",
                clock=clock,
            ),
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, agent.stop)
        loop.add_signal_handler(KEEP_JOBS_SIGNAL, partial(agent.stop, keep_jobs=True))
        await _run_agent_and_compile_executor(agent, compile_ahead=settings.agent.compile_ahead)


async def _kill_jobs_of_other_nodes(node_dir: Path) -> None:
    """Kills jobs of nodes that this machine was before, such as one that was removed: they use the same
    accelerators. The agent itself kills those of its own node."""
    count = await asyncio.to_thread(
        kill_jobs_of_stopped_agents, node_dir.parent, excluded_node_id=node_dir.name
    )
    if count:
        _log.warning("killed %d leftover processes of agents of other nodes on this machine", count)


def _find_control_group_for_jobs(node_dir: Path) -> str | None:
    """The control group for the jobs of this node."""
    # The node ID alone is not unique on a machine.
    digest = hashlib.sha256(str(node_dir.resolve()).encode()).hexdigest()[:8]
    group = cgroups.find_usable(
        f"{CONTROL_GROUP_PREFIX}{node_dir.name}-{digest}", cgroups.own_control_groups()
    )
    if group is None:
        _log.warning(
            "no control group can be created: processes of jobs are found by parent and environment instead"
        )
    else:
        _log.info("jobs run in control groups below %s", group)
    return group


async def _run_agent_and_compile_executor(agent: Agent, *, compile_ahead: bool) -> None:
    if not compile_ahead:
        await agent.run()
        return
    async with unwrapped_task_group() as group:
        ahead = try_build_in_background(
            prebuild_command("genie_executor"),
            what="the executors' library",
            consequence="remote_accelerator will not work on this node",
        )
        building = group.create_task(ahead)
        await agent.run()
        building.cancel()


def _get_join_token(args: argparse.Namespace, settings: Settings) -> str:
    if args.token and args.token_file:
        raise UsageError("--token and --token-file cannot be used together", hint="pass one of them")
    if args.token:
        return str(args.token)
    if args.token_file:
        try:
            return Path(args.token_file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenMissingError(f"could not read the token file: {error}") from error
    if settings.cluster.token is not None:
        return settings.cluster.token
    raise TokenMissingError(
        "joining a cluster requires a token",
        hint="create one with 'genie token create --join' and pass it with --token-file",
    )


def _choose_executor_listen_host(access: Access, host: str | None) -> str:
    """The address that executors bind: agent.host if local, else the one that reaches the controller."""
    if host is not None and _is_local_address(host):
        chosen = host
    elif is_loopback(access.host):
        chosen = "127.0.0.1"
    else:
        found = local_address_towards(access.host, access.port)
        if found is None:
            raise UsageError(
                f"no route from this machine to {access.host}",
                hint="check the address, or set GENIE_AGENT_HOST",
            )
        chosen = found
    if access.tls is None and not is_loopback(chosen):
        raise TlsError(
            f"executors cannot listen on {chosen} in a cluster without TLS",
            hint="unset agent.host, or start the cluster with TLS (the default)",
        )
    return chosen


def _is_local_address(host: str) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def _make_argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m genie.agent", description="Run the agent of a node.")
    parser.add_argument("--state-dir", help="state directory (default: GENIE_STATE_DIR)")
    parser.add_argument("--node-id", help="node ID; with --join, the preferred one")
    parser.add_argument("--join", metavar="HOST[:PORT]", help="join this cluster first")
    parser.add_argument("--token", help="join token; visible to others on this machine")
    parser.add_argument("--token-file", help="file that contains the join token")
    parser.add_argument("--controller", metavar="HOST:PORT", help="current address of the controller")
    parser.add_argument("--labels", metavar="K=V,K=V", help="labels of the node, for placement constraints")
    parser.add_argument("--rack", metavar="NAME", help="rack of the node")
    return parser


if __name__ == "__main__":
    sys.exit(main())
