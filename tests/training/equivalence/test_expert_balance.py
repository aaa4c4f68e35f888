"""Losses, capacity and counts of experts: no token slices, ranks or schedule change a gradient or a count.

The reference is plain autograd in fp64 over whole micro-batches on one process, with losses written as in the paper.
"""

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed_ext.runtime.attention.positional_dropout import DropoutPlace, jittered
from deepspeed_ext.runtime.clocks import Observer
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import LAYERS_BEFORE_BLOCKS
from megatron_terapipe.inference import WholeModel
from megatron_terapipe.model.balance import Balance
from megatron_terapipe.training import build_engine as trainer_engine
from tests.distributed import results_by_setup
from tests.training.equivalence.test_gpt_equivalence import (
    DROPOUT,
    EVEN,
    EVEN4,
    FULL,
    GPIPE,
    MODEL_CHUNKS,
    PACKED,
    PER_TOKEN,
    PP2,
    SELECTIVE,
    SEQ2,
    SP,
    STAGE,
    THERE_AND_BACK,
    TP2,
    UNEVEN,
    ZERO_BUBBLE,
    WholePast,
)
from tests.training.gpt_runs import SEQ, VOCAB, Setup, Step, batches, gradients

EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 24 --moe-layer-freq 2"


def balanced(kind: str) -> str:
    return f"{EXPERTS} --moe-router-load-balancing-type {kind} --moe-aux-loss-coeff 3"


Z, SIGMOID = "--moe-z-loss-coeff 0.5", "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
EP2 = "--expert-model-parallel-size 2 --moe-token-dispatcher-type"
CAPACITY, JITTER = "--moe-expert-capacity-factor 0.8", "--moe-input-jitter-eps 0.2"
LIMITED_CHUNKS = f"{CAPACITY} {MODEL_CHUNKS}"
SETUPS = [
    Setup(2, f"{PP2} {UNEVEN} {balanced('aux_loss')} {Z} {ZERO_BUBBLE} {SELECTIVE} {CAPACITY}", 3, fp64=True),
    Setup(2, f"{TP2} {EVEN} {SP} {balanced('seq_aux_loss')} {Z} {JITTER} {CAPACITY}", fp64=True),
    Setup(2, f"{SEQ2} {EVEN} {balanced('document_aux_loss')} {PACKED} {SIGMOID} {JITTER} {EP2} allgather", fp64=True),
    Setup(2, f"{UNEVEN} {balanced('global_aux_loss')} {PER_TOKEN} {DROPOUT} {EP2} alltoall {CAPACITY}", 3, fp64=True),
    Setup(2, f"{PP2} {UNEVEN} {balanced('document_aux_loss')} {PACKED} {STAGE} {LIMITED_CHUNKS}", 3, fp64=True),
    Setup(2, f"{PP2} {UNEVEN} {balanced('global_aux_loss')} {FULL} {GPIPE}", 3, fp64=True),
    Setup(2, f"{PP2} {THERE_AND_BACK} {balanced('seq_aux_loss')} {JITTER}", fp64=True),
    Setup(2, f"{PP2} {UNEVEN} {EXPERTS} {Z} --moe-router-load-balancing-type none {SELECTIVE}", fp64=True),
    Setup(4, f"{SEQ2} {TP2} {EVEN4} {SP} {balanced('aux_loss')} {Z} {CAPACITY}", fp64=True),
]


