"""The search beside its peers, and after few trials.

The strategy search beside its peers: seconds of a search, and errors of predictions, in one run and one table each.

python -m benchmarks.search_peers [--trials FILE ...] [--output FILE.csv]

Ours is measured: searches of whole spaces in seconds of one core, and the error on runs that others published, with
nothing fitted. `--trials` adds files of more trials, predicted with nothing fitted and calibrated on their other half.
Figures of peers are those that their authors publish. All figures go into a CSV file beside the page.

Errors after eight trials of a cluster: trials that `trials.calibration.design` chooses beside as many at random.

    python -m benchmarks.search_peers few TRIALS.jsonl [--trials 8] [--rounds 6]

In each round a third of the trials is held out; the few come from the other two thirds.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.measuring.command import Parser, run_named
from benchmarks.measuring.report import Section, progress
from benchmarks.published import RUNS, TRAINERS
from benchmarks.search_speed import CASES, Case, searched, searched_as_amp
from megatron_terapipe.search.learn.calibration import uncalibrated
from megatron_terapipe.search.learn.cluster_calibrations import Calibrations, propose
from megatron_terapipe.search.learn.fit import NOISE, Sample, fit
from megatron_terapipe.search.learn.priors import Prior
from megatron_terapipe.search.learn.trials import read_trials
from megatron_terapipe.search.learn.validation import (
    PredictedTrial,
    deal_groups,
    predict_in_folds,
    predict_trials,
    summary,
)
from megatron_terapipe.search.machine.trainer_files import read_trainers
from megatron_terapipe.search.price.efficiency import HardwareEfficiency

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "benchmarks" / "search-peers.csv"


@dataclass(frozen=True)
class Figure:
    """One line of a table."""

    tool: str
    value: str
    """The figure, with its unit."""
    subject: str
    """Subject of the search or prediction."""
    source: str


OURS, HERE = "this search", "this command"
ASTRA = "[Astra, abstract](https://arxiv.org/abs/2502.13480)"
SPEED_OF_PEERS = (
    Figure(
        "AMP",
        "about 500 s",
        "GPT-2 on 16 equal GPUs, without real runs",
        "[its README](https://github.com/DachengLi1/AMP#usage)",
    ),
    Figure("Astra", "1.27 s; less than 1.35 min", "GPUs of one kind; of several kinds, on average", ASTRA),
)
ERRORS_OF_PEERS = (
    Figure(
        "vTrain",
        "8.37 %; 14.73 %",
        "Megatron-DeepSpeed on one node of 8 A100; on up to 512 A100",
        "[KAIST](https://ee.kaist.ac.kr/en/research-achieve/"
        "ee-professor-minsoo-rhus-research-team-develops-a-simulation-framework-called-vtrain)",
    ),
    Figure(
        "SimAI",
        "1.9 % (98.1 % alignment)",
        "training of large language models, its own tests",
        "[NSDI 2025, abstract](https://www.usenix.org/conference/nsdi25/presentation/wang-xizheng-simai)",
    ),
    Figure(
        "Proteus",
        "3.0 %",
        "throughput of networks of many kinds, three kinds of machines",
        "[abstract](https://arxiv.org/abs/2306.02267)",
    ),
    Figure(
        "Charon",
        "less than 5.35 %; 3.74 %",
        "training and inference; training on large clusters",
        "[abstract](https://arxiv.org/abs/2605.17164)",
    ),
    Figure(
        "Zhang et al.",
        "4.98 %; 9.38 %",
        "up to 20B parameters and 128 GPUs: Perlmutter (A100); Vista (GH200)",
        "[abstract](https://arxiv.org/abs/2509.22832)",
    ),
    Figure("Astra", "less than 5 % (over 95 % accuracy)", "its own tests", ASTRA),
)


def searches() -> Iterator[Figure]:
    """Yield the seconds of our searches, each when it is done."""
    progress("searching as AMP does")
    result, seconds = searched_as_amp()
    yield _searched("AMP's dimensions, GPT-2 on 16 equal GPUs", result.counts.total, seconds, result.could_save)
    for case in CASES:
        progress(f"searching {case.model} on {case.cluster}")
        result, seconds = searched(case)
        yield _searched(_named(case), result.counts.total, seconds, result.could_save)


def _named(case: Case) -> str:
    return f"{case.model} on {Path(case.cluster).stem}, batch {case.global_batch_size}"


def _searched(subject: str, space: int, seconds: float, could_save: float) -> Figure:
    proven = "proven best" if could_save <= 0 else f"another could be {could_save:.1%} faster"
    return Figure(OURS, f"{seconds:.1f} s", f"{subject}: {space:,} strategies, {proven} under its model", HERE)


def errors(paths: Sequence[Path]) -> Iterator[Figure]:
    """Yield the errors of our predictions, each when it is known."""
    progress("predicting published runs")
    published = read_trials(RUNS)
    predicted = predict_trials(published, Calibrations([], (), progress))
    yield _error(predicted, "large runs of others, nothing fitted")
    for path in paths:
        progress(f"predicting {path.name}")
        trials = read_trials(path, read_trainers(str(TRAINERS)))
        yield _error(predict_trials(trials, Calibrations([], (), progress)), f"{path.stem}, nothing fitted")
        folds = deal_groups(trials, 2)
        if len(set(folds)) == 2:
            yield _error(predict_in_folds(trials, folds), f"{path.stem}, calibrated on the other half")


def _error(predicted: Sequence[PredictedTrial], subject: str) -> Figure:
    found = summary(predicted)
    inside = found["interval_coverage"]
    covered = "" if inside is None else f", {inside:.0%} inside the 90 % interval"
    return Figure(OURS, f"{found['mape']:.1%}", f"{subject}: {found['n']} runs{covered}", HERE)


COLUMNS = ("tool", "figure", "subject", "source")


def cells(figure: Figure) -> tuple[str, ...]:
    """Return a figure under `COLUMNS`."""
    return figure.tool, figure.value, figure.subject, figure.source


def table(title: str, figures: Sequence[Figure]) -> str:
    """Return a table of figures."""
    section = Section(title, COLUMNS)
    for each in figures:
        section.add(*cells(each))
    return section.markdown()


def peers(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables, and write all figures as CSV."""
    parser = Parser(description=__doc__)
    parser.add_argument("--trials", type=Path, nargs="+", default=[], metavar="FILE", help="more trials to predict")
    parser.add_argument("--output", type=Path, default=FIGURES, metavar="FILE.csv")
    options = parser.parse_args(argv)
    found = {
        "Seconds of a search": (*searches(), *SPEED_OF_PEERS),
        "Mean error of predicted times": (*errors(options.trials), *ERRORS_OF_PEERS),
    }
    print("\n\n".join(table(title, figures) for title, figures in found.items()))
    with options.output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["question", *COLUMNS])
        writer.writerows([title, *cells(each)] for title, figures in found.items() for each in figures)
    return 0


