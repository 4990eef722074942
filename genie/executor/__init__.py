"""The executor: the process that holds one client's tensors and runs its ops on one accelerator.

The agent starts it as `python -m genie.executor --config PATH` (processes/executor_config.py). listener.py
listens and checks tickets; session.py serves one client over one or several connections;
parcel_connector.py connects to other executors; accelerator.py initializes the accelerator; inductor.py
compiles recorded graphs; allowed_ops.txt lists the allowed ops. A C++ library (native/torch/executor) runs
the ops without Python. The process never registers the torch device of the client.
"""

from __future__ import annotations
