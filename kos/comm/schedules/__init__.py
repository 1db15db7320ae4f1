"""Collective algorithms as data: built by pure functions, verified, simulated, executed and drawn."""

from kos.comm.schedules import basic  # noqa: F401 - it registers its algorithms
from kos.comm.schedules.registry import algorithms, build, collectives, describe, runnable
from kos.comm.schedules.schedule import Schedule, ScheduleError, Step

__all__ = ["Schedule", "ScheduleError", "Step", "algorithms", "build", "collectives", "describe", "runnable"]
