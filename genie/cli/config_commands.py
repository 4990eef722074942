"""Settings: what they are, where each came from, and whether a file is right.

Also renders docs/ENVIRONMENT_VARIABLES.md, so that the page is the declarations and nothing
else. Not for: reading settings (config.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from genie.cli import output
from genie.cli.app import AsJson, Group, Invocation, app, command
from genie.config import OTHER_VARIABLES, SECTIONS, Setting, Settings, declared, load
from genie.errors import ConfigError, UsageError

settings_app = typer.Typer(
    name="config", cls=Group, help="Show and check settings.", no_args_is_help=True, rich_markup_mode="rich"
)
app.add_typer(settings_app)

_INTRODUCTION = """\
# Environment variables

Written by `genie config show --markdown`; do not edit by hand. A test compares this page with the
declarations in `genie/config.py`.

Settings are read once, in this order; the later wins: defaults, the settings file (TOML), these
variables, arguments of the call or the command. A variable that starts with `GENIE_` and is not
listed here is an error that names it. An empty value counts as not given. `genie config show`
prints every setting with its value and where it came from.
"""
_OTHERS = """\
## Others

These are not settings of the tree.

| variable | what it does |
|---|---|
"""
_FOREIGN = """\
`XDG_CONFIG_HOME` and `XDG_STATE_HOME` move the settings file and the default of `paths.state_dir`.
`NO_COLOR` turns colours off.
"""


@command(settings_app, "show", example="genie config show --json")
def show(
    invocation: Invocation,
    *,
    as_json: AsJson = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="The page of environment variables instead.")
    ] = False,
) -> None:
    """Print every setting, its value, and where the value came from. Secrets are not shown."""
    if markdown:
        output.write_line(environment_page().rstrip("\n"))
        return
    settings = invocation.load_settings()
    rows = [
        {
            "key": item.key,
            "value": _value(settings, item),
            "source": settings.sources[item.key],
            "env": item.env,
            "default": item.default,
            "help": item.help,
        }
        for item in declared()
    ]
    if as_json:
        output.write_json({"settings": rows})
        return
    output.write_table(
        ("setting", "value", "from"),
        [(str(row["key"]), _text(row["value"]), str(row["source"])) for row in rows],
    )


@command(settings_app, "check", example="genie config check cluster.toml")
def check(
    invocation: Invocation,
    *,
    file: Annotated[
        Path | None,
        typer.Argument(help="A settings file; without it, the settings as they would be read now."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check settings: a file alone, or what every command here would read."""
    try:
        _check(invocation, file)
    except ConfigError as error:
        if as_json:
            output.write_json({"ok": False, "error": error.message, "hint": error.hint})
        raise
    if as_json:
        output.write_json({"ok": True})
    else:
        output.write_line("the settings are right" if file is None else f"{file} is right")


def _check(invocation: Invocation, file: Path | None) -> None:
    if file is None:
        invocation.load_settings()
        return
    if not file.is_file():
        raise UsageError(f"there is no file {str(file)!r}", hint="give the path of a TOML file")
    try:
        load(environ={}, file=file)
    except ConfigError as error:
        # The hint is for a file that the environment names; this one was named by hand.
        raise ConfigError(error.message, hint=error.hint.removesuffix(" or unset GENIE_CONFIG")) from error


def environment_page() -> str:
    """docs/ENVIRONMENT_VARIABLES.md."""
    parts = [_INTRODUCTION]
    for section, cls in SECTIONS.items():
        items = [item for item in declared() if item.key.startswith(f"{section}.")]
        parts.append(f"## [{section}]\n\n{cls.__doc__}\n\n{_table(items)}")
    others = "".join(f"| `{name}` | {_cell(text)} |\n" for name, text in OTHER_VARIABLES.items())
    parts.append(f"{_OTHERS}{others}")
    parts.append(_FOREIGN)
    return "\n".join(parts)


def _table(items: list[Setting]) -> str:
    head = "| variable | key | value | default | what it does |\n|---|---|---|---|---|\n"
    return head + "".join(_row(item) for item in items)


def _row(item: Setting) -> str:
    kind = _cell(item.kind) + (" (secret)" if item.secret else "")
    default = f"`{item.default}`" if item.default else ""
    name = item.key.partition(".")[2]
    return f"| `{item.env}` | `{name}` | {kind} | {default} | {_cell(item.help)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _value(settings: Settings, item: Setting) -> object:
    section, _, name = item.key.partition(".")
    value = getattr(getattr(settings, section), name)
    if item.secret and value is not None:
        return "(hidden)"
    return str(value) if isinstance(value, Path) else value


def _text(value: object) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
