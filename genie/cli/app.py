"""The parser: the list of commands, the options that all of them share, and the boundary for errors.

`command` registers a function; the shared options may stand before the command's name or behind
it. Whatever a command raises becomes one line on standard error and an exit code here. Not for:
what commands do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import genie
from genie.cli import output
from genie.config import Settings, load
from genie.errors import ConfigError, GenieError, TokenMissingError, UsageError
from genie.model.names import parse_address
from genie.telemetry import log

_log = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., None])
# The parser's own word for wrong usage, which the library does not export.
_Misread: type[Exception] = typer.BadParameter.__mro__[1]

INTERRUPTED = 130
_MISREAD_CHARS_MAX = 400
_TOKEN_BYTES_MAX = 4096
_COMMANDS = {
    "up": "cluster_commands",
    "join": "cluster_commands",
    "down": "cluster_commands",
    "forget": "cluster_commands",
    "drain": "cluster_commands",
    "undrain": "cluster_commands",
    "status": "view_commands",
    "nodes": "view_commands",
    "submit": "job_commands",
    "jobs": "job_commands",
    "logs": "job_commands",
    "cancel": "job_commands",
    "queue": "queue_commands",
    "explain": "queue_commands",
    "doctor": "doctor",
    "grid": "app",
    "quota": "quota_commands",
    "token": "token_commands",
    "config": "config_commands",
    "sim": "sim_commands",
}
"""Which module registers a command or a group of them, in the order in which help shows them."""
_GRID_COMMANDS = {
    "health": "grid_health_commands",
    "top": "grid_health_commands",
    "metrics": "grid_health_commands",
    "promote": "grid_promote_commands",
    "demote": "grid_promote_commands",
    "setup": "grid_ray_commands",
    "run": "grid_run_commands",
    "ps": "grid_run_commands",
    "logs": "grid_run_commands",
    "attach": "grid_run_commands",
    "cancel": "grid_run_commands",
    "sync": "grid_sync_commands",
    "nodes": "grid_node_commands",
    "config": "grid_node_commands",
    "cluster": "grid_ray_commands",
}

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

_PANEL = "Options of every command"
_Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show tracebacks and debug logs of this command.", rich_help_panel=_PANEL),
]
_LogLevel = Annotated[
    str | None,
    typer.Option(
        "--log-level", metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR.", rich_help_panel=_PANEL
    ),
]
_Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST[:PORT]",
        help="The cluster to use (or GENIE_MASTER_ADDR); without it, the one on this machine.",
        rich_help_panel=_PANEL,
    ),
]
_TokenFile = Annotated[
    str | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File with the access token, '-' for standard input (or GENIE_TOKEN).",
        rich_help_panel=_PANEL,
    ),
]
_GridFile = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The grid's file (or GENIE_GRID_FILE); without it config/cluster_config.yaml.",
        rich_help_panel=_PANEL,
    ),
]
_ARGUMENT = re.compile(r"[a-z_.]+ = (?P<value>.*) \(argument (?P<name>[a-z_]+)\)", re.DOTALL)
_OPTIONS = {"level": "--log-level", "token": "--token-file", "master_addr": "--address", "file": "--config"}
"""Options that are not spelled like the setting that they give a value to."""
_SHARED = {
    "debug": (_Debug, False),
    "log_level": (_LogLevel, None),
    "address": (_Address, None),
    "token_file": (_TokenFile, None),
}
_GRID_SHARED = {"debug": _SHARED["debug"], "log_level": _SHARED["log_level"], "grid_file": (_GridFile, None)}
"""A grid has no controller, so neither its address nor its tokens; it has a file."""


@dataclass
class Invocation:
    """What the shared options said, before and behind the command's name together."""

    debug: bool = False
    log_level: str | None = None
    address: str | None = None
    token_file: str | None = None
    grid_file: str | None = None
    _token: str | None = None

    def add(self, given: Mapping[str, Any]) -> None:
        for name, value in given.items():
            _, default = {**_SHARED, **_GRID_SHARED}[name]
            if value != default:
                setattr(self, name, value)

    def load_settings(
        self, arguments: Mapping[str, object] | None = None, *, keep_logs: bool = False
    ) -> Settings:
        """The settings for this command, with its own arguments on top; starts logging.

        Log lines of a short command would only be in the way: without `keep_logs` they are
        shown from WARNING on, unless someone asked for a level.
        """
        try:
            settings = load({**self._arguments(), **(arguments or {})})
        except ConfigError as error:
            raise _in_options(error) from error
        asked = keep_logs or settings.sources["log.level"] != "default"
        log.configure(settings.log if asked else dataclasses.replace(settings.log, level="WARNING"))
        return settings

    def read_token(self) -> str | None:
        """The text in --token-file, if that was given. Read once: it may be standard input."""
        if self.token_file is not None and self._token is None:
            self._token = read_token_file(self.token_file, what="--token-file")
        return self._token

    def _arguments(self) -> dict[str, object]:
        host, port = (None, None)
        if self.address is not None:
            host, port = parse_address(self.address, what="--address")
        return {
            "cluster.master_addr": host,
            "cluster.master_port": port,
            "cluster.token": self.read_token(),
            "grid.file": self.grid_file,
            "log.level": "DEBUG" if self.debug else (self.log_level.upper() if self.log_level else None),
        }


