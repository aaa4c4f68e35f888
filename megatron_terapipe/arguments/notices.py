"""Lines at the start of a run about its command line: what of it has no effect here, and what it leaves out."""

from collections.abc import Iterator

from megatron_terapipe.arguments.other_defaults import differing_defaults
from megatron_terapipe.arguments.parser import CommandLine
from megatron_terapipe.config import Config


def notices(line: CommandLine, config: Config) -> Iterator[str]:
    """Yield the lines that rank 0 prints at the start.

    Args:
        line: the command line, with what files add to it.
    """
    if line.idle:
        yield f"These flags concern operation only and have no effect here: {', '.join(line.idle)}"
    if differing := list(differing_defaults(line.given, config)):
        yield f"These defaults are not those of Megatron, and no flag sets them: {', '.join(differing)}"
