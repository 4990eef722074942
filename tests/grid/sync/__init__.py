"""Tests of bringing a folder to nodes."""
