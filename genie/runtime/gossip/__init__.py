"""Gossip between servers and nodes: who is a member, and which members respond. Advisory only."""
