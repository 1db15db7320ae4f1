"""Measures the tuning tables by which ``auto`` chooses a backend: ``python -m kos.tune``."""
