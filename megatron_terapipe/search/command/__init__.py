"""The commands of the search: one module each, with `NAME`, `HELP`, `add_flags(parser)` and `run(options) -> int`."""
