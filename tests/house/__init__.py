"""Tests of the house itself: layers, errors, exports, settings page, file shape, docs."""
