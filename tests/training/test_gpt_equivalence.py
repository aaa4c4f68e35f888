"""The equivalence ladder of the GPT: token slices and stages change neither the loss nor any gradient.

Each setup trains one step through the trainer's own engine, and is held against plain autograd in fp64 over all layers
on one process, whose attention is torch's. An error is the norm of a tensor's difference over the norm of the tensor.
"""

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.inference.whole_model import WholeModel
from megatron_terapipe.model.gpt import gpt_loss
from tests.distributed import run_distributed
from tests.training.gpt_runs import Setup, batches, gradients_of_all

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 3e-2}
"""Of every gradient. bf16 has 8 bits, so each product is off by up to 2^-9 = 2e-3, and some ten of them add up."""
LOSS_TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 1e-2}

UNIFORM, UNEVEN, SINGLES = "--num-token-slices 4", "--token-slices 13,1,7,11", "--token-slices 1,1,1,1,1,27"
BALANCED = "--num-token-slices 3 --token-slices balanced"
GROUPED, UNTIED, GPIPE = "--num-key-value-heads 2", "--untie-embeddings-and-output-weights", "--pipeline-schedule gpipe"
PP2, PP4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
ZERO, BF16 = "--zero-stage 1", "--bf16"
SETUPS = [
    Setup(1, UNIFORM, fp64=True),
    Setup(1, f"{UNEVEN} {GROUPED} {GPIPE}", fp64=True),
    Setup(1, f"{BALANCED} {UNTIED} --recompute-granularity full", fp64=True),
    Setup(1, UNEVEN),
    Setup(1, f"{UNIFORM} {ZERO} {UNTIED}"),
    Setup(1, f"{UNEVEN} {BF16}"),
    Setup(1, f"{UNIFORM} {BF16} {ZERO}"),
    Setup(2, PP2, fp64=True),
    Setup(2, f"{PP2} {UNEVEN} {UNTIED}", fp64=True, micro_batches=3),
    Setup(2, f"{PP2} {BALANCED} {GPIPE} {GROUPED}", fp64=True),
    Setup(2, f"{PP2} {SINGLES} --ffn-hidden-size 48", fp64=True, micro_batches=1),
    Setup(2, f"{PP2} {UNIFORM} --stage-partition 0,1,4"),
    Setup(2, f"{PP2} {UNEVEN} {GPIPE} --stage-partition parameters"),
    Setup(2, f"{PP2} {UNEVEN} {ZERO} {GROUPED}"),
    Setup(2, f"{PP2} {UNEVEN} {BF16}"),
    Setup(2, UNEVEN, fp64=True),
    Setup(2, f"{UNIFORM} {ZERO}"),
    Setup(4, f"{PP4} {UNIFORM}", fp64=True, micro_batches=3),
    Setup(4, f"{PP4} {UNEVEN} {GPIPE} {UNTIED}", fp64=True),
    Setup(4, f"{PP4} {BALANCED} {GROUPED}", fp64=True, micro_batches=5),
    Setup(4, f"{PP4} {SINGLES} {GROUPED} {UNTIED}", micro_batches=1),
    Setup(4, f"{PP4} {UNIFORM} {GPIPE}"),
    Setup(4, f"{PP2} {UNEVEN} {ZERO}"),
]


class WholePast:
    """Stands in for a sequence's state: the whole sequence at once, by torch's own causal attention."""

    prefix_len = 0

    def past(self, layer: int, token_slice: int) -> "WholePast":
        return self

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)


def expected_gradients(setup: Setup) -> tuple[float, dict[str, np.ndarray]]:
    model = WholeModel(parse_arguments(setup.argv()).model).double()
    parts = [batch for rank in range(setup.data_parallel_size) for batch in batches(setup, rank)]
    losses = [gpt_loss(model(part.tokens, WholePast()), (part.labels, part.loss_mask)) for part in parts]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


@cache
def _trained(world_size: int) -> dict[Setup, list[tuple[float, dict[str, np.ndarray]]]]:
    """Per setup of a world size, what each rank found. One launch serves them all."""
    setups = [setup for setup in SETUPS if setup.world_size == world_size]
    by_rank = run_distributed(gradients_of_all, world_size, setups)
    return dict(zip(setups, zip(*by_rank, strict=True), strict=True))


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_loss_and_every_gradient_equal_plain_autograd(setup: Setup) -> None:
    expected_loss, expected = expected_gradients(setup)
    seen = set()
    for rank, (loss, found) in enumerate(_trained(setup.world_size)[setup]):
        assert loss == pytest.approx(expected_loss, rel=LOSS_TOLERANCE[setup.dtype])
        for name, gradient in found.items():
            seen.add(name)
            error = np.linalg.norm(gradient.astype(np.float64) - expected[name]) / np.linalg.norm(expected[name])
            assert error <= TOLERANCE[setup.dtype], f"{name} on rank {rank} is off by {error:.1e}"
    assert seen == expected.keys()


def test_the_loss_mask_matters_to_the_reference() -> None:
    """The masks are uneven enough that averaging token slices without weights would be seen at any tolerance."""
    setup = SETUPS[0]
    for batch in batches(setup, 0):
        per_token_slice = batch.loss_mask.reshape(2, 4, 8).sum((0, 2))
        assert per_token_slice.max() > 2 * per_token_slice.min()


@pytest.mark.parametrize(
    ("setup", "blocks"),
    [(SETUPS[7], [2, 2]), (SETUPS[11], [1, 3]), (SETUPS[17], [1, 1, 1, 1])],
    ids=["uniform", "given", "four_stages"],
)
def test_each_stage_holds_the_layers_it_was_dealt(setup: Setup, blocks: list[int]) -> None:
    """Layers 0 and 1 are the embeddings, the blocks follow, then the final norm, and the tied embedding again."""
    ends = [2 + sum(blocks[: stage + 1]) for stage in range(len(blocks))]
    starts = [0, *ends[:-1]]
    for stage, (_, found) in enumerate(_trained(setup.world_size)[setup]):
        expected = set(range(starts[stage], ends[stage]))
        expected |= {6, 0} if stage == len(blocks) - 1 else set()
        assert {int(name.split(".")[1]) for name in found} == expected
