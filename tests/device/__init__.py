"""Tests of the torch device `remote_accelerator`, against real executors on this machine."""
