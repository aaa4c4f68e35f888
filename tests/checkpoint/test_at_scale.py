"""Of a checkpoint of 1,024 ranks, one rank opens the files with its own parts, and no other."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from deepspeed_ext.plan.layout import Coordinate, ParallelLayout
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.initialize import initialize
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from deepspeed_ext.runtime.topology import layer_file
from megatron_terapipe.checkpoint import restore
from megatron_terapipe.checkpoint.directories import optimizer_files
from megatron_terapipe.checkpoint.optimizer_state import Fragment, Place, SavedRun
from megatron_terapipe.checkpoint.restore import load_checkpoint, saved_run
from megatron_terapipe.config import CheckpointConfig
from megatron_terapipe.errors import CheckpointError
from tests.distributed import run_distributed
from tests.inference.checkpoints import checkpoint_info

LAYOUT = ParallelLayout(pipeline_parallel_size=64, data_parallel_size=8, tensor_parallel_size=2)
STAGE, REPLICA, TENSOR_RANK = 7, 3, 1
RANK = LAYOUT.rank(Coordinate(pipe=STAGE, data=REPLICA, sequence=0, tensor=TENSOR_RANK))
LAYERS = (2 * STAGE, 2 * STAGE + 1)
WIDTH = 6


def built_engine() -> TokenSlicePipelineEngine:
    """The engine of one rank of 1,024, the others of which are not there."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=LAYOUT.world_size)
    with mock.patch.dict(os.environ, RANK=str(RANK), WORLD_SIZE=str(LAYOUT.world_size)):
        layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(2 * LAYOUT.pipeline_parallel_size)]
        module = TokenSlicePipelineModule(layers, layout=LAYOUT, token_slices=TokenSlices((2,)), partition="uniform")
        settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
        engine, *_ = initialize(module, settings, optimizer=torch.optim.Adam(module.parameters()))
    return engine


def opened_by_one_rank(folder: Path) -> tuple[set[str], int]:
    """Files that a rank opens while it loads, and the number of directories that it lists."""
    engine = built_engine()
    directory = folder / "tag"
    optimizer = engine.optimizer.optimizer
    (flat,) = optimizer.param_groups[0]["params"]
    places, own = {}, {}
    for number, (name, parameter) in enumerate(engine.module.named_parameters()):
        parameter.data.copy_(torch.arange(parameter.numel()).view(parameter.shape) + 100 * number)
        fragments = [Fragment(0, parameter.numel())]
        if (mapping := parameter._hp_mapping) is not None:
            address = mapping.lp_fragment_address
            end = address.start + address.numel
            mapping.hp_fragment.data.copy_(parameter.data.flatten()[address.start : end])
            own[name] = address.numel
            around = ((2, address.start), (REPLICA, address.numel), (4, parameter.numel() - end))
            fragments = [Fragment(*each) for each in around if each[1]]
        places[name] = Place(STAGE, tuple(fragments))
    fives = torch.full_like(flat, 5.0, requires_grad=False)
    optimizer.state[flat] = {"step": torch.tensor(3.0), "exp_avg": fives, "exp_avg_sq": fives.clone()}
    engine.save_checkpoint(str(folder), tag="tag", save_latest=False)
    for number in LAYERS:  # Another replica saves them.
        torch.save(engine.module.layer(number).state_dict(), directory / layer_file(number, TENSOR_RANK))
    weights = [parameter.detach().clone() for parameter in engine.module.parameters()]
    for parameter in engine.module.parameters():
        parameter.data.zero_()
    optimizer.state.clear()

    opened, listed, watching = set(), [], [True]

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event == "open" and str(arguments[0]).startswith(str(folder)):
            opened.add(Path(str(arguments[0])).name)
        if watching and event in ("os.listdir", "os.scandir", "glob.glob"):
            listed.append(arguments)

    sys.addaudithook(watch)
    info = replace(checkpoint_info(), layout=LAYOUT)
    counters = {"global_steps": 3, "skipped_steps": 0}
    load_checkpoint(engine, directory, info, SavedRun(places=places, counters=counters), CheckpointConfig())
    watching.clear()
    assert all(map(torch.equal, weights, engine.module.parameters()))
    assert int((optimizer.state[flat]["exp_avg"] == 5.0).sum()) == sum(own.values()) > 0
    return opened, len(listed)


def test_a_rank_opens_the_files_of_its_layers_and_of_its_partition(tmp_path: Path) -> None:
    ((opened, num_listed),) = run_distributed(opened_by_one_rank, 1, tmp_path)
    partition = optimizer_files(STAGE, TENSOR_RANK, 2, 8)[REPLICA]
    assert opened == {*(layer_file(number, TENSOR_RANK) for number in LAYERS), partition}
    assert num_listed == 0


def received(folder: Path, sent: list[object]) -> object:
    """Result on a rank that is not the first, from the broadcast and without a file."""

    def broadcast(objects: list[object], src: int, group: object) -> None:
        assert (src, group) == (0, None)
        objects[:] = sent

    with (
        mock.patch.object(dist, "get_rank", lambda: 5),
        mock.patch.object(dist, "broadcast_object_list", broadcast),
        mock.patch.object(restore, "read_run", side_effect=AssertionError),
    ):
        return saved_run(folder, checkpoint_info(), weights_only=False)


def test_other_ranks_take_the_facts_of_the_first(tmp_path: Path) -> None:
    known = SavedRun(places={"1.weight": Place(0)}, counters={"global_steps": 3, "skipped_steps": 0})
    assert received(tmp_path, [known, None]) is known
    with pytest.raises(CheckpointError, match="is damaged"):
        received(tmp_path, [None, "checkpoint x is damaged: layer_00"])
