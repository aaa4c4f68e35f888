"""Data and labels as dicts: entries reach the arguments of their names, on every stage, a token slice at a time."""

from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.utils import set_random_seed
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime import executor
from deepspeed_ext.runtime.micro_batch import to_device
from deepspeed_ext.runtime.state.sequence_state import Past
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.reference import BASE_SEED, WholePast, relative_error
from tests.runtime.training import ROWS, Setup, as_numpy, batches_of, build

CUT = (9, 1, 8, 6)


class Start(nn.Module):
    """Starts from the entry `tokens`, and takes positions if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(models.VOCAB, models.HIDDEN)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        hidden = self.words(tokens)
        return hidden if positions is None else hidden + torch.sin(positions.unsqueeze(-1) / 7.0)


class Gate(nn.Module):
    """A block whose output counts by a float mask of each token and a scale of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.block = models.Block()

    def forward(self, hidden: Tensor, past: Past, mask: Tensor, row_scale: Tensor) -> Tensor:
        return hidden + mask.unsqueeze(-1) * row_scale[:, None, None] * self.block(hidden, past)


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.HIDDEN, models.HIDDEN)

    def forward(self, hidden: Tensor, shift: Tensor | None = None) -> Tensor:
        hidden = hidden + self.linear(hidden)
        return hidden if shift is None else hidden + shift.unsqueeze(-1)


def weighted_loss(logits: Tensor, targets: Tensor, weight: Tensor, label_smoothing: float = 0.0) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=label_smoothing)
    return (losses * weight.flatten()).mean()


