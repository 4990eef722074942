"""`genie doctor`: what works on this machine and what does not, with the reason and the fix.

Ends with 1 only when something is missing that Genie cannot do without. The checks themselves
are in checks.py.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable

import typer

from genie.cli import checks, output
from genie.cli.app import AsJson, Invocation, app, command
from genie.cli.checks import Check, Verdict
from genie.config import Settings

_log = logging.getLogger(__name__)


@command(app, "doctor", example="genie doctor --json")
def doctor(invocation: Invocation, *, as_json: AsJson = False) -> None:
    """Look at this machine: what works, what does not, why, and what would help."""
    settings = invocation.load_settings()
    found = run_checks(settings)
    failed = any(check.verdict is Verdict.FAILED for check in found)
    if as_json:
        output.write_json({"ok": not failed, "checks": [dataclasses.asdict(check) for check in found]})
    else:
        rows = [(c.name, c.verdict.value, _found(c, debug=invocation.debug)) for c in found]
        output.write_table(("part", "verdict", "found"), rows)
        _write_fixes(found)
    if failed:
        raise typer.Exit(1)


def run_checks(settings: Settings) -> list[Check]:
    parts: list[tuple[str, Callable[[], Iterable[Check]]]] = [
        ("python", checks.python),
        ("packages", checks.packages),
        ("tools", checks.tools),
        ("accelerators", checks.accelerators),
        ("network", lambda: checks.network(settings)),
        ("state directory", lambda: checks.state_directory(settings)),
        ("clock", checks.clock),
        ("certificates", lambda: checks.certificates(settings)),
        ("cluster", lambda: checks.cluster(settings)),
    ]
    return [check for name, part in parts for check in _guarded(name, part)]


def _guarded(name: str, part: Callable[[], Iterable[Check]]) -> list[Check]:
    """The boundary of one part: a check that breaks is itself a finding, and the others still run."""
    try:
        return list(part())
    except Exception as error:
        _log.debug("the check of %s failed", name, exc_info=True)
        found = f"the check itself failed: {type(error).__name__}: {error}"
        return [
            Check(name=name, verdict=Verdict.WARNING, found=found, fix="run it with --debug and report it")
        ]


def _found(check: Check, *, debug: bool) -> str:
    return f"{check.found} ({check.detail})" if debug and check.detail else check.found


def _write_fixes(found: list[Check]) -> None:
    fixes = [(c.name, c.fix) for c in found if c.fix and c.verdict is not Verdict.OK]
    if not fixes:
        return
    output.write_line("")
    output.write_table(("part", "what would help"), fixes)
