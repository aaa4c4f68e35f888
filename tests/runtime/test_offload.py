"""Tensors on the host come back unchanged: gradients are equal to the bit, and the device frees its copies."""

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.ops import Op, OpKind
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.program import Content
from deepspeed_ext.plan.timeline import Timeline, critical_path
from deepspeed_ext.runtime import executor, offload
from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.offload import HostCopies, HostPages
from deepspeed_ext.runtime.state.sequence_state import Past
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.training import ROWS, Setup, as_numpy, build, feed

CUT, WINDOW = (9, 1, 8, 6), 7
SETUPS = {
    "one rank, two model chunks": Setup(cut=CUT, model_chunks=2, schedule="gpipe"),
    "two ranks": Setup(pp=2, cut=CUT, micro_batches=3, schedule="gpipe"),
    "1f1b": Setup(pp=2, cut=CUT, micro_batches=3),
    "interleaved": Setup(pp=2, cut=CUT, micro_batches=3, model_chunks=2, schedule="interleaved"),
    "breadth-first": Setup(pp=2, cut=CUT, micro_batches=3, model_chunks=2, schedule="breadth-first"),
    "weight gradients apart": Setup(pp=2, cut=CUT, micro_batches=3, schedule="zero-bubble"),
}
SETUPS = {name: replace(setup, dtype="fp64", recompute_stages=True, tied=False) for name, setup in SETUPS.items()}


