"""Faults of a simulated cluster that take several steps; fault_injector.py chooses and times them."""
