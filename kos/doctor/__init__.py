"""What this machine, and the ranks of a job on it, can do, and why not: ``python -m kos.doctor``."""
