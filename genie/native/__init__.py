"""Compiles and loads the C++ libraries of the top-level folder native/, and declares their Python API."""
