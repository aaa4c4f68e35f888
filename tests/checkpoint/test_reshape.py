"""A run goes on from a checkpoint that another layout saved, as if it had always been laid out so."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.checkpoint.runs import BEFORE, Outcome, Task, Way, perform
from tests.distributed import run_distributed
from tests.pairs import Axes

ONE = Way("one rank", 1, "--zero-stage 0")
ONE_ZERO_1 = Way("one rank, ZeRO 1", 1, "--zero-stage 1 --num-token-slices 2")
PIPELINE = Way("pp2", 2, "--pipeline-model-parallel-size 2 --zero-stage 0 --num-token-slices 4")
PIPELINE_ZERO_1 = Way("pp2, ZeRO 1", 2, "--pipeline-model-parallel-size 2 --stage-partition 0,1,3 --token-slices 7,9")
DATA = Way("dp2", 2, "--zero-stage 0")
DATA_ZERO_1 = Way("dp2, ZeRO 1", 2, "--zero-stage 1")
SGD_DATA = Way("sgd, dp2", 2, "--optimizer sgd")
SGD_PIPELINE = Way("sgd, pp2", 2, "--optimizer sgd --pipeline-model-parallel-size 2 --zero-stage 0")
BF16_DATA = Way("bf16, dp2, ZeRO 1", 2, "--bf16")
BF16_ZERO_0 = Way("bf16, dp2", 2, "--bf16 --zero-stage 0")
BF16_PIPELINE = Way("bf16, pp2", 2, "--bf16 --pipeline-model-parallel-size 2")
TENSOR = Way("tp2", 2, "--tensor-model-parallel-size 2 --zero-stage 0 --sequence-parallel")
TENSOR_ZERO_1 = Way("tp2, ZeRO 1", 2, "--tensor-model-parallel-size 2 --swiglu --disable-bias-linear")
SEQUENCE_ZERO_1 = Way("sp2, ZeRO 1", 2, "--context-parallel-size 2 --num-token-slices 2")
ONE_SWIGLU = Way("one rank, swiglu", 1, "--swiglu --disable-bias-linear --zero-stage 0")
EVERYTHING = Way(
    "tp2, pp2, ZeRO 1", 4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-token-slices 2"
)
FP16_DATA = Way("fp16, dp2, ZeRO 1", 2, "--fp16 --initial-loss-scale 4096 --loss-scale-window 2")
FP16_ONE = Way("fp16, one rank", 1, "--fp16 --initial-loss-scale 4096 --loss-scale-window 2")
DECOUPLED_PIPELINE = Way("pp2, decoupled, ZeRO 1", 2, "--pipeline-model-parallel-size 2 --decoupled-lr 3e-2")
DECOUPLED_DATA = Way("dp2, decoupled", 2, "--zero-stage 0 --decoupled-lr 3e-2")
_FOUR = "--num-layers 4 --pipeline-model-parallel-size 2"
MODEL_CHUNKS = Way(
    "pp2, v2", 2, f"{_FOUR} --num-layers-per-virtual-pipeline-stage 1 --zero-stage 0 --num-token-slices 2"
)
MODEL_CHUNKS_ZERO_1 = Way("pp2, v2, ZeRO 1", 2, f"{_FOUR} --num-model-chunks 2 --stage-partition parameters")
FOUR_ZERO_1 = Way("pp2, zero bubble, ZeRO 1", 2, f"{_FOUR} --pipeline-schedule zero-bubble --num-token-slices 4")
FOUR_DATA = Way("dp2, four layers", 2, "--num-layers 4 --zero-stage 0")
_UNTIED = "--untie-embeddings-and-output-weights"
VOCABULARY_STAGES = Way(
    "pp2, vocabulary stages", 2, f"{_UNTIED} --pipeline-model-parallel-size 2 --vocabulary-stages --num-token-slices 2"
)
UNTIED_TENSOR = Way("tp2, untied", 2, f"{_UNTIED} --tensor-model-parallel-size 2")
EVERYTHING_IN_PARTS = Way(
    "tp2, pp2, vocabulary stages", 4, f"{EVERYTHING.flags} {_UNTIED} --vocabulary-stages --pipeline-schedule gpipe"
)

PAIRS = [
    (ONE, PIPELINE),
    (ONE_ZERO_1, PIPELINE_ZERO_1),
    (PIPELINE, ONE_ZERO_1),
    (PIPELINE, PIPELINE_ZERO_1),
    (PIPELINE_ZERO_1, DATA_ZERO_1),
    (ONE, DATA_ZERO_1),
    (DATA, DATA_ZERO_1),
    (DATA_ZERO_1, DATA),
    (DATA_ZERO_1, PIPELINE),
    (SGD_DATA, SGD_PIPELINE),
    (SGD_PIPELINE, SGD_DATA),
    (BF16_DATA, BF16_PIPELINE),
    (BF16_ZERO_0, BF16_DATA),
    (BF16_DATA, BF16_ZERO_0),
    (BF16_DATA, PIPELINE),
    (TENSOR, PIPELINE_ZERO_1),
    (DATA_ZERO_1, TENSOR),
    (ONE, TENSOR),
    (TENSOR_ZERO_1, ONE_SWIGLU),
    (ONE_SWIGLU, TENSOR_ZERO_1),
    (EVERYTHING, DATA_ZERO_1),
    (DATA_ZERO_1, EVERYTHING),
    (SEQUENCE_ZERO_1, PIPELINE_ZERO_1),
    (FP16_DATA, FP16_ONE),
    (MODEL_CHUNKS, FOUR_ZERO_1),
    (FOUR_ZERO_1, MODEL_CHUNKS_ZERO_1),
    (MODEL_CHUNKS_ZERO_1, MODEL_CHUNKS),
    (FOUR_DATA, MODEL_CHUNKS),
    (DECOUPLED_PIPELINE, DECOUPLED_DATA),
    (VOCABULARY_STAGES, UNTIED_TENSOR),
    (UNTIED_TENSOR, EVERYTHING_IN_PARTS),
]
SAME = [
    MODEL_CHUNKS,
    FOUR_ZERO_1,
    ONE,
    PIPELINE,
    PIPELINE_ZERO_1,
    DATA_ZERO_1,
    BF16_DATA,
    BF16_ZERO_0,
    SGD_DATA,
    TENSOR,
    TENSOR_ZERO_1,
]

Ranks = list[Outcome]


class Pair(NamedTuple):
    """The way that saves, and the way that goes on from there."""

    first: Way
    second: Way

    def __str__(self) -> str:
        return f"{self.first.name} to {self.second.name}"


SETUPS = [Pair(*ways) for ways in PAIRS]


def axes_of(pair: Pair) -> Axes:
    """The pair's value on each axis: what is cut how before and after, in which type, and with which optimizer."""
    return {
        "from": _cut(pair.first),
        "to": _cut(pair.second),
        "partitioned": tuple("--zero-stage 0" not in way.flags for way in pair),
        "types": tuple(next((each for each in ("--bf16", "--fp16") if each in way.flags), "") for way in pair),
        "optimizer": "sgd" if "sgd" in pair.first.flags else "decoupled" * ("decoupled" in pair.first.flags),
    }


