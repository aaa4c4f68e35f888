"""`argparse` for the small commands, with errors of ours: one line, and no usage above it."""

import argparse
from typing import NoReturn

from megatron_terapipe.errors import ConfigError


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are `ConfigError`s; so are those of its sub-commands."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and where the flags are explained.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{message}: see {self.prog} --help")