@dataclass(frozen=True)
class BalancedPast(WholePast):
    """The same for layers of experts."""

    seq_length: int = SEQ

    def sum_before(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(values), values

    def jittered(self, inputs: Tensor, spread: float, *, site: int, first_token: int) -> Tensor:
        return jittered(inputs, spread, DropoutPlace.at(self.seed, self.layer, site, self.sequences, 0))


Routed = list[tuple[Tensor, Tensor]]
"""Logits [T, E], and choices [T, E] of 0 and 1, of each layer of experts."""


def expected(setup: Setup) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Gradients; counts [layers, E] and losses [layers, losses] of the step."""
    config = parse_arguments(setup.argv())
    model, ranks = WholeModel(config.model).double(), setup.data_parallel_size
    routed: list[list[Routed]] = []
    sums, counted = [], []

    def count(_: Balance, chosen: Tensor, rows: int, past: BalancedPast) -> None:
        choices = torch.zeros(len(chosen), 4, dtype=torch.float64).scatter_(1, chosen, 1)
        routed[-1][-1].append((torch.empty(0), choices))

    def with_losses(_: Balance, logits: Tensor, rows: int, past: BalancedPast) -> Tensor:
        routed[-1][-1][-1] = logits, routed[-1][-1][-1][1]
        return logits

    with patch.object(Balance, "count", count), patch.object(Balance, "with_losses", with_losses):
        parts = [batches(setup, rank) for rank in range(ranks)]
        for number in range(setup.micro_batches):
            routed.append([])
            for rank in range(ranks):
                part, first = parts[rank][number], (number * ranks + rank) * 2
                routed[-1].append([])
                logits = model(part.tokens, BalancedPast(1234, (first, first + 1), part.document_starts))[..., :VOCAB]
                each = F.cross_entropy(logits.flatten(0, 1), part.labels.flatten(), reduction="none")
                sums.append((each * part.loss_mask.flatten()).sum())
                counted.append(part.loss_mask.sum())
    per_token = "--calculate-per-token-loss" in setup.flags
    each = zip(sums, counted, strict=True)
    loss = sum(sums) / sum(counted) if per_token else sum(total / n.clamp(min=1) for total, n in each) / len(sums)
    starts = [[part.document_starts for part in of_rank] for of_rank in parts]
    losses = []
    for layer in range(len(routed[0][0])):
        of_layer = [[of_rank[layer] for of_rank in of_ranks] for of_ranks in routed]
        losses.append(losses_of(config.model, of_layer, starts, whole="gpipe" in setup.flags))
    given = [config.model.moe_aux_loss_coeff, config.model.moe_z_loss_coeff or 0.0]
    coefficients = torch.tensor(given, dtype=torch.float64)
    table = torch.stack(losses)
    (loss + (table * coefficients).sum()).backward()
    numbers = [index + LAYERS_BEFORE_BLOCKS for index, each in enumerate(config.model.blocks) if each.num_experts]
    found = np.zeros((len(model._functions), 4), np.int64)
    values = np.zeros((len(model._functions), sum(map(bool, given))))
    for layer, number in enumerate(numbers):
        found[number] = sum(of_rank[layer][1] for of_ranks in routed for of_rank in of_ranks).sum(0)
        values[number] = table[layer, coefficients != 0].detach()
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}, found, values


def losses_of(model: ModelConfig, routed: list[Routed], starts: list[list[Any]], *, whole: bool) -> Tensor:
    """The auxiliary loss and the z-loss [2] of a layer, without their coefficients."""
    kind, total = model.moe_router_load_balancing_type, torch.zeros(2, dtype=torch.float64)
    for number, of_ranks in enumerate(routed):
        for rank, (logits, choices) in enumerate(of_ranks):
            scores = logits.softmax(1) if model.moe_router_score_function == "softmax" else logits.sigmoid()
            scores = (scores / scores.sum(1, keepdim=True)).view(2, SEQ, 4)
            choices = choices.view(2, SEQ, 4)
            bounds = [(*row, SEQ) for row in starts[rank][number]]
            groups = {
                "seq_aux_loss": [(slice(row, row + 1), slice(None)) for row in (0, 1)],
                "document_aux_loss": [
                    (slice(row, row + 1), slice(*ends))
                    for row in (0, 1)
                    for ends in zip(bounds[row], bounds[row][1:], strict=False)
                ],
            }.get(kind, [(slice(None), slice(None))])
            for group in groups:
                chosen, size = choices[group].sum((0, 1)), choices[group][..., 0].numel()
                share = size / (2 * SEQ)
                if kind == "global_aux_loss":
                    known = routed if whole else routed[: number + 1]
                    chosen = sum(each.sum(0) for of_known in known for _, each in of_known)
                    chosen = chosen / (len(known) * len(of_ranks))
                total[0] = total[0] + share * 4 / (2 * size**2) * (chosen * scores[group].sum((0, 1))).sum()
            total[1] = total[1] + logits.logsumexp(1).square().mean()
    return total / (len(routed) * len(routed[0]))


def step_of(setup: Setup) -> tuple[Step, np.ndarray, np.ndarray]:
    engines, build = [], trainer_engine.build_engine
    with patch.object(trainer_engine, "build_engine", lambda run: engines.append(build(run)) or engines[0]):
        step = gradients(setup)
    engine = engines[0]
    if "zero-bubble" in setup.flags:
        # Neither counts anything, nor does the repeated forward of a backward.
        data = batches(setup, engine.replica)
        engine.replay(data, Observer())
        engine.eval_batch(iter(data))
    tally = engine.take_tally()
    assert tally.steps == 1 and engine.take_tally().steps == 0
    return step, tally.counts.numpy(), tally.values.numpy()


trained = results_by_setup(step_of, SETUPS)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_losses_and_counts_equal_plain_autograd(setup: Setup) -> None:
    wanted, counts, values = expected(setup)
    for (_, _, by_name), found_counts, found_values in trained(setup):
        assert found_counts.tolist() == counts.tolist()
        np.testing.assert_allclose(found_values, values, rtol=1e-12)
        for (name, share, cut), gradient in by_name.items():
            whole = wanted[name]
            if cut is not None:
                whole = np.split(whole, whole.shape[cut] // gradient.shape[cut], axis=cut)[share]
            assert np.linalg.norm(gradient - whole) <= 1e-12 * np.linalg.norm(whole), name
