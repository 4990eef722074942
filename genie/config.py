"""The one settings tree, and the only reader of the environment.

A setting is declared once, as a field of a section below: its type, default, bounds, help
text. The GENIE_* name, the key in the file and the row in docs/ENVIRONMENT_VARIABLES.md are
derived. `load()` reads defaults, then the file (TOML), then the environment, then arguments;
the later wins, and each value remembers where it came from.

Not for: reading files other than the settings file, or talking to anything.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from genie.errors import ConfigError

_Section = TypeVar("_Section")

LABELS_MAX = 64
"""Labels that one node may have."""
LABEL = re.compile(r"[A-Za-z0-9._/-]{1,63}")
"""A label's key, its value, or the name of a rack."""
LABEL_RULE = "1 to 63 letters, digits, '.', '_', '-' or '/'"


def setting(
    default: object,
    help_text: str,
    *,
    env: str = "",
    allowed: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    secret: bool = False,
    label: bool = False,
) -> Any:  # Any: dataclasses.field() is typed as the field's own type
    """Declares one setting. `env` is only given where the derived name would be another.

    The texts of a `label` keep to LABEL_RULE. A mapping is empty by default.
    """
    meta = {"help": help_text, "env": env, "allowed": allowed, "low": low, "high": high}
    meta |= {"secret": secret, "label": label}
    if isinstance(default, dict):
        assert not default, "who made the object could change the default of all"
        return dataclasses.field(default_factory=dict, metadata=meta)
    return dataclasses.field(default=default, metadata=meta)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """One process's session with a cluster, with the names that genie.init() takes. Times are seconds."""

    discovery_method: str = setting(
        "auto",
        "How the cluster is found: by the address given, or from this machine's own state.",
        allowed=("auto", "address", "local"),
    )
    master_addr: str | None = setting(None, "Address of the controller.")
    master_port: int = setting(5555, "Port of the controller.", low=1, high=65535)
    node_id: str | None = setting(None, "Name of this process in the cluster; made up when not given.")
    node_role: str = setting(
        "client",
        "What this process is: a client uses GPUs, a server hosts a cluster, a worker joins one.",
        allowed=("client", "server", "worker"),
    )
    backend: str = setting("auto", "Network backend.", allowed=("auto", "tcp", "rdma", "dpdk", "dpdk_gpudev"))
    enable_heartbeat: bool = setting(True, "Tell the controller that this process is alive.")
    heartbeat_interval: float = setting(10.0, "Seconds between two heartbeats.", low=0.05, high=3600)
    heartbeat_timeout: float = setting(
        60.0, "Seconds without an answer until a peer counts as gone.", low=0.1, high=86400
    )
    enable_gpu_monitoring: bool = setting(True, "Poll this machine's accelerators in the background.")
    gpu_poll_interval: float = setting(5.0, "Seconds between two polls.", low=0.05, high=3600)
    enable_health_checks: bool = setting(True, "Check this process's health in the background.")
    health_check_interval: float = setting(30.0, "Seconds between two health checks.", low=0.05, high=3600)
    timeout: float = setting(30.0, "Seconds that init() may take in all.", low=0.1, high=3600)
    launch_blocking: bool = setting(
        False,
        "Wait for every op on a remote accelerator, so that an error is raised on the line that made it.",
    )
    token: str | None = setting(
        None, "Access token; found in the state directory on the machine that hosts the cluster.", secret=True
    )


