"""Weights that pipeline ranks share: gradients of all copies are summed, and a mistake is an error on every rank."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.utils import set_random_seed
from torch import nn

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.ops import Placement
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from deepspeed_ext.runtime.shared_modules import Declaration, WeightSpec, find_fault
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.reference import BASE_SEED, Reference, WholePast, relative_error
from tests.runtime.shared_layers import BETWEEN, FIRST, LAST, PLACE, SHARED, Words, layers, share
from tests.runtime.training import LONG_STEP, Setup, as_numpy, batches_of, build, by_step, feed, losses, weights

CUT = (9, 1, 8, 6)


def by_hand(model: TokenSlicePipelineModule) -> None:
    """The same, module by module, on the ranks that have one."""
    shared = model.share(model.stage_owner(number) for number in SHARED)
    for number, attribute in ((FIRST, "words"), (BETWEEN, "look_up"), (LAST, "projection")):
        if model.layer(number) is not None:
            shared.register_module(getattr(model.layer(number), attribute))


@cache
def expected(setup: Setup) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients in fp64 on one process, where the weight is one and the same."""
    modules = []
    for number, spec in enumerate(layers()):
        set_random_seed(BASE_SEED + number)
        modules.append(spec.build())
    model = nn.ModuleList(modules)
    model[BETWEEN].look_up.weight = model[LAST].projection.weight = model[FIRST].words.weight
    model.double()
    batches = [batch for rank in range(setup.dp) for batch in batches_of(setup, rank)]
    total = 0.0
    for tokens, labels in batches:
        hidden = tokens
        for layer in model:
            wants_past = isinstance(layer, (Words, models.Block))
            hidden = layer(hidden, past=WholePast()) if wants_past else layer(hidden)
        total = total + models.loss_fn(hidden, labels) / len(batches)
    total.backward()
    gradients = {name: as_numpy(parameter.grad) for name, parameter in model.named_parameters()}
    return total.item(), gradients | {name: gradients[PLACE[FIRST]] for name in PLACE.values()}


# ---------------------------------------------------------------------- gradients

SETUPS = {
    1: [Setup(dtype="fp64", cut=CUT), Setup(cut=CUT, zero=1)],
    2: [
        Setup(pp=2, dtype="fp64", cut=CUT),
        Setup(pp=2, dtype="fp64", cut=CUT, recompute=1, schedule="gpipe"),
        Setup(pp=2, dtype="fp64", cut=CUT, schedule="interleaved", model_chunks=2),
        Setup(pp=2, dtype="fp64", cut=CUT, schedule="gpipe", model_chunks=2, placement=Placement.V),
        Setup(pp=2, dtype="fp64", cut=CUT, schedule="zero-bubble"),
        Setup(pp=2, cut=CUT, zero=1),
        Setup(pp=2, cut=CUT, dtype="bf16", zero=1, accumulate="fp32"),
    ],
    3: [Setup(pp=3, dtype="fp64", cut=CUT, micro_batches=4)],
    4: [Setup(pp=2, dp=2, dtype="fp64", cut=CUT), Setup(pp=2, dp=2, cut=CUT, zero=1)],
}
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 3e-2}


def _gradients(setups: list[Setup]) -> list[tuple[float, float, dict[str, np.ndarray]]]:
    found = []
    for number, setup in enumerate(setups):
        engine = build(setup, layers=layers(), prepare=by_hand if number % 2 else share)
        before = weights(engine)
        loss = engine.train_batch(feed(engine, setup)).item()
        if by_step(setup):
            after = weights(engine)
            gradients = {name: (before[name].astype(np.float64) - after[name]) / LONG_STEP for name in before}
        else:
            seen = engine.optimizer.seen
            gradients = {name: as_numpy(seen[p]) for name, p in engine.module.named_parameters() if p in seen}
        found.append((loss, float(engine.get_global_grad_norm()), gradients))
    return found


@pytest.mark.parametrize("world_size", SETUPS)
def test_gradients_are_those_of_one_weight(world_size: int) -> None:
    by_rank = run_distributed(_gradients, world_size, SETUPS[world_size])
    for index, setup in enumerate(SETUPS[world_size]):
        tolerance = TOLERANCE[setup.dtype]
        loss, gradients = expected(replace(setup, dtype="fp64", zero=0))
        once = {name: gradient for name, gradient in gradients.items() if name not in (PLACE[BETWEEN], PLACE[LAST])}
        norm = np.sqrt(sum(np.square(gradient).sum() for gradient in once.values()))
        seen: set[str] = set()
        for rank in range(world_size):
            found_loss, found_norm, found = by_rank[rank][index]
            assert found_loss == pytest.approx(loss, rel=tolerance)
            # A norm of fp64 gradients is reported in fp64, those of DeepSpeed's optimizers in fp32.
            assert found_norm == pytest.approx(norm, rel=max(tolerance, 1e-6)), f"{setup}"
            for name, gradient in found.items():
                error = relative_error(gradient, gradients[name])
                assert error <= tolerance, f"{setup}: {name} on rank {rank} is off by {error:.1e}"
            seen |= found.keys()
        # Where a rank has several of the layers they have one weight, under its first name.
        assert seen >= once.keys()
        assert seen.isdisjoint({PLACE[BETWEEN], PLACE[LAST]}) is (setup.pp == 1)


