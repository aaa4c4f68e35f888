"""In what order a pipeline works: layouts, token slices, ops, schedules, simulation, search, lowering, drawings.

Everything here is pure. A schedule can be read, simulated, drawn and run with the standard library alone; numpy and
numba serve the fast simulator (`simulate.compiled`), `optimise` and `solve`. Read in this order: `ops`,
`dependencies`, `schedules`, `simulate`, `lowering`.
"""

__all__ = [
    "closed_forms",
    "costs",
    "critical_path",
    "dependencies",
    "errors",
    "layout",
    "measured",
    "memory",
    "ops",
    "optimise",
    "partition",
    "render",
    "schedule_file",
    "schedules",
    "simulate",
    "slicing",
    "solve",
    "timeline",
]
