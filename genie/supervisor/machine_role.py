"""What this machine is, when nothing runs on it: a server, or a node of a cluster elsewhere.

Starting a node as a new cluster would end the jobs that its agent had kept, and starting a server as a node
would leave the cluster without one of its servers. So both are checked first, and 'genie down' and 'genie
doctor' name the command that starts the machine again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from genie.agent.identity import list_node_dirs, read_controller_addresses
from genie.config import Settings
from genie.controller.etcd.local_member import LocalMember, etcd_member_directory, has_member_record
from genie.controller.store.open import CONTROLLER_DIRECTORY, LOCAL_ETCD_STORE
from genie.errors import ConfigError
from genie.model.names import address_text
from genie.runtime.credentials import DEFAULT_PORT, OWNER_TOKEN_FILE, is_wildcard
from genie.supervisor.etcd_majority import format_join_again
from genie.supervisor.incomplete_join import IncompleteJoin


@dataclass(frozen=True, slots=True)
class JoinedNode:
    """A node that this machine is in a cluster on other machines. `host` and `port` are those of a server."""

    node_id: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"node {self.node_id} of the cluster at {address_text(self.host, self.port)}"

    @property
    def start_command(self) -> str:
        """The command that starts its agent again."""
        is_port_needed = self.port != DEFAULT_PORT or ":" in self.host
        where = address_text(self.host, self.port) if is_port_needed else self.host
        return f"genie join {where} --node-id {self.node_id}"


def find_joined_nodes(state_dir: Path) -> list[JoinedNode]:
    """The nodes that this machine is in clusters on other machines; empty for a server. Blocks."""
    own_cluster = (
        state_dir / CONTROLLER_DIRECTORY,
        etcd_member_directory(state_dir),
        state_dir / OWNER_TOKEN_FILE,  # a standby with an external etcd
    )
    if any(path.exists() for path in own_cluster):
        return []
    found = []
    for node_dir in list_node_dirs(state_dir):
        try:
            host, port = read_controller_addresses(node_dir)[0]
        except (ConfigError, IndexError):
            continue
        found.append(JoinedNode(node_dir.name, host, port))
    return found


def describe_how_to_start(state_dir: Path, node_id: str) -> str:
    """How this machine is started again; `node_id` is that of the agent that ran. Blocks."""
    for node in find_joined_nodes(state_dir):
        if node.node_id == node_id:
            return f"start it again with {node.start_command!r}"
    # Only an etcd member remembers store, address and port.
    options = "" if has_member_record(state_dir) else " and the options that were given before"
    return f"start it again with 'genie up'{options}"


def check_may_start_cluster(state_dir: Path) -> None:
    """Raises ConfigError if 'genie up' would start a new cluster on a node of another one."""
    nodes = find_joined_nodes(state_dir)
    if not nodes:
        return
    commands = " or ".join(repr(node.start_command) for node in nodes)
    raise ConfigError(
        f"this machine is {', '.join(map(str, nodes))}: start it with {commands}",
        hint="to start another cluster here on purpose, set GENIE_STATE_DIR to another directory than "
        f"{state_dir}",
    )


def check_may_start_as_node(state_dir: Path) -> None:
    """Raises ConfigError if 'genie join' would start only the agent of a server."""
    member, incomplete = LocalMember.read(state_dir), IncompleteJoin.read(state_dir)
    is_join_undone = incomplete is not None and not incomplete.may_vote(state_dir)
    if member is None or is_join_undone:
        return
    raise ConfigError(
        f"this machine is the server {member.name}: start it with 'genie up'",
        hint=f"to join another cluster, set GENIE_STATE_DIR to another directory than {state_dir}",
    )


def check_etcd_address(settings: Settings) -> None:
    """Raises ConfigError if the etcd member of this machine would listen on loopback by default
    because no address was set, or if an address other than its own is set."""
    config, sources = settings.controller, settings.sources
    if config.store != LOCAL_ETCD_STORE:
        return
    is_bind_set = sources["controller.bind"] != "default"
    member = LocalMember.read(settings.paths.state_dir)
    if member is None and not is_bind_set:
        raise missing_bind_error(config.bind)
    if member is None or not is_bind_set or config.bind in (member.bind, member.host):
        return
    if is_wildcard(member.bind):
        return  # etcd listens on every address, and the controller on one of them
    raise ConfigError(
        f"--bind {config.bind}: the etcd member of this machine is registered with address {member.bind}",
        hint="start it without --bind; to move the only server: 'genie store backup FILE' while it runs, "
        f"'genie down --keep-jobs', 'genie store restore FILE --bind {config.bind}'; one of several: while "
        f"it runs, 'genie etcd remove {member.name} --running' on another server; then 'genie down "
        f"--keep-jobs' here, {format_join_again(settings.paths.state_dir)} with --bind {config.bind}",
    )


def missing_bind_error(bind: str) -> ConfigError:
    """For the first etcd member of a cluster without an address."""
    return ConfigError(
        f"etcd and the controller would listen on {bind}, where no other server can reach them",
        hint="give an address of this machine that does not change with --bind (--bind 127.0.0.1 for a "
        "cluster that never has another server)",
    )
