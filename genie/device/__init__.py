"""The torch device `remote_accelerator`: tensors and ops that live in executors on other machines.

A plain form: every op is one round trip, dispatched in Python. roster.py knows which device is
where; connection.py speaks to one executor; tensor.py is what the user holds; calls.py and
copies.py turn ops into messages; backend.py tells torch; accelerator.py is
`torch.remote_accelerator`. Importing this package does not import torch.
Not for: finding executors (cluster/ gives a callable that does).
"""

from __future__ import annotations

from genie.device.roster import ExecutorAddress, RemoteDevice, attach, detach

__all__ = ["ExecutorAddress", "RemoteDevice", "attach", "detach"]
