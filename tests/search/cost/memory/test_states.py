"""Bytes of weights, gradients and optimizer state."""

import pytest

from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.search.machine.trainers import SOFTWARE
from megatron_terapipe.search.price.memory import Counted, MemoryModel
from tests.search.cost.machines import GPT, nodes


def states(software: str, precision: str, zero_stage: int, parameters: float) -> Counted:
    """Bytes of a rank of four replicas."""
    model = MemoryModel(workload=GPT, cluster=nodes(2), software=SOFTWARE[software], precision=precision)
    return model.states(parameters, layout=ParallelLayout(data_parallel_size=4), zero_stage=zero_stage)


@pytest.mark.parametrize(
    ("software", "precision", "zero_stage", "total"),
    [
        # ZeRO, arXiv 1910.02054 section 3.1: 2 + 2 + 12 = 16 bytes a parameter in half precision.
        ("terapipe", "fp16", 0, 16),
        ("terapipe", "fp16", 1, 2 + 2 + 12 / 4),
        ("deepspeed", "fp16", 1, 2 + 2 + 12 / 4),
        # Sums in fp32 take 4 bytes more, which no rank shares; ours has them alone.
        ("deepspeed", "bf16", 1, 2 + 6 + 12 / 4),
        ("terapipe", "bf16", 1, 2 + 4 + 12 / 4),
        # fp32: two moments of 4 bytes each; ZeRO 1 keeps a copy of the weights beside them.
        ("terapipe", "fp32", 0, 16),
        ("terapipe", "fp32", 1, 8 + 12 / 4),
    ],
)
def test_bytes_of_a_parameter(software: str, precision: str, zero_stage: int, total: float) -> None:
    counted = states(software, precision, zero_stage, 1.0)
    assert counted.weights + counted.gradients + counted.optimizer == pytest.approx(total)


def test_buckets_are_no_larger_than_the_model() -> None:
    assert states("deepspeed", "fp16", 1, 1e12).buffers == 2 * 2 * 500e6
    assert states("terapipe", "bf16", 1, 1e6).buffers == 2 * 4 * 1e6
    assert states("deepspeed", "fp16", 0, 1e12).buffers == 0
