"""The description of this trainer agrees with its modules: kernels exactly, bytes to the digits that it gives."""

from collections.abc import Sequence
from dataclasses import fields
from functools import cache

import pytest
import torch.distributed as dist

from benchmarks import kernel_counts
from benchmarks.kernel_counts import LLAMA, SIZES, Both, kernels
from benchmarks.measuring.counters import KernelCounter
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.search.machine.software import Operator, Operators
from megatron_terapipe.search.machine.trainers import TERAPIPE
from megatron_terapipe.search.price.efficiency import HardwareEfficiency
from megatron_terapipe.training import build_engine as trainer_engine
from tests.distributed import run_distributed
from tests.training.gpt_runs import Setup, batches, run_of

SMALL = 0.12
"""Bytes for each number that are left out or rounded: one in fp32 for each row of a norm, weights, tables of angles. A
cast that is added moves 6, a kernel that is not fused at least 4."""


@cache
def counted() -> dict[str, Both]:
    return kernel_counts.operators()


def described(operator: Operator) -> list[tuple[float, float]]:
    """Kernels and bytes of both directions, in half precision."""
    return [
        (operator.forward_kernels, operator.bytes_forward(2)),
        (operator.backward_kernels, operator.bytes_backward(2)),
    ]


OF_EXPERTS = ("routing", "expert_activation", "expert_bias")
"""Counted with the products of experts, below."""
NO_KERNELS = ("expert_clamp", "scaled_rotary")
"""Parts of the kernels of an activation, and of the angles."""


@pytest.mark.parametrize(
    "name", [field.name for field in fields(Operators) if field.name not in OF_EXPERTS + NO_KERNELS]
)
def test_operators_launch_and_move_as_described(name: str) -> None:
    found = [(each.kernels, 2 * each.numbers + each.other_bytes) for each in counted()[name]]
    for (num_kernels, num_bytes), (kernels_described, bytes_described) in zip(
        found, described(getattr(TERAPIPE.operators, name)), strict=True
    ):
        assert num_kernels == kernels_described
        assert num_bytes == pytest.approx(bytes_described, abs=SMALL)


def test_products_add_to_their_sums_without_other_kernels() -> None:
    products = TERAPIPE.products
    forward, backward = kernel_counts.product()
    assert (forward.products, backward.products) == (products.forward_kernels, products.backward_kernels)
    assert products.accumulates_in_place
    assert (forward.kernels, backward.kernels, backward.numbers, backward.other_bytes) == (0, 0, 0, 0)


def test_gradients_of_keys_before_a_token_slice_are_added_up() -> None:
    found, prefix = kernel_counts.prefix(), TERAPIPE.attention.prefix
    assert (found.kernels, found.numbers, found.other_bytes) == (
        prefix.backward_kernels,
        prefix.backward,
        prefix.backward_bytes,
    )


@pytest.mark.parametrize("model", [{}, LLAMA], ids=["GPT", "Llama"])
def test_operators_make_up_a_layer(model: dict[str, object]) -> None:
    """The kernels of a layer are the sum of its operators."""
    software, llama = TERAPIPE, bool(model)
    operators, attention = software.operators, software.attention
    norm = operators.rmsnorm if llama else operators.layernorm
    parts = [norm, norm, operators.residual, operators.residual, operators.heads]
    parts += [operators.rotary, operators.gated_activation] if llama else [operators.activation, *[operators.bias] * 4]
    forward, backward = kernels(ModelConfig(**SIZES, **model), compiled=True, apart=True)
    beside = 4 * software.products.forward_kernels + attention.forward_kernels
    assert forward.total() == sum(part.forward_kernels for part in parts) + beside
    beside = 4 * software.products.backward_kernels + attention.backward_kernels + attention.prefix.backward_kernels
    assert backward.total() == sum(part.backward_kernels for part in parts) + beside


def step_bytes(stages: Sequence[int]) -> list[float]:
    """Bytes that the step of a bf16 model moves for each parameter of the rank, by ZeRO stage."""
    found = []
    for stage in stages:
        setup = Setup(dist.get_world_size(), f"--bf16 --zero-stage {stage}", micro_batches=1)
        engine = trainer_engine.build_engine(run_of(setup))
        take_step, counter = engine._take_model_step, KernelCounter()

        def counted(*arguments: object, take_step=take_step, counter=counter) -> None:
            with counter:
                take_step(*arguments)

        engine._take_model_step = counted
        for _ in range(2):  # The first one makes the moments.
            counter.moved.clear()
            engine.train_batch(iter(batches(setup, 0)))
        moved = sum(number * dtype.itemsize for dtype, number in counter.moved.items())
        found.append(moved / sum(weight.numel() for weight in engine.module.parameters()))
    return found


def test_the_step_moves_gradients_of_all_parameters_and_state_of_its_part() -> None:
    stages = (0, 1)
    for stage, found in zip(stages, run_distributed(step_bytes, 2, stages)[0], strict=True):
        # Adam reads four numbers and writes three, and weights are copied to bf16; stage 0 casts gradients before.
        divided = 28 + 6 + 6 * (stage == 0)
        assert found - divided / 2 == pytest.approx(TERAPIPE.state("bf16", stage).whole_step, abs=0.1)
        assert divided == pytest.approx(HardwareEfficiency().optimizer_passes * TERAPIPE.step_bytes, rel=0.25)
