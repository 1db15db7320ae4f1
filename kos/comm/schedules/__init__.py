"""Collective algorithms as data: built by pure functions, verified, simulated, executed and drawn."""

from kos.comm.schedules import moving as _moving
from kos.comm.schedules import reducing as _reducing
from kos.comm.schedules.registry import algorithms, build, collectives, describe
from kos.comm.schedules.schedule import Schedule, ScheduleError, Step

__all__ = ["Schedule", "ScheduleError", "Step", "algorithms", "build", "collectives", "describe"]

del _moving, _reducing
