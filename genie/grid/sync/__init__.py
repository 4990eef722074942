"""Bringing a folder to nodes: only what changed, put into place at once, never half-written.

`excludes` says what is left out, `local_tree` what is here, `delta` what differs, `pack` reads it, `stream`
carries it, `syncer` does all of that for several nodes; `tar_pipe` is for nodes without Python. What runs
on nodes is in ../remote (tree, site, sync).

Not for: fetching results back.
"""
