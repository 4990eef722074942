"""Tests of the command line, each through `genie.cli.main`, as a person would call it."""
