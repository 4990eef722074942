"""Carries bytes: the wire, connections, certificates, and what the network between two nodes can do."""
