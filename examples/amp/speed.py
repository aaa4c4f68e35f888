"""Time of the search of AMP's three experiments, and quality of its stage partitions and predictions.

    python -m examples.amp.speed --amp-repo DIR [--trials trials_homogeneous.csv]

AMP's own search of the same spaces took 280.7, 271.7 and 147.0 s on one core of a Xeon. Seconds here are of one
core, too, after numba has loaded the simulator's code. With the published trials of the homogeneous cluster, it prints
how far predictions are from them, and how many of AMP's partitions our solver improves by AMP's own objective.
"""

import argparse
import csv
import json
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from examples.amp.deepspeed_costs import read_profile
from examples.amp.experiments import EXPERIMENTS
from examples.amp.run import load_player
from examples.amp.search import amp_partition, search
from megatron_terapipe.strategy import Strategy

AMP_SECONDS = {"homogeneous": 280.7, "het_cluster": 271.7, "het_model": 147.0}
AMP_ACCURACY = {"spearman": 0.935, "pairs": 0.897, "mape": 0.210, "raw": 0.476, "regret": 1.10}
AMP_BANDWIDTH = 50e9 / 32
"""Entries of 4 bytes that AMP sends in a second over 50 Gbit/s."""

AMP_VOCAB_SIZE = 52256


def main(arguments: list[str] | None = None) -> int:
    """Run all of it; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--amp-repo", type=Path, required=True, metavar="DIR", help="checkout of AMP's repository")
    parser.add_argument("--trials", type=Path, metavar="CSV", help="trials of the homogeneous cluster")
    options = parser.parse_args(arguments)
    load_player()
    print(f"{'experiment':12} {'strategies':>10} {'ours s':>7} {'AMP s':>7} {'best s':>7}  winner")
    for name, experiment in EXPERIMENTS.items():
        started = time.process_time()
        best, *others = search(experiment, experiment.pricing(options.amp_repo))
        seconds = time.process_time() - started
        assert best.prediction is not None
        sizes = best.strategy
        print(
            f"{name:12} {1 + len(others):10} {seconds:7.2f} {AMP_SECONDS[name]:7.1f} "
            f"{best.prediction.iteration_time_s:7.3f}  mbs {sizes.micro_batch_size}, tp {sizes.tensor_parallel_size}, "
            f"dp {sizes.data_parallel_size}, pp {sizes.pipeline_parallel_size}"
        )
    if options.trials:
        with options.trials.open() as file:
            rows = list(csv.DictReader(file))
        ran = sum(row["outcome"] == "ran" for row in rows)
        print(f"\n{ran} trials of the homogeneous cluster, without a fit to them")
        for name, value in accuracy(options.amp_repo, rows).items():
            print(f"{name:10} ours {value:6.3f}   AMP {AMP_ACCURACY[name]:6.3f}")
        gains = partition_gains(options.amp_repo, rows)
        better = [gain for gain in gains if gain > 1e-6]
        print(
            f"\nby AMP's own objective our partition is better than AMP's in {len(better)} of {len(gains)} strategies, "
            f"by at most {max(gains):.2%}, and worse in {sum(gain < -1e-9 for gain in gains)}"
        )
    return 0


def accuracy(repository: Path, rows: list[dict[str, str]]) -> dict[str, float]:
    """Return scores of the predictions of the trials that ran, by the names of `AMP_ACCURACY`.

    `mape` is the error with the best single scale, `raw` without one.
    """
    pricing = EXPERIMENTS["homogeneous"].pricing(repository)
    ran = [row for row in rows if row["outcome"] == "ran"]
    measured = np.array([float(row["real_s"]) for row in ran])
    predicted = np.array([pricing.predict(_strategy(row)).iteration_time_s for row in ran])
    scales = measured / predicted
    errors = [float(np.mean(np.abs(predicted * scale - measured) / measured)) for scale in scales]
    first, second = np.triu_indices(len(ran), 1)
    differ = measured[first] != measured[second]
    signs = np.sign(predicted[first] - predicted[second]) * np.sign(measured[first] - measured[second])
    return {
        "spearman": float(spearmanr(predicted, measured).statistic),
        "pairs": float(np.mean((1 + signs[differ]) / 2)),
        "mape": min(errors),
        "raw": float(np.mean(np.abs(predicted - measured) / measured)),
        "regret": float(measured[np.argmin(predicted)] / measured.min()),
    }


def partition_gains(repository: Path, rows: list[dict[str, str]]) -> list[float]:
    """By how much our partition is better than AMP's by AMP's own objective, relative, for each trial with stages.

    AMP's layers take 3 x forward x micro-batch, and a cut costs its activation once.
    """
    profile = read_profile(repository, "gpt2_G4")
    gains = []
    for row in rows:
        stages, micro_batches, size = int(row["pp"]), int(row["microbatches"]), int(row["tp"])
        if stages == 1 or micro_batches == 1:
            continue
        sequences = int(row["mbs"])
        layers = np.array([3 * sequences * times[size] for times in profile])
        cuts = np.full(31, sequences * 1024 * 1024 / AMP_BANDWIDTH)
        cuts[29:] = sequences * 1024 * AMP_VOCAB_SIZE / size / AMP_BANDWIDTH
        bounds = json.loads(row["layer_partition"])
        times = [layers[first:end].sum() for first, end in pairwise(bounds)]
        theirs = (micro_batches - 1) * max(times) + sum(times) + sum(cuts[bound] for bound in bounds[1:-1])
        gains.append(theirs / amp_partition(layers, cuts, stages, micro_batches)[1] - 1)
    return gains


def _strategy(row: dict[str, str]) -> Strategy:
    plain = Strategy(
        data_parallel_size=int(row["dp"]),
        tensor_parallel_size=int(row["tp"]),
        pipeline_parallel_size=int(row["pp"]),
        micro_batch_size=int(row["mbs"]),
        global_batch_size=int(row["gbs"]),
        zero_stage=0,
    )
    return replace(plain, stage_partition=tuple(json.loads(row["layer_partition"])))


if __name__ == "__main__":
    sys.exit(main())
