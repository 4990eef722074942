"""Seeded simulation of the real controller and agent."""
