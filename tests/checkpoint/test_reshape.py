"""A run continues from a checkpoint that another layout saved, as if it had always had its own layout."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.verify import files_to_load
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.errors import CheckpointError
from megatron_terapipe.inference import WholeModel
from tests.checkpoint.runs import BEFORE, Outcome, Task, Way, perform
from tests.distributed import run_each

ONE = Way("one rank", 1, "--zero-stage 0")
ONE_ZERO_1 = Way("one rank, ZeRO 1", 1, "--zero-stage 1 --num-token-slices 2")
PIPELINE = Way("pp2", 2, "--pipeline-model-parallel-size 2 --zero-stage 0 --num-token-slices 4")
PIPELINE_ZERO_1 = Way("pp2, ZeRO 1", 2, "--pipeline-model-parallel-size 2 --stage-partition 0,1,3 --token-slices 7,9")
ENDS_ALONE = Way(
    "pp4, ends alone, ZeRO 1", 4, "--pipeline-model-parallel-size 4 --stage-partition 0,0,1,3,3 --num-token-slices 4"
)
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
# By default each rank searches for a schedule, which takes seconds.
_IN_PARTS = f"{_UNTIED} --vocabulary-stages --pipeline-schedule gpipe"
VOCABULARY_STAGES = Way(
    "pp2, vocabulary stages", 2, f"{_IN_PARTS} --pipeline-model-parallel-size 2 --num-token-slices 2"
)
UNTIED_TENSOR = Way("tp2, untied", 2, f"{_UNTIED} --tensor-model-parallel-size 2")
EVERYTHING_IN_PARTS = Way("tp2, pp2, vocabulary stages", 4, f"{EVERYTHING.flags} {_IN_PARTS}")
_EXPERTS = (
    "--num-experts 4 --moe-layer-freq [0,1,1] --swiglu --ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16"
    " --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1"
    " --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall"
)
_TENSOR_2 = "--tensor-model-parallel-size 2 --sequence-parallel"
EXPERTS_DATA = Way("dp2, ep2, ZeRO 1", 2, f"{_EXPERTS} --expert-model-parallel-size 2 --num-token-slices 2")
EXPERTS_ONE = Way("one rank, experts", 1, f"{_EXPERTS} --zero-stage 0")
EXPERTS_TENSOR = Way("tp2, dp2, ep4, ZeRO 1", 4, f"{_EXPERTS} {_TENSOR_2} --expert-model-parallel-size 4")
EXPERTS_COPIES = Way(
    "sp2, dp2, ep2", 4, f"{_EXPERTS} --context-parallel-size 2 --expert-model-parallel-size 2 --zero-stage 0"
)
EXPERTS_PIPELINE = Way(
    "tp2, pp2, ep2",
    4,
    f"{_EXPERTS} {_TENSOR_2} --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --zero-stage 0"
    " --num-token-slices 2",
)
EXPERTS_WHOLE = Way("tp2, experts of each whole, ZeRO 1", 2, f"{_EXPERTS} {_TENSOR_2}")
BF16_EXPERTS = Way("bf16, dp2, ep2", 2, f"{_EXPERTS} --bf16 --expert-model-parallel-size 2")
BF16_EXPERTS_TENSOR = Way("bf16, tp2, ep2", 2, f"{_EXPERTS} --bf16 {_TENSOR_2} --expert-model-parallel-size 2")
FP16_EXPERTS = Way("fp16, pp2, experts", 2, f"{_EXPERTS} --fp16 --pipeline-model-parallel-size 2")

CHAINS: dict[str, tuple[Way, ...]] = {
    "whole and partitioned": (ONE, ONE, ONE_ZERO_1, PIPELINE, PIPELINE_ZERO_1),
    "ends alone": (ENDS_ALONE, PIPELINE),
    "tensor parallel": (TENSOR, DATA_ZERO_1, ONE),
    "sequence": (SEQUENCE_ZERO_1, TENSOR, PIPELINE_ZERO_1, DATA_ZERO_1),
    "everything": (EVERYTHING, DATA, DATA_ZERO_1, PIPELINE),
    "sgd": (SGD_DATA, SGD_PIPELINE),
    "bf16": (BF16_DATA, BF16_DATA, BF16_PIPELINE, PIPELINE, BF16_ZERO_0),
    "fp16": (FP16_DATA, FP16_ONE),
    "swiglu": (TENSOR_ZERO_1, TENSOR_ZERO_1, ONE_SWIGLU),
    "model chunks": (MODEL_CHUNKS, FOUR_ZERO_1, MODEL_CHUNKS_ZERO_1, FOUR_DATA),
    "decoupled": (DECOUPLED_PIPELINE, DECOUPLED_DATA),
    "experts": (EXPERTS_COPIES, EXPERTS_TENSOR, EXPERTS_ONE, EXPERTS_DATA, EXPERTS_WHOLE, EXPERTS_PIPELINE),
    "bf16 experts": (BF16_EXPERTS, FP16_EXPERTS, BF16_EXPERTS_TENSOR),
    "vocabulary stages": (VOCABULARY_STAGES, UNTIED_TENSOR, EVERYTHING_IN_PARTS),
}
"""Layouts through which a run passes: each loads the checkpoint of the one before, and the first that of the last.

