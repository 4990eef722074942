"""Access control. Pure functions that return a decision or raise an error with the reason."""
