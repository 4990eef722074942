"""Backups of the store: taking, the file format, restoring."""
