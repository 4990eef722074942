"""Uploaded working directories: their files on disk, and their copies on other controllers."""
