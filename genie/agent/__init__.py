"""The agent of a node: reports its hardware to the controller and runs the jobs that are placed on it.

`python -m genie.agent` is the process. Placement is decided by scheduler/ and controller/.
"""
