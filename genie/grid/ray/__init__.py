"""Ray on the nodes of a grid: its cluster, its jobs, and batches of tasks."""
