"""Files of a checkpoint are damaged on purpose: each kind of damage to each kind of file, before a run is started."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.checkpoint.damage import DAMAGE, kinds_of_file
from tests.end_to_end.corpus import write_corpus
from tests.end_to_end.launching import Launch, flags
from tests.faults.campaign import Outcome, Settings, ending, forked

SAVES = ("--save", "checkpoints", "--save-interval", 2, "--eval-iters", 0)


def campaign(settings: Settings) -> Iterator[Outcome]:
    """Yield an outcome for each damage of each file: refused and named, or passed over if that is asked for."""
    data, clean = write_corpus(settings.folder), settings.folder / "clean"
    clean.mkdir()
    assert forked(clean, flags(data, *SAVES, "--train-iters", 6)).code == 0
    kinds = sorted(kinds_of_file(clean / "checkpoints" / "global_step6"))
    pairs = [(damage, kind) for damage in DAMAGE for kind in kinds]
    if settings.quick:
        pairs = pairs[:: len(kinds) + 1]
    for number, (damage, kind) in enumerate(pairs):
        folder = settings.folder / str(number)
        shutil.copytree(clean, folder)
        yield _refused(folder, data, damage, kind)
        shutil.rmtree(folder)


def _refused(folder: Path, data: Path, damage: str, kind: str) -> Outcome:
    directory = folder / "checkpoints" / "global_step6"
    file = kinds_of_file(directory)[kind]
    # Two saves of one run have the same index: only a damage that changes a file can be seen.
    before = file.read_bytes()
    DAMAGE[damage](file)
    changes = not file.exists() or file.read_bytes() != before
    damaged = {path.name: path.read_bytes() for path in directory.iterdir()}
    more = flags(data, *SAVES, "--load", "checkpoints", "--train-iters", 8)
    end = ending(Launch(folder, more))
    broken = [f"it does not name {file.name}"] * (changes and not any(kind in line for line in end.lines))
    if changes:
        passed = forked(folder, [*more, "--load-previous-if-damaged"]).code
        kept = folder / "checkpoints" / "global_step6.damaged"
        if passed != 0:
            broken.append(f"exit code {passed} of the run that resumes from the one before")
        elif not kept.is_dir() or {path.name: path.read_bytes() for path in kept.iterdir()} != damaged:
            broken.append("the damaged checkpoint was not kept aside")
        elif (folder / "checkpoints" / "latest").read_text() != "global_step8":
            broken.append("the run did not continue to its end")
    name = f"{kind}: {damage}"
    if not changes:
        return Outcome(fault=name, tried=1, message="nothing, because the file is the same", broken=tuple(broken))
    outcome = end.outcome(name, code=2, lines=end.lines, broken=broken)
    return replace(outcome, longest_s=None, message=outcome.message.replace(str(folder), "").partition(": put")[0])
