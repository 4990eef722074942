"""A grid: a few SSH hosts used as they are, with nothing installed on them.

`grid_file` says which hosts, `ssh_pool` reaches them, `remote/` is what runs there while we are
connected. Everything else stands on these three.

Not for: nodes with an agent (genie/agent), and jobs that the cluster's scheduler places.
"""
