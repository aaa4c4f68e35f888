"""A run continues from a checkpoint that another layout saved, as if it had always had its own layout."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch

from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.restore import _Share
from megatron_terapipe.checkpoint.verify import files_to_load
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.errors import CheckpointError
from megatron_terapipe.inference import WholeModel
from tests.checkpoint.runs import BEFORE, Outcome, Task, Way, perform
from tests.distributed import run_each
from tests.inference.checkpoints import checkpoint_info

_PP2 = "--pipeline-model-parallel-size 2"
_TP2 = "--tensor-model-parallel-size 2"
_TP2_SP = f"{_TP2} --sequence-parallel"
_FOUR = f"--num-layers 4 {_PP2}"
_SWIGLU = "--swiglu --disable-bias-linear"
_FP16 = "--fp16 --initial-loss-scale 4096 --loss-scale-window 2"
_UNTIED = "--untie-embeddings-and-output-weights"
# By default each rank searches for a schedule, which takes seconds.
_IN_PARTS = f"{_UNTIED} --vocabulary-stages --pipeline-schedule gpipe {_PP2} --num-token-slices 2"
_EXPERTS = (
    "--num-experts 4 --moe-layer-freq [0,1,1] --swiglu --ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16"
    " --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1"
    " --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall"
    " --softmax-type learnable"
)
_EP2, _EP4 = (f"{_EXPERTS} --expert-model-parallel-size {size}" for size in (2, 4))

CHAINS: dict[str, tuple[Way, ...]] = {
    "dense": (
        Way(1, "--zero-stage 0"),
        Way(1, "--zero-stage 1 --num-token-slices 2"),
        Way(2, f"{_PP2} --zero-stage 0 --num-token-slices 4"),
        Way(2, f"{_PP2} --stage-partition 0,1,3 --token-slices 7,9"),
        Way(2, f"{_TP2_SP} --zero-stage 0"),
        Way(2, "--context-parallel-size 2 --num-token-slices 2"),
        Way(4, "--pipeline-model-parallel-size 4 --stage-partition 0,0,1,3,3 --num-token-slices 4"),
        Way(4, f"{_TP2} {_PP2} --num-token-slices 2"),
        Way(2, "--zero-stage 1"),
        Way(2, "--zero-stage 0"),
    ),
    "sgd": (Way(2, "--optimizer sgd"), Way(2, f"--optimizer sgd {_PP2} --zero-stage 0")),
    "bf16": (
        Way(2, "--bf16"),
        Way(2, f"--bf16 {_PP2}"),
        Way(2, f"{_PP2} --zero-stage 0 --num-token-slices 4"),
        Way(2, "--bf16 --zero-stage 0"),
    ),
    "fp16": (Way(2, _FP16), Way(1, _FP16)),
    "swiglu": (Way(2, f"{_TP2} {_SWIGLU}"), Way(2, f"{_TP2} {_SWIGLU}"), Way(1, f"{_SWIGLU} --zero-stage 0")),
    "model chunks": (
        Way(2, f"{_FOUR} --num-layers-per-virtual-pipeline-stage 1 --zero-stage 0 --num-token-slices 2"),
        Way(2, f"{_FOUR} --pipeline-schedule zero-bubble --num-token-slices 4"),
        Way(2, f"{_FOUR} --num-model-chunks 2 --stage-partition parameters"),
    ),
    "decoupled": (Way(2, f"{_PP2} --decoupled-lr 3e-2"), Way(2, "--zero-stage 0 --decoupled-lr 3e-2")),
    "experts": (
        Way(4, f"{_EP2} --context-parallel-size 2 --zero-stage 0"),
        Way(4, f"{_EP4} {_TP2_SP}"),
        Way(1, f"{_EXPERTS} --zero-stage 0"),
        Way(2, f"{_EP2} --num-token-slices 2"),
        Way(2, f"{_EXPERTS} {_TP2_SP}"),
        Way(4, f"{_EP2} {_TP2_SP} {_PP2} --zero-stage 0 --num-token-slices 2"),
    ),
    "bf16 experts": (Way(2, f"{_EP2} --bf16"), Way(2, f"{_EXPERTS} --fp16 {_PP2}"), Way(2, f"{_EP2} --bf16 {_TP2_SP}")),
    "vocabulary stages": (Way(2, _IN_PARTS), Way(2, f"{_UNTIED} {_TP2}"), Way(4, f"{_TP2} {_IN_PARTS}")),
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
    if name in FORGETFUL:
        yield -1, Task(replace(chain[0], flags=f"{chain[0].flags} --no-load-optim"), folder / f"{name} 0", None)


FORGETFUL = ("dense", "sgd")
"""Chains whose first layout also loads its own checkpoint without the state of the optimizer."""


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


@pytest.mark.parametrize("name", ["dense", "experts", "vocabulary stages"])
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


@pytest.mark.parametrize("name", FORGETFUL)
def test_losses_differ_without_the_state_of_the_optimizer(outcomes: dict[tuple[str, int], Ranks], name: str) -> None:
    """The first test can fail in fp32; in bf16 rounding hides the difference, and the test of bits finds it."""
    for rank in outcomes[name, -1]:
        assert rank.losses != pytest.approx(outcomes[name, 0][0].losses, rel=20 * _tolerance(CHAINS[name]))


@pytest.mark.parametrize("saved", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_of_a_weight_in_blocks_are_joined_block_by_block(saved: int, size: int) -> None:
    """A gate and the product that it gates, of each of which a rank has its share."""
    whole = torch.arange(48.0).view(16, 3)

    def part(rank: int, ranks: int) -> torch.Tensor:
        return torch.cat([block.chunk(ranks)[rank] for block in whole.chunk(2)])

    for rank in range(size):
        found = _Share(saved, rank, size, cut=0, stride=2).of(lambda number: part(number, saved))
        assert found.equal(part(rank, size))


def test_experts_of_a_program_are_divided_as_its_other_weights() -> None:
    """Their names are those of the GPT's, which has all of them on each tensor-parallel rank."""
    gpt = checkpoint_info()
    gpt = replace(gpt, layout=ParallelLayout(tensor_parallel_size=2))
    name = "3.layer.mlp.experts.local_experts.0.linear_fc1.weight"
    assert [replace(gpt, program=program).num_parts(3, name) for program in (None, "mine.py")] == [1, 2]
