"""Stages of a model: their layers, initial weights, forwards and refusals."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from deepspeed_ext.plan.errors import PlanError, UserError
from deepspeed_ext.plan.layout import ParallelLayout, StagePartition
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from deepspeed_ext.runtime.state.sequence_state import Past, SequenceState
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.training import as_numpy

CUT = TokenSlices((9, 1, 8, 6))


def module(layers: list[Any] | None = None, *, stages: int = 1, **keywords: Any) -> TokenSlicePipelineModule:
    return TokenSlicePipelineModule(
        models.layers() if layers is None else layers,
        layout=ParallelLayout(pipeline_parallel_size=stages, num_token_slices=len(CUT)),
        token_slices=CUT,
        **keywords,
    )


# ---------------------------------------------------------------------- partitions


def _parts(settings: list[Any]) -> list[list[int]]:
    return [module(stages=2, partition=setting).parts for setting in settings]


def test_layers_are_on_the_stages_of_the_partition(tmp_path: Path) -> None:
    path = tmp_path / "partition.json"
    path.write_text(json.dumps([0, 5, 6]))
    settings = ["uniform", "parameters", "0,1,6", str(path), StagePartition((0, 4, 6))]
    # Embedding and head have 896 parameters each, a block has 1936.
    assert run_distributed(_parts, 2, settings) == [[[0, 3, 6], [0, 3, 6], [0, 1, 6], [0, 5, 6], [0, 4, 6]]] * 2


def _on_one() -> tuple[list[float], dict[str, tuple[list[Any], int]]]:
    return _tied_with_past(), _recomputed()


@pytest.fixture(scope="module")
def on_one() -> tuple[list[float], dict[str, tuple[list[Any], int]]]:
    return run_distributed(_on_one, 1)[0]


def test_modules_that_no_rank_can_train_are_refused() -> None:
    def double(hidden: Tensor) -> Tensor:
        return hidden * 2.0

    layers = [LayerSpec(nn.Linear, 4, 4), double, LayerSpec(nn.ReLU)]
    with pytest.raises(UserError, match=r"stage 1 of the partition 0,1,3 has no parameters to train"):
        module(layers, stages=2, partition="0,1,3")
    with pytest.raises(UserError, match="give the layout num_token_slices=4"):
        TokenSlicePipelineModule(models.layers(), layout=ParallelLayout(num_token_slices=3), token_slices=CUT)


class Counted(nn.Linear):
    built = 0

    def __init__(self) -> None:
        super().__init__(4, 4)
        assert self.weight.device.type == "meta"
        Counted.built += 1


def test_counting_parameters_allocates_nothing() -> None:
    with pytest.raises(PlanError):
        module([LayerSpec(Counted)] * 3, stages=2, partition="0,9,11")
    assert Counted.built == 3


# ---------------------------------------------------------------------- forward


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight


def past_of_tied(shared: Shared, hidden: Tensor, past: Past) -> Tensor:
    return hidden @ shared.weight + past.prefix_len


def _tied_with_past() -> list[float]:
    stage = module([TiedLayerSpec("w", Shared), TiedLayerSpec("w", Shared, forward_fn=past_of_tied)])
    state = SequenceState(CUT)
    return [stage(torch.zeros(1, 1, 4), state, index).max().item() for index in range(len(CUT))]


def test_a_tied_layer_gets_the_past(on_one) -> None:
    assert on_one[0] == [0.0, 9.0, 10.0, 18.0]


# ---------------------------------------------------------------------- recomputation


def _recomputed() -> dict[str, tuple[list[Any], int]]:
    """Gradients through `nn.Dropout`, not recomputed and with either setting; how often a generator was saved."""
    found: dict[str, tuple[list[Any], int]] = {}
    for name, keywords in {
        "kept": {},
        "default": {"activation_checkpoint_interval": 3},
        "without states": {"activation_checkpoint_interval": 3, "preserve_rng_state": False},
    }.items():
        linear = LayerSpec(nn.Linear, models.HIDDEN, models.HIDDEN)
        model = module([linear, LayerSpec(nn.Dropout, 0.5), linear], **keywords)
        torch.manual_seed(5)
        hidden = torch.ones(2, CUT.seq_length, models.HIDDEN)
        with patch("torch.get_rng_state", wraps=torch.get_rng_state) as saved:
            model(hidden).square().sum().backward()
        found[name] = [as_numpy(weight.grad) for weight in model.parameters()], saved.call_count
    return found


def test_recomputed_layers_draw_the_same_random_numbers_unless_set_otherwise(on_one) -> None:
    ((kept, never), (default, often), (others, not_once)) = on_one[1].values()
    assert all(np.array_equal(*pair) for pair in zip(kept, default, strict=True))
    assert not all(np.array_equal(*pair) for pair in zip(kept, others, strict=True))
    assert (never, not_once) == (0, 0) and often > 0
