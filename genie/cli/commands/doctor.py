"""`genie doctor`: runs the checks of doctor_checks.py and prints results and fixes.

Exits with 1 if a required part failed.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable

import typer

from genie.cli import doctor_checks, output
from genie.cli.app import Invocation, JsonOption, app, command
from genie.cli.doctor_checks import CheckOutcome, CheckVerdict
from genie.config import Settings

_log = logging.getLogger(__name__)


@command(app, "doctor", example="genie doctor --json")
def doctor(invocation: Invocation, *, as_json: JsonOption = False) -> None:
    """Check software, hardware, network and cluster, and suggest fixes."""
    settings = invocation.load_settings()
    found = run_checks(settings)
    failed = any(check.verdict is CheckVerdict.FAILED for check in found)
    if as_json:
        output.write_json({"ok": not failed, "checks": [dataclasses.asdict(check) for check in found]})
    else:
        rows = [(c.name, c.verdict.value, _format_check_details(c, debug=invocation.debug)) for c in found]
        output.write_table(("check", "result", "details"), rows)
        _write_fixes(found)
    if failed:
        raise typer.Exit(1)


def run_checks(settings: Settings) -> list[CheckOutcome]:
    parts: list[tuple[str, Callable[[], Iterable[CheckOutcome]]]] = [
        ("python", doctor_checks.check_python_and_system),
        ("packages", doctor_checks.check_packages),
        ("tools", doctor_checks.check_libraries_and_system_tools),
        ("accelerators", doctor_checks.check_accelerators),
        ("network", lambda: doctor_checks.check_network_backends(settings)),
        ("state directory", lambda: doctor_checks.check_state_directory(settings)),
        ("clock", doctor_checks.check_clock),
        ("certificates", lambda: doctor_checks.check_certificate_expiry(settings)),
        ("cluster", lambda: doctor_checks.check_port_and_cluster(settings)),
    ]
    return [check for name, part in parts for check in _run_check_group(name, part)]


def _run_check_group(name: str, part: Callable[[], Iterable[CheckOutcome]]) -> list[CheckOutcome]:
    """Run one part. An exception becomes a warning, so that the other parts still run."""
    try:
        return list(part())
    except Exception as error:
        _log.debug("check %s raised an exception", name, exc_info=True)
        found = f"internal error in the check: {type(error).__name__}: {error}"
        return [
            CheckOutcome(
                name=name,
                verdict=CheckVerdict.WARNING,
                found=found,
                fix="run genie doctor --debug and report the output",
            )
        ]


def _format_check_details(check: CheckOutcome, *, debug: bool) -> str:
    return f"{check.found} ({check.detail})" if debug and check.detail else check.found


def _write_fixes(found: list[CheckOutcome]) -> None:
    fixes = [(c.name, c.fix) for c in found if c.fix and c.verdict is not CheckVerdict.OK]
    if not fixes:
        return
    output.write_line("")
    output.write_table(("check", "fix"), fixes)