class _Door(TyperGroup):
    """Imports the module of a command when that is named, so that nobody waits for the others.

    Help and completion, which show all commands, import all; so does a name that there is not, for the
    hint at the nearest.
    """

    homes: Mapping[str, str] = _COMMANDS

    # Any: the parser's own context and commands, which have other types in each version of typer.
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            self._load([cmd_name] if cmd_name in self.homes else self.homes)
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        if len(self.commands) < len(self.homes):
            self._load(self.homes)
        return list(self.homes)

    def _load(self, names: Iterable[str]) -> None:
        for name in names:
            importlib.import_module(f"genie.cli.{self.homes[name]}")  # it registers its commands
        self.commands = cast(TyperGroup, get_command(self._typer())).commands

    def _typer(self) -> typer.Typer:
        return app


class _GridDoor(_Door):
    homes = _GRID_COMMANDS

    def _typer(self) -> typer.Typer:
        return grid


app = typer.Typer(
    name="genie",
    cls=_Door,
    help="GPUs on other machines: a cluster, its jobs, and a PyTorch device.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)


grid = typer.Typer(
    name="grid",
    cls=_GridDoor,
    help="A few SSH hosts as a cluster, with nothing installed on them: grid-cli, or genie grid.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings=app.info.context_settings,
)
app.add_typer(grid)


def run(argv: Sequence[str] | None = None, *, door: typer.Typer = app, prog: str = "genie") -> int:
    """Parses, runs, reports. The exit code is what the process should end with.

    `grid-cli` is a door of its own to the commands of `genie grid`.
    """
    invocation = Invocation()
    output.open_closed_streams()
    try:
        _check_text(sys.argv[1:] if argv is None else argv)
        code = get_command(door).main(args=argv, prog_name=prog, obj=invocation, standalone_mode=False)
        return _checked_flush(code or 0)
    except SystemExit as end:
        return _checked_flush(end.code if isinstance(end.code, int) else int(bool(end.code)))
    except typer.Abort as abort:
        if isinstance(abort.__context__, KeyboardInterrupt):
            return INTERRUPTED
        output.say("genie: aborted; the question was not answered")
        return 1
    except _Misread as error:
        return _show_misread(error, prog=prog, debug=invocation.debug)
    except GenieError as error:
        output.show_error(error, debug=invocation.debug)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return _checked_flush(1)
    except Exception as error:
        _log.debug("the command failed", exc_info=True)
        output.show_error(error, debug=invocation.debug)
        return 1
    finally:
        output.leave_unsaid()


def _show_misread(error: Any, *, prog: str, debug: bool) -> int:  # Any: the parser's own types
    """What the parser says about wrong usage, as any other error of ours. Help it has shown already."""
    if type(error).__name__ != "NoArgsIsHelpError":
        text = error.format_message().removesuffix(".")
        text = text if len(text) <= _MISREAD_CHARS_MAX else f"{text[:_MISREAD_CHARS_MAX]} ..."
        hints = _usage_hints(error) if error.ctx is not None else [f"'{prog} --help' has the options"]
        output.show_error(UsageError(text[:1].lower() + text[1:], hint="; ".join(hints)), debug=debug)
    return UsageError.exit_code


def _usage_hints(error: Any) -> Iterator[str]:
    found = error.ctx.command
    unknown_option, missing = hasattr(error, "possibilities"), hasattr(error, "param_type")
    about = getattr(found, "about_arguments", "")
    if about and (unknown_option or missing or type(error) is _Misread):
        yield about
    elif unknown_option and not error.possibilities and _takes_arguments(found):
        yield "a name that begins with '-' goes behind --"
    what = "commands" if hasattr(found, "commands") else "options"
    yield f"'{error.ctx.command_path} --help' has the {what}"


def _takes_arguments(kind: Any) -> bool:
    return any(parameter.param_type_name == "argument" for parameter in kind.params)


def _check_text(argv: Sequence[str]) -> None:
    """What the system passes on as bytes that are no text could not be sent anywhere."""
    for number, argument in enumerate(argv, 1):
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = ascii(argument)
            raise UsageError(
                f"argument {number} is not UTF-8 text: {shown}", hint="write it in UTF-8"
            ) from None


def grid_command(
    name: str,
    *,
    example: str,
    group: typer.Typer = grid,
    context_settings: dict[str, Any] | None = None,
    with_cluster: bool = False,
    about_arguments: str = "",
) -> Callable[[_Function], _Function]:
    """Registers a command of the grid, like `command` does for the others.

    `with_cluster` is for those that speak with a controller, too. `about_arguments` is the hint when an
    argument is missing or one too many, or an option was typed that there is not.
    """
    shared = _GRID_SHARED | (_SHARED if with_cluster else {})
    kind: type[_Command] = type("_Hinted", (_Command,), {"about_arguments": about_arguments})
    return command(group, name, example=example, context_settings=context_settings, shared=shared, kind=kind)


class _Command(TyperCommand):
    """Its errors of usage know where they come from. `about_arguments` is their hint."""

    about_arguments = ""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # Any: the parser's own context
        try:
            return super().parse_args(ctx, args)
        except _Misread as error:
            error.ctx = ctx  # type: ignore[attr-defined]  # it leaves that out for options without a value
            raise


def command(
    group: typer.Typer,
    name: str,
    *,
    example: str,
    context_settings: dict[str, Any] | None = None,
    shared: Mapping[str, tuple[Any, Any]] = _SHARED,
    kind: type[_Command] = _Command,
) -> Callable[[_Function], _Function]:
    """Registers a function that takes the Invocation first and its own options by keyword.

    A parameter whose type is a dataclass stands for one option for each of its fields.
    """

    def register(function: _Function) -> _Function:
        own = inspect.signature(function, eval_str=True)
        _, *named = own.parameters.values()
        # Any: dataclasses of every kind.
        groups: dict[str, Any] = {
            each.name: each.annotation for each in named if dataclasses.is_dataclass(each.annotation)
        }
        parameters = [one for each in named for one in _unfolded(each)]

        @functools.wraps(function)
        def call(context: typer.Context, **given: Any) -> None:
            invocation = context.find_object(Invocation)
            assert invocation is not None
            invocation.add({each: given.pop(each) for each in shared})
            for name, group in groups.items():
                names = [field.name for field in dataclasses.fields(group)]
                given[name] = group(**{each: given.pop(each) for each in names})
            function(invocation, **given)

        # The parser reads the signature: the function's own parameters, then the shared ones.
        first = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        merged = [
            first,
            *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters),
            *_options(shared),
        ]
        call.__signature__ = own.replace(parameters=merged)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in merged}
        epilog = f"Example: [bold]{_as_it_is(example)}[/bold]"
        group.command(name, cls=kind, epilog=epilog, context_settings=context_settings)(call)
        return function

    return register


