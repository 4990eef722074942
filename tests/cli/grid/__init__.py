"""Tests of the commands of `grid-cli`."""