def _cut(way: Way) -> tuple[str, ...]:
    """Axes of parallelism of a way."""
    axes = {
        "tp": "--tensor-model",
        "pp": "--pipeline-model-parallel",
        "v": "chunk",
        "dp": "dp",
        "sp": "context",
        "vs": "vocabulary",
    }
    return tuple(name for name, sign in axes.items() if sign in f"{way.name} {way.flags}")


@dataclass(frozen=True)
class Resumed:
    """One pair: the run undisturbed, what the other layout made of it, and back from there."""

    undisturbed: Ranks
    elsewhere: Ranks
    back: Ranks


class _Workbench:
    """Performs tasks, those of one world size in one launch."""

    def __init__(self) -> None:
        self._queue: dict[Any, Task] = {}

    def add(self, key: Any, task: Task) -> None:
        self._queue[key] = task

    def work(self) -> dict[Any, Ranks]:
        """Perform what was added, and give each task's outcome on every rank."""
        outcomes: dict[Any, Ranks] = {}
        for world_size in {task.way.world_size for task in self._queue.values()}:
            keys = [key for key, task in self._queue.items() if task.way.world_size == world_size]
            ranks = run_distributed(perform, world_size, [self._queue[key] for key in keys])
            outcomes |= {key: [rank[number] for rank in ranks] for number, key in enumerate(keys)}
        self._queue.clear()
        return outcomes


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, setups: list[Pair]) -> tuple[Path, dict[Way, Ranks]]:
    """Each way, trained, saved on the way, and trained on; and the directory with what it saved."""
    folder, bench = tmp_path_factory.mktemp("saved"), _Workbench()
    for way in {pair.first for pair in setups} | set(SAME):
        bench.add(way, Task(way, None, folder / way.name, BEFORE))
    return folder, bench.work()


