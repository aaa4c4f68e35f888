"""`validate`: predictions compared with measured trials."""

import argparse
import json
import sys
from collections.abc import Hashable, Sequence
from typing import Any

from deepspeed_ext.plan.terminal import STANDARD_OUTPUT, ProgressLine, add_json_flag, write_json
from megatron_terapipe.console import output_console
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.learn.cluster_calibrations import Calibrations, read_calibrations, write_calibrations
from megatron_terapipe.search.learn.trials import Trial, read_trials
from megatron_terapipe.search.learn.validation import (
    PredictedTrial,
    folds_of,
    predict_in_folds,
    predict_trials,
    print_validation,
    validation_document,
)
from megatron_terapipe.search.machine.trainer_files import OF_PACKAGE, read_trainers
from megatron_terapipe.search.price.profile import read_profile

HELP = (
    "Compare predictions with measured runs, whose times they do not use: errors, order, and coverage of the "
    "intervals, beside a naive model. Trials have one JSON object per line, as `terapipe search trial` writes "
    "them. Without --calibrate or --folds nothing is fitted. The fit changes a dozen constants of each cluster (a "
    "source and its devices), and no constant of a strategy."
)

EXAMPLES = """\
examples:
  %(prog)s --trials trials.jsonl
  %(prog)s --trials trials.jsonl --folds 4 --show-groups
  %(prog)s --trials published.jsonl --trainers benchmarks/published/trainers.yaml"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    group = parser.add_argument_group("trials")
    group.add_argument("--trials", metavar="FILE", nargs="+", required=True, help="trials to predict")
    group.add_argument(
        "--trainers",
        metavar="FILE",
        help="JSON or YAML file with more trainers that trials may name, and the trainers of trials that name none",
    )
    group.add_argument("--show-groups", action="store_true", help="also print a line for every group")
    group = parser.add_argument_group("calibration")
    group.add_argument(
        "--calibrate",
        metavar="FILE",
        nargs="+",
        default=[],
        help="trials that constants are fitted to; trials that are also in --trials are marked as in-sample",
    )
    group.add_argument("--calibration", metavar="FILE", help="constants that --save-calibration wrote")
    group.add_argument("--save-calibration", metavar="FILE", help="write the constants, for rank and predict")
    left_out = group.add_mutually_exclusive_group()
    left_out.add_argument(
        "--folds",
        type=int,
        metavar="K",
        help="cross-validate: split the groups of each source into K folds, and predict each fold from the others",
    )
    left_out.add_argument(
        "--leave-out",
        choices=["hidden_size", "layers", "model", "devices"],
        help="predict the trials of each hidden size, number of layers, model or number of devices from the "
        "others, to see how predictions extrapolate",
    )
    group.add_argument("--profile", metavar="FILE", help="times of ops and links, written by `terapipe search measure`")
    add_json_flag(parser.add_argument_group("output"), "the answer")


def run(options: argparse.Namespace) -> int:
    """Predict trials, compare, and return 0."""
    _check(options)
    trainers = read_trainers(options.trainers) if options.trainers else OF_PACKAGE
    trials = [one for path in options.trials for one in read_trials(path, trainers)]
    calibrating = [one for path in options.calibrate for one in read_trials(path, trainers)]
    ignored = sorted({name for one in (*trials, *calibrating) for name in one.ignored})
    if ignored:
        print(f"note: fields without a meaning here are left out: {', '.join(ignored)}", file=sys.stderr)
    folds = folds_of(trials, options.folds, options.leave_out)
    predicted = _predicted(options, trials, calibrating, folds)
    for note in dict.fromkeys(note for one in predicted for note in one.calibration.notes):
        print(f"note: {note}", file=sys.stderr)
    document = validation_document(
        predicted,
        calibrated_on=[*options.calibrate, *([options.calibration] if options.calibration else [])],
        in_sample=_in_sample(trials, calibrating),
        num_folds=options.folds,
        left_out=options.leave_out,
    )
    if options.json != STANDARD_OUTPUT:
        print_validation(document, output_console(), show_groups=options.show_groups)
    if options.json is not None:
        write_json(options.json, json.dumps(document, indent=1))
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.folds is not None and options.folds < 2:
        raise ConfigError(f"--folds {options.folds} leaves no trials for the calibration: give 2 or more")
    if options.calibration and (options.leave_out or options.calibrate or options.folds):
        others = "--leave-out" if options.leave_out else "--calibrate and --folds"
        raise ConfigError(f"--calibration brings constants that are already fitted: leave out {others}")
    if options.save_calibration and options.profile:
        raise ConfigError(
            "--save-calibration keeps constants of formulas, not factors on a profile: drop --profile, and give both "
            "files, --profile and --calibrate, to later searches"
        )
    if options.save_calibration and not options.calibrate:
        raise ConfigError("--save-calibration has nothing to save: give --calibrate, too")


def _predicted(
    options: argparse.Namespace,
    trials: Sequence[Trial],
    calibrating: Sequence[Trial],
    folds: Sequence[Hashable] | None,
) -> list[PredictedTrial]:
    profile, left = read_profile(options.profile) if options.profile else None, len(trials)
    with ProgressLine() as line:

        def progress(doing: str) -> None:
            line.part(doing)(1 - left / len(trials))

        def step(done: int) -> None:
            nonlocal left
            left -= done
            progress("predicting")

        if folds is not None:
            return predict_in_folds(trials, folds, more=calibrating, profile=profile, step=step, progress=progress)
        ready = read_calibrations(options.calibration) if options.calibration else ()
        calibrations = Calibrations(calibrating, ready, progress, profile=profile)
        if options.save_calibration:
            write_calibrations(options.save_calibration, calibrations.fitted())
        return predict_trials(trials, calibrations, profile=profile, step=step)


def _in_sample(trials: Sequence[Trial], calibrating: Sequence[Trial]) -> int:
    """Return how many trials are among those that constants were fitted to, in whichever file they are."""

    def key(one: Trial) -> tuple[Any, ...]:
        return one.source, one.group, one.workload.name, str(one.strategy), one.iteration_time_s, one.peak_memory_bytes

    seen = {key(one) for one in calibrating}
    return sum(key(one) in seen for one in trials)
