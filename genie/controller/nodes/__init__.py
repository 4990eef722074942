"""Nodes: admission, registration, heartbeats, failure detection, and orders to agents."""