def layers() -> list[Any]:
    """Entries are taken on the first, the second and the fourth of six layers, and by a function."""

    def tilt(hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden * (1.0 + 0.1 * mask.unsqueeze(-1))

    return [
        LayerSpec(Start),
        LayerSpec(Gate),
        LayerSpec(models.Block),
        LayerSpec(Gate),
        tilt,
        LayerSpec(nn.Linear, models.HIDDEN, models.VOCAB),
    ]


def dict_batches(setup: Setup, data_rank: int, dtype: torch.dtype) -> list[Any]:
    found = []
    generator = torch.Generator().manual_seed(data_rank)
    for tokens, targets in batches_of(setup, data_rank):
        data = {
            "tokens": tokens,
            "mask": torch.rand(tokens.shape, generator=generator, dtype=dtype),
            "row_scale": torch.rand(ROWS, generator=generator, dtype=dtype),
            "positions": torch.arange(tokens.shape[1]).expand(ROWS, -1),
            "not_taken": object(),
        }
        labels = {"targets": targets, "weight": torch.rand(targets.shape, generator=generator, dtype=dtype), "other": 3}
        found.append((data, labels))
    return found


@cache
def expected(setup: Setup) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients in fp64, each layer called by hand."""
    modules = []
    for number, spec in enumerate(layers()):
        set_random_seed(BASE_SEED + number)
        modules.append(spec.build() if isinstance(spec, LayerSpec) else spec)
    start, gate, block, second_gate, tilt, head = modules
    model = nn.ModuleDict({str(n): layer for n, layer in enumerate(modules) if isinstance(layer, nn.Module)}).double()
    batches = [batch for rank in range(setup.dp) for batch in dict_batches(setup, rank, torch.double)]
    total = 0.0
    for data, labels in batches:
        given = data["mask"], data["row_scale"]
        hidden = gate(start(data["tokens"], data["positions"]), WholePast(), *given)
        hidden = tilt(second_gate(block(hidden, WholePast()), WholePast(), *given), data["mask"])
        total = total + weighted_loss(head(hidden), labels["targets"], labels["weight"]) / len(batches)
    total.backward()
    return total.item(), {name: as_numpy(weight.grad) for name, weight in model.named_parameters()}


SETUPS = {
    1: [Setup(dtype="fp64", cut=CUT), Setup(dtype="fp64", cut=CUT, recompute=2)],
    2: [
        Setup(pp=2, dtype="fp64", cut=CUT, recompute=1, schedule="gpipe", micro_batches=3),
        Setup(pp=2, dtype="fp64", cut=CUT, schedule="interleaved", model_chunks=2),
        Setup(pp=2, dtype="fp64", cut=CUT, schedule="zero-bubble", recompute=1),
    ],
    4: [Setup(pp=4, dtype="fp64", cut=CUT), Setup(pp=2, dp=2, dtype="fp64", cut=CUT)],
}
PARTITION = {1: "0,6", 2: "0,2,6", 4: "0,1,2,4,6"}


def _train(setup: Setup) -> tuple[float, dict[str, np.ndarray], float]:
    stages = setup.pp * setup.model_chunks
    engine = build(setup, layers=layers(), loss_fn=weighted_loss, partition=PARTITION[stages])
    batches = dict_batches(setup, engine.grid.get_data_parallel_rank(), torch.double)
    evaluated = engine.eval_batch(iter(batches)).item()
    loss = engine.train_batch(iter(batches)).item()
    seen = engine.optimizer.seen
    return loss, {name: as_numpy(seen[p]) for name, p in engine.module.named_parameters() if p in seen}, evaluated


def _launch(world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"trained": [_train(setup) for setup in SETUPS[world_size]]}
    if world_size == 1:
        found["called"] = _plain_call()
    if world_size == 4:
        # Last the error that ends a neighbour.
        read = [_num_read(partition) for partition in READING]
        found |= {"moves": _moves(), "read": read, "error": _without_an_iterator()}
    return found


@cache
def launched(world_size: int) -> list[dict[str, Any]]:
    return run_distributed(_launch, world_size, world_size)


@pytest.mark.parametrize("world_size", SETUPS)
def test_entries_reach_the_layers_that_name_them(world_size: int) -> None:
    by_rank = [found["trained"] for found in launched(world_size)]
    for index, setup in enumerate(SETUPS[world_size]):
        loss, gradients = expected(setup)
        seen: set[str] = set()
        for rank in range(world_size):
            found_loss, found, evaluated = by_rank[rank][index]
            assert found_loss == pytest.approx(loss, rel=1e-12), f"{setup}"
            assert evaluated == pytest.approx(loss, rel=1e-12), f"{setup}"
            for name, gradient in found.items():
                assert relative_error(gradient, gradients[name]) <= 1e-12, f"{setup}: {name} on rank {rank}"
            seen |= found.keys()
        assert seen == gradients.keys()


# ---------------------------------------------------------------------- copies to devices


def _moves() -> list[tuple[int, list[str]]]:
    """Entries that this rank moves, each time it moves any: with one stage's layers, for one token slice."""
    setup = Setup(pp=4, cut=CUT, micro_batches=1)
    engine = build(setup, layers=layers(), loss_fn=weighted_loss, partition=PARTITION[4])
    moves = []

    def recorded(tensors: Any, device: torch.device) -> Any:
        if isinstance(tensors, dict):
            lengths = {each.shape[1] for each in tensors.values() if torch.is_tensor(each) and each.dim() > 1}
            moves.append((*lengths, sorted(tensors)))
        return to_device(tensors, device)

    with patch.object(executor, "to_device", recorded):
        engine.train_batch(iter(dict_batches(setup, 0, torch.float32)))
    return moves


def _num_read(partition: str) -> int:
    setup = Setup(pp=4, cut=CUT, micro_batches=3)
    engine = build(setup, layers=layers(), loss_fn=weighted_loss, partition=partition)
    taken = []
    engine.train_batch(taken.append(None) or batch for batch in dict_batches(setup, 0, torch.float32))
    return len(taken)


def _without_an_iterator() -> str:
    setup = Setup(pp=4, cut=CUT)
    engine = build(setup, layers=layers(), loss_fn=weighted_loss, partition=PARTITION[4])
    try:
        engine.train_batch(None if engine.module.stage_id == 1 else iter(dict_batches(setup, 0, torch.float32)))
    except UserError as error:
        return str(error)
    except RuntimeError:
        return "its neighbour has ended"
    return ""


READING = {"0,2,3,4,6": [3, 0, 3, 3], "0,1,3,4,6": [3, 3, 3, 3]}
"""Micro-batches that each rank reads, by partition."""


def test_entries_move_a_token_slice_at_a_time_to_the_stages_that_read_them() -> None:
    by_rank = launched(4)
    first, second, third, last = (found["moves"] for found in by_rank)
    assert first == [(length, ["positions", "tokens"]) for length in CUT]
    assert second == third == [(length, ["mask", "row_scale"]) for length in CUT]
    # The last stage has the function, which takes the mask, and the loss.
    assert sorted(last) == sorted(
        [(length, ["mask"]) for length in CUT] + [(length, ["targets", "weight"]) for length in CUT]
    )
    assert [list(each) for each in zip(*(found["read"] for found in by_rank), strict=True)] == [*READING.values()]
    assert by_rank[1]["error"] == (
        "pipeline rank 1 reads the data for layer 1 (Gate), and was given no data iterator: pass one on this rank too"
    )


def _plain_call() -> bool:
    engine = build(Setup(cut=CUT), layers=layers(), loss_fn=weighted_loss)
    ((data, _), *_) = dict_batches(Setup(cut=CUT), 0, torch.float32)
    whole = engine.module(data)
    _, (outputs, *_) = engine.eval_batch(
        iter(dict_batches(Setup(cut=CUT), 0, torch.float32)), return_logits=True, num_micro_batches=1
    )
    return torch.allclose(whole, outputs, atol=1e-5)


def test_the_module_can_be_called_with_a_dict() -> None:
    assert launched(1)[0]["called"]


# ---------------------------------------------------------------------- arguments with a default


def optional_layers() -> list[Any]:
    return [LayerSpec(Start), LayerSpec(Optional), LayerSpec(nn.Linear, models.HIDDEN, models.VOCAB)]


def _optional(declared: tuple[str, ...] | None, with_shift: bool, tuple_of: bool = False) -> str | float:
    setup = Setup(pp=3, cut=CUT)
    try:
        engine = build(setup, layers=optional_layers(), partition="uniform", data_entries=declared)
        batches = batches_of(setup, 0)
        if not tuple_of:
            batches = [
                ({"tokens": tokens} | ({"shift": tokens.float()} if with_shift else {}), targets)
                for tokens, targets in batches
            ]
        middle = engine.module.stage_id == 1 and declared is None
        return engine.train_batch(None if middle else iter(batches)).item()
    except UserError as error:
        return str(error)
    except RuntimeError:
        return "its neighbour has ended"


def _on_three() -> dict[str, str | float]:
    declared = ("tokens", "shift")
    return {
        "a tuple": _optional(None, False, True),
        "not declared, without one": _optional(None, False),
        "declared": _optional(declared, True),
        "declared and missing": _optional(declared, False),
        "declared, and a tuple": _optional(declared, False, True),
        # Last the error that ends a neighbour.
        "not declared": _optional(None, True),
    }


def test_arguments_with_a_default_get_entries_that_are_declared() -> None:
    first, middle, last = run_distributed(_on_three, 3)
    for found in (first, middle, last):
        assert found["a tuple"] == found["not declared, without one"] != found["declared"]
        assert all(isinstance(found[name], float) for name in ("a tuple", "not declared, without one", "declared"))
        assert found["declared and missing"].startswith("the data has no entry 'shift' of data_entries ('tokens'): ")
        assert found["declared, and a tuple"].startswith(
            "the data is a Tensor, and data_entries=('shift', 'tokens') names the entries of a dict"
        )
    # An entry is never kept from a layer in silence.
    assert first["not declared"] == last["not declared"]
    assert first["not declared"] == (
        "layer 1 (Optional) takes 'shift', an entry of the data, by an argument with a default, and stage 1 "
        "reads no data: build the module with data_entries=('tokens', 'shift'), and give its rank the data iterator"
    )
    assert middle["not declared"] == "its neighbour has ended"
