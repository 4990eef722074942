"""Reads the settings tree, and everything else that Genie reads from the environment.

`load()` reads defaults, then the file (TOML), then the environment, then arguments; later sources win. Each
value records its source. Does not read any file but the settings file.
"""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from genie.config.schema import (
    check_key,
    convert,
    default_value,
    describe_type,
    setting_fields,
    suggest_similar,
)
from genie.config.sections import ALIASES, SECTIONS, Settings
from genie.errors import ConfigError

_Section = TypeVar("_Section")

# Variables that are not settings of the tree.
OTHER_ENVIRONMENT_VARIABLES = {
    "GENIE_CONFIG": "Path of the settings file (default: ~/.config/genie/config.toml, if it exists).",
    "GENIE_TEST_SERVER": "Address of a running cluster for the integration tests, instead of their own.",
    "GENIE_TEST_REQUIRE_ALL": "1: tests that would be skipped fail.",
    "GENIE_JOB_ID": "Set for a running job: its ID.",
    "GENIE_JOB_NODE": "Set for a running job: the ID of its node.",
    "GENIE_JOB_GPUS": "Set for a running job: numbers of its accelerators, separated by commas.",
    "GENIE_JOB_RANK": "Set for a running job: rank of this worker, from 0.",
    "GENIE_JOB_WORKERS": "Set for a running job: number of its workers.",
    "GENIE_JOB_HOSTS": "Set for a running job: node addresses of its workers, by rank, separated by commas.",
    "GENIE_JOB_DIR": "Set for a running job: its directory on the node, which contains the log.",
    "GENIE_LOCK_TOKEN": "Set for the command of 'genie lock run': the fencing token of the lock.",
}

# Variables that a job inherits from its agent. A job must not see the others, which may contain tokens.
VARIABLES_INHERITED_BY_JOBS = (
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
    # so that executors share the compiled library with the other programs of this user
    "XDG_CACHE_HOME",
    "CXX",
)


@dataclass(frozen=True)
class Setting:
    """A declared setting, for documentation and `genie config show`."""

    key: str
    env: str
    type_description: str
    default: str
    help: str
    secret: bool


def list_settings() -> list[Setting]:
    """All settings of the tree, in order."""
    return [
        Setting(
            key=f"{section}.{field.name}",
            env=_env_name(section, field),
            type_description=describe_type(cls, field.name),
            default=_format_value(default_value(field)),
            help=field.metadata["help"],
            secret=field.metadata["secret"],
        )
        for section, cls in SECTIONS.items()
        for field in setting_fields(cls).values()
    ]


def environment_variables() -> dict[str, str]:
    """All GENIE_* variables that Genie reads, with their help texts."""
    return {item.env: item.help for item in list_settings()} | OTHER_ENVIRONMENT_VARIABLES


