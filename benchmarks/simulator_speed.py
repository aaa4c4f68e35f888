"""The fast simulator against the plain one: seconds and ops per second for the same orders, in one run.

python -m benchmarks.simulator_speed [--ops 131072 1048576]
"""

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.schedules import fixed, interleaved, rank_orders
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.simulate.compiled import CompiledOrders

Result = TypeVar("Result")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, nargs="+", default=[16384, 131072, 1048576], metavar="N")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plain-up-to", type=int, default=131072, metavar="N", help="most ops for the plain simulator")
    options = parser.parse_args(argv)
    first, _ = timed(
        lambda: CompiledOrders.of_schedule(interleaved, pipeline(16)).simulate(OpCosts.uniform(pipeline(16)))
    )
    print(f"first simulation, with numba's start: {first:.2f} s")
    print(f"{'what':>18} {'ops':>9} {'median s':>9} {'ops/s':>12} {'over plain':>10}")
    for num_ops in options.ops:
        shape = pipeline(num_ops)
        costs = OpCosts.uniform(shape, transfer=0.1)
        orders = rank_orders(interleaved, shape)
        compiled = CompiledOrders.of(orders, shape)
        ways: dict[str, Callable[[], object]] = {
            "generate orders": lambda shape=shape: rank_orders(interleaved, shape),
            "compile": lambda orders=orders, shape=shape: CompiledOrders.of(orders, shape),
            "compile and simulate": lambda orders=orders, shape=shape, costs=costs: CompiledOrders.of(
                orders, shape
            ).simulate(costs),
            "replay": lambda compiled=compiled, costs=costs: compiled.simulate(costs),
            "peak activation": lambda compiled=compiled: compiled.peak_activation(),
        }
        if num_ops <= options.plain_up_to:
            ways["plain"] = lambda orders=orders, shape=shape, costs=costs: simulate(orders, shape, costs)
            ways["lower to programs"] = lambda orders=orders, shape=shape: lower(fixed(orders), shape)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, way in ways.items():
                seconds, _ = timed(way)
                times[name].append(seconds)
        count = sum(map(len, orders))
        for name, seconds in times.items():
            ratio = f"{median(times['plain']) / median(seconds):>9.1f}x" if "plain" in times else ""
            print(f"{name:>18} {count:>9} {median(seconds):>9.4f} {count / median(seconds):>12,.0f} {ratio:>10}")


def pipeline(num_ops: int) -> PipelineShape:
    """16 ranks of 4 model chunks, 32 token slices, and micro-batches for about so many ops."""
    return PipelineShape(64, max(num_ops // (2 * 64 * 32), 1), 32, num_model_chunks=4)


def timed(way: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds of CPU time, which others on the machine do not lengthen, and what came of it."""
    gc.collect()
    start = time.process_time()
    result = way()
    return time.process_time() - start, result


if __name__ == "__main__":
    main()
