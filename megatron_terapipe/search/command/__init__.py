"""The commands of the search: one module each, with `HELP`, `add_flags(parser)` and `run(options) -> int`."""
