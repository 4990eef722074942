"""The master: what the cluster remembers, who leads, who holds what, and which job goes where."""
