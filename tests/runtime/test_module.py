"""Stages of a model: their layers, initial weights, forwards and refusals."""

import json
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
from tests.runtime.reference import Reference
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


def _weights(stages: int) -> dict[str, np.ndarray]:
    stage = module(stages=stages, partition="0,2,6" if stages == 2 else "uniform")
    return {name: as_numpy(parameter) for name, parameter in stage.named_parameters()}


def _on_two(settings: list[Any]) -> tuple[list[list[int]], dict[str, np.ndarray]]:
    return [module(stages=2, partition=setting).parts for setting in settings], _weights(2)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[list[int]], dict[str, np.ndarray]]]:
    path = tmp_path_factory.mktemp("partition") / "partition.json"
    path.write_text(json.dumps([0, 5, 6]))
    settings = ["uniform", "parameters", "0,1,6", str(path), StagePartition((0, 4, 6))]
    return run_distributed(_on_two, 2, settings)


def _on_one() -> dict[str, Any]:
    return {"weights": _weights(1), "forwards": _forwards(), "tied": _tied_with_past(), "recomputed": _recomputed()}


@pytest.fixture(scope="module")
def on_one() -> dict[str, Any]:
    return run_distributed(_on_one, 1)[0]


def test_layers_are_on_the_stages_of_the_partition(on_two) -> None:
    # Embedding and head have 896 parameters each, a block has 1936.
    expected = [[0, 3, 6], [0, 3, 6], [0, 1, 6], [0, 5, 6], [0, 4, 6]]
    assert [bounds for bounds, _ in on_two] == [expected, expected]


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


# ---------------------------------------------------------------------- weights


def test_weights_do_not_depend_on_the_stages(on_one, on_two) -> None:
    expected = {name: as_numpy(parameter) for name, parameter in Reference(4, tied=True).named_parameters()}
    whole, (first, last) = on_one["weights"], [weights for _, weights in on_two]
    assert whole.keys() == expected.keys() == first.keys() | last.keys()
    for found in (whole, first, last):
        for name, weight in found.items():
            if name != "tied_modules.embedding.position" or found is not last:
                np.testing.assert_array_equal(weight, expected[name])


# ---------------------------------------------------------------------- forward


class Records(nn.Module):
    """Notes the number of earlier tokens and of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: list[int] = []
        self.numbers: set[int] = set()

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        self.seen.append(past.prefix_len)
        self.numbers.add(past._layer)
        return hidden * self.weight


def _forwards() -> dict[str, Any]:
    layers = [LayerSpec(Records), lambda hidden: hidden + 1.0, LayerSpec(nn.Linear, 4, 4), LayerSpec(Records)]
    stage = module(layers)
    state = SequenceState(CUT)
    hidden = torch.randn(2, CUT.seq_length, 4)
    parts = [stage(hidden[:, start:end], state, index) for index, (start, end) in enumerate(CUT.bounds())]
    seen = [list(stage.forward_funcs[index].seen) for index in (0, 3)]
    whole = stage(hidden)
    transformer = module()
    tokens = models.batches(1, 2)[0][0]
    return {
        "seen": seen,
        "whole": torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-6),
        "plain": as_numpy(transformer(tokens)),
        "numbers": [stage.forward_funcs[index].numbers for index in (0, 3)],
    }


def test_layers_with_an_argument_past_get_it(on_one) -> None:
    found = on_one["forwards"]
    assert found["seen"] == [[0, 9, 10, 18], [0, 9, 10, 18]]
    assert found["whole"]
    assert found["numbers"] == [{0}, {3}], "a past for each layer, by its place in the model"
    with torch.no_grad():
        expected = as_numpy(Reference(4, tied=True)(models.batches(1, 2)[0][0]))
    assert np.linalg.norm(found["plain"] - expected) <= 1e-6 * np.linalg.norm(expected)


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
    assert on_one["tied"] == [0.0, 9.0, 10.0, 18.0]


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
    ((kept, never), (default, often), (others, not_once)) = on_one["recomputed"].values()
    assert all(np.array_equal(*pair) for pair in zip(kept, default, strict=True))
    assert not all(np.array_equal(*pair) for pair in zip(kept, others, strict=True))
    assert (never, not_once) == (0, 0) and often > 0
