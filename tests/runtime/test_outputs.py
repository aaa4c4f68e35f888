"""Outputs and labels of a batch, returned on request and freed otherwise; evaluation in other shapes."""

import gc
import weakref
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deepspeed_ext.plan.errors import PlanError, UserError
from deepspeed_ext.plan.ops import Placement
from deepspeed_ext.plan.slicing import TokenSlices
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.reference import Reference
from tests.runtime.training import ROWS, Setup, as_numpy, batches_of, build, feed, losses, weights

CUT = (9, 1, 8, 6)
CLOSE = 1e-6
SHARED = (8, 2, 8, 6)
"""Lengths that two ranks can share."""
SHORT, SAME_COUNT, OTHER_ROWS, OTHER_COUNT = (4, 6, 2), (8, 8, 8), 5, 3
"""Cuts, of sequences of another length and of the same, and sizes of a batch, only for evaluation."""


def _still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def _held_out(seq: int = models.SEQ) -> list[Any]:
    return models.batches(OTHER_COUNT, OTHER_ROWS, seed=7, seq=seq)


@cache
def _whole(kind: str, data_rank: int = 0) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss, outputs and labels of all micro-batches, without pipeline or token slices."""
    model = Reference(4, tied=True)
    batches = {
        "training": lambda: batches_of(Setup(micro_batches=3), data_rank),
        "held out": _held_out,
        "short": lambda: _held_out(sum(SHORT)),
    }[kind]()
    with torch.no_grad():
        outputs = [model(tokens) for tokens, _ in batches]
        loss = np.mean(
            [models.loss_fn(logits, labels).item() for logits, (_, labels) in zip(outputs, batches, strict=True)]
        )
    return float(loss), as_numpy(torch.cat(outputs)), as_numpy(torch.cat([labels for _, labels in batches]))


SETUPS = {
    1: [Setup(cut=CUT, micro_batches=3)],
    2: [
        Setup(pp=2, cut=CUT, micro_batches=3, recompute=1),
        Setup(pp=2, cut=CUT, micro_batches=3, schedule="gpipe", model_chunks=2, placement=Placement.V),
    ],
    4: [Setup(pp=2, dp=2, cut=CUT, micro_batches=3), Setup(pp=2, sp=2, cut=SHARED, micro_batches=3)],
}


def _results(setups: list[Setup]) -> list[dict[str, Any]]:
    found = []
    sizes = {"num_micro_batches": OTHER_COUNT, "micro_batch_size": OTHER_ROWS, "return_output_label": True}
    for setup in setups:
        engine = build(setup, optimizer=_still)
        plain = engine.train_batch(feed(engine, setup))
        again = engine.train_batch(feed(engine, setup), return_output_label=True)
        results = {
            "training": again,
            "evaluation": engine.eval_batch(feed(engine, setup), return_output_label=True),
            "held out": engine.eval_batch(iter(_held_out()), **sizes),
            "short": engine.eval_batch(iter(_held_out(sum(SHORT))), token_slices=SHORT, **sizes),
            "short, as a cut": engine.eval_batch(iter(_held_out(12)), token_slices=TokenSlices((12,)), **sizes),
        }
        found.append(
            {
                name: (loss.item(), *(each if each is None else as_numpy(each) for each in rest))
                for name, (loss, *rest) in results.items()
            }
            | {"plain": plain.item(), "data rank": engine.replica}
        )
    return found


def _launch(world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"results": _results(SETUPS[world_size])}
    if world_size == 1:
        found |= {"refusals": _refusals(), "forms": _forms(), "alive": _alive(Setup(cut=CUT, micro_batches=4))}
    if world_size == 2:
        found |= {"evaluations": _evaluations(), "alive": _alive(Setup(pp=2, cut=CUT, micro_batches=4))}
        found["trained"] = [
            [_trained(setup, evaluate=evaluate, known_shapes=known_shapes) for evaluate in (False, True)]
            for setup, known_shapes in zip(TRAINED, (True, False), strict=True)
        ]
    return found


@cache
def launched(world_size: int) -> list[dict[str, Any]]:
    return run_distributed(_launch, world_size, world_size)


@pytest.mark.parametrize("world_size", SETUPS)
def test_outputs_and_labels_are_those_of_the_whole_batch(world_size: int) -> None:
    by_rank = [found["results"] for found in launched(world_size)]
    for index, setup in enumerate(SETUPS[world_size]):
        complete = 0
        for found in (rank[index] for rank in by_rank):
            assert found["plain"] == found["training"][0], "outputs have no effect on the loss"
            for name, kind in {
                "training": "training", "evaluation": "training", "held out": "held out", "short": "short",
                "short, as a cut": "short",
            }.items():  # fmt: skip
                data_ranks = range(setup.dp) if kind == "training" else (0,)
                expected_loss = np.mean([_whole(kind, data_rank)[0] for data_rank in data_ranks])
                _, expected, expected_labels = _whole(kind, found["data rank"] if kind == "training" else 0)
                loss, outputs, labels = found[name]
                assert loss == pytest.approx(expected_loss, rel=CLOSE), f"{name} of {setup}"
                assert (outputs is None) is (labels is None)
                if outputs is None:
                    continue
                complete += 1
                assert outputs.shape == expected.shape
                assert np.linalg.norm(outputs - expected) <= CLOSE * np.linalg.norm(expected), f"{name} of {setup}"
                np.testing.assert_array_equal(labels, expected_labels)
        assert complete == 5 * setup.dp * setup.sp, "on the ranks of the last stage, and on no others"


TRAINED = [Setup(pp=2, cut=CUT), Setup(pp=2, cut=CUT, schedule="interleaved", model_chunks=2)]


def _trained(setup: Setup, *, evaluate: bool, known_shapes: bool) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of three steps, with or without evaluations in between, and weights."""
    keywords = {} if known_shapes else {"activation_spec": None}
    engine = build(setup, optimizer=lambda each: torch.optim.SGD(each, lr=0.1), **keywords)
    found: list[float] = []
    for step in range(3):
        if evaluate:
            sizes = {"num_micro_batches": OTHER_COUNT, "micro_batch_size": OTHER_ROWS}
            engine.eval_batch(iter(_held_out(sum(SHORT))), token_slices=SHORT, **sizes)
            # As many token slices, of other lengths: neither may take the other's shapes for its own.
            engine.eval_batch(iter(_held_out()), token_slices=SAME_COUNT, micro_batch_size=OTHER_ROWS)
            # The cut of training, and another size each time.
            engine.eval_batch(iter(_held_out()), **sizes)
            engine.eval_batch(iter(models.batches(1, 1, seed=step)), num_micro_batches=1, micro_batch_size=1)
        found += losses(engine, setup, 1, first=step)
    return found, weights(engine)


