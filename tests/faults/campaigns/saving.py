"""Processes are killed at every access to the disk while they save, in every situation."""

from collections.abc import Iterator

from tests.checkpoint.killed_saves import kill_at_every_point
from tests.faults.campaign import Outcome, Settings

SITUATIONS: dict[str, tuple[list[int], int, int | None]] = {
    "a new checkpoint": ([2, 4], 6, None),
    "over the latest": ([4, 6], 6, None),
    "over an older one": ([4, 6], 4, None),
    "over the only one": ([6], 6, 1),
    "with rotation": ([2, 4], 7, 1),
}
"""Checkpoints that are there, the iteration that is saved, and how many are kept."""


def campaign(settings: Settings) -> Iterator[Outcome]:
    """Yield an outcome for each situation, of a kill at every point."""
    for name, (before, iteration, keep_last) in SITUATIONS.items():
        folder = settings.folder / name.replace(" ", "-")
        folder.mkdir()
        points, found = kill_at_every_point(folder, before, iteration, keep_last)
        wrong = found - {before[-1], iteration}
        yield Outcome(
            fault=f"killed while saving {name}, at each access to the disk",
            tried=points,
            message="a whole checkpoint was found each time",
            broken=(f"iteration {min(wrong)} was found",) if wrong else (),
        )
