"""What runs on nodes, tested without one."""
