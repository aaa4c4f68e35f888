"""Command-line flags of the trainer, derived from the sections of `Config`.

A flag is a field: its name, type, default, choices and docstring belong to the field, so a flag cannot lack its
help and a field cannot lack its flag.
"""

from megatron_terapipe.arguments.build import Arguments, build_config, parse_arguments, read_arguments
from megatron_terapipe.arguments.parser import Flag, flags

__all__ = ["Arguments", "Flag", "build_config", "flags", "parse_arguments", "read_arguments"]
