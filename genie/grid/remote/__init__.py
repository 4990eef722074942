"""What runs on a node, sent to it over the connection: standard library only, Python 3.8 and newer.

`core` is sent first and answers requests; the other modules are sent when one of their ops is first
asked for. They import nothing but the standard library and each other, and leave no file behind
except what an op is there to write.

Not for: anything that runs on this machine (the parent folder).
"""
