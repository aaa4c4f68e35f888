"""The parser of the small commands, under the name that it had before all commands shared it."""

from deepspeed_ext.plan.command_line import CommandParser

__all__ = ["CommandParser"]
