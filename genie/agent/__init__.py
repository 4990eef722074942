"""A GPU node: it tells the controller what it has and how it is, and runs what it is given.

`python -m genie.agent` is the process. Not for: deciding what runs where (scheduler/, controller/).
"""