@dataclass(frozen=True, kw_only=True)
class ControllerConfig:
    """The controller: where it listens, what it remembers in, when it gives up on a node."""

    bind: str = setting("127.0.0.1", "Address to listen on. Anything but loopback needs TLS.")
    port: int = setting(5555, "Port to listen on; 0 takes a free one.", low=0, high=65535)
    advertise: str | None = setting(
        None, "Address that other machines use for this one, when it is not `bind`."
    )
    store: str = setting("sqlite", "sqlite, sqlite:PATH, etcd://HOST:PORT[,HOST:PORT] or etcds://...")
    tls: str = setting("on", "Encrypt and authenticate every connection.", allowed=("on", "off"))
    node_ttl_s: float = setting(10.0, "Seconds without a heartbeat until a node is down.", low=0.5, high=600)
    node_suspect_s: float = setting(
        3.0, "Seconds without a heartbeat until it is suspect.", low=0.1, high=600
    )
    reclaim_grace_s: float = setting(
        3.0, "Seconds after that until what a node held is given away.", low=0.1, high=600
    )
    leader_ttl_s: float = setting(5.0, "Life of the leader's lease.", low=1, high=60)
    certificate_days: float = setting(7.0, "Life of node and executor certificates.", low=0.0001, high=365)
    join_token_s: float = setting(3600.0, "Life of a join token.", low=1, high=86400)
    policy: str = setting(
        "fair", "Who comes next: fair, fifo, priority, or MODULE:CLASS, a policy of your own in Python."
    )
    policy_budget_s: float = setting(
        0.01, "Seconds that one call of a policy of your own may take.", low=0.00001, high=1
    )
    queue_max: int = setting(10_000, "Jobs that may wait at once.", low=1, high=1_000_000)
    node_workers_max: int = setting(
        1000, "Workers that a node runs at once, also of jobs that ask for nothing.", low=1, high=1000
    )
    jobs_kept: int = setting(10_000, "Finished jobs that are remembered.", low=1, high=1_000_000)
    compile_ahead: bool = setting(
        True, "Compile the scheduler's library when the controller starts, where that is still to be done."
    )
    blobs_bytes_max: int = setting(
        10 * 1024**3, "Disk space for directories that were sent along.", low=1024, high=1 << 50
    )


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """The agent: what this machine offers and how it runs what it is given."""

    heartbeat_s: float = setting(1.0, "Seconds between two heartbeats.", low=0.05, high=60)
    cpu_accelerators: int = setting(1, "CPU accelerators to offer where there is no GPU.", low=0, high=64)
    host: str | None = setting(
        None, "Address under which clients reach executors here; found out when not given."
    )
    labels: Mapping[str, str] = setting(
        {}, "What jobs can ask for in a node: names with values, such as disk=ssd.", label=True
    )
    rack: str | None = setting(
        None, "Where the machine stands; nodes of one rack count as near to each other.", label=True
    )
    log_bytes_max: int = setting(
        16 * 1024**2, "Size at which a job's log is rotated.", low=4096, high=1 << 40
    )
    log_files_max: int = setting(4, "Rotated logs kept for each job.", low=1, high=100)
    stop_grace_s: float = setting(5.0, "Seconds between SIGTERM and SIGKILL.", low=0, high=600)
    jobs_kept: int = setting(200, "Finished jobs whose logs are kept.", low=1, high=100_000)
    compile_ahead: bool = setting(
        True, "Compile the executors' library when the agent starts, where that is still to be done."
    )
    executor_memory_bytes_max: int = setting(
        0,
        "Memory that one client's tensors may take on one accelerator; 0 for no limit.",
        low=0,
        high=1 << 50,
    )


@dataclass(frozen=True, kw_only=True)
class PathsConfig:
    """Where Genie keeps its files on this machine."""

    state_dir: Path = setting(Path("~/.local/state/genie"), "Keys, tokens, the embedded store, logs.")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is written to standard error, and how."""

    level: str = setting("INFO", "Log level.", allowed=("DEBUG", "INFO", "WARNING", "ERROR"))
    format: str = setting("text", "Log lines for people or for machines.", allowed=("text", "json"))


@dataclass(frozen=True, kw_only=True)
class WorkdirConfig:
    """What `genie submit --workdir` sends along."""

    bytes_max: int = setting(256 * 1024**2, "Largest directory that is sent.", low=1024, high=1 << 40)
    files_max: int = setting(20_000, "Most files that are sent.", low=1, high=10_000_000)


@dataclass(frozen=True, kw_only=True)
class GridConfig:
    """`genie grid`, which is also `grid-cli`: where its own file is, and what OpenSSH keeps."""

    file: Path = setting(
        Path("config/cluster_config.yaml"), "The grid's file: its nodes and how to use them."
    )
    ssh_config: Path = setting(
        Path("~/.ssh/config"), "OpenSSH's settings: aliases, users, ports, keys, jump hosts."
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The tree. `sources` says for each dotted key where its value came from."""

    cluster: ClusterConfig
    controller: ControllerConfig
    agent: AgentConfig
    paths: PathsConfig
    log: LogConfig
    workdir: WorkdirConfig
    grid: GridConfig
    sources: Mapping[str, str]


