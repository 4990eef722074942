"""The grid, with real SSH servers on this machine as its nodes."""
