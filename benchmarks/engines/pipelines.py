"""The engines that are measured: plain torch, DeepSpeed's, torch's and ours, each with the same weights and a step.

Job, Engine        the interface of all engines
plain_layers ...   the benchmark's GPT in plain torch, which the rivals run and all are held against
plain, deepspeed_pipeline, torch_pipeline, ours    the engines
catalogue          all of them, by name
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import DualPipeVModule, PipelineModule
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, ScheduleDualPipeV
from torch.nn import functional as F

from benchmarks.engines.results import (
    DEEPSPEED,
    IN_ONE_THREAD,
    IN_TWO_THREADS,
    OURS_AUTO,
    PIPELINE_ENGINE,
    TORCH,
    Name,
    ours_with,
)
from benchmarks.measuring.report import progress
from benchmarks.measuring.workload import our_engine, settings
from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.measured import measured_costs
from deepspeed_ext.plan.ops import Placement
from deepspeed_ext.plan.schedules import OPTIMISED
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.flops import balanced_token_slices
from megatron_terapipe.data.loader import MicroBatch
from megatron_terapipe.planning import with_found_token_slices


@dataclass(frozen=True)
class Job:
    """The work of a step, the same for all engines."""

    model: ModelConfig
    num_micro_batches: int
    """Micro-batches of a step, each with data of its own."""
    micro_batch_size: int
    cores: frozenset[int]
    """Cores of this machine that the ranks share."""

    def samples(self) -> Tensor:
        """Token ids of the step, the same in each step and on each rank: [sequences, N + 1]."""
        rows = self.num_micro_batches * self.micro_batch_size
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, self.model.vocab_size or 0, (rows, self.model.seq_length + 1), generator=generator)

    def inputs_and_labels(self) -> tuple[Tensor, Tensor]:
        """Token ids and the ones after them: each [sequences, N]."""
        samples = self.samples()
        return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()

    def micro_batches(self) -> list[tuple[Tensor, Tensor]]:
        """Inputs and labels of each micro-batch: each [B, N]."""
        inputs, labels = (each.split(self.micro_batch_size) for each in self.inputs_and_labels())
        return list(zip(inputs, labels, strict=True))


@dataclass(frozen=True)
class Engine:
    """An engine on this rank."""

    weights: Mapping[str, nn.Parameter]
    """Parameters of this rank, by the number of their layer and their name in it."""
    optimizer: torch.optim.Optimizer
    """Steps once in each step of the engine, and then has gradients that are means over the micro-batches."""
    step: Callable[[], float | None]
    """Trains on the job's micro-batches, and returns their mean loss; None on a rank without a loss."""
    holder: Any = None
    """Whatever must live as long."""


