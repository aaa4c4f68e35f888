"""Which batches may load kernels."""

import random
from itertools import pairwise

from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.program import InstructionKind
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.executor import METHODS
from deepspeed_ext.runtime.live_batch import BatchPlan, LiveBatch, RunLengths


def batch_of(
    *lengths: int, training: bool = True, micro_batches: int = 1, rows: int = 2, **settings: bool
) -> LiveBatch:
    shape = PipelineShape(2, micro_batches, len(lengths))
    return LiveBatch(
        BatchPlan(shape=shape, token_slices=TokenSlices(lengths), rows=rows, training=training, **settings)
    )


def test_a_batch_with_lengths_that_have_not_run_may_load_kernels() -> None:
    equal = 256, 256
    batches = [
        (batch_of(*equal), True),
        (batch_of(*equal), False),
        (batch_of(*equal, training=False), True),
        (batch_of(*equal, rows=1), True),
        (batch_of(*equal, micro_batches=2), True),
        (batch_of(*equal, keeps_outputs=True), True),
        (batch_of(*equal, computes_loss=False), True),
        (batch_of(256, 511, 1), True),
        (batch_of(320, 192), True),  # the second length, which compilers take for all
        (batch_of(192, 320), True),  # the same lengths, other numbers of keys
        (batch_of(192, 320), False),
        (batch_of(511, 1), True),  # one token
        (batch_of(511, 1), False),
    ]
    known = RunLengths()
    assert not known.are_new(batches[0][0]), "a CPU loads nothing"
    known.settles = True
    for number, (batch, expected) in enumerate(batches):
        assert known.are_new(batch) is expected, number
        known.add(batch)


def test_lengths_of_their_own_for_each_step_do_not_keep_messages_from_travelling() -> None:
    """As cuts by documents have, of whole tiles or not."""
    generator = random.Random(0)
    for multiple in (128, 1):
        known, new = RunLengths(), list[int]()
        known.settles = True
        for step in range(600):
            inner = (2048 * number + generator.randint(-768, 768) // multiple * multiple for number in range(1, 8))
            batch = batch_of(*(end - start for start, end in pairwise([0, *inner, 16384])))
            new += [step] * known.are_new(batch)
            known.add(batch)
        assert new[:2] == [0, 1] and len(new) < 60 and sum(step >= 400 for step in new) < 10, new


def test_the_executor_has_a_method_for_every_instruction() -> None:
    assert METHODS.keys() == set(InstructionKind)
