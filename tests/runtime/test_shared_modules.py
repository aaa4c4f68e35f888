"""Weights that pipeline ranks share: gradients of all copies are summed, and a mistake is an error on every rank.

Checkpoints are tested with them, since all that holds of these weights also holds of others.
"""

import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.checkpoint.deepspeed_checkpoint import LAYER_FILE_PREFIX_PATTERN
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
    """The same as `share`, module by module, on the ranks that have one."""
    shared = model.share(model.stage_owner(number) for number in SHARED)
    for number, attribute in ((FIRST, "words"), (BETWEEN, "look_up"), (LAST, "projection")):
        if model.layer(number) is not None:
            shared.register_module(getattr(model.layer(number), attribute))


@cache
def expected(setup: Setup) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients in fp64 on one process, with one parameter."""
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
            takes_past = isinstance(layer, (Words, models.Block))
            hidden = layer(hidden, past=WholePast()) if takes_past else layer(hidden)
        total = total + models.loss_fn(hidden, labels) / len(batches)
    total.backward()
    gradients = {name: as_numpy(parameter.grad) for name, parameter in model.named_parameters()}
    return total.item(), gradients | {name: gradients[PLACE[FIRST]] for name in PLACE.values()}


SETUPS = {
    3: [Setup(pp=3, dtype="fp64", cut=CUT, micro_batches=4)],
    1: [Setup(dtype="fp64", cut=CUT), Setup(cut=CUT, zero=1)],
    2: [
        Setup(pp=2, dtype="fp64", cut=CUT, recompute=1, schedule="gpipe"),
        Setup(pp=2, dtype="fp64", cut=CUT, schedule="interleaved", model_chunks=2),
        Setup(pp=2, dtype="fp64", cut=CUT, schedule="gpipe", model_chunks=2, placement=Placement.V),
        Setup(pp=2, dtype="fp64", cut=CUT, schedule="zero-bubble"),
        Setup(pp=2, cut=CUT, zero=1),
        Setup(pp=2, cut=CUT, dtype="bf16", zero=1, accumulate="fp32"),
    ],
    4: [Setup(pp=2, dp=2, dtype="fp64", cut=CUT), Setup(pp=2, dp=2, cut=CUT, zero=1)],
}
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 3e-2}
COPIED = [Setup(pp=3, cut=CUT, zero=1), Setup(pp=3, cut=CUT, dtype="bf16", zero=1, accumulate="fp32")]
SAVED, REPLICATED = COPIED[0], Setup(pp=2, dp=2, cut=CUT, zero=1)
TIED = Setup(pp=2, dtype="fp64", cut=CUT)


def _gradients(setup: Setup, number: int) -> tuple[float, float, dict[str, np.ndarray]]:
    engine = build(setup, layers=layers(), prepare=by_hand if number % 2 else share)
    before = weights(engine)
    loss = engine.train_batch(feed(engine, setup)).item()
    if by_step(setup):
        after = weights(engine)
        gradients = {name: (before[name].astype(np.float64) - after[name]) / LONG_STEP for name in before}
    else:
        seen = engine.optimizer.seen
        gradients = {name: as_numpy(seen[p]) for name, p in engine.module.named_parameters() if p in seen}
    return loss, float(engine.get_global_grad_norm()), gradients


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def _copies(setup: Setup) -> tuple[np.ndarray, np.ndarray]:
    """This rank's copy of the shared weight at the start and after three steps."""
    engine = build(setup, layers=layers(), prepare=share, optimizer=_adam)
    ((weight, _),) = engine.module.get_tied_weights_and_groups()
    before = as_numpy(weight)
    losses(engine, setup, 3)
    return before, as_numpy(weight)


def _saved(directory: str, setup: Setup) -> tuple[dict[str, np.ndarray], list[float]]:
    engine = build(setup, layers=layers(), prepare=share, optimizer=_adam)
    losses(engine, setup, 2)
    engine.save_checkpoint(directory)
    return weights(engine), losses(engine, setup, 3, first=2)


def _loaded(setup: Setup, directory: str, *, resumes: bool = True) -> tuple[dict[str, np.ndarray], list[float]]:
    engine = build(setup, layers=layers(), prepare=share, base_seed=99, optimizer=_adam)
    engine.load_checkpoint(directory, load_optimizer_states=resumes, load_module_only=not resumes)
    assert engine.global_steps == 2 * resumes
    return weights(engine), losses(engine, setup, 3, first=2)


