"""How Genie is watched from outside: logs today; metrics and traces will join them here."""
