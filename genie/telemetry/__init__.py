"""Logs of the processes of Genie."""
