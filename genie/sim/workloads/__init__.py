"""Workloads of the scheduling simulation: traces of real clusters, and synthetic jobs."""
