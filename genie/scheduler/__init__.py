"""Decides which job goes where. Pure: values in, decisions with their reasons out.

`scheduler.py` decides, over `request.py` (what is asked for and what there is), `book.py` (who holds what),
`order.py`, `quota.py`, `victims.py`, `migration.py`, `pins.py` (jobs that name their GPUs), and `placement/`,
which chooses among many nodes. `policies.py` and `filters.py` are for what users write. `explain.py` says
why a job waits, `possible.py` why it never could start; `facts.py` makes requests and facts of the model's
jobs and nodes. Not for: carrying a decision out.
"""
