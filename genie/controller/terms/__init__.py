"""Terms of leadership: how a controller begins one, and what it does meanwhile."""