def test_evaluation_has_no_effect_on_training() -> None:
    for found_by_rank in launched(2):
        for (same, same_weights), (found, found_weights) in found_by_rank["trained"]:
            assert found == same
            for name, weight in found_weights.items():
                np.testing.assert_array_equal(weight, same_weights[name])


def _evaluations() -> dict[str, Any]:
    """Losses of an evaluation in all forms, and outputs without a loss."""
    engine, sizes = (
        build(TRAINED[0], optimizer=_still),
        {"num_micro_batches": OTHER_COUNT, "micro_batch_size": OTHER_ROWS},
    )
    by_micro_batch = engine.eval_batch(iter(_held_out()), reduce_output=None, **sizes)
    of_last_stage = engine.eval_batch(iter(_held_out()), bcast_loss=False, **sizes)
    outputs = engine.eval_batch(iter(_held_out()), return_logits=True, compute_loss=False, **sizes)[1]
    return {
        "mean": engine.eval_batch(iter(_held_out()), **sizes).item(),
        "by micro-batch": by_micro_batch and [loss.item() for loss in by_micro_batch],
        "of the last stage": of_last_stage if of_last_stage is None else of_last_stage.item(),
        "outputs": outputs and [as_numpy(tensor) for tensor in outputs],
    }


def test_forms_of_the_loss_of_an_evaluation() -> None:
    first, last = (found["evaluations"] for found in launched(2))
    loss, outputs, _ = _whole("held out")
    assert first["mean"] == last["mean"] == last["of the last stage"] == pytest.approx(loss, rel=CLOSE)
    assert (first["by micro-batch"], first["of the last stage"], first["outputs"]) == (None, None, None)
    assert len(last["by micro-batch"]) == OTHER_COUNT
    assert np.mean(last["by micro-batch"]) == pytest.approx(loss, rel=CLOSE)
    assert np.linalg.norm(np.concatenate(last["outputs"]) - outputs) <= CLOSE * np.linalg.norm(outputs)


REFUSED = (
    ({"return_logits": True, "return_output_label": True}, "return_logits and return_output_label give outputs in two"),
    ({"token_slices": (8, 0)}, "0"),
    ({"reduce_output": "sum"}, "reduce_output='sum'"),
    ({"token_slices": (8, 8)}, "inputs of shape (5, 24) do not have the 16 tokens of the token slices 8,8"),
)


def _refusals() -> list[str]:
    engine = build(Setup(cut=CUT))
    found = []
    for keywords, _ in REFUSED:
        with pytest.raises((UserError, PlanError)) as refused:
            engine.eval_batch(iter(_held_out()), **keywords)
        found.append(str(refused.value))
    return found


def test_evaluations_are_refused_in_one_line() -> None:
    for found, (_, line) in zip(launched(1)[0]["refusals"], REFUSED, strict=True):
        assert line in found and "\n" not in found


# ---------------------------------------------------------------------- other forms of outputs


def _pair(logits: Tensor, labels: Any) -> Tensor:
    return models.loss_fn(logits[0], labels)


