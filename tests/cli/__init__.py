"""Tests of the command line, through `genie.cli.main`."""
