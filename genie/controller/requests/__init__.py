"""Requests of clients: authentication, dispatch, and the handlers by subject."""
