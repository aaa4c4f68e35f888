"""In what order a pipeline works: layouts, token slices, ops, schedules, simulation, lowering, drawings.

Everything here is pure and needs the standard library alone, so a schedule can be read, simulated, drawn and
tested on any machine. Read the files in this order: `ops`, `schedules`, `dependencies`, `simulate`, `lowering`.
"""