SECTIONS: dict[str, type[Any]] = {
    "cluster": ClusterConfig,
    "controller": ControllerConfig,
    "agent": AgentConfig,
    "paths": PathsConfig,
    "log": LogConfig,
    "workdir": WorkdirConfig,
    "grid": GridConfig,
}

# Other spellings that the visual guide uses.
ALIASES = {"enable_gpu_monitor": "enable_gpu_monitoring", "health_interval": "health_check_interval"}

# Read by Genie but not settings of the tree: where the file is, and what only tests and builds use.
OTHER_VARIABLES = {
    "GENIE_CONFIG": "Path of the settings file (default: ~/.config/genie/config.toml, if it is there).",
    "GENIE_TEST_SERVER": "Address of a running cluster that the integration tests use instead of their own.",
    "GENIE_TEST_REQUIRE_ALL": "With 1, a test that would be skipped fails.",
    "GENIE_JOB_ID": "Set for a running job: its id.",
    "GENIE_JOB_NODE": "Set for a running job: the id of the node that it runs on.",
    "GENIE_JOB_GPUS": "Set for a running job: numbers of the accelerators that it holds, with commas.",
    "GENIE_JOB_RANK": "Set for a running job: which of its workers this is, from 0 on.",
    "GENIE_JOB_WORKERS": "Set for a running job: how many workers it has.",
    "GENIE_JOB_HOSTS": "Set for a running job: addresses of its workers' nodes, by rank, with commas.",
    "GENIE_JOB_DIR": "Set for a running job: the directory that the node keeps for it, log included.",
}

# What a job gets of the agent's own environment. Everything else (tokens above all) stays behind.
INHERITED_BY_JOBS = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "LD_LIBRARY_PATH",
    # an executor finds, or compiles, its library where the other programs of this user do
    "XDG_CACHE_HOME",
    "CXX",
)


@dataclass(frozen=True)
class Setting:
    """One declared setting, as the pages and `genie config show` list it."""

    key: str
    env: str
    kind: str
    default: str
    help: str
    secret: bool


def declared() -> list[Setting]:
    """Every setting of the tree, in order."""
    return [
        Setting(
            key=f"{section}.{field.name}",
            env=_env_name(section, field),
            kind=_kind_text(section, field),
            default=_shown(_default(field)),
            help=field.metadata["help"],
            secret=field.metadata["secret"],
        )
        for section, cls in SECTIONS.items()
        for field in dataclasses.fields(cls)
    ]


def environment_variables() -> dict[str, str]:
    """Every GENIE_* variable that Genie reads, with its help text."""
    return {item.env: item.help for item in declared()} | OTHER_VARIABLES


