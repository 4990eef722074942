"""How a session starts, runs and ends: phases of `genie.init`, heartbeats, its thread and event loop."""