def _copies(setup: Setup) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """This rank's copy of the shared weight at the start and after three steps."""
    engine = build(setup, layers=layers(), prepare=share, optimizer=lambda each: torch.optim.Adam(each, lr=1e-2))
    held = [weight for weight, _ in engine.module.get_tied_weights_and_groups()]
    before = [as_numpy(weight) for weight in held]
    losses(engine, setup, 3)
    return before, [as_numpy(weight) for weight in held]


COPIED = [
    Setup(pp=3, cut=CUT),
    Setup(pp=3, cut=CUT, zero=1),
    Setup(pp=3, cut=CUT, dtype="bf16"),
    Setup(pp=3, cut=CUT, dtype="bf16", zero=1, accumulate="fp32"),
]


def _all_copies() -> list[tuple[list[np.ndarray], list[np.ndarray]]]:
    return [_copies(setup) for setup in COPIED]


def test_copies_start_as_the_first_and_stay_equal() -> None:
    set_random_seed(BASE_SEED + FIRST)
    words = Words().words.weight.detach()
    for setup, by_rank in zip(COPIED, zip(*run_distributed(_all_copies, 3), strict=True), strict=True):
        start = as_numpy(words.bfloat16() if setup.dtype == "bf16" else words)
        (after_first,) = by_rank[0][1]
        for (before,), (after,) in by_rank:
            np.testing.assert_array_equal(before, start)
            np.testing.assert_array_equal(after, after_first)
        assert not np.array_equal(start, after_first), f"{setup}"


# ---------------------------------------------------------------------- tied layers and shared modules together


def _tied_and_shared() -> dict[str, Any]:
    """Layers 0 and 5 are one tied embedding; layers 1 and 4 share the matrix of their attention."""
    setup = Setup(pp=2, dtype="fp64", cut=CUT)
    shared = {1: "out.weight", 4: "out.weight"}
    engine = build(setup, prepare=lambda model: model.share_layers(shared))
    module = engine.module
    engine.train_batch(feed(engine, setup))
    held = {
        name: as_numpy(engine.optimizer.seen[p]) for name, p in module.named_parameters() if p in engine.optimizer.seen
    }
    try:
        fault = ""
        build(setup, prepare=lambda model: model.share_layers({0: "weight", 5: "weight"}))
    except UserError as error:
        fault = str(error)
    return {
        "gradients": held,
        "norm": engine.get_global_grad_norm(),
        "layers": [type(module.layer(number)).__name__ for number in range(6)],
        "fault": fault,
    }


def test_tied_layers_and_shared_modules_stand_side_by_side() -> None:
    setup = Setup(pp=2, dtype="fp64", cut=CUT)
    model = Reference(setup.num_blocks, tied=True).double()
    model.get_submodule("4").out.weight = model.get_submodule("1").out.weight
    batches = batches_of(setup, 0)
    (sum(models.loss_fn(model(tokens), labels) for tokens, labels in batches) / len(batches)).backward()
    gradients = {name: as_numpy(parameter.grad) for name, parameter in model.named_parameters()}
    norm = np.sqrt(sum(np.square(gradient).sum() for gradient in gradients.values()))
    first, last = run_distributed(_tied_and_shared, 2)
    assert first["layers"] == ["Embedding", "Block", "Block", "NoneType", "NoneType", "NoneType"]
    assert last["layers"] == ["NoneType", "NoneType", "NoneType", "Block", "Block", "Embedding"]
    for found in (first, last):
        assert found["norm"] == pytest.approx(norm, rel=1e-12)
        assert found["fault"].startswith("weight [32, 16] is in share((0, 1)) and in a tied layer, and its gradient")
        for name, gradient in found["gradients"].items():
            if name == "tied_modules.embedding.position" and found is last:
                continue  # the head's copy, which nothing reads
            assert relative_error(gradient, gradients["1.out.weight" if name == "4.out.weight" else name]) <= 1e-12, (
                name
            )


# ---------------------------------------------------------------------- checkpoints


def _train_and_save(directory: str) -> tuple[dict[str, np.ndarray], float]:
    setup = Setup(pp=3, cut=CUT, zero=1)
    engine = build(setup, layers=layers(), prepare=share, optimizer=lambda each: torch.optim.Adam(each, lr=1e-2))
    losses(engine, setup, 2)
    engine.save_checkpoint(directory)
    return weights(engine), losses(engine, setup, 1, first=2)[0]


