"""Every schedule on two ranks beside one rank that runs the same token slices, in one run.

    python -m benchmarks.schedule_speed [--micro-batches 4] [--token-slices 8] [--rounds 5]

Process groups of one and of two ranks, one core and one thread a rank, take turns step by step; the medians are
compared. `simulated` is the makespan of the schedule played with the op times of one measured step.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measuring.command import Parser
from benchmarks.measuring.workload import SEQ_LENGTH, batches, benchmark_model, join, our_engine
from benchmarks.measuring.worlds import World
from deepspeed_ext.plan.measured import Comparison, measured_costs
from deepspeed_ext.plan.memory import peak_activation
from deepspeed_ext.plan.ops import Op
from deepspeed_ext.plan.schedules import Schedule, fixed
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.solve.orders import optimise
from deepspeed_ext.plan.timeline import Timeline
from megatron_terapipe.config.flops import balanced_token_slices


@dataclass(frozen=True)
class Setup:
    """A schedule that the ranks of one process group run. `orders` were found by a solver."""

    name: str
    ranks: int
    schedule: str = "1f1b"
    num_model_chunks: int = 1
    orders: tuple[tuple[Op, ...], ...] | None = None


@dataclass(frozen=True)
class Result:
    """Times of a setup's steps."""

    name: str
    median_s: float
    rounds_s: list[float]
    speedup: float
    bubble_ratio: float
    eta: float
    """Makespan simulated from a step's own mean op times, over the measured one; median of the steps."""


def build(setup: Setup, cut: TokenSlices, num_micro_batches: int, num_layers: int) -> tuple[Any, Iterator[Any]]:
    """Return the engine of a setup on one of its ranks, and its data."""
    join()
    model = benchmark_model(num_layers)
    schedule: str | Schedule = setup.schedule if setup.orders is None else fixed(setup.orders)
    engine = our_engine(
        model,
        cut,
        num_micro_batches,
        num_stages=setup.ranks,
        schedule=schedule,
        num_model_chunks=setup.num_model_chunks,
    )
    return engine, batches(model, for_deepspeed=False)


def step(built: tuple[Any, Iterator[Any]]) -> None:
    """Train one step."""
    engine, data = built
    engine.train_batch(data)


def measured_step(built: tuple[Any, Iterator[Any]]) -> Timeline:
    """Train one step with the clock on."""
    engine, data = built
    with engine.timeline() as timelines:
        engine.train_batch(data)
    return timelines[0]


def found_orders(cut: TokenSlices, num_micro_batches: int, num_layers: int) -> tuple[tuple[Op, ...], ...]:
    """Return the schedule that the optimiser finds for the op times of three measured steps, in the memory of 1f1b."""
    world = World(2, build, Setup("measured", 2, "zero-bubble"), cut, num_micro_batches, num_layers)
    world.run(step)
    steps = [world.run(measured_step)[0] for _ in range(3)]
    world.end()
    costs, lengths = measured_costs(steps), cut.lengths
    limit = max(peak_activation(steps[0], lengths))
    return optimise(steps[0].shape, costs, memory_limit=max(limit, 1.0), lengths=lengths).orders


def compare(
    setups: Sequence[Setup], cut: TokenSlices, num_micro_batches: int, num_layers: int, rounds: int
) -> list[Result]:
    """Time the setups in turn, and compare the others with the first one."""
    worlds = {setup.name: World(setup.ranks, build, setup, cut, num_micro_batches, num_layers) for setup in setups}
    times: dict[str, list[float]] = {name: [] for name in worlds}
    steps: dict[str, list[Timeline]] = {name: [] for name in worlds}
    for turn in range(rounds + 1):
        for name, world in worlds.items():
            seconds = world.seconds(step)
            if turn:  # the first one warms up
                times[name].append(seconds)
                steps[name].append(world.run(measured_step)[0])
    for world in worlds.values():
        world.end()
    base = median(times[setups[0].name])
    results = []
    for name in worlds:
        found, middle = Comparison(tuple(steps[name])), median(times[name])
        bubble = found.measured.bubble_ratio
        results.append(Result(name, middle, times[name], base / middle, bubble, median(found.step_efficiencies)))
    return results


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = Parser(description=__doc__)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4], metavar="M")
    parser.add_argument("--token-slices", type=int, default=8, metavar="S")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", metavar="FILE", help="write the results to a file as well")
    options = parser.parse_args(argv)
    cut = balanced_token_slices(benchmark_model(options.layers), options.token_slices)
    document = {}
    for count in options.micro_batches:
        setups = [
            Setup("one rank, 1f1b", 1),
            Setup("gpipe", 2, "gpipe"),
            Setup("1f1b", 2),
            Setup("interleaved, 2 model chunks", 2, "interleaved", 2),
            Setup("zero-bubble", 2, "zero-bubble"),
            Setup("optimised", 2, orders=found_orders(cut, count, options.layers)),
        ]
        results = compare(setups, cut, count, options.layers, options.rounds)
        document[f"micro_batches_{count}"] = [asdict(result) for result in results]
        print(f"\n{count} micro-batches of {SEQ_LENGTH} tokens, cut into {cut}, fp32")
        print(f"{'':28} {'median s':>9} {'speed-up':>9} {'bubble':>7} {'eta':>6}")
        for result in results:
            print(
                f"{result.name:28} {result.median_s:>9.3f} {result.speedup:>9.2f} {result.bubble_ratio:>7.1%} "
                f"{result.eta:>6.3f}",
                flush=True,
            )
    if options.json:
        Path(options.json).write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
