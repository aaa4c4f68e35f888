"""The campaign of fuzzing: many inputs on each parser, and what came of them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measuring.report import progress
from tests.faults.campaign import Outcome, Settings
from tests.faults.fuzzing.fuzz import fuzz
from tests.faults.fuzzing.targets import targets

INPUTS, QUICK_INPUTS = 100_000, 2_000
"""Inputs for each parser."""

KEPT = Path("runs/faults/inputs")
"""Folder for the inputs that broke a promise. They belong among the `found` of their target once it is mended."""


def campaign(settings: Settings) -> Iterator[Outcome]:
    """Yield an outcome for each parser."""
    for target in targets():
        folder = settings.folder / target.name.replace(" ", "-")
        done = fuzz(target, folder, QUICK_INPUTS if settings.quick else INPUTS, settings.seed + 1)
        kept = KEPT / folder.name
        if done.faults:
            shutil.copytree(folder / "faults", kept, dirs_exist_ok=True)
        progress(f"{target.name}: {done.tried / done.seconds:.0f} inputs/s")
        yield Outcome(
            fault=f"bad input: {target.name}",
            tried=done.tried,
            said="read, or one line",
            broken=tuple(f"{kind}: {kept / path.name}" for kind, path in done.faults),
        )
