"""The commands of the search: modules with `HELP`, `EXAMPLES`, `add_flags(parser)` and `run(options) -> int`."""
