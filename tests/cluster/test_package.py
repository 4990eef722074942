"""What `import genie.cluster` gives, and what it leaves alone until it is asked for."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def test_the_documented_modules_are_there_on_first_use_and_not_before() -> None:
    code = """
        import sys, genie, genie.cluster
        names = ("dashboard", "events", "health", "monitoring", "node_info")
        print([name for name in names if f"genie.cluster.{name}" in sys.modules])
        print(callable(genie.cluster.dashboard.show), genie.cluster.events.EventBus.__name__)
        print(set(names) <= set(dir(genie.cluster)))
        print([getattr(genie.cluster, name).__name__.rpartition(".")[2] for name in names] == list(names))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30
    )
    assert done.stdout.splitlines() == ["[]", "True EventBus", "True", "True"], done.stderr
