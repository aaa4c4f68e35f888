"""This engine beside DeepSpeed's own pipeline engine: the same model, ranks and data, in one run.

    deepspeed --num_accelerators 2 --module benchmarks.pipeline_speed [--micro-batches 1 4] [--token-slices 8]

Engines take turns, step by step, so that a machine that slows down slows all of them; the medians are compared.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks.workload import SEQ_LENGTH, batches, benchmark_model, deepspeed_engine, join, our_engine
from deepspeed_ext.plan.measured import Comparison
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config.balance import balanced_token_slices


@dataclass(frozen=True)
class Result:
    """Times of an engine's steps.

    Attributes:
        engine: what ran.
        median_s: of the rounds.
        rounds_s: every round.
        speedup: over DeepSpeed's engine.
        bubble_ratio: measured in one step, if the engine can.
        eta: makespan simulated from that step's mean op times, over the measured one.
    """

    engine: str
    median_s: float
    rounds_s: list[float]
    speedup: float
    bubble_ratio: float | None = None
    eta: float | None = None


def step_time(engine: Any, data: Iterator[Any]) -> float:
    """Seconds of one step of all ranks.

    Args:
        engine: the engine of this rank.
        data: its micro-batches.
    """
    dist.barrier()
    start = time.perf_counter()
    engine.train_batch(data)
    dist.barrier()
    return time.perf_counter() - start


def compare(
    num_micro_batches: int, cuts: dict[str, TokenSlices], *, rounds: int, num_layers: int, micro_batch_size: int
) -> list[Result]:
    """Time DeepSpeed's engine and ours with each set of token slices, in turn.

    Args:
        num_micro_batches: micro-batches of a step.
        cuts: token slices, by name.
        rounds: measured steps of each.
        num_layers: transformer layers.
        micro_batch_size: sequences of a micro-batch.
    """
    model, stages = benchmark_model(num_layers), dist.get_world_size()
    engines: dict[str, tuple[Any, Iterator[Any]]] = {
        "DeepSpeed PipelineEngine": (
            deepspeed_engine(model, num_micro_batches, num_stages=stages, micro_batch_size=micro_batch_size),
            batches(model, for_deepspeed=True, micro_batch_size=micro_batch_size),
        )
    }
    for name, cut in cuts.items():
        engine = our_engine(model, cut, num_micro_batches, num_stages=stages, micro_batch_size=micro_batch_size)
        engines[name] = (engine, batches(model, for_deepspeed=False, micro_batch_size=micro_batch_size))
    times: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds + 1):
        for name, (engine, data) in engines.items():
            seconds = step_time(engine, data)
            if turn:  # the first one warms up
                times[name].append(seconds)
    base = median(next(iter(times.values())))
    results = []
    for name, (engine, data) in engines.items():
        bubble = eta = None
        if name in cuts:
            with engine.timeline() as timelines:
                engine.train_batch(data)
            bubble = timelines[0].bubble_ratio
            (eta,) = Comparison((timelines[0],)).step_efficiencies
        middle = median(times[name])
        results.append(Result(name, middle, times[name], base / middle, bubble, eta))
    return results


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", help="set by the launcher")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4], metavar="M")
    parser.add_argument("--token-slices", type=int, default=8, metavar="S")
    parser.add_argument("--micro-batch-size", type=int, default=1, metavar="B")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", metavar="FILE", help="write the results to a file as well")
    options = parser.parse_args(argv)
    join()
    cuts = {
        "ours, 1 token slice": TokenSlices.uniform(SEQ_LENGTH, 1),
        f"ours, {options.token_slices} uniform token slices": TokenSlices.uniform(SEQ_LENGTH, options.token_slices),
        f"ours, {options.token_slices} balanced token slices": balanced_token_slices(
            benchmark_model(), options.token_slices
        ),
    }
    document = {}
    for count in options.micro_batches:
        rows = options.micro_batch_size
        results = compare(count, cuts, rounds=options.rounds, num_layers=options.layers, micro_batch_size=rows)
        document[f"micro_batches_{count}"] = [asdict(result) for result in results]
        if dist.get_rank() == 0:
            print(f"\n{dist.get_world_size()} stages, {count} micro-batches of {rows} x {SEQ_LENGTH} tokens, fp32")
            print(f"{'':34} {'median s':>9} {'speed-up':>9} {'bubble':>7} {'eta':>6}")
            for result in results:
                measured = "" if result.bubble_ratio is None else f"{result.bubble_ratio:>7.1%} {result.eta:>6.3f}"
                print(f"{result.engine:34} {result.median_s:>9.3f} {result.speedup:>9.2f} {measured}", flush=True)
    if options.json and dist.get_rank() == 0:
        Path(options.json).write_text(json.dumps(document, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