def _as_it_is(text: str) -> str:
    """In help, '[' begins a style; a package's extras are none."""
    return text.replace("[", r"\[")


def _show_version(wanted: bool) -> None:
    if wanted:
        output.write_line(f"genie {genie.__version__}")
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_show_version)
]


@app.callback()
def _root(
    context: typer.Context,
    debug: _Debug = False,
    log_level: _LogLevel = None,
    address: _Address = None,
    token_file: _TokenFile = None,
    _version: _Version = False,
) -> None:
    invocation = context.find_object(Invocation)
    assert invocation is not None
    invocation.add({"debug": debug, "log_level": log_level, "address": address, "token_file": token_file})


@grid.callback()
def _grid_root(
    context: typer.Context,
    debug: _Debug = False,
    log_level: _LogLevel = None,
    config: _GridFile = None,
    _version: _Version = False,
) -> None:
    invocation = context.find_object(Invocation)
    assert invocation is not None
    invocation.add({"debug": debug, "log_level": log_level, "grid_file": config})


def read_token_file(name: str, *, what: str) -> str:
    """The token in a file, or on standard input for '-'. Never part of an error message."""
    try:
        text = sys.stdin.read(_TOKEN_BYTES_MAX) if name == "-" else _head(Path(name))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(
            f"{what} {name!r} cannot be read: {reason}", hint="give a file that holds a token"
        ) from None
    if not text.strip():
        raise TokenMissingError(f"{what} {name!r} is empty", hint="make a token with 'genie token create'")
    return text.strip()


def _head(path: Path) -> str:
    with path.expanduser().open(encoding="utf-8") as file:
        return file.read(_TOKEN_BYTES_MAX)


def _in_options(error: ConfigError) -> ConfigError:
    """The same complaint, about the option that was typed instead of the setting behind it."""

    def option(found: re.Match[str]) -> str:
        name = _OPTIONS.get(found["name"], f"--{found['name'].replace('_', '-')}")
        return f"{name} {found['value']}"

    return ConfigError(_ARGUMENT.sub(option, error.message, count=1), hint=error.hint)


def _unfolded(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """A parameter as the parser is to see it: itself, or the fields of a dataclass."""
    group = parameter.annotation
    if not dataclasses.is_dataclass(group):
        return [parameter]
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(group)
    ]


def _options(shared: Mapping[str, tuple[Any, Any]]) -> list[inspect.Parameter]:
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in shared.items()
    ]


def _checked_flush(code: int) -> int:
    """Flushes now: a reader that went away must not become a message when the interpreter ends."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            output.say(f"genie: the output could not be written: {error.strerror}")
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or 1
    return code
