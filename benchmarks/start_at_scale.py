"""Work of one rank of 1,024 before its first step: seconds, memory, calls of all ranks, files that it opens.

    python -m benchmarks.start_at_scale [--micro-batches 512] [--json]

One process plays one rank. Its process group is torch's fake one, which has the number of ranks and sends
nothing; the cost of each part is real. Every part runs in a process of its own, so that each has a peak of its own.
"""

import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.measuring.command import Parser
from deepspeed_ext.plan.layout import Coordinate, ParallelLayout
from deepspeed_ext.plan.ops import PipelineShape

WIDTH, PARAMETERS = 12288, 175e9
"""Of GPT-3 175B."""


@dataclass(frozen=True)
class Scale:
    """The run whose start is measured."""

    stages: int
    replicas: int
    tensor_ranks: int
    micro_batches: int
    """Micro-batches of an iteration."""
    token_slices: int
    """Token slices of a sequence."""
    schedule: str
    stage: int
    """Stage of the rank that is measured."""
    documents: int
    samples: int

    @property
    def layout(self) -> ParallelLayout:
        """The parallel axes."""
        return ParallelLayout(
            pipeline_parallel_size=self.stages,
            data_parallel_size=self.replicas,
            tensor_parallel_size=self.tensor_ranks,
            num_token_slices=self.token_slices,
        )

    @property
    def rank(self) -> int:
        """The rank that is played: of the stage, the last one."""
        return self.layout.rank(Coordinate(self.stage, self.replicas - 1, 0, self.tensor_ranks - 1))


Figures = dict[str, float | str]
"""Results of a part, by their names in the table."""


def main(argv: Sequence[str] | None = None) -> None:
    """Play each part and print a table."""
    parser = Parser(description=__doc__)
    parser.add_argument("--stages", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--tensor-ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=512)
    parser.add_argument("--token-slices", type=int, default=32)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--stage", type=int, default=1, help="stage of the rank that is played")
    parser.add_argument("--documents", type=int, default=2_000_000, help="documents of the data")
    parser.add_argument("--samples", type=int, default=4_000_000, help="samples of the run")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--json", action="store_true", help="print one object a part instead of a table")
    options = vars(parser.parse_args(argv))
    parts, as_json = options.pop("parts"), options.pop("json")
    scale = Scale(**options)
    if not as_json:
        print(f"rank {scale.rank} of {scale.layout.world_size}: {asdict(scale)}")
    for name in parts:
        figures = alone(PARTS[name], scale)
        if as_json:
            print(json.dumps({"part": name, **figures}), flush=True)
            continue
        for what, figure in figures.items():
            text = figure if isinstance(figure, str) else f"{figure:,.3g}" if figure % 1 else f"{figure:,.0f}"
            print(f"{name:>10}  {what:<62} {text:>12}", flush=True)


