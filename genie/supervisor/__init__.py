"""Starts, restarts and stops controller and agent of this machine: `genie up`, `genie join`, server mode."""
