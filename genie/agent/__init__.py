"""The agent of a node: reports its hardware to the controller and runs the jobs that are placed on it.

`python -m genie.agent` is the process. Placement is decided by scheduler/ and controller/.
"""

from __future__ import annotations

import signal

KEEP_JOBS_SIGNAL = signal.SIGUSR1
"""An agent that receives it ends, and its jobs keep running; a supervisor forwards the signal."""
