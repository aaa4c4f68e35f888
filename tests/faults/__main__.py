"""The fault suite: makes every fault of docs/reliability.md on purpose, and checks its promises.

make faults                                 # all campaigns; hours
python -m tests.faults --quick              # each fault once or a few times
python -m tests.faults --only soak          # one campaign
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measuring.report import Section, one_line, progress, publish, software
from tests.faults.campaign import Campaign, Settings, add, table
from tests.faults.campaigns import bad_numbers, damage, data, disk, hangs, hosts, kills, saving, signals, soak
from tests.faults.fuzzing import fuzz

CAMPAIGNS: dict[str, tuple[str, Campaign]] = {
    "saving": ("Kills while saving", saving.campaign),
    "damage": ("Damaged checkpoints", damage.campaign),
    "disk": ("Disks", disk.campaign),
    "data": ("Data", data.campaign),
    "fuzzing": ("Bad input", fuzz.campaign),
    "hangs": ("Ranks that hang", hangs.campaign),
    "hosts": ("Several hosts", hosts.campaign),
    "kills": ("A rank or a launcher dies", kills.campaign),
    "restarts": ("Automatic restarts", kills.restarts),
    "numbers": ("Numbers", bad_numbers.campaign),
    "signals": ("Signals", signals.campaign),
    "soak": ("Long runs", soak.campaign),
}
"""Title and function of each campaign, by name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run campaigns and print their tables. Returns 1 if a promise was broken, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CAMPAIGNS, default=list(CAMPAIGNS), help="campaigns to run")
    parser.add_argument("--quick", action="store_true", help="make each fault once or a few times")
    parser.add_argument("--seed", type=int, default=0, help="seed of random choices")
    parser.add_argument("--output", type=Path, default=Path("runs/faults"), help="folder for report.md and report.json")
    options = parser.parse_args(argv)
    # Commands that a shell starts in the background ignore Ctrl-C, and so do all that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sections: list[Section] = []
    kept = True
    for name in options.only:
        title, campaign = CAMPAIGNS[name]
        sections.append(table(title))
        with tempfile.TemporaryDirectory(prefix=f"faults-{name}-") as folder:
            kept &= _play(campaign, Settings(folder=Path(folder), quick=options.quick, seed=options.seed), sections[-1])
        # After each campaign, so that its results are not lost if a later one fails.
        publish("make faults", software(), sections, options.output)
    print(publish("make faults", software(), sections, options.output))
    return 0 if kept else 1


def _play(campaign: Campaign, settings: Settings, section: Section) -> bool:
    """Add the outcomes of a campaign to its table, and return whether all promises were kept."""
    kept = True
    try:
        for outcome in campaign(settings):
            add(section, outcome)
            progress(" | ".join(section.rows[-1]))
            kept &= not outcome.all_broken
    except Exception as error:  # The other campaigns must run even if one fails.
        section.add("the campaign itself", "", "", "", one_line(f"{type(error).__name__}: {error}"), "NO: it failed")
        return False
    return kept


if __name__ == "__main__":
    sys.exit(main())
