"""Tests of file sync."""
