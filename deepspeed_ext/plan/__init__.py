"""The order of work in a pipeline: layouts, token slices, ops, schedules, simulation, search, lowering, drawings.

Everything here is pure. A schedule can be read, simulated, drawn and run with only the standard library; numpy and
numba serve the fast simulator (`simulate.compiled`) and `solve`. Read in this order: `ops`, `schedules`,
`simulate`, `programs.lowering`.
"""

__all__ = [
    "costs",
    "draw",
    "errors",
    "layout",
    "measured",
    "memory",
    "ops",
    "schedule_file",
    "schedules",
    "simulate",
    "slicing",
    "solve",
    "timeline",
]
