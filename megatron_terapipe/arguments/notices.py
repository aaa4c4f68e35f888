"""Lines at the start of a run about the command line: what of it has no effect here."""

from collections.abc import Iterator

from megatron_terapipe.arguments.parser import CommandLine


def notices(line: CommandLine) -> Iterator[str]:
    """Yield the lines that rank 0 prints at the start.

    Args:
        line: the command line.
    """
    if line.idle:
        yield f"These flags concern operation only and have no effect here: {', '.join(line.idle)}"
