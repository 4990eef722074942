"""The helper: modules that are sent to a node over the connection and run there. Python 3.8 and newer.

`core` is sent first and serves requests; the other modules are sent when one of their ops is first called.
They import only the standard library and each other, and write no files except those of their ops.
"""
