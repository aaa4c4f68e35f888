"""Plays the programs of every schedule and shape on models of devices, and counts those that lock, as a table.

    python -m benchmarks.deadlock_proof [--workers 2] [--most-units 256] [--random 1000]

Every combination of 2 to 8 ranks, 1 to 8 micro-batches and token slices, and 1 to 4 model chunks with at most so many
micro-batches x token slices x ranks; then orders that the optimiser finds for random costs. `slower` is how much longer
a step takes in the model of a CUDA device than in the simulator, which holds no message back: with transfers of a
tenth of a forward, and token slices of growing cost.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from random import Random
from typing import NamedTuple

from benchmarks.measuring.command import Parser
from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.errors import ScheduleDeadlock
from deepspeed_ext.plan.ops import PipelineShape, Placement
from deepspeed_ext.plan.programs.device import DeviceModel, Events, check_programs
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.schedules import OPTIMISED, SCHEDULES, fixed, rank_orders, schedule_named
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.solve.orders import optimise

DEVICES = {
    "a queue for each stream": DeviceModel(),
    "shared queues": DeviceModel(hardware_queues=1),
    "cold": DeviceModel(warms_up=False, host_waits=False),
}
"""The default device waits at every op and drains anywhere; streams share queues in the worst way; `cold` makes
connections in mid-step."""
EFFORT = 0.01


class Case(NamedTuple):
    """A schedule and a shape; for `optimised` also a seed of costs."""

    schedule: str
    shape: PipelineShape
    seed: int = 0


class CaseResult(NamedTuple):
    """Result of a case: per device, whether it deadlocked; whether a setting that helps was named; and the cost."""

    schedule: str
    locked: dict[str, bool]
    named: bool
    slower: float


def cases(most_units: int, num_random: int) -> Iterator[Case]:
    """Yield all combinations, then random ones for the optimiser."""
    for ranks, micro_batches, token_slices, model_chunks in product(range(2, 9), range(1, 9), range(1, 9), range(1, 5)):
        if ranks * micro_batches * token_slices <= most_units:
            shape = PipelineShape(ranks * model_chunks, micro_batches, token_slices, model_chunks)
            for name in ("gpipe", "interleaved", "breadth-first") if model_chunks > 1 else SCHEDULES:
                yield Case(name, shape)
    random = Random(11)
    for seed in range(num_random):
        ranks, micro_batches, token_slices, model_chunks = (random.randint(1, most) for most in (6, 4, 4, 3))
        placement = random.choice(list(Placement))
        shape = PipelineShape((ranks + 1) * model_chunks, micro_batches, token_slices, model_chunks, placement)
        yield Case(OPTIMISED, shape, seed)


def play(case: Case) -> CaseResult:
    """Lower one case and play it on all devices."""
    shape = case.shape
    costs = growing_costs(shape)
    if case.schedule == OPTIMISED:
        costs = random_costs(shape, Random(case.seed))
        orders = optimise(shape, costs, effort=EFFORT, seed=case.seed).orders
    else:
        orders = rank_orders(schedule_named(case.schedule), shape)
    # As in a training run: the optimiser's costs are known, those of a schedule by name are not.
    programs = lower(fixed(orders), shape, costs=costs if case.schedule == OPTIMISED else None)
    locked, named = {}, True
    for name, device in DEVICES.items():
        try:
            check_programs(programs, shape, device)
        except ScheduleDeadlock as deadlock:
            locked[name] = True
            named = named and "CUDA_DEVICE_MAX_CONNECTIONS" in str(deadlock)
    on_device = Events(programs, shape, DeviceModel(host_waits=False)).makespan(costs)
    return CaseResult(case.schedule, locked, named, on_device / simulate(orders, shape, costs).makespan - 1)


def growing_costs(shape: PipelineShape) -> OpCosts:
    """Costs of token slices of equal length, of which the last takes half as long again as the first."""
    row = [1 + 0.5 * place / max(shape.last_token_slice, 1) for place in range(shape.num_token_slices)]
    forward = [row] * shape.num_stages
    linear = [[1.0] * len(row)] * shape.num_stages
    return OpCosts(forward=forward, backward=forward, weight_gradient=linear, transfer=0.1)


def random_costs(shape: PipelineShape, random: Random) -> OpCosts:
    """Return costs of ops between 0.5 and 2, each drawn separately."""
    tables = [
        [[random.uniform(0.5, 2) for _ in range(shape.num_token_slices)] for _ in range(shape.num_stages)]
        for _ in range(3)
    ]
    return OpCosts(forward=tables[0], backward=tables[1], weight_gradient=tables[2], transfer=random.uniform(0, 0.2))


def main() -> None:
    """Play all cases and print the table."""
    parser = Parser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--most-units", type=int, default=256, help="ranks x micro-batches x token slices, at most")
    parser.add_argument("--random", type=int, default=1000, help="optimised schedules of random shapes and costs")
    options = parser.parse_args()
    todo = list(cases(options.most_units, options.random))
    results: dict[str, list[CaseResult]] = {}
    with ProcessPoolExecutor(options.workers) as pool:
        for number, played in enumerate(pool.map(play, todo, chunksize=8), start=1):
            results.setdefault(played.schedule, []).append(played)
            if number % 200 == 0:
                print(f"{number} of {len(todo)}", file=sys.stderr, flush=True)
    print(
        "| schedule | cases | "
        + " | ".join(f"locked, {name}" for name in DEVICES)
        + " | slower, worst | slower, mean |"
    )
    print("|---|---|" + "---|" * (len(DEVICES) + 2))
    for schedule, each in results.items():
        locked = [str(sum(played.locked.get(name, False) for played in each)) for name in DEVICES]
        slower = [played.slower for played in each]
        cost = f"{max(slower):.2%} | {sum(slower) / len(slower):.3%}"
        print(f"| {schedule} | {len(each)} | {' | '.join(locked)} | {cost} |")
    unnamed = sum(not played.named for each in results.values() for played in each)
    print(f"\nlocked without the name of a setting that helps: {unnamed}")


if __name__ == "__main__":
    main()
