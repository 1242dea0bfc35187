"""The one clock: seconds that only grow, for deadlines and for everything that is timed."""

from time import perf_counter as now

__all__ = ["now"]
