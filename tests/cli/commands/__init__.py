"""Tests of the commands of `genie`, except those of `genie grid`."""
