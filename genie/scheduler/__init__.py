"""Decides which job runs where. Pure: values in, decisions with reasons out.

`scheduler.py` receives events and runs passes (`scheduling_pass.py`) over the jobs (`job_table.py`) and the
cluster (`cluster/`). `order.py`, `quota.py`, `preemption/` and `gpu_reservations.py` are parts of a pass;
`placement/` chooses among nodes; `rules.py` configures all of it. `policies.py` isolates policies written by
users. `explain.py` and `start_estimate.py` explain why a job is pending, `feasibility.py` why it never could
start; `conversion.py` converts the model's jobs and nodes. Does not carry out decisions (controller/).
"""
