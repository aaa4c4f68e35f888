"""A run that stands still explains itself, whatever its ranks do: every rank writes its ledger, one line names one."""

import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from deepspeed_ext.runtime.health.ledger import OpLedger
from deepspeed_ext.runtime.health.stall_watch import StallWatch, watch_this_rank
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.training import Setup, build, feed

TIMEOUT = timedelta(seconds=2)
LONGEST_S = 30


def compute(told: threading.Event) -> None:
    """Compute until the line is said."""
    assert told.wait(LONGEST_S)


def stop(told: threading.Event) -> None:
    """Stand as still as a process whose node is gone: no thread of it runs, until others have ended."""
    until_then = f"for i in $(seq {LONGEST_S}0); do test -e told && break; sleep 0.1; done; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", until_then])
    os.kill(os.getpid(), signal.SIGSTOP)


class Pausing(nn.Linear):
    """Does something else before its third token slice, on one rank."""

    def __init__(self, pause: Callable[[], None]) -> None:
        super().__init__(models.HIDDEN, models.HIDDEN)
        self.pause, self.seen = pause, 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen += 1
        if self.seen == 3:
            self.pause()
        return super().forward(hidden)


def _watched(directory: str) -> tuple[StallWatch, threading.Event, list[str]]:
    """A watch that does not end the process, an event for that it would have, and what it said."""
    os.chdir(directory)
    said: list[str] = []
    told = threading.Event()

    def end() -> None:
        Path("told").touch()
        told.set()

    made = watch_this_rank(TIMEOUT, Path(directory), name="test", end=end)
    made._say = said.append  # before it has anything to say
    dist.barrier()
    return made, told, said


def _trained(
    directory: str, setup: Setup, pausing_rank: int, pause: Callable[[threading.Event], None]
) -> tuple[list[str], str]:
    """Train a step in which a rank pauses: what this rank said, and where it ended."""
    watch, told, said = _watched(directory)
    pauses = (lambda: pause(told)) if dist.get_rank() == pausing_rank else (lambda: None)
    layers = [LayerSpec(models.Embedding), LayerSpec(models.Block), LayerSpec(Pausing, pauses)]
    layers.append(LayerSpec(nn.Linear, models.HIDDEN, models.VOCAB))
    engine = build(
        setup,
        layers=layers,
        partition="0,2,3,4" if setup.pp == 3 else "parameters",
        # It would call the layer that counts.
        engine_keywords={"watch": watch, "check_token_slices": False},
    )
    engine.train_batch(feed(engine, setup))
    assert told.wait(LONGEST_S)
    watch.end()
    return said, ""


def _lines(results: list[tuple[list[str], str]]) -> list[str]:
    return [line for said, _ in results for line in said]


def _ledgers(directory: Path) -> dict[int, dict]:
    return {int(path.stem.removeprefix("rank_")): json.loads(path.read_text()) for path in directory.glob("*.json")}


def test_a_rank_that_computes_too_long_is_named_and_all_ranks_write_their_ledgers(tmp_path: Path) -> None:
    setup = Setup(pp=3, cut=(6, 6, 6, 6), micro_batches=1)
    (line,) = _lines(run_distributed(_trained, 3, str(tmp_path), setup, 1, compute))
    assert f"the run stands still: rank 1 (host {socket.gethostname()}) is behind: rank 1 is at 'forward 1F0.2" in line
    # Those that have waited long enough by then are named: on a busy host only one of them.
    assert re.search(r"\(train step 1, instruction .*; rank [02] is at '.*; the ledger of each rank is in", line)
    ledgers = _ledgers(tmp_path)
    assert ledgers.keys() == {0, 1, 2}
    assert (
        ledgers[1]["waiting"] | {"stage": 1, "micro_batch": 0, "token_slice": 2, "peer": None} == ledgers[1]["waiting"]
    )
    assert ledgers[2]["waiting"]["op"] == "2F0.2" and ledgers[2]["waiting"]["peer"] == 1
    assert "forward 2F0.1 @1" in ledgers[2]["done"]
    # What a rank has done, does, and has to do is its whole program.
    for ledger in ledgers.values():
        position = ledger["position"]
        assert len(ledger["done"]) == position["done"]
        assert len(ledger["done"]) + len(ledger["to_do"]) == position["total"]
        assert ledger["to_do"][0] == position["doing"]


def test_a_replica_that_shows_no_sign_of_life_is_named(tmp_path: Path) -> None:
    setup = Setup(dp=2, cut=(6, 6, 6, 6), micro_batches=1)
    lines = _lines(run_distributed(_trained, 2, str(tmp_path), setup, 1, stop))
    assert len(lines) == 1
    assert f"rank 1 (host {socket.gethostname()}) is behind: it gives no sign of life; rank 0 is at 'sums" in lines[0]
    assert "for a collective of the replicas" not in lines[0]  # nobody knows what rank 1 has started
    assert 0 in _ledgers(tmp_path)


def _built(directory: str) -> tuple[list[str], str]:
    """Stop the first rank, which keeps the store, before it builds its engine."""
    watch, told, said = _watched(directory)
    with watch.ledger.phase("building the engine"):
        if dist.get_rank() == 0:
            stop(told)
        build(Setup(pp=2, cut=(6, 6, 6, 6), micro_batches=1), engine_keywords={"watch": watch})
    if dist.get_rank() == 1:
        assert told.is_set()
    watch.end()
    return said, ""


def test_the_rank_that_keeps_the_store_is_named_while_engines_are_built(tmp_path: Path) -> None:
    (line,) = _lines(run_distributed(_built, 2, str(tmp_path)))
    # The host of rank 0 is known where it said so before it was stopped.
    assert re.search(
        r"stands still: rank 0( \(host \S+\))? is behind: its host keeps the store at which the ranks", line
    )
    assert "rank 1 is at 'building the engine' since" in line
    assert 1 in _ledgers(tmp_path)


def _ordinary(directory: str) -> tuple[list[str], str]:
    watch, told, said = _watched(directory)
    setup = Setup(pp=2, dp=2, cut=(6, 6, 6, 6), micro_batches=1)
    engine = build(setup, engine_keywords={"watch": watch})
    for step in range(2):
        engine.train_batch(feed(engine, setup, step=step))
    counts = json.dumps(engine.ledger.collectives.counts(), sort_keys=True)
    assert isinstance(engine.ledger, OpLedger) and not told.is_set()
    watch.end()
    return said, counts


def test_ranks_of_a_run_that_goes_well_count_the_same_collectives(tmp_path: Path) -> None:
    results = run_distributed(_ordinary, 4, str(tmp_path))
    assert not _lines(results) and not _ledgers(tmp_path)
    counts = [json.loads(found) for _, found in results]
    # Nobody is left with a lead in a group, by which it would seem to wait for the others.
    for first in counts:
        for other in counts:
            shared = first.keys() & other.keys()
            assert {name: first[name] for name in shared} == {name: other[name] for name in shared}
    assert any(name.startswith("replicas#") and count > 0 for name, count in counts[0].items())