class Windowed(models.Block):
    """Attends within a sliding window."""

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        heads = self.qkv(self.norm(hidden)).unflatten(-1, (-1, models.HIDDEN // models.HEADS))
        query, key, value = heads.split([models.HEADS, models.GROUPS, models.GROUPS], dim=2)
        hidden = hidden + self.out(past.attend(query, key, value, window=WINDOW).flatten(2))
        return hidden + self.mlp(hidden)


def settings_of(setup: Setup, **more: Any) -> HostCopySettings:
    """Bytes of the small transformer in fp64, of two micro-batch rows; its first stage reads tokens."""
    stages = setup.pp * setup.model_chunks
    size, layers = ROWS * 8, setup.num_blocks // stages
    keys = 2 * models.GROUPS * (models.HIDDEN // models.HEADS) * size * layers
    inputs = (0.0, *(float(models.HIDDEN * size),) * (stages - 1))
    return HostCopySettings(lengths=setup.cut, input_bytes=inputs, key_value_bytes=(float(keys),) * stages, **more)


class WatchedCopies(HostCopies):
    """Counts the tensors that are alive on the device after they were dropped."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.storages: dict[tuple[Any, ...], list[weakref.ref[Any]]] = {}
        self.dropped, self.held = Counter[Content](), 0

    def offload(self, name: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
        self.storages[name] = [weakref.ref(each.untyped_storage()) for each in tensors]
        super().offload(name, tensors)

    def drop(self, name: tuple[Any, ...]) -> None:
        super().drop(name)
        self.dropped[name[0]] += 1
        self.held += sum(each() is not None for each in self.storages[name])


def _step(setup: Setup, host_copies: HostCopySettings | None, **module: Any) -> dict[str, Any]:
    with patch.object(executor, "HostCopies", WatchedCopies):
        engine = build(
            setup,
            engine_keywords={"host_copies": host_copies, "check_token_slices": False},
            preserve_rng_state=False,
            partition="0,2,3,4,6" if setup.pp * setup.model_chunks == 4 else "0,3,6",
            **module,
        )
    evaluated = engine.eval_batch(feed(engine, setup)).item()
    with engine.timeline() as timelines:
        loss = engine.train_batch(feed(engine, setup)).item()
    seen, copies = engine.optimizer.seen, engine._executor.copies
    gradients = {name: as_numpy(seen[each]).tobytes() for name, each in engine.module.named_parameters()}
    return {
        "numbers": (loss, evaluated, gradients),
        "dropped": dict(copies.dropped) if copies else None,
        "measured": Timeline.from_json(timelines[0].to_json()),
        "still held": copies and (copies.held, copies.pages.in_use),
    }


def _documents(batch: Any) -> Documents:
    return Documents(((0, 5, 11), (0, 13)))


def _windowed_layers() -> list[LayerSpec]:
    head = LayerSpec(nn.Linear, models.HIDDEN, models.VOCAB)
    return [LayerSpec(models.Embedding), *[LayerSpec(Windowed)] * 4, head]


def _both(setup: Setup, windows: tuple[int, ...] = (), **module: Any) -> list[dict[str, Any]]:
    return [_step(setup, settings, **module) for settings in (None, settings_of(setup, windows=windows))]


def _steps(names: list[str]) -> dict[str, list[dict[str, Any]]]:
    found = {name: _both(SETUPS[name]) for name in names}
    first = SETUPS[names[0]]
    found["packed documents"] = _both(first, documents=_documents)
    found["sliding windows"] = _both(first, (WINDOW, WINDOW), layers=_windowed_layers())
    with pytest.raises(UserError, match="build it with recompute_stages=True"):
        _step(replace(first, recompute_stages=False), settings_of(first))
    return found


def _check_measured(timeline: Timeline, rank: int, number: int) -> None:
    """On a CPU a copy ends before the next op begins: its times are between those of its forward and backward."""
    own = [copy for copy in timeline.host_copies if timeline.shape.rank_of(copy.stage) == rank]
    assert len(own) == len({copy[:4] for copy in own}) == number
    ends = {span.op: span for spans in timeline.spans for span in spans}
    for copy in own:
        forward = ends[Op(OpKind.FORWARD, *copy[1:4])]
        backward = next(ends[op] for kind in (OpKind.BACKWARD, OpKind.INPUT_GRADIENT)
                        if (op := Op(kind, *copy[1:4])) in ends)  # fmt: skip
        times = [forward.end, *copy[4:], backward.start]
        assert times == sorted(times) and copy.offload_start < copy.offload_end and copy.fetch_start < copy.fetch_end
    path = critical_path(timeline)
    assert path.events[-1].end == timeline.end and all(slack >= 0 for slack in path.slack.values())


@pytest.mark.parametrize("world_size", [1, 2])
def test_results_are_equal_to_the_bit_and_the_device_frees_its_copies(world_size: int) -> None:
    names = [name for name, setup in SETUPS.items() if setup.pp == world_size]
    by_rank = run_distributed(_steps, world_size, names)
    for rank, by_name in enumerate(by_rank):
        assert by_name.keys() >= {*names}
        for name, (without, with_copies) in by_name.items():
            assert with_copies["numbers"] == without["numbers"], f"{name} on rank {rank}"
            assert with_copies["still held"] == (0, 0)
            assert without["dropped"] is None
            assert sum(with_copies["dropped"].values()) > 0, f"{name} on rank {rank}"
            _check_measured(with_copies["measured"], rank, sum(with_copies["dropped"].values()))
            assert without["measured"].host_copies == ()
    # Everything is offloaded if a rank runs its other stage in between; the inputs of the first stage are tokens.
    everything = "breadth-first" if world_size == 2 else names[0]
    dropped = by_rank[-1][everything][1]["dropped"]
    token_slices = SETUPS[everything].micro_batches * len(CUT)
    stages_with_inputs = SETUPS[everything].model_chunks - (world_size == 1)
    assert dropped[Content.INPUT] == token_slices * stages_with_inputs
    assert dropped[Content.KEYS_AND_VALUES] == token_slices * 2


CPU = torch.device("cpu")


NAME = (Content.INPUT, 0, 0, 0)


def test_tensors_come_back_as_they_were_and_are_gone_in_between() -> None:
    copies = HostCopies(CPU)
    tensors = [torch.randn(3, 4, requires_grad=True), torch.arange(6).view(2, 3).t(), torch.randn(0, 2)]
    values = [tensor.detach().clone() for tensor in tensors]
    held = weakref.ref(tensors[0].untyped_storage())
    copies.offload(NAME, tensors)
    assert tensors[0].sum() == values[0].sum(), "ops may read them until they are dropped"
    del tensors
    copies.drop(NAME)
    assert held() is None
    copies.fetch(NAME)
    back = copies.arrive(NAME)
    assert all(torch.equal(one, other) for one, other in zip(back, values, strict=True))
    assert [tensor.requires_grad for tensor in back] == [True, False, False] and back[0].is_leaf
    assert copies.pages.in_use == 0


def test_tensors_share_pages_of_one_size_and_are_cut_where_pages_end() -> None:
    """Of other types and sizes each time; pages are as many as were in use at once."""
    with patch.multiple(offload, PAGE_BYTES=64, SLAB_BYTES=256):
        copies = HostCopies(CPU)
        batches = [
            [torch.arange(9, dtype=torch.float64), torch.tensor(True), torch.randn(3, 7)],
            [torch.randn(2, 3).to(torch.bfloat16)],
            [torch.randn(50), torch.zeros(0)],
        ]
        names = [(Content.INPUT, 0, 0, number) for number in range(3)]
        for name, tensors in zip(names, batches, strict=True):
            copies.offload(name, tensors)
        assert copies.pages.held == copies.pages.in_use == 64 * (3 + 1 + 4) == 2 * 256
        places = {page.data_ptr() for name in names for page in copies._under_way[name].pages}
        for round_ in range(2):
            for name in reversed(names):
                copies.drop(name)
                copies.fetch(name)
                back = copies.arrive(name)
                for tensor, expected in zip(back, batches[names.index(name)], strict=True):
                    assert tensor.dtype is expected.dtype and torch.equal(tensor, expected)
            if round_ == 0:
                for name, tensors in zip(reversed(names), reversed(batches), strict=True):
                    copies.offload(name, tensors)
                assert {page.data_ptr() for name in names for page in copies._under_way[name].pages} == places
        assert (copies.pages.held, copies.pages.in_use) == (64 * 8, 0)


def test_page_locked_memory_has_sizes_that_torch_does_not_round() -> None:
    """Its allocator rounds up to a power of two and keeps what is freed; `held` is what it holds."""
    sizes: list[int] = []
    empty = torch.empty

    def locking(size: int, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        assert pin_memory
        sizes.append(size * dtype.itemsize)
        return empty(size, dtype=dtype)

    pages = HostPages(torch.device("cuda"))
    with patch.object(torch, "empty", locking):
        for number_of_bytes in (1, 20 << 20, 3 << 19, 0):
            taken = pages.take(number_of_bytes)
            assert number_of_bytes <= sum(page.nbytes for page in taken) < number_of_bytes + offload.PAGE_BYTES
            pages.give_back(taken)
    assert all(size.bit_count() == 1 for size in sizes)
    assert pages.held == sum(sizes) == offload.SLAB_BYTES and pages.most_in_use == 20 << 20


def test_copies_end_in_any_state() -> None:
    copies = HostCopies(CPU)
    for steps in ((), (copies.drop,), (copies.drop, copies.fetch)):
        tensor = torch.randn(4)
        held = weakref.ref(tensor.untyped_storage())
        copies.offload(NAME, [tensor])
        del tensor
        for step in steps:
            step(NAME)
        copies.finish()
        assert (copies.pages.in_use, held()) == (0, None)