def alone(part: Callable[[Scale], Figures], scale: Scale) -> Figures:
    """Return the figures of a part that runs in its own process."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_serve, args=(there, part, scale))
    process.start()
    there.close()
    figures: Figures = here.recv()
    process.join()
    return figures


def _serve(pipe: Connection, part: Callable[[Scale], Figures], scale: Scale) -> None:
    os.environ.update(RANK=str(scale.rank), LOCAL_RANK="0", LOCAL_SIZE="1", WORLD_SIZE=str(scale.layout.world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    pipe.send(part(scale))


@contextmanager
def measured(figures: Figures, what: str) -> Iterator[None]:
    """Record the CPU seconds of a block, which other processes hardly lengthen, and the increase of peak memory."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    figures[f"{what}, CPU s"] = time.process_time() - start
    figures[f"{what}, peak MB"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def schedule(scale: Scale) -> Figures:
    """The program of one pipeline rank: order, check and lowering."""
    from deepspeed_ext.plan.programs.lowering import ProvenSchedule
    from deepspeed_ext.plan.schedules import schedule_named

    shape = PipelineShape(scale.stages, scale.micro_batches, scale.token_slices)
    programs = ProvenSchedule(schedule_named(scale.schedule))
    figures: Figures = {"ops of all ranks": 2.0 * scale.stages * scale.micro_batches * scale.token_slices}
    with measured(figures, "program ready"):
        programs.program(scale.stage, shape)
    return figures


def groups(scale: Scale) -> Figures:
    """Process groups of an engine, with gloo's way to make them and with NCCL's."""
    import torch
    import torch.distributed as dist
    from deepspeed.pipe import LayerSpec, TiedLayerSpec
    from torch import nn

    from deepspeed_ext.plan.slicing import TokenSlices
    from deepspeed_ext.runtime import topology
    from deepspeed_ext.runtime.initialize import initialize
    from deepspeed_ext.runtime.module import TokenSlicePipelineModule

    calls: Counter[str] = Counter()
    new_group = dist.new_group

    def counting(*arguments: Any, **keywords: Any) -> Any:
        calls["of members" if keywords.get("use_local_synchronization") else "of all ranks"] += 1
        return new_group(*arguments, **keywords)

    def splitting(split_ranks: list[list[int]], timeout: Any) -> Any:
        calls["of all ranks"] += 1
        return new_group(next(ranks for ranks in split_ranks if scale.rank in ranks), use_local_synchronization=True)

    figures: Figures = {}
    dist.new_group, dist.split_group = counting, splitting
    for backend in ("gloo", "NCCL"):
        calls.clear()
        topology._splits = lambda backend=backend: backend == "NCCL"
        _join(scale)
        ends = [TiedLayerSpec("word", nn.Linear, 4, 4), TiedLayerSpec("word", nn.Linear, 4, 4, forward_fn=nn.Linear)]
        layers = [ends[0], *(LayerSpec(nn.Linear, 4, 4) for _ in range(scale.stages - 2)), ends[1]]
        token_slices = TokenSlices((2,) * scale.token_slices)
        with measured(figures, f"module and engine of tiny layers, {backend}"):
            tensor_group = topology.own_group(scale.layout.groups("tensor"))  # as the trainer does
            module = TokenSlicePipelineModule(
                layers, layout=scale.layout, token_slices=token_slices, tensor_parallel_group=tensor_group
            )
            settings = {"train_micro_batch_size_per_gpu": 1}
            initialize(module, settings, optimizer=torch.optim.Adam(module.parameters()))
        figures[f"calls that take all ranks, {backend}"] = float(calls["of all ranks"])
        figures[f"groups of this rank, {backend}"] = float(sum(calls.values()))
        dist.destroy_process_group()
    return figures


def checkpoint(scale: Scale) -> Figures:
    """Figures of a checkpoint: the files that the first rank looks at, and those that this rank opens."""
    import torch
    import torch.distributed as dist

    from deepspeed_ext.runtime.topology import layer_file
    from megatron_terapipe.checkpoint.directories import optimizer_files, state_file
    from megatron_terapipe.checkpoint.info import CheckpointInfo
    from megatron_terapipe.checkpoint.verify import check_files
    from megatron_terapipe.config import ModelConfig
    from megatron_terapipe.model.gpt import layers_with_weights
    from tests.checkpoint.test_at_scale import LAYOUT, opened_by_one_rank

    figures: Figures = {}
    model = ModelConfig(
        num_layers=96, hidden_size=8, num_attention_heads=2, seq_length=8, max_position_embeddings=8, vocab_size=8
    )
    layout, tensor_ranks = scale.layout, range(scale.tensor_ranks)
    info = CheckpointInfo(
        iteration=1,
        consumed_samples=1,
        model=asdict(model),
        layout=layout,
        optimizer="adam",
        partitioned=True,
        tokenizer={},
    )
    names = [layer_file(layer, rank) for layer in layers_with_weights(model) for rank in tensor_ranks]
    for stage in range(scale.stages):
        for rank in tensor_ranks:
            names += [state_file(stage, rank, scale.tensor_ranks)]
            names += optimizer_files(stage, rank, scale.tensor_ranks, scale.replicas)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "tag"
        directory.mkdir()
        torch.save({}, directory / "any")
        for name in names:
            (directory / name).hardlink_to(directory / "any")
        figures["files of the checkpoint"] = float(len(names))
        with measured(figures, "the first rank sees that all are whole"):
            check_files(directory, info, model, weights_only=False)
    if scale.layout.world_size == LAYOUT.world_size:
        _join(scale)
        with tempfile.TemporaryDirectory() as folder:
            opened, num_listed = opened_by_one_rank(Path(folder))
        figures["files that a rank opens, of two layers and its partition"] = float(len(opened))
        figures["directories that it lists"] = float(num_listed)
        dist.destroy_process_group()
    return figures


def weights(scale: Scale) -> Figures:
    """A rank's part of a matrix of GPT-3 175B, drawn by place."""
    from megatron_terapipe.model.initialization import normal
    from megatron_terapipe.model.tensor_parallel import TensorParallelRanks

    ranks = TensorParallelRanks(0, scale.tensor_ranks)
    return _drawn(scale, lambda: ranks.parameter(WIDTH, WIDTH, cut=0, initialize=normal(0.02)))


def whole_weights(scale: Scale) -> Figures:
    """Figures of weights that each rank draws whole by a sequential generator, and then splits, as was done before."""
    import torch
    from torch import nn

    return _drawn(scale, lambda: nn.init.normal_(torch.empty(WIDTH, WIDTH)).chunk(scale.tensor_ranks)[0].clone())


def _drawn(scale: Scale, draw: Callable[[], object]) -> Figures:
    import torch

    torch.set_num_threads(1)
    elements, of_stage = WIDTH * WIDTH / scale.tensor_ranks, PARAMETERS / scale.stages / scale.tensor_ranks
    figures: Figures = {"part of a matrix, MB": elements * 4 / 2**20}
    with measured(figures, "matrix"):
        draw()
    seconds = figures["matrix, CPU s"]
    assert isinstance(seconds, float)
    figures["a stage's part of 175B, one core, extrapolated CPU s"] = seconds / elements * of_stage
    return figures


def datasets(scale: Scale) -> Figures:
    """Samples of a blend of two corpora: on the reading rank, again with its cache, and on other ranks."""
    import numpy as np

    from megatron_terapipe.config import DataConfig
    from megatron_terapipe.data.datasets import build_datasets
    from megatron_terapipe.data.indexed_dataset import IndexedDatasetWriter

    figures: Figures = {"documents": float(scale.documents), "samples": float(scale.samples)}
    document = np.zeros(40, np.uint16)
    with tempfile.TemporaryDirectory() as folder:
        prefixes = [f"{folder}/{name}" for name in "ab"]
        for prefix in prefixes:
            with IndexedDatasetWriter(prefix, vocab_size=50257) as writer:
                for _ in range(scale.documents // 2):
                    writer.add_document(document)
        data = DataConfig(data_path=("0.3", prefixes[0], "0.7", prefixes[1]), split="1")
        for what, reads in (
            ("where nothing is read", False),
            ("first start where data is read", True),
            ("next start there, or another rank of the host", True),
        ):
            with measured(figures, what):
                build_datasets(data, seq_length=64, num_samples=(scale.samples, 0, 0), seed=1, reads=reads)
    return figures


_BLENDED, _SAMPLES = 300, 20_000_000


def blend(scale: Scale) -> Figures:
    """Order of 20 million samples of 300 data sets: by its definition, as was done before, and as it is done now."""
    import numpy as np

    from megatron_terapipe.data.blend_order import BlendOrder
    from tests.data.test_datasets import each_furthest_below_its_share

    figures: Figures = {}
    weights, few = np.random.default_rng(0).random(_BLENDED).tolist(), 20_000
    with measured(figures, f"{few:,} samples by the definition"):
        wanted = each_furthest_below_its_share(weights, few)
    figures["all by the definition, extrapolated CPU s"] = (
        float(figures[f"{few:,} samples by the definition, CPU s"]) * _SAMPLES / few
    )
    order = BlendOrder(weights, _SAMPLES)
    with measured(figures, "first samples, with the time to load the compiled loop"):
        assert [order[sample] for sample in range(few)] == wanted
    with measured(figures, "last sample, as after a resume"):
        order[_SAMPLES - 1]
    return figures


def epochs(scale: Scale) -> Figures:
    """Order of 128 million samples of three documents: all at once, as was done before, and as it is done now."""
    from tests.data.test_datasets import order_before

    figures: Figures = {}
    lengths, few, wanted = [90, 100, 110], 5000, 500_000 * 256
    all_epochs = wanted * 64 // sum(lengths)
    with measured(figures, f"{few:,} epochs at once"):
        order_before(lengths, 64, few, 1)
    figures["all epochs at once, extrapolated CPU s"] = (
        float(figures[f"{few:,} epochs at once, CPU s"]) * all_epochs / few
    )
    return figures | _started([1.0], lengths, wanted)


def prefixes(scale: Scale) -> Figures:
    """A blend of 30,000 data sets, where 256 files may be open."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    return _started([1.0 + number % 7 for number in range(30_000)], [90, 100, 110], _SAMPLES)


def _started(weights: Sequence[float], lengths: Sequence[int], samples: int) -> Figures:
    """Return the figures of a start on data sets of these documents, each the same, and of the first batch."""
    from megatron_terapipe.config import DataConfig
    from megatron_terapipe.data.datasets import build_datasets, prepare_samples
    from megatron_terapipe.data.indexed_dataset import IndexedDatasetWriter

    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        with IndexedDatasetWriter(f"{folder}/0", vocab_size=257) as writer:
            for length in lengths:
                writer.add_document([1] * length)
        for number in range(1, len(weights)):
            for end in ("bin", "idx"):
                os.link(f"{folder}/0.{end}", f"{folder}/{number}.{end}")
        words = tuple(word for number, each in enumerate(weights) for word in (str(each), f"{folder}/{number}"))
        data = DataConfig(data_path=words if len(weights) > 1 else words[1:], split="1")
        with measured(figures, "start"):
            train = build_datasets(data, seq_length=64, num_samples=(samples, 0, 0), seed=1).train
            prepare_samples(train, 0)
        assert train is not None
        with measured(figures, "first 256 samples"):
            for sample in range(256):
                train[sample]
    return figures


def _join(scale: Scale) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from deepspeed_ext.runtime.initialize import init_distributed

    dist.init_process_group("fake", store=FakeStore(), rank=scale.rank, world_size=scale.layout.world_size)
    init_distributed(dist_backend="fake")


PARTS: dict[str, Callable[[Scale], Figures]] = {
    "schedule": schedule,
    "groups": groups,
    "checkpoint": checkpoint,
    "weights": weights,
    "whole": whole_weights,
    "datasets": datasets,
    "blend": blend,
    "epochs": epochs,
    "prefixes": prefixes,
}
"""The work of a rank before its first step."""


if __name__ == "__main__":
    main()
