"""Speed of the solvers of token slices and orders, and of the simulators.

Time of the solvers, TeraPipe's program of the example among them, and quality of their solutions.

python -m benchmarks.solver_speed [--effort 1] [--optimise]

Seconds are those that one core computed for, so a busy machine does not count. Kernels are compiled in the first run on
a machine, which takes some seconds more.

The fast simulator against the plain one: seconds and ops per second for the same orders, in one run.

python -m benchmarks.solver_speed simulator [--ops 131072 1048576]
"""

import gc
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

from benchmarks.measuring.command import Parser, run_named
from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import PipelineShape, Placement
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.schedules import fixed, interleaved, one_f_one_b, rank_orders, zero_bubble
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.simulate.compiled import CompiledOrders
from deepspeed_ext.plan.solve import PolynomialCosts, op_costs, solve_token_slices
from deepspeed_ext.plan.solve.cuts import CutGrid
from deepspeed_ext.plan.solve.orders import optimise
from examples.terapipe.joint_program import TerapipeProblem

SEQ_LENGTH, NUM_STAGES = 131_072, 64
GRANULARITY, MIN_LENGTH = 128, 1024
ATTENTION_SHARE = 0.6
FIXED = 0.001
"""Fixed cost of each op, in forwards of a stage."""
SHORT_SEQ_LENGTH = 8192

PIPELINES = (
    # Ranks, micro-batches, token slices, attention share.
    (4, 4, 4, 0.3),
    (4, 4, 4, 0.6),
    (4, 1, 8, 0.6),
    (8, 8, 8, 0.3),
    (8, 8, 8, 0.6),
    (8, 8, 8, 0.8),
    (8, 4, 16, 0.6),
    (8, 16, 4, 0.6),
)
Result = TypeVar("Result")

MODEL_CHUNKS = ((1, Placement.LOOPED), (2, Placement.LOOPED), (2, Placement.V), (4, Placement.LOOPED))


def solvers(argv: Sequence[str] | None = None) -> None:
    """Measure and print tables."""
    parser = Parser(description=__doc__)
    parser.add_argument("--effort", type=float, default=1.0, help="of the solvers")
    parser.add_argument("--optimise", action="store_true", help="token slices and orders of some pipelines, too")
    options = parser.parse_args(argv)
    token_slices(options.effort)
    if options.optimise:
        orders(options.effort)


def token_slices(effort: float) -> None:
    """Cut a long sequence for many stages."""
    costs = PolynomialCosts.of_layers([1] * NUM_STAGES, SEQ_LENGTH, ATTENTION_SHARE, fixed=FIXED)
    print(f"{SEQ_LENGTH} tokens, {NUM_STAGES} stages, granularity {GRANULARITY}")
    print(f"{'solver':>12} {'M':>3} {'S':>4} {'seconds':>8} {'bubble':>7}")
    for name, schedule, num_micro_batches, count in (
        ("1f1b", one_f_one_b, 8, 16),
        ("1f1b", one_f_one_b, 16, 32),
        ("zero-bubble", zero_bubble, 8, 16),
        ("zero-bubble", zero_bubble, 16, 32),
    ):
        shape = PipelineShape(NUM_STAGES, num_micro_batches, count)
        seconds, solved = timed(
            lambda shape=shape, schedule=schedule: solve_token_slices(
                shape,
                SEQ_LENGTH,
                costs,
                schedule=schedule,
                granularity=GRANULARITY,
                min_length=MIN_LENGTH,
                effort=effort,
            )
        )
        timeline = simulate(rank_orders(schedule, shape), shape, op_costs(shape, solved.cut, costs))
        print(f"{name:>12} {num_micro_batches:>3} {count:>4} {seconds:>8.2f} {timeline.bubble_ratio:>7.1%}")
    grid = CutGrid(SEQ_LENGTH, GRANULARITY, MIN_LENGTH)
    for count in (None, 16, 64):
        seconds, exact = timed(
            # Stages are equal, so one stands for all.
            lambda count=count: TerapipeProblem.of({1: costs}, grid, 1, 1, NUM_STAGES - 1).solve(count)
        )
        over = exact.makespan / exact.lower_bound - 1
        print(f"{'terapipe':>12} {1:>3} {len(exact.micro_batches[0][1]):>4} {seconds:>8.2f}  at most {over:.2%} off")


def orders(effort: float) -> None:
    """Token slices and op orders under the memory of 1f1b with even token slices, (P + S - 1) / S."""
    print(f"\n{'P':>3} {'M':>3} {'S':>3} {'share':>5} {'V':>2} {'placement':>9} {'bubble':>7} {'bound':>7}", end="")
    print(f" {'peak':>6} {'limit':>6} {'cut s':>8} {'orders s':>8}")
    for num_ranks, num_micro_batches, count, share in PIPELINES:
        limit = min((num_ranks + count - 1) / count, num_micro_batches)
        for num_model_chunks, placement in MODEL_CHUNKS:
            shape = PipelineShape(num_ranks * num_model_chunks, num_micro_batches, count, num_model_chunks, placement)
            token_slice_costs = PolynomialCosts.of_layers(
                [1] * shape.num_stages, SHORT_SEQ_LENGTH, share, layer_time=1 / num_model_chunks
            )
            cutting, solved = timed(
                lambda shape=shape, token_slice_costs=token_slice_costs, limit=limit: solve_token_slices(
                    shape, SHORT_SEQ_LENGTH, token_slice_costs, memory_limit=limit, granularity=64, effort=effort
                )
            )
            costs = op_costs(shape, solved.cut, token_slice_costs)
            ordering, found = timed(
                lambda shape=shape, costs=costs, limit=limit, cut=solved.cut: optimise(
                    shape, costs, memory_limit=limit, lengths=cut.lengths, effort=effort
                )
            )
            bound = 1 - (1 - found.bubble_ratio) * found.makespan / found.lower_bound
            print(
                f"{num_ranks:>3} {num_micro_batches:>3} {count:>3} {share:>5} {num_model_chunks:>2} {placement:>9} "
                f"{found.bubble_ratio:>7.1%} {bound:>7.1%} {max(found.peak_activation):>6.3f} {limit:>6.3f} "
                f"{cutting:>8.1f} {ordering:>8.1f}",
                flush=True,
            )


def simulator(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = Parser(description=__doc__)
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
    """Seconds of CPU time, which other processes do not lengthen, and the result."""
    gc.collect()
    start = time.process_time()
    result = way()
    return time.process_time() - start, result


def main(argv: Sequence[str] | None = None) -> object:
    """Run the named measurement, by default the first."""
    return run_named({"solvers": solvers, "simulator": simulator}, argv)


if __name__ == "__main__":
    main()