def _tied_and_shared() -> dict[str, Any]:
    """Layers 0 and 5 are one tied embedding; layers 1 and 4 share the matrix of their attention."""
    engine = build(TIED, prepare=lambda model: model.share_layers({1: "out.weight", 4: "out.weight"}))
    module = engine.module
    engine.train_batch(feed(engine, TIED))
    seen = engine.optimizer.seen
    fault = _error(lambda: build(TIED, prepare=lambda model: model.share_layers({0: "weight", 5: "weight"})))
    return {
        "gradients": {name: as_numpy(seen[p]) for name, p in module.named_parameters() if p in seen},
        "norm": engine.get_global_grad_norm(),
        "layers": [type(module.layer(number)).__name__ for number in range(6)],
        "fault": fault,
    }


def _error(call: Any) -> str:
    try:
        call()
    except UserError as error:
        return str(error)
    return ""


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

    return _error(lambda: build(Setup(pp=3, cut=CUT), layers=layers(), prepare=prepare, partition="0,2,5,7"))


MISTAKES = {
    "shape": "with share((0, 2)) pipeline rank 2 registers weight [32, 16] float32, and ",
    "missing": "pipeline rank 2 registers no module with share((0, 2)): ",
    "elsewhere": "pipeline rank 1 registers a module with share((0, 2)): ",
    "twice": "words.weight [32, 16] is in share((0, 2)) and in share((0, 1, 2)), and its gradient would be ",
    "rank": "share((0, 3)) names pipeline rank 3 of 3: ",
}