def _load_and_train(setup: Setup, directory: str, optimizer_too: bool) -> tuple[dict[str, np.ndarray], float]:
    engine = build(
        setup, layers=layers(), prepare=share, base_seed=99, optimizer=lambda each: torch.optim.Adam(each, lr=1e-2)
    )
    engine.load_checkpoint(directory, load_optimizer_states=optimizer_too, load_module_only=not optimizer_too)
    return weights(engine), losses(engine, setup, 1, first=2)[0]


def test_checkpoints_hold_shared_weights_like_any_other(tmp_path: Path) -> None:
    saved = run_distributed(_train_and_save, 3, str(tmp_path))
    same = run_distributed(_load_and_train, 3, Setup(pp=3, cut=CUT, zero=1), str(tmp_path), True)
    for (found, loss), (expected_weights, expected_loss) in zip(same, saved, strict=True):
        assert loss == expected_loss
        for name, weight in found.items():
            np.testing.assert_array_equal(weight, expected_weights[name])
    # Another number of stages, where one rank now has several of the layers.
    whole = {name: weight for rank, _ in saved for name, weight in rank.items()}
    for world_size in (1, 2):
        for found, loss in run_distributed(
            _load_and_train, world_size, Setup(pp=world_size, cut=CUT), str(tmp_path), False
        ):
            assert loss == pytest.approx(saved[0][1], rel=1e-6)
            for name, weight in found.items():
                np.testing.assert_array_equal(weight, whole[name])


# ---------------------------------------------------------------------- mistakes


def _mistake(name: str) -> str:
    def prepare(model: TokenSlicePipelineModule) -> None:
        if name == "shape":
            shared = model.share((0, 2))
            if model.stage_id == 0:
                shared.register_module(model.layer(FIRST), "position")
            if model.stage_id == 2:
                shared.register_module(model.layer(LAST).projection)
        elif name == "missing":
            shared = model.share((0, 2))
            if model.stage_id == 0:
                shared.register_module(model.layer(FIRST).words)
        elif name == "elsewhere":
            model.share((0, 2)).register_module(model.layer((FIRST, BETWEEN, LAST)[model.stage_id]))
        elif name == "twice":
            share(model)
            model.share_layers({FIRST: "words.weight", LAST: "projection.weight"})
        elif name == "rank":
            model.share((0, 3))

    try:
        build(Setup(pp=3, cut=CUT), layers=layers(), prepare=prepare, partition="0,2,5,7")
    except UserError as error:
        return str(error)
    return "nothing was raised"


MISTAKES = {
    "shape": "with share((0, 2)) pipeline rank 2 registers weight [32, 16] float32, and ",
    "missing": "pipeline rank 2 registers no module with share((0, 2)): ",
    "elsewhere": "pipeline rank 1 registers a module with share((0, 2)): ",
    "twice": "words.weight [32, 16] is in share((0, 2)) and in share((0, 1, 2)), and its gradient would be ",
    "rank": "share((0, 3)) names pipeline rank 3 of 3: ",
}


def _mistakes() -> dict[str, str]:
    return {name: _mistake(name) for name in MISTAKES}


def test_a_mistake_is_one_line_on_every_rank() -> None:
    first, *others = run_distributed(_mistakes, 3)
    assert others == [first, first]
    for name, said in MISTAKES.items():
        assert first[name].startswith(said) and "\n" not in first[name]


def _declared(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, trained: bool = True) -> Declaration:
    return Declaration((0, 1), (tuple(WeightSpec(f"w{shape[0]}", shape, dtype, trained) for shape in shapes),))


def test_what_ranks_declare_is_compared_in_order() -> None:
    assert find_fault([[_declared((2, 3))], [_declared((2, 3))]]) is None
    assert find_fault([[_declared((2,)), _declared((4,))], [_declared((2,)), _declared((4,))]]) is None
    assert find_fault([[], []]) is None
    for first, other, words in (
        (_declared((2, 3)), _declared((3, 2)), "registers w3 [3, 2] float32, and pipeline rank 0 w2 [2, 3] float32"),
        (_declared((2,)), _declared((2,), dtype=torch.double), "registers w2 [2] float64"),
        (_declared((2,)), _declared((2,), trained=False), "registers w2 [2] float32 frozen"),
        (_declared((2,)), _declared((2,), (4,)), "registers 2 weights (w2 [2] float32, w4 [4] float32)"),
        (_declared((2,)), Declaration((0, 1)), "pipeline rank 1 registers no module with share((0, 1))"),
    ):
        fault = find_fault([[first], [other]])
        assert fault is not None
        assert words in fault
        assert "\n" not in fault
    assert find_fault([[_declared((2,)), _declared((4,))], [_declared((4,)), _declared((2,))]]) is not None


def test_a_module_without_such_a_weight_is_refused() -> None:
    assert run_distributed(_unknown_weight, 1) == [
        "Words has no weight word.weight to share: name some of position, words.weight"
    ]


def _unknown_weight() -> str:
    try:
        build(Setup(cut=CUT), layers=layers(), prepare=lambda model: model.share_layers({FIRST: "word.weight"}))
    except UserError as error:
        return str(error)
    return ""
