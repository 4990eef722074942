"""Placement: the scheduler in sync with the ledger, scheduling passes, policies and placers."""