def sgd(weights: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of all engines, which costs next to nothing."""
    return torch.optim.SGD(list(weights.values()), lr=1e-3)


class Positions(nn.Embedding):
    """Adds a learned vector for each position."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, N, hidden] in, the same out."""
        return hidden + self.weight[: hidden.shape[1]]


class Attention(nn.Module):
    """Causal attention of all heads, with query, key and value of a head side by side, as Megatron has them."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.num_heads = model.num_attention_heads
        self.query_key_value = nn.Linear(model.hidden_size, 3 * model.hidden_size)
        self.projection = nn.Linear(model.hidden_size, model.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, N, hidden] in, the same out."""
        heads = self.query_key_value(hidden).unflatten(-1, (self.num_heads, 3, -1))
        query, key, value = (each.transpose(1, 2) for each in heads.unbind(-2))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Up, GELU, down."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(model.hidden_size, model.ffn_hidden_size)
        self.down = nn.Linear(model.ffn_hidden_size, model.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, N, hidden] in, the same out."""
        return self.down(F.gelu(self.up(hidden), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to the residual."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(model.hidden_size, eps=model.layernorm_epsilon)
        self.attention = Attention(model)
        self.mlp_norm = nn.LayerNorm(model.hidden_size, eps=model.layernorm_epsilon)
        self.mlp = MLP(model)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, N, hidden] in, the same out."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class OutputLayer(nn.Module):
    """Logits from a weight of their own: pipelines of torch share no weights between ranks."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(model.hidden_size, model.padded_vocab_size(1), bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, N, hidden] in, logits [B, N, vocabulary] out."""
        return self.linear(hidden)


def plain_layers(model: ModelConfig) -> list[nn.Module]:
    """Return the layers of the model, first to last, with weights that are the same each time."""
    words, hidden = model.padded_vocab_size(1), model.hidden_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        layers = [
            nn.Embedding(words, hidden),
            Positions(model.max_position_embeddings, hidden),
            *(Block(model) for _ in range(model.num_layers)),
            nn.LayerNorm(hidden, eps=model.layernorm_epsilon),
            OutputLayer(model),
        ]
        with torch.no_grad():
            for layer in layers:
                for weight in layer.parameters():
                    # Norms and biases too: what is 1 or 0 everywhere hides a mistake.
                    weight.add_(torch.randn_like(weight), alpha=0.02) if weight.dim() == 1 else weight.normal_(0, 0.02)
    return layers


def stage_bounds(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Return the first layer of each stage, and the end: equal numbers of blocks; embeddings first, logits last."""
    inner = (2 + stage * num_blocks // num_stages for stage in range(1, num_stages))
    return (0, *inner, num_blocks + 4)


class Stage(nn.Module):
    """Some of the layers, one after the other, under their numbers in the whole model."""

    def __init__(self, layers: Sequence[nn.Module], first: int, end: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): layers[number] for number in range(first, end)})

    def forward(self, hidden: Tensor) -> Tensor:
        """Output of the last layer [B, N, ...] for the input [B, N, ...] of the first."""
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden

    def named_weights(self) -> dict[str, nn.Parameter]:
        """The weights by the number of their layer and their name in it."""
        return {name.removeprefix("layers."): weight for name, weight in self.named_parameters()}


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of all tokens: [].

    Args:
        logits: [B, N, vocabulary].
        labels: [B, N].
    """
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain(job: Job, *, threads: int) -> Engine:
    """Return plain torch on the first rank, while the others do nothing.

    Args:
        threads: threads that share each operation.
    """
    if dist.get_rank():
        nothing = torch.nn.Parameter(torch.zeros(1))
        return Engine({}, torch.optim.SGD([nothing], lr=1e-3), lambda: None)
    layers = plain_layers(job.model)
    whole = Stage(layers, 0, len(layers))
    weights = whole.named_weights()
    optimizer, data = sgd(weights), job.micro_batches()

    def step() -> float:
        total = 0.0
        for inputs, labels in data:
            loss = mean_loss(whole(inputs), labels) / len(data)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Engine(weights, optimizer, step if threads == 1 else _with_threads(step, threads, job.cores))


def _with_threads(step: Callable[[], float], threads: int, cores: frozenset[int]) -> Callable[[], float]:
    def wrapped() -> float:
        with _spread(threads, cores):
            return step()

    return wrapped


@contextmanager
def _spread(threads: int, cores: frozenset[int]) -> Iterator[None]:
    """Compute on these cores with so many threads, and then again on the core of this rank with one."""
    own = os.sched_getaffinity(0)
    # Threads inherit the cores of the one that makes them, so the cores come first.
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(1)
        os.sched_setaffinity(0, own)


SAME_BLOCKS = f"type:{Block.__name__}"
"""DeepSpeed's partition into stages with as many transformer layers each."""


def deepspeed_pipeline(job: Job, *, module_class: type[PipelineModule]) -> Engine:
    """Return DeepSpeed's engine for a class of modules: `PipelineEngine`, or `DualPipeVEngine`."""
    with _quiet():
        module = module_class(
            plain_layers(job.model),
            num_stages=dist.get_world_size(),
            loss_fn=mean_loss,
            partition_method=SAME_BLOCKS,
        )
        weights = dict(module.named_parameters())
        engine, *_ = deepspeed.initialize(
            model=module, config=settings(job.num_micro_batches, job.micro_batch_size), optimizer=sgd(weights)
        )
    data = cycle(job.micro_batches())
    return Engine(weights, engine.optimizer, lambda: engine.train_batch(data).item(), engine)


@contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed prints the layers of each stage."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def torch_pipeline(job: Job, *, schedule_class: type[Any], v_shaped: bool = False) -> Engine:
    """Return a schedule of torch with its stages: one on each rank, or two where the schedule has several."""
    rank, size = dist.get_rank(), dist.get_world_size()
    is_single = issubclass(schedule_class, PipelineScheduleSingle)
    num_stages = size if is_single else 2 * size
    second = 2 * size - 1 - rank if v_shaped else rank + size
    numbers = [rank] if is_single else [rank, second]
    layers, bounds = plain_layers(job.model), stage_bounds(job.model.num_layers, num_stages)
    parts = [Stage(layers, bounds[number], bounds[number + 1]) for number in numbers]
    stages = [
        PipelineStage(part, number, num_stages, torch.device("cpu"))
        for part, number in zip(parts, numbers, strict=True)
    ]
    schedule = schedule_class(
        stages[0] if is_single else stages, n_microbatches=job.num_micro_batches, loss_fn=mean_loss
    )
    weights = {name: weight for part in parts for name, weight in part.named_weights().items()}
    optimizer = sgd(weights)
    inputs, labels = job.inputs_and_labels()
    has_last = numbers[-1] == num_stages - 1

    def step() -> float | None:
        losses: list[torch.Tensor] = []
        given = (inputs,) if rank == 0 else ()
        wanted = {"target": labels, "losses": losses} if has_last else {}
        schedule.step(*given, return_outputs=False, **wanted)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().item() if has_last else None

    return Engine(weights, optimizer, step, schedule)


Cutting = Callable[[Job], TokenSlices]
"""Gives the token slices of a job."""


def ours(job: Job, *, schedule: str, cutting: Cutting, **stages: Any) -> Engine:
    """Return our engine; `optimised` is found for op times that are measured first.

    Args:
        **stages: `num_model_chunks` and `placement`.
    """
    cut, more = cutting(job), dict[str, Any]()
    if schedule == OPTIMISED:
        costs = _measured(job, cut, **stages)
        more["costs"] = lambda _: costs
    engine = _engine(job, cut, schedule, **stages, **more)
    data = cycle(_batches(job))
    weights = dict(engine.module.named_parameters())
    return Engine(weights, engine.optimizer, lambda: engine.train_batch(data).item(), engine)


def balanced(job: Job, count: int) -> TokenSlices:
    """Token slices of about equal FLOPs."""
    return balanced_token_slices(job.model, count)


def uniform(job: Job, count: int) -> TokenSlices:
    """Token slices of equal lengths."""
    return TokenSlices.uniform(job.model.seq_length, count)


def found(job: Job, op_profile: str) -> tuple[TokenSlices, Placement]:
    """Return the token slices and the placement of 2 model chunks that the trainer finds.

    Args:
        op_profile: file that `terapipe search measure` wrote for this model on this machine.
    """
    model, rows = job.model, job.num_micro_batches * job.micro_batch_size
    words = (
        f"--num-layers {model.num_layers} --hidden-size {model.hidden_size} --seq-length {model.seq_length} "
        f"--num-attention-heads {model.num_attention_heads} --vocab-size {model.vocab_size} "
        f"--micro-batch-size {job.micro_batch_size} --global-batch-size {rows} --train-iters 1 --lr 1e-3 --mock-data "
        f"--pipeline-model-parallel-size {dist.get_world_size()} --num-model-chunks 2 --pipeline-schedule {OPTIMISED} "
        "--token-slices auto --model-chunk-placement auto --op-profile"
    )
    config = parse_arguments([*words.split(), op_profile])
    config = with_found_token_slices(config, 1)
    cut, placement = config.token_slices(), config.parallel.placements[0]
    progress(f"found: --token-slices {cut} --model-chunk-placement {placement}")
    return cut, placement


def ours_found(job: Job, op_profile: str) -> Engine:
    """Return our engine with the token slices and the placement that are found for 2 model chunks."""
    cut, placement = found(job, op_profile)
    return ours(job, schedule=OPTIMISED, cutting=lambda _: cut, num_model_chunks=2, placement=placement)


def _engine(job: Job, cut: TokenSlices, schedule: str, **more: Any) -> Any:
    return our_engine(
        job.model,
        cut,
        job.num_micro_batches,
        num_stages=dist.get_world_size(),
        micro_batch_size=job.micro_batch_size,
        schedule=schedule,
        **more,
    )


def _measured(job: Job, cut: TokenSlices, **stages: Any) -> OpCosts:
    """Op times of the second of two steps, under the order that is found for even costs; the same on all ranks."""
    engine, data = _engine(job, cut, OPTIMISED, **stages), cycle(_batches(job))
    engine.train_batch(data)
    with engine.timeline() as timelines:
        engine.train_batch(data)
    return measured_costs(timelines)


def _batches(job: Job) -> list[MicroBatch]:
    return [MicroBatch.from_samples(rows) for rows in job.samples().split(job.micro_batch_size)]


OUR_SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "zero-bubble": {"schedule": "zero-bubble"},
    "interleaved, 2 model chunks": {"schedule": "interleaved", "num_model_chunks": 2},
    "optimised": {"schedule": OPTIMISED},
    "optimised, 2 model chunks": {"schedule": OPTIMISED, "num_model_chunks": 2},
    "optimised, 2 model chunks in a V": {"schedule": OPTIMISED, "num_model_chunks": 2, "placement": Placement.V},
}
TORCH_SCHEDULES: dict[str, dict[str, Any]] = {
    "GPipe": {"schedule_class": ScheduleGPipe},
    "1F1B": {"schedule_class": Schedule1F1B},
    "Interleaved1F1B, 2 stages": {"schedule_class": ScheduleInterleaved1F1B},
    "InterleavedZeroBubble, 2 stages": {"schedule_class": ScheduleInterleavedZeroBubble},
    "ZBVZeroBubble": {"schedule_class": ScheduleZBVZeroBubble, "v_shaped": True},
    "DualPipeV": {"schedule_class": ScheduleDualPipeV, "v_shaped": True},
}


@dataclass(frozen=True)
class Entry:
    """An engine under one schedule."""

    name: Name
    build: Callable[[Job], Engine]
    """Makes it on this rank; raises if it does not take the job."""


def catalogue(num_token_slices: Sequence[int], op_profile: str | None = None) -> list[Entry]:
    """Return the engines; the first one is plain torch, which the others are held against.

    Args:
        num_token_slices: numbers of token slices of our engine, other than 1.
        op_profile: times of ops for `--token-slices auto`; None to leave it out.
    """
    entries = [
        Entry(IN_ONE_THREAD, partial(plain, threads=1)),
        Entry(IN_TWO_THREADS, partial(plain, threads=2)),
        Entry(PIPELINE_ENGINE, partial(deepspeed_pipeline, module_class=PipelineModule)),
        Entry(Name(DEEPSPEED, "DualPipeV"), partial(deepspeed_pipeline, module_class=DualPipeVModule)),
    ]
    entries += [
        Entry(Name(TORCH, name), partial(torch_pipeline, **arguments)) for name, arguments in TORCH_SCHEDULES.items()
    ]
    entries += [
        Entry(Name(ours_with(count), name), partial(ours, cutting=partial(balanced, count=count), **arguments))
        for count in (1, *num_token_slices)
        for name, arguments in OUR_SCHEDULES.items()
    ]
    entries += [
        Entry(
            Name(ours_with(count), "1f1b, uniform lengths"),
            partial(ours, schedule="1f1b", cutting=partial(uniform, count=count)),
        )
        for count in num_token_slices[-1:]
    ]
    if op_profile is not None:
        chosen = partial(ours_found, op_profile=op_profile)
        entries.append(Entry(Name(OURS_AUTO, "optimised, 2 model chunks"), chosen))
    return entries
