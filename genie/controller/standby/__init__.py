"""A controller that does not lead: it copies the ledger, answers reads and forwards requests."""
