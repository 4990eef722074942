"""SSH: targets, login keys, host keys, the connection pool, and the client of the helper."""