def load(
    arguments: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """Reads everything once. `arguments` are dotted keys; None values among them count as not given.

    Raises ConfigError for the first thing that is unknown, mistyped or out of range.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    for layer in (_from_file(environ, file), _from_environ(environ), _from_arguments(arguments or {})):
        for key, (raw, source) in layer.items():
            values[key] = _converted(key, raw, source)
            sources[key] = source
    built = {name: _build(name, cls, values, sources) for name, cls in SECTIONS.items()}
    return Settings(**built, sources=types.MappingProxyType(sources))


def inherited_by_jobs(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The part of this process's environment that a job may see."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in INHERITED_BY_JOBS if name in environ}


def cxx(environ: Mapping[str, str] | None = None) -> str | None:
    """The C++ compiler that the person has chosen, as make and CMake read it; None when they have not."""
    environ = os.environ if environ is None else environ
    return environ.get("CXX") or None


def compile_into(folder: Path) -> None:
    """Where inductor, triton and the compilers below them write, in this process from now on.

    The environment is the only place from which they read that.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    os.environ["TMPDIR"] = str(folder)


def cache_home(environ: Mapping[str, str] | None = None) -> Path:
    """Where this user's programs keep what they can make again."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def cluster_arguments(given: Mapping[str, object]) -> dict[str, object]:
    """The keyword arguments of init() as dotted keys, other spellings resolved."""
    return {f"cluster.{ALIASES.get(name, name)}": value for name, value in given.items()}


def _from_file(environ: Mapping[str, str], file: Path | None) -> dict[str, tuple[object, str]]:
    path = file or (Path(environ["GENIE_CONFIG"]) if environ.get("GENIE_CONFIG") else None)
    if path is None:
        base = Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
        path = base / "genie" / "config.toml"
        if not path.is_file():
            return {}
    import tomllib  # late: most have no such file

    try:
        tree = tomllib.loads(path.expanduser().read_text("utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"settings file {path}: {error}", hint="correct it or unset GENIE_CONFIG"
        ) from error
    found: dict[str, tuple[object, str]] = {}
    for section, body in tree.items():
        if not isinstance(body, dict):
            raise ConfigError(
                f"settings file {path}: {section!r} is not a section",
                hint=f"settings stand under one of {_listed(SECTIONS)}, such as [cluster]",
            )
        for name, raw in body.items():
            found[f"{section}.{ALIASES.get(name, name)}"] = (raw, f"file {path}")
    return found


def _from_environ(environ: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    known = {item.env: item.key for item in declared()}
    found: dict[str, tuple[object, str]] = {}
    for name, raw in environ.items():
        if not name.startswith("GENIE_") or name in OTHER_VARIABLES:
            continue
        if name not in known:
            near = _nearest(name, [*known, *OTHER_VARIABLES])
            raise ConfigError(
                f"environment variable {name} is not a setting of Genie",
                hint=f"{near}unset it or see docs/ENVIRONMENT_VARIABLES.md",
            )
        if raw != "":
            found[known[name]] = (raw, f"environment variable {name}")
    if "paths.state_dir" not in found and environ.get("XDG_STATE_HOME"):
        found["paths.state_dir"] = (
            str(Path(environ["XDG_STATE_HOME"]) / "genie"),
            "environment variable XDG_STATE_HOME",
        )
    return found


def _from_arguments(arguments: Mapping[str, object]) -> dict[str, tuple[object, str]]:
    return {
        key: (value, f"argument {key.rpartition('.')[2]}")
        for key, value in arguments.items()
        if value is not None
    }


def _converted(key: str, raw: object, source: str) -> object:
    section, _, name = key.partition(".")
    if section not in SECTIONS:
        near = _nearest(section, SECTIONS)
        raise ConfigError(
            f"{source}: there is no section {section!r}", hint=f"{near}sections are {_listed(SECTIONS)}"
        )
    fields = {field.name: field for field in dataclasses.fields(SECTIONS[section])}
    if name not in fields:
        near = _nearest(name, [*fields, *ALIASES] if section == "cluster" else fields)
        raise ConfigError(
            f"{source}: {section} has no setting {name!r}", hint=f"{near}allowed are {_listed(fields)}"
        )
    return _checked(key, fields[name], raw, source)


def _checked(key: str, field: dataclasses.Field[Any], raw: object, source: str) -> object:
    kind = _base_type(key.partition(".")[0], field)
    shown = "its value" if field.metadata["secret"] else repr(raw)
    try:
        value = _PARSERS[kind](raw)
    except (ValueError, TypeError):
        raise ConfigError(
            f"{key} = {shown} ({source}) is not {_KIND_WORDS[kind]}", hint=_allowed_text(field, kind)
        ) from None
    meta = field.metadata
    low, high = meta["low"], meta["high"]
    outside = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and ((low is not None and not value >= low) or (high is not None and not value <= high))
    )
    if (
        outside
        or (meta["allowed"] and value not in meta["allowed"])
        or (meta["label"] and _breaks_rule(value))
    ):
        raise ConfigError(f"{key} = {shown} ({source}) is not allowed", hint=_allowed_text(field, kind))
    return value


def _build(
    section: str, cls: type[_Section], values: Mapping[str, object], sources: dict[str, str]
) -> _Section:
    given: dict[str, object] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # every section is a dataclass
        key = f"{section}.{field.name}"
        sources.setdefault(key, "default")
        value = values.get(key, _default(field))
        given[field.name] = value.expanduser() if isinstance(value, Path) else value
    return cls(**given)


def _to_bool(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    words = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }
    if isinstance(raw, str) and raw.lower() in words:
        return words[raw.lower()]
    raise ValueError(raw)


def _to_int(raw: object) -> int:
    if isinstance(raw, bool) or not isinstance(raw, (int, str)):
        raise TypeError(raw)
    return int(raw)


def _to_float(raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise TypeError(raw)
    return float(raw)


def _to_str(raw: object) -> str:
    if not isinstance(raw, str) or not raw or "\x00" in raw:
        raise TypeError(raw)
    return str(raw)


def _to_path(raw: object) -> Path:
    return raw if isinstance(raw, Path) else Path(_to_str(raw))


def _to_mapping(raw: object) -> Mapping[str, str]:
    """A table of a file, or K=V,K=V."""
    if isinstance(raw, Mapping):
        return {_to_str(key): _to_str(value) for key, value in raw.items()}
    pairs = [pair.strip().partition("=") for pair in _to_str(raw).split(",")]
    found = {key: value for key, sign, value in pairs if sign}
    if len(found) != len(pairs):  # one without a sign, or a key twice
        raise ValueError(raw)
    return found


def _breaks_rule(value: object) -> bool:
    if not isinstance(value, Mapping):
        return not LABEL.fullmatch(str(value))
    texts = [*value.keys(), *value.values()]
    return len(value) > LABELS_MAX or not all(LABEL.fullmatch(text) for text in texts)


_PARSERS: dict[type, Callable[[object], object]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_str,
    Path: _to_path,
    Mapping: _to_mapping,
}
_KIND_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    Mapping: "names with values (K=V,K=V; a table in the file)",
}


@functools.cache
def _type_hints(section: str) -> dict[str, Any]:
    return typing.get_type_hints(SECTIONS[section])


def _base_type(section: str, field: dataclasses.Field[Any]) -> type:
    hint = _type_hints(section)[field.name]
    if typing.get_origin(hint) is Mapping:
        return Mapping
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
    return typing.cast("type", parts[0] if parts else hint)


def _kind_text(section: str, field: dataclasses.Field[Any]) -> str:
    allowed = field.metadata["allowed"]
    return " | ".join(allowed) if allowed else _KIND_WORDS[_base_type(section, field)]


def _allowed_text(field: dataclasses.Field[Any], kind: type) -> str:
    meta = field.metadata
    if meta["allowed"]:
        return f"allowed: {', '.join(meta['allowed'])}"
    if meta["label"]:
        several = f" for each, at most {LABELS_MAX} names" if kind is Mapping else ""
        return f"allowed: {LABEL_RULE}{several}"
    if meta["low"] is not None:
        low, high = (_number_text(meta[bound]) for bound in ("low", "high"))
        return f"allowed: {_KIND_WORDS[kind]} from {low} to {high}"
    return f"give {_KIND_WORDS[kind]}"


def _number_text(number: float) -> str:
    """Whole numbers in full: a limit in bytes would come out as 1.09951e+12 otherwise."""
    return str(int(number)) if number == int(number) else f"{number:g}"


def _env_name(section: str, field: dataclasses.Field[Any]) -> str:
    if field.metadata["env"]:
        return str(field.metadata["env"])
    plain = section in ("cluster", "paths")
    return f"GENIE_{field.name.upper()}" if plain else f"GENIE_{section.upper()}_{field.name.upper()}"


def _default(field: dataclasses.Field[Any]) -> object:
    return {} if field.default is dataclasses.MISSING else field.default


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}={text}" for name, text in value.items())
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _nearest(word: str, known: Mapping[str, object] | list[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]}? " if near else ""


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(names)
