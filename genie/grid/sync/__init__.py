"""File sync from this machine to nodes: sends only changes, and switches files in atomically.

`excludes` decides what is skipped, `local_tree` scans the local folder, `delta` compares, `pack` reads files,
`stream` sends them, `syncer` does it for several nodes; `sync_without_python` sends a tar archive to nodes
without Python. The code that runs on nodes is in ../remote (tree, synced_tree, sync). One direction only:
results are not fetched.
"""
