"""A progress bar on standard error, where somebody looks at it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_terapipe.search.ranking.space_prices import Progress


@contextmanager
def progress_bar(wanted: bool | None = None) -> Iterator[Progress | None]:
    """Give what shows the progress of a search; None where nobody would see it.

    Args:
        wanted: whether to show it; None = if standard error is a terminal.
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield None
        return
    from tqdm import tqdm

    bars: dict[str, Any] = {}

    def show(done: int, total: int, what: str) -> None:
        if what not in bars:
            for bar in bars.values():
                bar.close()
            bars[what] = tqdm(total=total, desc=what, file=sys.stderr, leave=False)
        bars[what].update(done + 1 - bars[what].n)

    try:
        yield show
    finally:
        for bar in bars.values():
            bar.close()