@pytest.fixture(scope="module")
def resumed(trained: tuple[Path, dict[Way, Ranks]], setups: list[Pair]) -> Iterator[dict[Pair, Resumed]]:
    folder, undisturbed = trained
    bench = _Workbench()
    for pair in setups:
        first, second = pair
        bench.add(pair, Task(second, folder / first.name, folder / first.name / second.name))
    elsewhere = bench.work()
    for pair in setups:
        first, second = pair
        bench.add(pair, Task(first, folder / first.name / second.name, None))
    back = bench.work()
    yield {pair: Resumed(undisturbed[pair.first], elsewhere[pair], back[pair]) for pair in setups}


def _tolerance(ways: tuple[Way, ...]) -> float:
    """In fp32 the last digits, over three steps; in bf16 those that a forward rounds away, in the order of the ways."""
    return 2e-3 if any("--bf16" in way.flags or "--fp16" in way.flags for way in ways) else 2e-6


def _assert_same_bits(found: Ranks, expected: Ranks) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.losses, mine.loss_scale) == (theirs.losses, theirs.loss_scale)
        assert mine.weights.keys() == theirs.weights.keys()
        assert [name for name in mine.weights if not np.array_equal(mine.weights[name], theirs.weights[name])] == []


@pytest.mark.setups(SETUPS, axes_of)
def test_the_losses_go_on_as_if_nothing_had_happened(resumed: dict[Pair, Resumed], setup: Pair) -> None:
    case = resumed[setup]
    for rank in case.elsewhere:
        assert rank.losses == pytest.approx(case.undisturbed[0].losses, rel=_tolerance(setup))


def test_without_the_state_of_the_optimizer_they_would_not(trained: tuple[Path, dict[Way, Ranks]]) -> None:
    """What shows that the test above can fail in fp32; in bf16 rounding hides it, and the test below tells."""
    folder, undisturbed = trained
    bench = _Workbench()
    ways = {way: replace(way, flags=f"{way.flags} --no-load-optim") for way in (ONE, SGD_PIPELINE)}
    for way, forgetful in ways.items():
        bench.add(way, Task(forgetful, folder / way.name, None))
    for way, ranks in bench.work().items():
        for rank in ranks:
            assert rank.losses != pytest.approx(undisturbed[way][0].losses, rel=20 * _tolerance((way,)))


@pytest.mark.setups(SETUPS, axes_of)
def test_there_and_back_again_nothing_is_lost(resumed: dict[Pair, Resumed], setup: Pair) -> None:
    """What the other layout saves at once is loaded where it came from, and training goes on bit for bit."""
    _assert_same_bits(resumed[setup].back, resumed[setup].undisturbed)


def test_the_same_layout_goes_on_bit_for_bit(trained: tuple[Path, dict[Way, Ranks]]) -> None:
    folder, undisturbed = trained
    bench = _Workbench()
    for way in SAME:
        bench.add(way, Task(way, folder / way.name, None))
    for way, ranks in bench.work().items():
        _assert_same_bits(ranks, undisturbed[way])