def _launch(world_size: int, directory: str) -> dict[str, Any]:
    found: dict[str, Any] = {"gradients": [_gradients(each, n) for n, each in enumerate(SETUPS[world_size])]}
    if world_size == 3:
        found |= {"saved": _saved(directory, SAVED), "copies": [_copies(setup) for setup in COPIED]}
        found |= {"loaded": _loaded(SAVED, directory), "mistakes": {name: _mistake(name) for name in MISTAKES}}
        found["other cut"] = _loaded(replace(SAVED, cut=(sum(CUT),)), directory)
    elif world_size < 3:
        found["loaded"] = _loaded(Setup(pp=world_size, cut=CUT), directory, resumes=False)
    else:
        found["saved"] = _saved(f"{directory}/replicas", REPLICATED)
        found["loaded"] = _loaded(REPLICATED, f"{directory}/replicas")
    if world_size == 2:
        found["tied"] = _tied_and_shared()
    if world_size == 1:
        unknown = {FIRST: "word.weight"}
        build_unknown = lambda: build(Setup(cut=CUT), layers=layers(), prepare=lambda each: each.share_layers(unknown))  # noqa: E731
        found["unknown"] = _error(build_unknown)
    return found


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By world size; the first one saves the checkpoint that others load."""
    directory = tmp_path_factory.mktemp("checkpoint")
    found = {world_size: run_distributed(_launch, world_size, world_size, str(directory)) for world_size in SETUPS}
    names = {path.name for path in directory.rglob("layer_*")}
    assert "layer_01-model_00-model_states.pt" in names
    assert all(re.match(LAYER_FILE_PREFIX_PATTERN, name) and "token" not in name for name in names)
    return found


@pytest.mark.parametrize("world_size", SETUPS)
def test_gradients_are_those_of_one_weight(world_size: int, launched) -> None:
    for index, setup in enumerate(SETUPS[world_size]):
        tolerance = TOLERANCE[setup.dtype]
        loss, gradients = expected(replace(setup, dtype="fp64", zero=0))
        once = {name: gradient for name, gradient in gradients.items() if name not in (PLACE[BETWEEN], PLACE[LAST])}
        norm = np.sqrt(sum(np.square(gradient).sum() for gradient in once.values()))
        seen: set[str] = set()
        for rank, of_rank in enumerate(launched[world_size]):
            found_loss, found_norm, found = of_rank["gradients"][index]
            assert found_loss == pytest.approx(loss, rel=tolerance)
            # A norm of fp64 gradients is reported in fp64, those of DeepSpeed's optimizers in fp32.
            assert found_norm == pytest.approx(norm, rel=max(tolerance, 1e-6)), f"{setup}"
            for name, gradient in found.items():
                error = relative_error(gradient, gradients[name])
                assert error <= tolerance, f"{setup}: {name} on rank {rank} is off by {error:.1e}"
            seen |= found.keys()
        # A rank with several of the layers has one weight, under its first name.
        assert seen >= once.keys()
        assert seen.isdisjoint({PLACE[BETWEEN], PLACE[LAST]}) is (setup.pp == 1)


def test_copies_start_as_the_first_and_stay_equal(launched) -> None:
    set_random_seed(BASE_SEED + FIRST)
    words = Words().words.weight.detach()
    for index, setup in enumerate(COPIED):
        start = as_numpy(words.bfloat16() if setup.dtype == "bf16" else words)
        by_rank = [found["copies"][index] for found in launched[3]]
        for before, after in by_rank:
            np.testing.assert_array_equal(before, start)
            np.testing.assert_array_equal(after, by_rank[0][1])
        assert not np.array_equal(start, by_rank[0][1]), f"{setup}"


def test_tied_layers_and_shared_modules_in_one_model(launched) -> None:
    model = Reference(TIED.num_blocks, tied=True).double()
    model.get_submodule("4").out.weight = model.get_submodule("1").out.weight
    batches = batches_of(TIED, 0)
    (sum(models.loss_fn(model(tokens), labels) for tokens, labels in batches) / len(batches)).backward()
    gradients = {name: as_numpy(parameter.grad) for name, parameter in model.named_parameters()}
    norm = np.sqrt(sum(np.square(gradient).sum() for gradient in gradients.values()))
    first, last = (found["tied"] for found in launched[2])
    assert first["layers"] == ["Embedding", "Block", "Block", "NoneType", "NoneType", "NoneType"]
    assert last["layers"] == ["NoneType", "NoneType", "NoneType", "Block", "Block", "Embedding"]
    for found in (first, last):
        assert found["norm"] == pytest.approx(norm, rel=1e-12)
        assert found["fault"].startswith("weight [32, 16] is in share((0, 1)) and in a tied layer, and its gradient")
        for name, gradient in found["gradients"].items():
            if name == "tied_modules.embedding.position" and found is last:
                continue  # the head's copy, which is not read
            exact = gradients["1.out.weight" if name == "4.out.weight" else name]
            assert relative_error(gradient, exact) <= 1e-12, name


def test_checkpoints_have_shared_weights_like_any_other(launched) -> None:
    saved = [found["saved"] for found in launched[3]]
    whole = {name: weight for rank, _ in saved for name, weight in rank.items()}
    # With another number of stages, one rank has several of the layers.
    for found, later in (each["loaded"] for world_size in (2, 1) for each in launched[world_size]):
        assert later[0] == pytest.approx(saved[0][1][0], rel=1e-6)
        for name, weight in found.items():
            np.testing.assert_array_equal(weight, whole[name])


@pytest.mark.parametrize("world_size", [3, 4])
def test_training_continues_bit_for_bit_and_with_another_cut(world_size: int, launched) -> None:
    for of_rank in launched[world_size]:
        (saved, expected), (same, losses_of_same) = of_rank["saved"], of_rank["loaded"]
        assert losses_of_same == expected
        other, others = of_rank.get("other cut", (saved, expected))
        # From the same weights the first loss differs only by rounding; Adam then makes more of it.
        assert others[0] == pytest.approx(expected[0], rel=1e-6) and others == pytest.approx(expected, rel=1e-3)
        for found in (same, other):
            assert found.keys() == saved.keys()
            for name, weight in found.items():
                np.testing.assert_array_equal(weight, saved[name])


def test_a_mistake_is_one_line_on_every_rank(launched) -> None:
    first, *others = (found["mistakes"] for found in launched[3])
    assert others == [first, first]
    for name, line in MISTAKES.items():
        assert first[name].startswith(line) and "\n" not in first[name]
    assert launched[1][0]["unknown"] == "Words has no weight word.weight to share: name some of position, words.weight"


def _declared(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, trained: bool = True) -> Declaration:
    return Declaration((0, 1), (tuple(WeightSpec(f"w{shape[0]}", shape, dtype, trained) for shape in shapes),))


def test_declarations_are_compared_in_order() -> None:
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
        assert fault is not None and words in fault and "\n" not in fault
    assert find_fault([[_declared((2,)), _declared((4,))], [_declared((4,)), _declared((2,))]]) is not None
