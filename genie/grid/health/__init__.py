"""Health of the nodes: readings, with or without Python there, and which node is best."""
