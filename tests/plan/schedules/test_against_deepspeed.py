"""Our 1F1B order compared with DeepSpeed's own, which has no token slices.

A pipeline with token slices runs in the order of a longer pipeline without: M * S micro-batches over P + S - 1
stages. There, forward unit k is token slice k % S; backward unit k is token slice S - 1 - k % S.
"""

from itertools import product

import pytest

from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.schedules import one_f_one_b

deepspeed_schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")


def deepspeed_order(shape: PipelineShape, stage: int) -> list[Op]:
    num_token_slices = shape.num_token_slices
    steps = deepspeed_schedule.TrainSchedule(
        micro_batches=shape.num_micro_batches * num_token_slices,
        stages=shape.num_stages + num_token_slices - 1,
        stage_id=stage,
    )
    order, forwards, backwards = [], 0, 0
    for command in (command for step in steps for command in step):
        if isinstance(command, deepspeed_schedule.ForwardPass):
            order.append(Op(OpKind.FORWARD, stage, *divmod(forwards, num_token_slices)))
            forwards += 1
        elif isinstance(command, deepspeed_schedule.BackwardPass):
            micro_batch, place = divmod(backwards, num_token_slices)
            order.append(Op(OpKind.BACKWARD, stage, micro_batch, num_token_slices - 1 - place))
            backwards += 1
    return order


@pytest.mark.parametrize("num_stages", range(1, 7))
def test_1f1b_is_deepspeed_s_order_over_a_longer_pipeline(num_stages):
    for num_micro_batches, num_token_slices in product(range(1, 7), range(1, 6)):
        shape = PipelineShape(num_stages, num_micro_batches, num_token_slices)
        for stage in range(num_stages):
            assert list(one_f_one_b(shape, stage)) == deepspeed_order(shape, stage), (shape, stage)
