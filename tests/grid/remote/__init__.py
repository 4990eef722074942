"""What runs on nodes, run here."""
