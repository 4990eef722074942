"""The parser: the list of commands, their shared options, and the error boundary.

`command` registers a function as a command. Shared options are accepted before and after the command
name. An exception of a command becomes one line on standard error and an exit code.
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

from genie.cli import output
from genie.config import Settings, load
from genie.errors import ConfigError, GenieError, TokenMissingError, UsageError
from genie.model.names import parse_address
from genie.telemetry import log
from genie.version import __version__

_log = logging.getLogger(__name__)
_CommandFunction = TypeVar("_CommandFunction", bound=Callable[..., None])
# Base class of the parser's usage errors; typer does not export it.
_TyperUsageError: type[Exception] = typer.BadParameter.__mro__[1]

INTERRUPTED_EXIT_CODE = 130
_USAGE_MESSAGE_CHARS_MAX = 400
_TOKEN_BYTES_MAX = 4096
_COMMAND_MODULES = {
    "up": "commands.cluster",
    "join": "commands.cluster",
    "down": "commands.cluster",
    "login": "commands.logins",
    "logout": "commands.logins",
    "forget": "commands.cluster",
    "drain": "commands.drains",
    "undrain": "commands.drains",
    "status": "commands.status",
    "nodes": "commands.status",
    "members": "commands.members",
    "submit": "commands.jobs",
    "jobs": "commands.jobs",
    "logs": "commands.jobs",
    "cancel": "commands.jobs",
    "queue": "commands.queue",
    "explain": "commands.queue",
    "doctor": "commands.doctor",
    "grid": "app",
    "etcd": "commands.etcd",
    "quota": "commands.quotas",
    "lock": "commands.locks",
    "token": "commands.tokens",
    "store": "commands.store",
    "config": "commands.config",
    "sim": "commands.sim",
}
"""Module that registers each command or group, in the order of the help."""
_GRID_COMMAND_MODULES = {
    "health": "grid.health",
    "top": "grid.health",
    "metrics": "grid.health",
    "promote": "grid.promote",
    "demote": "grid.promote",
    "setup": "grid.ray",
    "run": "grid.run",
    "ps": "grid.run",
    "logs": "grid.run",
    "attach": "grid.run",
    "cancel": "grid.run",
    "sync": "grid.sync",
    "nodes": "grid.nodes",
    "config": "grid.nodes",
    "cluster": "grid.ray",
}

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

_GLOBAL_OPTIONS_PANEL = "Global options"
_DebugOption = Annotated[
    bool,
    typer.Option("--debug", help="Show tracebacks and debug logs.", rich_help_panel=_GLOBAL_OPTIONS_PANEL),
]
_LogLevelOption = Annotated[
    str | None,
    typer.Option(
        "--log-level",
        metavar="LEVEL",
        help="Log level: DEBUG, INFO, WARNING, ERROR or CRITICAL.",
        rich_help_panel=_GLOBAL_OPTIONS_PANEL,
    ),
]
_AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST[:PORT]",
        help="Cluster address (or GENIE_MASTER_ADDR; default: local cluster, then last login).",
        rich_help_panel=_GLOBAL_OPTIONS_PANEL,
    ),
]
_TokenFileOption = Annotated[
    str | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File with the access token; - reads standard input (or GENIE_TOKEN, or 'genie login').",
        rich_help_panel=_GLOBAL_OPTIONS_PANEL,
    ),
]
_GridFileOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Grid file (or GENIE_GRID_FILE; default: config/cluster_config.yaml).",
        rich_help_panel=_GLOBAL_OPTIONS_PANEL,
    ),
]
_SETTING_IN_ERROR_PATTERN = re.compile(r"[a-z_.]+ = (?P<value>.*) \(argument (?P<name>[a-z_]+)\)", re.DOTALL)
_OPTION_BY_SETTING = {
    "level": "--log-level",
    "token": "--token-file",
    "master_addr": "--address",
    "file": "--config",
}
"""Options whose name differs from that of their setting."""
_SHARED_OPTIONS = {
    "debug": (_DebugOption, False),
    "log_level": (_LogLevelOption, None),
    "address": (_AddressOption, None),
    "token_file": (_TokenFileOption, None),
}
_HIDDEN_ADDRESS_OPTION = (Annotated[str | None, typer.Option("--address", hidden=True)], None)
_GRID_SHARED_OPTIONS = {
    "debug": _SHARED_OPTIONS["debug"],
    "log_level": _SHARED_OPTIONS["log_level"],
    "grid_file": (_GridFileOption, None),
}
"""A grid has no controller, hence no address and no token; it has a file."""


@dataclass
class Invocation:
    """Values of the shared options, given before or after the command name."""

    debug: bool = False
    log_level: str | None = None
    address: str | None = None
    token_file: str | None = None
    grid_file: str | None = None
    _cached_token: str | None = None

    def update_options(self, given: Mapping[str, Any]) -> None:
        for name, value in given.items():
            _, default = {**_SHARED_OPTIONS, **_GRID_SHARED_OPTIONS}[name]
            if value != default:
                setattr(self, name, value)

    def load_settings(
        self, arguments: Mapping[str, object] | None = None, *, keep_info_logs: bool = False
    ) -> Settings:
        """Load the settings, overridden by `arguments`, and configure logging.

        Without `keep_info_logs` the default log level is WARNING, so that short commands print no INFO lines.
        """
        try:
            settings = load({**self._shared_options_as_settings(), **(arguments or {})})
        except ConfigError as error:
            raise _with_option_instead_of_setting(error) from error
        explicit = keep_info_logs or settings.sources["log.level"] != "default"
        log.configure(settings.log if explicit else dataclasses.replace(settings.log, level="WARNING"))
        return settings

    def read_token(self) -> str | None:
        """Return the token of --token-file, or None. Reads the file once: it may be standard input."""
        if self.token_file is not None and self._cached_token is None:
            self._cached_token = read_token_file(self.token_file, what="--token-file")
        return self._cached_token

    def _shared_options_as_settings(self) -> dict[str, object]:
        host, port = (None, None)
        if self.address is not None:
            host, port = parse_address(self.address, what="--address")
        return {
            "cluster.master_addr": host,
            "cluster.master_port": port,
            "cluster.token": self.read_token(),
            "grid.file": self.grid_file,
            "log.level": "DEBUG" if self.debug else self.log_level,
        }


class _LazyImportGroup(TyperGroup):
    """Imports the module of a command when the command is invoked.

    Help and completion import all modules; so does an unknown name, to suggest the closest command.
    """

    module_by_command: Mapping[str, str] = _COMMAND_MODULES

    # Any: the types of the parser differ between versions of typer.
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            self._import_commands(
                [cmd_name] if cmd_name in self.module_by_command else self.module_by_command
            )
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        if len(self.commands) < len(self.module_by_command):
            self._import_commands(self.module_by_command)
        return list(self.module_by_command)

    def _import_commands(self, names: Iterable[str]) -> None:
        for name in names:
            importlib.import_module(f"genie.cli.{self.module_by_command[name]}")  # registers the commands
        self.commands = cast(TyperGroup, get_command(self._get_typer_app())).commands

    def _get_typer_app(self) -> typer.Typer:
        return app


class _LazyImportGridGroup(_LazyImportGroup):
    module_by_command = _GRID_COMMAND_MODULES

    def _get_typer_app(self) -> typer.Typer:
        return grid_app


app = typer.Typer(
    name="genie",
    cls=_LazyImportGroup,
    help="Use remote GPUs: manage a cluster and its jobs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)


grid_app = typer.Typer(
    name="grid",
    cls=_LazyImportGridGroup,
    help="Use SSH hosts as a grid; nothing is installed on them. 'grid-cli' is short for 'genie grid'.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings=app.info.context_settings,
)
app.add_typer(grid_app)


def run_command_line(
    argv: Sequence[str] | None = None, *, commands: typer.Typer = app, prog: str = "genie"
) -> int:
    """Parse the arguments, run the command, report errors, and return the exit code."""
    invocation = Invocation()
    output.replace_closed_streams()
    try:
        _check_arguments_are_utf8(sys.argv[1:] if argv is None else argv)
        code = get_command(commands).main(args=argv, prog_name=prog, obj=invocation, standalone_mode=False)
        return _flush_stdout_and_get_exit_code(code or 0)
    except SystemExit as end:
        return _flush_stdout_and_get_exit_code(end.code if isinstance(end.code, int) else int(bool(end.code)))
    except typer.Abort as abort:
        if isinstance(abort.__context__, KeyboardInterrupt):
            return INTERRUPTED_EXIT_CODE
        output.print_message("genie: aborted: the prompt was not answered")
        return 1
    except _TyperUsageError as error:
        return _print_usage_error_and_get_exit_code(error, prog=prog, debug=invocation.debug)
    except GenieError as error:
        output.show_error(error, debug=invocation.debug)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        return _flush_stdout_and_get_exit_code(1)
    except Exception as error:
        _log.debug("command failed", exc_info=True)
        output.show_error(error, debug=invocation.debug)
        return 1
    finally:
        output.discard_unwritable_stderr()


def _print_usage_error_and_get_exit_code(
    error: Any, *, prog: str, debug: bool
) -> int:  # Any: a type of the parser
    """Print a usage error of the parser in the format of all errors; return the exit code."""
    if type(error).__name__ != "NoArgsIsHelpError":
        text = error.format_message().removesuffix(".")
        text = text if len(text) <= _USAGE_MESSAGE_CHARS_MAX else f"{text[:_USAGE_MESSAGE_CHARS_MAX]} ..."
        hints = _usage_hints(error) if error.ctx is not None else [f"'{prog} --help' lists the options"]
        output.show_error(UsageError(text[:1].lower() + text[1:], hint="; ".join(hints)), debug=debug)
    return UsageError.exit_code


def _usage_hints(error: Any) -> Iterator[str]:
    found = error.ctx.command
    unknown_option, missing = hasattr(error, "possibilities"), hasattr(error, "param_type")
    hint = getattr(found, "arguments_hint", "")
    if hint and (unknown_option or missing or type(error) is _TyperUsageError):
        yield hint
    elif unknown_option and not error.possibilities and _has_positional_arguments(found):
        yield "put arguments that start with '-' after --"
    what = "commands" if hasattr(found, "commands") else "options"
    yield f"'{error.ctx.command_path} --help' lists the {what}"


def _has_positional_arguments(command: Any) -> bool:
    return any(parameter.param_type_name == "argument" for parameter in command.params)


def _check_arguments_are_utf8(argv: Sequence[str]) -> None:
    """Raise UsageError for an argument that is not valid UTF-8."""
    for number, argument in enumerate(argv, 1):
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = ascii(argument)
            raise UsageError(
                f"argument {number} is not UTF-8 text: {shown}", hint="encode it in UTF-8"
            ) from None


def grid_command(
    name: str,
    *,
    example: str,
    group: typer.Typer = grid_app,
    context_settings: dict[str, Any] | None = None,
    with_cluster: bool = False,
    arguments_hint: str = "",
) -> Callable[[_CommandFunction], _CommandFunction]:
    """Register a grid command; see `command`.

    `with_cluster` adds the options for the connection to a controller. `arguments_hint` is the hint for
    missing and surplus arguments and for unknown options.
    """
    shared = _GRID_SHARED_OPTIONS | (_SHARED_OPTIONS if with_cluster else {})
    kind: type[_CommandWithHint] = type("_Hinted", (_CommandWithHint,), {"arguments_hint": arguments_hint})
    return command(group, name, example=example, context_settings=context_settings, shared=shared, kind=kind)


class _CommandWithHint(TyperCommand):
    """A command whose usage errors carry its context. `arguments_hint` is their hint."""

    arguments_hint = ""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # Any: a type of the parser
        try:
            return super().parse_args(ctx, args)
        except _TyperUsageError as error:
            error.ctx = ctx  # type: ignore[attr-defined]  # missing for options without a value
            raise


def command(
    group: typer.Typer,
    name: str,
    *,
    example: str,
    context_settings: dict[str, Any] | None = None,
    shared: Mapping[str, tuple[Any, Any]] = _SHARED_OPTIONS,
    kind: type[_CommandWithHint] = _CommandWithHint,
    no_address_hint: str = "",
) -> Callable[[_CommandFunction], _CommandFunction]:
    """Register a function that takes an Invocation and, by keyword, its options.

    A parameter whose type is a dataclass becomes one option per field. `no_address_hint` is for a command
    that connects to no cluster: it rejects --address with this hint and does not list the option.
    """
    if no_address_hint:
        shared = {**shared, "address": _HIDDEN_ADDRESS_OPTION}

    def register(function: _CommandFunction) -> _CommandFunction:
        own = inspect.signature(function, eval_str=True)
        _, *named = own.parameters.values()
        # Any: any dataclass.
        groups: dict[str, Any] = {
            each.name: each.annotation for each in named if dataclasses.is_dataclass(each.annotation)
        }
        parameters = [one for each in named for one in _expand_dataclass_parameter(each)]

        @functools.wraps(function)
        def call(context: typer.Context, **given: Any) -> None:
            invocation = context.find_object(Invocation)
            assert invocation is not None
            invocation.update_options({each: given.pop(each) for each in shared})
            if no_address_hint and invocation.address is not None:
                raise UsageError(f"'{context.command_path}' takes no --address", hint=no_address_hint)
            for name, group in groups.items():
                names = [field.name for field in dataclasses.fields(group)]
                given[name] = group(**{each: given.pop(each) for each in names})
            function(invocation, **given)

        # The parser reads the signature: the function's own parameters, then the shared ones.
        first = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        merged = [
            first,
            *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters),
            *_shared_option_parameters(shared),
        ]
        call.__signature__ = own.replace(parameters=merged)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in merged}
        epilog = f"Example: [bold]{_escape_markup(example)}[/bold]"
        group.command(name, cls=kind, epilog=epilog, context_settings=context_settings)(call)
        return function

    return register


def _escape_markup(text: str) -> str:
    """Escape '[', which starts a style in help texts."""
    return text.replace("[", r"\[")


def _print_version_and_exit_if_requested(requested: bool) -> None:
    if requested:
        output.write_line(f"genie {__version__}")
        raise typer.Exit


_VersionOption = Annotated[
    bool,
    typer.Option(
        "--version",
        help="Print the version and exit.",
        is_eager=True,
        callback=_print_version_and_exit_if_requested,
    ),
]


@app.callback()
def _root_callback(
    context: typer.Context,
    debug: _DebugOption = False,
    log_level: _LogLevelOption = None,
    address: _AddressOption = None,
    token_file: _TokenFileOption = None,
    _version: _VersionOption = False,
) -> None:
    invocation = context.find_object(Invocation)
    assert invocation is not None
    invocation.update_options(
        {"debug": debug, "log_level": log_level, "address": address, "token_file": token_file}
    )


@grid_app.callback()
def _grid_root_callback(
    context: typer.Context,
    debug: _DebugOption = False,
    log_level: _LogLevelOption = None,
    config: _GridFileOption = None,
    _version: _VersionOption = False,
) -> None:
    invocation = context.find_object(Invocation)
    assert invocation is not None
    invocation.update_options({"debug": debug, "log_level": log_level, "grid_file": config})


def read_token_file(name: str, *, what: str) -> str:
    """Return the token in a file, or on standard input for '-'. Errors never contain it."""
    try:
        text = sys.stdin.read(_TOKEN_BYTES_MAX) if name == "-" else _read_token_text(Path(name))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(
            f"could not read {what} {name!r}: {reason}", hint="give a file that contains a token"
        ) from None
    if not text.strip():
        raise TokenMissingError(f"{what} {name!r} is empty", hint="create a token: genie token create")
    return text.strip()


def _read_token_text(path: Path) -> str:
    with path.expanduser().open(encoding="utf-8") as file:
        return file.read(_TOKEN_BYTES_MAX)


def _with_option_instead_of_setting(error: ConfigError) -> ConfigError:
    """Return the error with the name of the option instead of the setting."""

    def replace_setting_name(found: re.Match[str]) -> str:
        name = _OPTION_BY_SETTING.get(found["name"], f"--{found['name'].replace('_', '-')}")
        return f"{name} {found['value']}"

    return ConfigError(
        _SETTING_IN_ERROR_PATTERN.sub(replace_setting_name, error.message, count=1), hint=error.hint
    )


def _expand_dataclass_parameter(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """Return the parameter itself, or one parameter per field of its dataclass."""
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


def _shared_option_parameters(shared: Mapping[str, tuple[Any, Any]]) -> list[inspect.Parameter]:
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in shared.items()
    ]


def _flush_stdout_and_get_exit_code(code: int) -> int:
    """Flush now, so that a closed pipe causes no message when the interpreter exits."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            output.print_message(f"genie: could not write the output: {error.strerror}")
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or 1
    return code
