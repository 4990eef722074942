"""Lazy imports of `genie.cluster`."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def test_documented_modules_are_imported_on_first_use() -> None:
    code = """
        import sys, genie, genie.cluster
        names = ("backend_info", "dashboard", "events", "health")
        names += ("monitoring", "network_discovery", "node_info")
        print([name for name in names if f"genie.cluster.{name}" in sys.modules])
        print(callable(genie.cluster.dashboard.show), genie.cluster.events.EventBus.__name__)
        print(set(names) <= set(dir(genie.cluster)))
        print([getattr(genie.cluster, name).__name__.rpartition(".")[2] for name in names] == list(names))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30
    )
    assert done.stdout.splitlines() == ["[]", "True EventBus", "True", "True"], done.stderr
