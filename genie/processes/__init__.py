"""What one process needs of its operating system: process marks, files and locks, threads, tasks, time."""
