"""A pipeline that stands still explains itself: every rank writes its ledger, one line says which rank is behind."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from datetime import timedelta
from io import StringIO
from pathlib import Path

import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.training import Setup, build, feed

TIMEOUT_S = 3.0
PAUSE_S = 2.5 * TIMEOUT_S


def sleep() -> None:
    time.sleep(PAUSE_S)


def stop() -> None:
    """Stand as still as a process whose node is gone: no thread of it runs."""
    subprocess.Popen(["sh", "-c", f"sleep {PAUSE_S}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


class Pausing(nn.Linear):
    """Does something else before its third token slice."""

    def __init__(self, pause: Callable[[], None]) -> None:
        super().__init__(models.HIDDEN, models.HIDDEN)
        self.pause, self.seen = pause, 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen += 1
        if self.seen == 3:
            self.pause()
        return super().forward(hidden)


def _stalled(directory: str, pause: Callable[[], None]) -> str:
    """Train a step in which the middle rank pauses for longer than a transfer may take: what this rank printed."""
    setup = Setup(pp=3, cut=(6, 6, 6, 6), micro_batches=1)
    layers = [models.Embedding, models.Block, (Pausing, pause), (nn.Linear, models.HIDDEN, models.VOCAB)]
    printed = StringIO()
    with redirect_stderr(printed):
        engine = build(
            setup,
            layers=[LayerSpec(*layer) if isinstance(layer, tuple) else LayerSpec(layer) for layer in layers],
            partition="0,2,3,4",
            engine_keywords={
                "timeout": timedelta(seconds=TIMEOUT_S),
                "ledger_directory": directory,
                "check_token_slices": False,  # It would call the layer that counts.
            },
        )
        try:
            engine.train_batch(feed(engine, setup))
        except RuntimeError:
            pass  # the transfer timed out, or its other end did
        # A launcher leaves the others as much time.
        dist.distributed_c10d._get_default_store().set(f"ended by {engine.global_rank}", "")
        time.sleep(TIMEOUT_S)
    return printed.getvalue()


def _ledgers(directory: Path) -> dict[int, dict]:
    return {int(path.stem.removeprefix("rank_")): json.loads(path.read_text()) for path in directory.glob("*.json")}


def test_a_rank_that_computes_too_long_is_named_and_all_ranks_write_their_ledgers(tmp_path: Path) -> None:
    printed = run_distributed(_stalled, 3, str(tmp_path), sleep)
    lines = [line for text in printed for line in text.splitlines() if "stands still" in line]
    assert len(lines) == 1
    assert "the pipeline stands still: rank 1 is behind: rank 1 is at 'forward 1F0.2" in lines[0]
    assert "(train step 1, instruction" in lines[0] and "waiting: ranks 0, 2; the ledger" in lines[0]
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


def test_a_rank_that_shows_no_sign_of_life_is_named(tmp_path: Path) -> None:
    printed = run_distributed(_stalled, 3, str(tmp_path), stop)
    lines = [line for text in printed for line in text.splitlines() if "stands still" in line]
    assert lines and all("rank 1 is behind: it gives no sign of life; waiting: ranks 0, 2" in line for line in lines)
    assert {0, 2} <= _ledgers(tmp_path).keys()


def _ordinary(directory: str) -> str:
    setup = Setup(pp=2, cut=(6, 6, 6, 6), micro_batches=1)
    printed = StringIO()
    with redirect_stderr(printed):
        keywords = {"timeout": timedelta(seconds=2 * TIMEOUT_S), "ledger_directory": directory}
        engine = build(setup, engine_keywords=keywords)
        for step in range(3):
            engine.train_batch(feed(engine, setup, step=step))
            time.sleep(0.5)
    return printed.getvalue()


def test_a_pipeline_that_runs_says_nothing(tmp_path: Path) -> None:
    printed = run_distributed(_ordinary, 2, str(tmp_path))
    assert not any("stands still" in text for text in printed)
    assert not _ledgers(tmp_path)
