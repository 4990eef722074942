"""Whole clusters of real processes on loopback, or the one that GENIE_TEST_SERVER names."""
