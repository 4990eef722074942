"""Faults in a cluster of real processes, and the checks of what they left: `make faults`, run.py.

namespaces.py     a sandbox with one network namespace per machine
machines.py       servers and nodes: commands, processes, disks, clocks
workload.py       jobs of two tenants, and the history of the requests
job_wrapper.py    the program of the jobs, which records what it does
faults.py         the faults
rounds.py         one round: cluster, workload, faults, checks
store_history.py  the revision history of etcd
checks.py         the invariants
reports.py        the printed results
"""
