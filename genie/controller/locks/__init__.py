"""Locks of tenants: the table of leases, waiting clients, and requests."""
