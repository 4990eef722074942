"""The executor: a process that owns one client's tensors and runs its ops on one accelerator.

Started by the agent as `python -m genie.agent.executor --config PATH`. config.py says what it is
told; door.py listens and checks tickets; session.py answers one client; ops.py decides which ops
may run; tensors.py holds the tensors and the quota. It never registers the torch device that the
client sees. Not for: deciding who gets an executor (controller/) and starting it (agent/).
"""

from __future__ import annotations