class Pair(torch.nn.Linear):
    """Gives logits and, for each row, their mean."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = super().forward(hidden)
        return logits, logits.mean(dim=(1, 2))


def named_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return models.loss_fn(logits, targets)


def _forms() -> dict[str, Any]:
    from deepspeed.pipe import LayerSpec

    setup = Setup(cut=CUT)
    ending_in_a_pair = [*models.layers(tied=False)[:-1], LayerSpec(Pair, models.HIDDEN, models.VOCAB)]
    engine = build(setup, layers=ending_in_a_pair, loss_fn=_pair, optimizer=_still)
    _, (logits, means), labels = engine.train_batch(feed(engine, setup), return_output_label=True)
    by_micro_batch = engine.eval_batch(feed(engine, setup), return_logits=True)[1]
    loss, _ = engine.eval_batch(feed(engine, setup), return_logits=True)
    engine.module.output_fn = lambda outputs: outputs[0].argmax(-1)
    same_loss, made = engine.eval_batch(feed(engine, setup), return_logits=True)
    named = [(tokens, {"targets": labels, "task": "words"}) for tokens, labels in batches_of(setup, 0)]
    dict_engine = build(setup, loss_fn=named_loss)
    _, _, labels_of_names = dict_engine.train_batch(iter(named), return_output_label=True)
    return {
        "shapes": [tuple(each.shape) for each in (logits, means, labels)],
        "grad": logits.requires_grad or means.requires_grad,
        "means": torch.allclose(means[:, 0], logits[:, : CUT[0]].mean(dim=(1, 2)), atol=1e-6),
        "made": [torch.equal(each, logits.argmax(-1)) for each, (logits, _) in zip(made, by_micro_batch, strict=True)],
        "same loss": torch.equal(loss, same_loss),
        "by micro-batch": [(type(each).__name__, *(tuple(part.shape) for part in each)) for each in by_micro_batch],
        "names": {name: tuple(each.shape) if torch.is_tensor(each) else each for name, each in labels_of_names.items()},
    }


def test_outputs_may_be_tuples_and_labels_dicts() -> None:
    found = launched(1)[0]["forms"]
    rows = 2 * ROWS
    assert found["shapes"] == [(rows, models.SEQ, models.VOCAB), (rows, len(CUT)), (rows, models.SEQ)]
    assert not found["grad"]
    assert found["means"]
    assert found["made"] == [True, True], "outputs are those of `output_fn`"
    assert found["same loss"]
    assert found["by micro-batch"] == [("tuple", (ROWS, models.SEQ, models.VOCAB), (ROWS, len(CUT)))] * 2
    assert found["names"] == {"targets": (rows, models.SEQ), "task": "words"}


# ---------------------------------------------------------------------- memory


class Token:
    """Lives as long as a reference to it."""


class Marked(torch.autograd.Function):
    """Adds a token to the graph. Saved tensors are freed after backward, the graph with the last reference."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Witness:
    """A loss function that counts, in each call, the graphs and the values of outputs that are alive."""

    def __init__(self) -> None:
        self.graphs: list[weakref.ref[Token]] = []
        self.values: list[weakref.ref[Any]] = []
        self.most = (0, 0)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.most = max(self.most, self.alive())
        token = Token()
        self.graphs.append(weakref.ref(token))
        self.values.append(weakref.ref(logits.untyped_storage()))
        # Its backward needs the logits, so that a graph that waits for its backward holds their values.
        return Marked.apply(models.loss_fn(logits, labels) + (logits * logits).mean(), token)

    def alive(self) -> tuple[int, int]:
        gc.collect()
        return tuple(sum(each() is not None for each in references) for references in (self.graphs, self.values))


def _alive(setup: Setup) -> dict[str, Any]:
    witness = Witness()
    engine, found = build(setup, loss_fn=witness), {}
    result = engine.train_batch(feed(engine, setup))
    found["graph of the loss"] = result.requires_grad or result.grad_fn is not None
    found["in training"], found["after training"] = witness.most, witness.alive()
    witness.most = (0, 0)
    engine.eval_batch(feed(engine, setup))
    found["in evaluation"], found["after evaluation"] = witness.most, witness.alive()
    asked = engine.train_batch(feed(engine, setup), return_output_label=True)
    found["asked"] = asked[1].requires_grad if asked[1] is not None else False
    held = [each for each in (engine._executor.batch.outputs, engine._executor.batch.labels) if each]
    found["held by the engine"] = len(held)
    found["after asking"] = witness.alive()
    return found


@pytest.mark.parametrize("pp", [1, 2])
def test_outputs_are_freed_unless_requested(pp: int) -> None:
    found = launched(pp)[-1]["alive"]
    # On the last stage the other token slices of the micro-batch are live, and the loss sums up without their graphs.
    assert found["in training"] == (len(CUT) - 1, len(CUT) - 1)
    assert found["in evaluation"] == (0, 0)
    assert not found["graph of the loss"]
    assert found["after training"] == found["after evaluation"] == (0, 0)
    assert found["held by the engine"] == 0
    assert not found["asked"]
    assert found["after asking"] == (0, 0), "the result is a copy in one piece"
