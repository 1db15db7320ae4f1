"""Reports what this machine and job can use, and why something is unavailable: ``python -m kos.doctor``."""
