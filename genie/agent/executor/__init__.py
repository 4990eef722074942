"""The executor: a process that owns one client's tensors and runs its ops on one accelerator.

Started by the agent as `python -m genie.agent.executor --config PATH`. config.py says what it is
told; door.py listens and checks tickets; session.py serves one client over the connections that it
makes; fetching.py connects to other executors, for copies from them; accelerator.py makes the
accelerator ready; allowed_ops.txt names the ops that may run. Ops are run by a C++ library
(native/torch/executor), with no Python in between. It never registers the torch device that the
client sees. Not for: deciding who gets an executor (controller/) and starting it (agent/).
"""

from __future__ import annotations
