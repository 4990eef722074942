"""The protocol of locks: the lease of one acquisition, and all locks of a session. The API is locks.py."""
