"""Jobs and sessions: durable state changes, leases of clients, and uploaded working directories."""
