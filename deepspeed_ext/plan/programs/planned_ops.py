"""How many ops a step has, and how many can be planned."""

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import PipelineShape

MOST_OPS = 2**25
"""Ops of a step on all ranks. The simulator takes 2 us and 150 bytes for each: a minute and 5 GB for so many."""

MOST_OPS_OF_RANK = 2**20
"""Ops of a step on one rank. Its program takes 50 us and 2.5 kB for each: a minute and 3 GB for so many."""


_US_PER_OP = 2

_SLOW_OPS = 2**21
"""More ops than this take so long that people want to know why nothing happens."""


def num_ops(shape: PipelineShape) -> int:
    """Forwards and backwards of a step on all ranks."""
    return 2 * shape.num_stages * shape.num_micro_batches * shape.num_token_slices


def slow_planning(shape: PipelineShape) -> str | None:
    """Return a line about the time that planning a step takes; None if it is short."""
    count = num_ops(shape)
    if count <= _SLOW_OPS:
        return None
    return f"planning a step of {count:,} forwards and backwards takes about {count * _US_PER_OP / 1e6:.0f} s"


def check_num_ops(shape: PipelineShape, most: int = MOST_OPS) -> None:
    """See that a step has no more ops than can be planned. Nothing of it has to be planned to know.

    Raises:
        PlanError: if it has more.
    """
    every = num_ops(shape)
    of_rank = every // shape.num_ranks
    if every <= most and of_rank <= MOST_OPS_OF_RANK:
        return
    count, limit, where = (every, most, "") if every > most else (of_rank, MOST_OPS_OF_RANK, " on each rank")
    raise PlanError(
        f"stages {shape.num_stages} x micro-batches {shape.num_micro_batches} x token slices {shape.num_token_slices} "
        f"make a step of {count:,} forwards and backwards{where}, more than the {limit:,} that can be planned: give "
        "larger micro-batches, a smaller batch, or fewer token slices"
    )
