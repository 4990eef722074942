"""The controller: admits nodes and clients, schedules jobs, and records every decision in the store."""