def load(
    arguments: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """Reads all sources once. `arguments` are dotted keys; a value of None counts as not given.

    Raises ConfigError for the first key that is unknown and the first value that is not allowed.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    for layer in (
        _values_from_file(environ, file),
        _values_from_environment(environ),
        _values_from_arguments(arguments or {}),
    ):
        for key, (raw, source) in layer.items():
            values[key] = _convert(key, raw, source)
            sources[key] = source
    built = {name: _build_section(name, cls, values, sources) for name, cls in SECTIONS.items()}
    return Settings(**built, sources=types.MappingProxyType(sources))


def environment_for_jobs(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of this process that a job inherits."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in VARIABLES_INHERITED_BY_JOBS if name in environ}


def environment_for_command(added: Mapping[str, str]) -> dict[str, str]:
    """All variables of this process, with `added`, for a command that it runs for its user."""
    return {**os.environ, **added}


def cxx_command(environ: Mapping[str, str] | None = None) -> str | None:
    """The C++ compiler of the CXX variable, as in make and CMake; None if it is not set."""
    environ = os.environ if environ is None else environ
    return environ.get("CXX") or None


def set_compiler_cache_dir(folder: Path) -> None:
    """Makes inductor, triton and their compilers write to `folder` in this process.

    They read their cache directory only from the environment.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    os.environ["TMPDIR"] = str(folder)


def cache_home(environ: Mapping[str, str] | None = None) -> Path:
    """The cache directory of this user (XDG_CACHE_HOME)."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def cluster_settings_from_arguments(given: Mapping[str, object]) -> dict[str, object]:
    """The keyword arguments of init() as dotted keys, with aliases resolved."""
    return {f"cluster.{ALIASES.get(name, name)}": value for name, value in given.items()}


def _values_from_file(environ: Mapping[str, str], file: Path | None) -> dict[str, tuple[object, str]]:
    path = file or (Path(environ["GENIE_CONFIG"]) if environ.get("GENIE_CONFIG") else None)
    if path is None:
        base = Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
        path = base / "genie" / "config.toml"
        if not path.is_file():
            return {}
    import tomllib  # late: most machines have no such file

    try:
        tree = tomllib.loads(path.expanduser().read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"could not read the settings file {path}: {error.strerror}", hint="correct or unset GENIE_CONFIG"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"settings file {path}: {error}", hint="correct the file or unset GENIE_CONFIG"
        ) from error
    found: dict[str, tuple[object, str]] = {}
    for section, body in tree.items():
        if not isinstance(body, dict):
            raise ConfigError(
                f"settings file {path}: {section!r} is not a section",
                hint=f"put settings below a section such as [cluster]; sections: {', '.join(SECTIONS)}",
            )
        _check_section(section, f"file {path}")
        for name, raw in body.items():
            found[f"{section}.{ALIASES.get(name, name)}"] = (raw, f"file {path}")
    return found


def _values_from_environment(environ: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    known = {item.env: item.key for item in list_settings()}
    found: dict[str, tuple[object, str]] = {}
    for name, raw in environ.items():
        if not name.startswith("GENIE_") or name in OTHER_ENVIRONMENT_VARIABLES:
            continue
        if name not in known:
            near = suggest_similar(name, [*known, *OTHER_ENVIRONMENT_VARIABLES])
            raise ConfigError(
                f"environment variable {name} is not a setting of Genie",
                hint=f"{near}{' ' if near else ''}unset it or see docs/ENVIRONMENT_VARIABLES.md",
            )
        if raw != "":
            found[known[name]] = (raw, f"environment variable {name}")
    if "paths.state_dir" not in found and environ.get("XDG_STATE_HOME"):
        found["paths.state_dir"] = (
            str(Path(environ["XDG_STATE_HOME"]) / "genie"),
            "environment variable XDG_STATE_HOME",
        )
    return found


def _values_from_arguments(arguments: Mapping[str, object]) -> dict[str, tuple[object, str]]:
    return {
        key: (value, f"argument {key.rpartition('.')[2]}")
        for key, value in arguments.items()
        if value is not None
    }


def _check_section(section: str, source: str) -> None:
    if section not in SECTIONS:
        near = suggest_similar(section, list(SECTIONS))
        raise ConfigError(
            f"{source}: there is no section {section!r}",
            hint=f"{near}{' ' if near else ''}sections: {', '.join(SECTIONS)}",
        )


def _convert(key: str, raw: object, source: str) -> object:
    section, _, name = key.partition(".")
    _check_section(section, source)
    cls = SECTIONS[section]
    aliases = ALIASES if section == "cluster" else ()
    check_key(name, list(setting_fields(cls)), of=section, source=source, aliases=aliases)
    return convert(cls, name, raw, key=key, source=source)


def _build_section(
    section: str, cls: type[_Section], values: Mapping[str, object], sources: dict[str, str]
) -> _Section:
    given: dict[str, object] = {}
    for name, field in setting_fields(cls).items():
        key = f"{section}.{name}"
        sources.setdefault(key, "default")
        value = values.get(key, default_value(field))
        given[name] = value.expanduser() if isinstance(value, Path) else value
    return cls(**given)


def _env_name(section: str, field: dataclasses.Field[Any]) -> str:
    if field.metadata["env"]:
        return str(field.metadata["env"])
    plain = section in ("cluster", "paths")
    return f"GENIE_{field.name.upper()}" if plain else f"GENIE_{section.upper()}_{field.name.upper()}"


def _format_value(value: object) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}={text}" for name, text in value.items())
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