RANDOM_PICKS = 3
"""Random choices in each round."""


def few_trials(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = Parser(description=__doc__)
    parser.add_argument("path", metavar="TRIALS.jsonl")
    parser.add_argument("--trials", type=int, default=8, help="that are run (default: 8)")
    parser.add_argument("--rounds", type=int, default=6, help="thirds that are held out (default: 6)")
    options = parser.parse_args(argv)
    trials = [
        one for one in read_trials(options.path, read_trainers(str(TRAINERS))) if one.iteration_time_s is not None
    ]
    sample, prior = Sample(trials), uncalibrated()
    ratio = sample.simulated_ratio(HardwareEfficiency())
    slopes = sample.slopes(HardwareEfficiency(), prior.parameter_names)

    def mape(rows: NDArray[np.int64], held_out: NDArray[np.int64]) -> float:
        efficiency = fit(Sample([trials[row] for row in rows]), Prior.of(HardwareEfficiency())).constants
        return float(np.abs(np.expm1(sample.errors(sample.times(efficiency) * ratio)[held_out])).mean())

    found: dict[str, list[float]] = {"designed": [], "random": []}
    for round_number in range(options.rounds):
        random = np.random.default_rng(100 + round_number)
        order = random.permutation(len(trials))
        pool, held_out = order[: 2 * len(trials) // 3], order[2 * len(trials) // 3 :]
        chosen = propose(slopes[pool], prior.covariance, NOISE, options.trials)
        found["designed"].append(mape(pool[chosen], held_out))
        for _ in range(RANDOM_PICKS):
            found["random"].append(mape(random.choice(pool, options.trials, replace=False), held_out))
    for name, values in found.items():
        print(f"{name:>10}  mean {np.mean(values):.1%}  worst {np.max(values):.1%}  of {len(values)}")


def main(argv: Sequence[str] | None = None) -> object:
    """Run the named measurement, by default the first."""
    return run_named({"peers": peers, "few": few_trials}, argv)


if __name__ == "__main__":
    main()
