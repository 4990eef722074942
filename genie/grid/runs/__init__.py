"""Runs: commands that continue on a node without a connection. Starts, follows and signals them."""
