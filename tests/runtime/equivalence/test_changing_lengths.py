"""The length of the sequences, and the number of token slices, may change from batch to batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER

from deepspeed_ext.plan import found_schedule
from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.found_schedule import FoundSchedule
from deepspeed_ext.plan.ops import Op, PipelineShape
from deepspeed_ext.plan.programs.device import ExpertExchange
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.channels import Incoming
from deepspeed_ext.runtime.clocks import Observer
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.live_batch import BatchPlan, LiveBatch
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.training import Setup, as_numpy, batches_of, build, weights

CUT = (9, 1, 14)
CUTS = (CUT, (8, 4), (17,), CUT, (4, 4, 4, 4), (12, 8))


class Loads(Observer):
    """A device that loads kernels at the first op of a kind and length, and counts those under posted receives."""

    def __init__(self, engine: TokenSlicePipelineEngine) -> None:
        self._engine, self._loaded, self.under_receives = engine, set(), 0

    @contextmanager
    def op(self, op: Op) -> Iterator[None]:
        batch = self._engine._executor.batch
        kernel = op.kind, batch.plan.training, batch.token_slices_of(op.micro_batch).lengths[op.token_slice]
        posted = sum(
            len(end._posted) + len(end._unposted)
            for end in self._engine._links._ends.values()
            if isinstance(end, Incoming)
        )
        self.under_receives += kernel not in self._loaded and posted > 0
        self._loaded.add(kernel)
        yield


def _train(
    setup: Setup, cuts: tuple[tuple[int, ...], ...], keywords: dict[str, Any], *, settles: bool = False
) -> dict[str, Any]:
    engine = build(setup, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02), **keywords)
    engine._lengths.settles = settles
    losses, loads = [], Loads(engine)
    with engine.observers.joined_by(loads):
        for step, cut in enumerate(cuts):
            data = iter(batches_of(setup, 0, step=step, seq=sum(cut)))
            losses.append(engine.train_batch(data, token_slices=cut).item())
    # Two events of a device for each step, which DeepSpeed reads only to print.
    assert not engine.timers(TRAIN_BATCH_TIMER).event_timers
    return {
        "losses": losses,
        "weights": weights(engine),
        "loads": loads.under_receives,
        "schedule": type(engine._schedule.schedule).__name__,
    }


def _documents(batch: Any) -> Documents:
    """Documents without an effect on attention, computed from the batch, so that all ranks find the same."""
    tokens = batch[0] if torch.is_tensor(batch[0]) else batch[0][0]
    starts = tuple((0, *sorted({1 + int(token) % (len(row) - 1) for token in row[:3]})) for row in tokens)
    return Documents(starts, attend_apart=False, positions_restart=False)


def _cut_at_documents(documents: Documents) -> TokenSlices:
    """Three token slices, the first two as long as documents have it."""
    first, second = documents.starts[0][-1], documents.starts[1][-1] % 5 + 1
    first = min(first, models.SEQ - second - 1)
    return TokenSlices((first, second, models.SEQ - first - second))


def _train_by_documents(setup: Setup, *, settles: bool = False, **keywords: Any) -> dict[str, Any]:
    """Two steps, then an evaluation with the outputs of the model."""
    seen = []

    def cut(documents: Documents) -> TokenSlices:
        seen.append(_cut_at_documents(documents).lengths)
        return _cut_at_documents(documents)

    if len(setup.cut) > 1:
        keywords |= {"documents": _documents, "cut_by_documents": cut, "activation_spec": None}
    engine = build(setup, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02), **keywords)
    engine._lengths.settles = settles
    loads = Loads(engine)
    with engine.observers.joined_by(loads):
        losses = [engine.train_batch(iter(batches_of(setup, 0, step=step))).item() for step in range(2)]
        loss, outputs, labels = engine.eval_batch(iter(batches_of(setup, 0, step=2)), return_output_label=True)
    kept = [None if each is None else as_numpy(each) for each in (outputs, labels)]
    found = {"losses": [*losses, loss.item()], "kept": kept, "weights": weights(engine), "cuts": set(seen)}
    return found | {"loads": loads.under_receives}


def _decisions(setup: Setup, exchange: ExpertExchange) -> list[bool]:
    """Whether each step may load kernels, where documents change the cut of the second replica only."""
    second = torch.distributed.get_rank() == 1
    engine = build(
        setup,
        documents=_documents,
        cut_by_documents=lambda documents: _cut_at_documents(documents) if second else TokenSlices(setup.cut),
        activation_spec=None,
        engine_keywords={"expert_exchange": exchange},
    )
    engine._lengths.settles = True
    found = []
    for step in range(5):
        engine.train_batch(iter(batches_of(setup, engine.replica, step=step)))
        found.append(engine.batch.may_load)
    return found


WHOLE = Setup(cut=(models.SEQ,), dtype="fp64")
IN_THREE = Setup(pp=2, cut=(8, 8, models.SEQ - 16), dtype="fp64", schedule="zero-bubble", micro_batches=4)
CHANGING = [
    (Setup(pp=2, cut=CUT, dtype="fp64"), {}),
    (Setup(pp=2, cut=CUT, dtype="fp64", schedule="zero-bubble"), {"activation_spec": None}),
    (
        Setup(pp=2, cut=CUT, dtype="fp64", schedule="interleaved", model_chunks=2),
        {"activation_spec": None, "dynamic_shape": True},
    ),
]
FOUND = Setup(pp=2, cut=CUT, dtype="fp64", schedule="optimised", micro_batches=3)
REPLICAS = Setup(dp=2, cut=(8, 8, models.SEQ - 16), num_blocks=1, micro_batches=1)


def _on_one() -> tuple[dict[str, Any], dict[str, Any]]:
    whole = tuple((sum(cut),) for cut in CUTS)
    return _train_by_documents(replace(WHOLE, micro_batches=4)), _train(WHOLE, whole, {})


def _on_two() -> tuple[Any, ...]:
    changing = [_train(setup, CUTS, keywords) for setup, keywords in CHANGING]
    with patch.object(found_schedule, "EFFORT", 1e-3):
        found = [_train(setup, CUTS, {}, settles=setup is FOUND) for setup in (FOUND, replace(FOUND, schedule="1f1b"))]
    by_documents = [_train_by_documents(IN_THREE, settles=settles) for settles in (False, True)]
    return by_documents, changing, found, {exchange: _decisions(REPLICAS, exchange) for exchange in ExpertExchange}


@pytest.fixture(scope="module")
def on_one() -> tuple[dict[str, Any], dict[str, Any]]:
    return run_distributed(_on_one, 1)[0]


@pytest.fixture(scope="module")
def on_two() -> list[tuple[Any, ...]]:
    return run_distributed(_on_two, 2)


def test_each_micro_batch_may_have_a_cut_of_its_own(on_one, on_two) -> None:
    """Lengths of messages are learned from the messages, by both ends alike."""
    expected, (first, last) = on_one[0], [by_documents[0] for by_documents, *_ in on_two]
    for found, settled in (by_documents for by_documents, *_ in on_two):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-12)
        assert settled["losses"] == found["losses"]
        assert found["cuts"] == settled["cuts"] == first["cuts"]
    assert len(first["cuts"]) > 5
    assert first["kept"] == [None, None]
    for found, exact in zip(last["kept"], expected["kept"], strict=True):
        assert np.allclose(found, exact, rtol=1e-12, atol=1e-12)


def test_kernels_are_loaded_before_receives_are_posted(on_two) -> None:
    """On an accelerator, whatever lengths come later, also those that only the data has."""
    documents, _, trained, _ = zip(*on_two, strict=True)
    for kinds in (documents, [(loading, settled) for settled, loading in trained]):
        counts = [[each["loads"] for each in of_rank] for of_rank in kinds]
        assert sum(loading for loading, _ in counts) > 0, "the test would find them"
        assert [settled for _, settled in counts] == [0, 0]


def test_replicas_that_exchange_tokens_run_one_program(on_two) -> None:
    """Whether messages travel under ops follows from lengths, which documents of replicas have of their own."""
    first, second = (by_exchange for *_, by_exchange in on_two)
    apart, together = ExpertExchange.NONE, [ExpertExchange.ALLTOALL, ExpertExchange.ALLGATHER]
    assert first[apart] == [True, False, False, False, False] and sum(second[apart]) > 1
    assert [first[each] for each in together] == [second[each] for each in together] == [second[apart]] * 2


def test_a_cut_of_another_length_is_refused() -> None:
    plan = BatchPlan(
        shape=PipelineShape(1, 2, 2),
        token_slices=TokenSlices((4, 4)),
        by_documents=lambda _: TokenSlices((4, 5)),
        rows=1,
        training=True,
    )
    batch = LiveBatch(plan)
    with pytest.raises(UserError, match=r"2 token slices of 9 tokens \(4,5\), and the module has 2 of 8: give as many"):
        batch.cut(0, Documents(((0,),)))
    batch.cut(1, None)
    assert batch.token_slices_of(1) == batch.parts_of(1) == TokenSlices((4, 4))


@pytest.mark.parametrize("index", range(len(CHANGING)), ids=[str(setup) for setup, _ in CHANGING])
def test_results_with_other_lengths_are_those_of_one_token_slice(index: int, on_one, on_two) -> None:
    expected = on_one[1]
    for found in (changing[index] for _, changing, *_ in on_two):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-12)
        for name, weight in found["weights"].items():
            if name == "tied_modules.embedding.position" and "1.norm.weight" not in found["weights"]:
                continue  # The head's copy of the embedding has positions that nothing reads.
            assert np.allclose(weight, expected["weights"][name], rtol=1e-11, atol=1e-12), name


def test_an_optimised_schedule_is_found_for_each_number_of_token_slices(on_two) -> None:
    for _, _, (found, other), _ in on_two:
        assert found["schedule"] == FoundSchedule.__name__
        assert found["losses"] == other["losses"]
