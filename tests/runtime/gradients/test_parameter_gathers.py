"""Gathers on an accelerator, by a stub of its streams: one piece's memory at a time, and layers wait for their own."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from deepspeed_ext.runtime.gradients import parameter_gathers
from deepspeed_ext.runtime.gradients.parameter_gathers import ParameterGathers
from megatron_terapipe.search.machine.trainers import TERAPIPE

REPLICAS, PARTITION = 4, 60


class Stream:
    def __init__(self) -> None:
        self.waits: list[Any] = []

    def wait_stream(self, stream: "Stream") -> None:
        self.waits.append(stream)

    wait_event = wait_stream


class Accelerator:
    """Streams that keep what they wait for."""

    Stream = Stream

    def __init__(self) -> None:
        self.current = Stream()

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @staticmethod
    def Event() -> SimpleNamespace:  # noqa: N802
        event = SimpleNamespace()
        event.record = lambda stream: setattr(event, "after", stream.waits[-1])
        return event


class Work:
    """A gather as of NCCL: its stream's wait, and memory that lives as long as this does."""

    def __init__(self, accelerator: Accelerator, gathered: Tensor, number: int) -> None:
        self._accelerator, self.gathered, self._number = accelerator, gathered, number

    def wait(self) -> None:
        self._accelerator.current_stream().waits.append(self._number)


def test_the_memory_estimate_counts_a_piece() -> None:
    assert parameter_gathers.PIECE_ELEMENTS <= TERAPIPE.bucket_elements


@pytest.mark.parametrize(("bucket", "most", "pieces"), [(80, 10**9, 3), (10**9, 80, 3), (10**9, 10**9, 1), (1, 80, 60)])
def test_one_piece_has_memory_at_a_time_and_layers_wait_for_their_pieces(bucket: int, most: int, pieces: int) -> None:
    accelerator, optimizer = Accelerator(), type("Optimizer", (), {"__module__": __name__})()
    flat = torch.zeros(REPLICAS * PARTITION)
    layers = {place: [nn.Parameter(flat[place * 20 : place * 20 + 20])] for place in range(12)}
    posted: list[weakref.ref[Tensor]] = []

    def all_gather(views: list[Tensor], own: Tensor, *, group: int, async_op: bool) -> Work:
        assert async_op and own.data_ptr() == views[1].data_ptr() and len(views) == REPLICAS
        assert accelerator.current is not compute
        assert not any(earlier() is not None for earlier in posted), "an earlier piece has its memory still"
        gathered = torch.stack(views)
        assert gathered.numel() <= max(min(bucket, most), REPLICAS)
        posted.append(weakref.ref(gathered))
        return Work(accelerator, gathered, len(posted) - 1)

    fake = SimpleNamespace(all_gather=all_gather, get_rank=lambda group: 1)
    with (
        patch.object(parameter_gathers, "get_accelerator", lambda: accelerator),
        patch.object(parameter_gathers, "dist", fake),
        patch.object(parameter_gathers, "PIECE_ELEMENTS", most),
    ):
        compute = accelerator.current
        gathers = ParameterGathers(optimizer, layers, [])
        gathers._start([flat], [flat.split(PARTITION)], [7], start_alignment_factor=2, allgather_bucket_size=bucket)
        assert len(posted) == pieces and not compute.waits, "ops do not wait when gathers are posted"
        assert gathers._stream is not None and gathers._stream.waits[0] is compute
        for place in (4, 5, 0):
            gathers.entering(place, None)
        numbers = [event.after for event in compute.waits]
        # Layers 4 and 5 are the second and third 20 elements of a partition of 60; layer 0 is the first ones.
        third = pieces // 3
        assert sorted(numbers) == list(range(pieces))
        assert numbers == ([*range(third, 3 * third), *range(third)] if third else [0])
        assert not gathers.pending