A layout saves the state that it has loaded, and then trains. Where the first layout continues with the bits of a run
without interruption, no layout of the chain has lost a bit while loading or saving.
"""

Ranks = list[Outcome]


def _tasks(name: str, folder: Path) -> Iterator[tuple[int, Task]]:
    """The links of a chain, and what they perform: 0 the run without interruption, the last the first layout again.

    Link -1 is the first layout without the state of the optimizer.
    """
    chain = CHAINS[name]
    for link, way in enumerate((*chain, chain[0])):
        load, save = (folder / f"{name} {number}" for number in (link - 1, link))
        yield link, Task(way, load if link else None, save if link < len(chain) else None, 0 if link else BEFORE)
    if (name, chain[0]) in FORGETFUL:
        yield -1, Task(replace(chain[0], flags=f"{chain[0].flags} --no-load-optim"), folder / f"{name} 0", None)


FORGETFUL = [("whole and partitioned", ONE), ("sgd", SGD_DATA)]
"""Chains with their first layout, which also loads its own checkpoint without the state of the optimizer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[tuple[str, int], Ranks]:
    """Outcomes of all ranks by chain and link.

    A launch performs all links of its world size that can follow, but for the last ones: new processes, which have
    nothing but the files, compare with the run without interruption.
    """
    found: dict[tuple[str, int], Ranks] = {}
    left = {name: list(_tasks(name, folder)) for name in CHAINS}
    for world_size in cycle((4, 1, 2)):
        batch = []
        for name, links in left.items():
            started = len(batch)
            while links and links[0][1].way.world_size == world_size:
                if links[0][0] == len(CHAINS[name]) and len(batch) > started:
                    break
                number, task = links.pop(0)
                batch.append(((name, number), task))
        if batch:
            keys, tasks = zip(*batch, strict=True)
            found |= zip(keys, map(list, run_each(perform, world_size, tasks)), strict=True)
        if not any(left.values()):
            return found
    raise AssertionError


def _tolerance(chain: tuple[Way, ...]) -> float:
    """In fp32 the last digits, over three steps; in bf16 those that a forward rounds, in the order of the layout."""
    return 2e-3 if any("--bf16" in way.flags or "--fp16" in way.flags for way in chain) else 2e-6


@pytest.mark.parametrize("name", CHAINS)
def test_losses_continue_in_every_layout(outcomes: dict[tuple[str, int], Ranks], name: str) -> None:
    for link in range(1, 1 + len(CHAINS[name])):
        for rank in outcomes[name, link]:
            assert rank.losses == pytest.approx(outcomes[name, 0][0].losses, rel=_tolerance(CHAINS[name]))


@pytest.mark.parametrize("name", CHAINS)
def test_the_first_layout_continues_bit_for_bit(outcomes: dict[tuple[str, int], Ranks], name: str) -> None:
    for mine, theirs in zip(outcomes[name, len(CHAINS[name])], outcomes[name, 0], strict=True):
        assert (mine.losses, mine.loss_scale) == (theirs.losses, theirs.loss_scale)
        assert mine.weights.keys() == theirs.weights.keys()
        assert [each for each in mine.weights if not np.array_equal(mine.weights[each], theirs.weights[each])] == []


@pytest.mark.parametrize("name", ["everything", "experts", "vocabulary stages"])
def test_the_whole_weights_are_those_of_any_layout(
    outcomes: dict[tuple[str, int], Ranks], folder: Path, name: str
) -> None:
    """Each link but the last has saved the weights that it loaded."""
    directories = [next((folder / f"{name} {link}").glob("global_step*")) for link in range(len(CHAINS[name]))]
    model = ModelConfig(**CheckpointInfo.read(directories[0]).model)
    first, *others = [WholeModel(model).load(directory).state_dict() for directory in directories]
    for other in others:
        assert [each for each in first if not torch.equal(first[each], other[each])] == []


def test_a_file_of_experts_that_is_missing_is_refused(outcomes: dict[tuple[str, int], Ranks], folder: Path) -> None:
    for link, missing in ((0, "stage_00-experts_01-optim_states.pt"), (1, "layer_03-experts_03-model_states.pt")):
        directory = next((folder / f"experts {link}").glob("global_step*"))
        info = CheckpointInfo.read(directory)
        (directory / missing).unlink()
        with pytest.raises(CheckpointError, match=f"lacks {missing}: "):
            files_to_load(directory, info, ModelConfig(**info.model), weights_only=False)


def test_the_bias_of_experts_stays_in_fp32(outcomes: dict[tuple[str, int], Ranks]) -> None:
    bias = outcomes["bf16 experts", len(CHAINS["bf16 experts"])][0].weights["3.mlp.router.expert_bias"]
    assert (torch.from_numpy(bias).bfloat16().double().numpy() != bias).any()


@pytest.mark.parametrize("name", [name for name, _ in FORGETFUL])
def test_losses_differ_without_the_state_of_the_optimizer(outcomes: dict[tuple[str, int], Ranks], name: str) -> None:
    """The first test can fail in fp32; in bf16 rounding hides the difference, and the test of bits finds it."""
    for rank in outcomes[name, -1]:
        assert rank.losses != pytest.approx(outcomes[name, 0][0].losses, rel=20 * _tolerance(CHAINS[name]))
