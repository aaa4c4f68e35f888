"""Long sequences: times and peaks, their table, and the data of one sample.

A small Llama trained on one long sequence: peak memory beside its closed form, and the time of two stages.

    python -m benchmarks.long_sequences memory --tokens 131072 --token-slices 64
    python -m benchmarks.long_sequences memory --tokens 1048576 --token-slices 128 --window 1024 --width 64 --stages 2 \
        --only stage
    python -m benchmarks.long_sequences speed --tokens 16384 --token-slices 16
    python -m benchmarks.long_sequences mixers --tokens 16384 --token-slices 16 --layers 8 --recompute stage

`memory` trains one step, once in each way, with a process for each of `--stages` (1): token slices with stages computed
again; the same with gradients of keys and values in bf16; with tensors that are not read in a second buffer, in place
of a host's memory; and whole sequences with every layer computed again. It counts the bytes of all tensors that torch
allocates in the step, without weight gradients; the buffers of kernels are in the process only. `speed` trains
on two ranks, with one token slice and with several, in turns. `mixers` does so for Mamba-2 and for attention in the
same model, and counts the tensors that torch allocates in a step; `latents` for latent attention, with keys and values
or latents kept for later token slices.

Closed form of the peak, which the second backward reaches in the last layer: keys and values of all tokens; gradients
of keys and values of all but the last token slice; activations of one token slice on the stage; and gradients under
way, in attention those that its kernel finds for all keys and values that it is given. A stage after the first also
keeps its input of all tokens.

Llama-3 with long sequences on H100: our best strategy beside ZeRO-3 with Ulysses, all predicted.

python -m benchmarks.long_sequences table [--model NAME] [--rows FILE.jsonl] [--output FILE.csv]

For each model, length and number of devices the search ranks strategies for one sequence a step, or for the smallest
power of two of them with which a strategy fits. The rival gets the same sequences. Where it cannot use all devices with
so few, a second line has as many as it needs. Rows are appended to a file, and an interrupted run goes on after the
last. All rows are written as a CSV beside the page, which shows some of them.

Data of long sequences: seconds to order, read and prepare one sample, from short documents and from one long one.

python -m benchmarks.long_sequences samples [--seq-length 4000000] [--document-length 40]
"""

import argparse
import csv
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks.measuring.closed_forms import (
    block_activation_bytes_per_token,
    key_value_bytes_per_token,
    stage_input_bytes_per_token,
)
from benchmarks.measuring.command import Parser, run_named
from benchmarks.measuring.counters import LiveBytes
from benchmarks.measuring.report import Section, progress
from benchmarks.measuring.workload import batches, join, our_engine
from benchmarks.measuring.worlds import RankFailed, World
from deepspeed_ext.plan.memory import TokenBytes, memory_over_time, peak
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.lowering import lowering_costs
from deepspeed_ext.plan.schedules import SCHEDULES, rank_orders
from deepspeed_ext.plan.simulate import simulate_with_host_copies
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.solve.cuts import DocumentCuts
from deepspeed_ext.runtime.attention.documents import Documents, document_attention
from megatron_terapipe.config import ModelConfig, flops
from megatron_terapipe.config.flops import balanced_token_slices
from megatron_terapipe.data.datasets import GPTDataset
from megatron_terapipe.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_terapipe.data.loader import MicroBatch
from megatron_terapipe.search.answer.figures import speed_of
from megatron_terapipe.search.answer.other_trainers import Rival, best_rival
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.cluster_files import parse_cluster
from megatron_terapipe.search.machine.library import GIGABYTE
from megatron_terapipe.search.machine.trainers import ALST
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.workload import Workload
from megatron_terapipe.search.price.workload_files import read_workload
from megatron_terapipe.search.rank.search import Ranked, SearchResult, search
from megatron_terapipe.search.rank.space import MEMORY_HEADROOM, SearchProblem, all_choices
from megatron_terapipe.strategy import Strategy
from megatron_terapipe.texts import bytes_text, strategy_text, time_text

FP32_BYTES = 4
BREADTH_FIRST = "breadth-first"
HIDDEN, HEAD_DIM, KEY_HEADS = 256, 32, 2


@dataclass(frozen=True)
class Way:
    """A way to train on the sequence."""

    name: str
    num_token_slices: int
    recompute: str
    key_value_gradients: str = "fp32"
    """`fp32` or `bf16`."""
    offloads: bool = False
    """Whether tensors that are not read are moved to the host; with two model chunks, breadth-first."""


def long_model(tokens: int, num_layers: int, window: int | None, width: int = HIDDEN) -> ModelConfig:
    """A Llama with grouped keys and a byte-sized vocabulary.

    Args:
        window: tokens that a token attends to, itself included; None for all before it.
        width: hidden size, a multiple of 64.
    """
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=width,
        num_attention_heads=width // HEAD_DIM,
        num_key_value_heads=KEY_HEADS,
        seq_length=tokens,
        vocab_size=256,
        sliding_window=window,
        position_embedding_type="rope",
        normalization="rmsnorm",
        activation="swiglu",
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
    )


def step_flops(model: ModelConfig, *, recompute: bool) -> float:
    """FLOPs of a step on one sequence, causal attention and windows counted exactly, in flash kernels.

    With `recompute` every layer is computed twice.
    """
    attention = linear = 0
    for block in model.blocks:
        of_block = model.seq_length * flops.linear_flops_per_token(model, block)
        linear += of_block
        attention += flops.block_forward_flops(model, block, model.seq_length) - of_block
    again = int(recompute)
    blocks = linear * (3 + again) + attention * (1 + flops.FLASH_BACKWARD_PER_FORWARD + again)
    return blocks + 3 * model.seq_length * flops.logits_flops_per_token(model)


def host_copies(model: ModelConfig, cut: TokenSlices) -> HostCopySettings:
    """Settings of copies to the host, for two stages with half of the layers each."""
    key_value = key_value_bytes_per_token(model, model.blocks[0], FP32_BYTES) * model.num_layers / 2
    inputs = (0.0, float(stage_input_bytes_per_token(model, FP32_BYTES)))
    windows = (model.sliding_window,) * 2
    return HostCopySettings(cut.lengths, inputs, (key_value,) * 2, windows=windows)


def closed_form(model: ModelConfig, way: Way, stages: int = 1, stage: int = 0) -> float:
    """Bytes of the peak of a step on one sequence and one stage, without weights and their gradients."""
    block, tokens, layers = model.blocks[0], model.seq_length, model.num_layers // stages
    key_value, hidden = key_value_bytes_per_token(model, block, FP32_BYTES), model.hidden_size * FP32_BYTES
    activations = block_activation_bytes_per_token(model, block, FP32_BYTES) - key_value
    of_mlp = block_activation_bytes_per_token(model, replace(block, num_key_value_heads=0), FP32_BYTES)
    # Gradients of two hidden states, of the input of the last product, of the gate, and of the first product, twice as
    # wide; or, once the MLP is done, of three hidden states.
    in_mlp = 2 * hidden + 4 * block.ffn_hidden_size * FP32_BYTES
    in_attention = 3 * hidden - of_mlp
    if way.recompute == "full":
        # Inputs of all other layers, keys and values, and one layer computed again.
        under_way = max(in_mlp, in_attention + key_value)
        return tokens * ((layers - 1) * hidden + layers * key_value + activations + under_way)
    length = -(-tokens // way.num_token_slices)
    in_reach = min(tokens - length, (model.sliding_window or tokens + 1) - 1)
    gradients = in_reach * key_value * (0.5 if way.key_value_gradients == "bf16" else 1.0)
    # A kernel finds gradients for all keys that it is given. Where token slices keep theirs apart, these were put
    # together for it, too.
    found = (min(tokens - length, in_reach + length)) * key_value
    put_together = found if way.offloads or in_reach < tokens - length else 0
    under_way = max(length * in_mlp, length * in_attention + found + put_together)
    if not way.offloads:
        inputs = tokens * hidden if stage else 0.0
        return layers * (tokens * key_value + gradients + length * activations) + under_way + inputs
    cut = TokenSlices.uniform(tokens, way.num_token_slices)
    shape, copies = PipelineShape(2, 1, len(cut), 2), host_copies(model, cut)
    orders, costs = rank_orders(SCHEDULES[BREADTH_FIRST], shape), lowering_costs(shape)
    timeline = simulate_with_host_copies(orders, shape, costs, copies)
    of_a_stage = (
        tuple(each * layers / 2 for _ in range(2)) for each in (activations, key_value, gradients / (tokens - length))
    )
    token_bytes = TokenBytes(*of_a_stage, stage_input=copies.input_bytes)
    # Once the second stage is done, the first has the gradients of all its outputs before it.
    passed = (tokens - 2 * length) * hidden
    return peak(memory_over_time(timeline, cut.lengths, token_bytes)[0]) + passed + under_way


def build_way(model: ModelConfig, way: Way, stages: int, threads: int) -> tuple[Any, Iterator[Any]]:
    """Return the engine of a way on this rank, and its batches."""
    import torch

    join(threads)
    cut = TokenSlices.uniform(model.seq_length, way.num_token_slices)
    more: dict[str, Any] = {"key_value_gradients": torch.bfloat16 if way.key_value_gradients == "bf16" else None}
    if way.offloads:
        more |= {"host_copies": host_copies(model, cut), "num_model_chunks": 2, "schedule": BREADTH_FIRST}
    engine = our_engine(
        model,
        cut,
        1,
        num_stages=stages,
        recompute=way.recompute,
        **more,
    )
    return engine, batches(model, for_deepspeed=False)


def measured_peak(built: tuple[Any, Iterator[Any]]) -> tuple[int, int, int, float, float]:
    """Train one step: peak bytes of tensors, of a host's buffers, and of the process; seconds; and the loss."""
    engine, data = built
    batch = iter([next(data)])
    weights = sum(parameter.nbytes for parameter in engine.module.parameters())
    copies = engine._executor.copies
    start = time.perf_counter()
    with LiveBytes((lambda: copies.pages.held) if copies else lambda: 0) as live:
        loss = engine.train_batch(batch)
    seconds = time.perf_counter() - start
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return live.peak - weights, copies.pages.most_in_use if copies else 0, resident, seconds, loss.item()


def memory(options: argparse.Namespace) -> Section:
    """Measure each way once."""
    model = long_model(options.tokens, options.layers, options.window, options.width)
    count, stages = options.token_slices, options.stages
    ways = [
        Way("stage", count, "stage"),
        Way("bf16", count, "stage", key_value_gradients="bf16"),
        Way("offload", count, "stage", offloads=True),
        Way("whole", 1, "full"),
    ]
    window = f", window {options.window}" if options.window else ""
    sizes = f"{model.num_layers} layers of {options.width}, {stages} stages, {count} token slices"
    title = f"{model.seq_length:,} tokens{window}, {sizes}, fp32"
    columns = ("way", "peak MB", "closed form MB", "error", "host MB", "process MB", "seconds", "loss")
    section = Section(title, columns)
    section.notes.append(
        f"A step has {step_flops(model, recompute=True):.2e} FLOPs, every layer computed twice. The process has the "
        "libraries and the buffers of kernels, too."
    )
    for way in ways:
        if options.only and way.name not in options.only:
            continue
        variables = [{"OMP_NUM_THREADS": str(options.threads)}] * stages
        try:
            with World(stages, build_way, model, way, stages, options.threads, variables=variables) as world:
                measured = world.run(measured_peak)
        except RankFailed as error:
            section.fail(way.name, error)
            continue
        for stage, (found, host, resident, seconds, loss) in enumerate(measured):
            expected = closed_form(model, way, stages, stage)
            name = way.name if stages == 1 else f"{way.name}, rank {stage}"
            compared = f"{found / 1e6:,.0f}", f"{expected / 1e6:,.0f}", f"{expected / found - 1:+.1%}"
            others = f"{host / 1e6:,.0f}", f"{resident / 1e6:,.0f}", f"{seconds:.1f}", f"{loss:.6f}"
            section.add(name, *compared, *others)
            progress(" | ".join(section.rows[-1]))
    return section


def build_each(
    models: Sequence[tuple[ModelConfig, bool]], count: int, recompute: str
) -> list[tuple[Any, Iterator[Any]]]:
    """Return engines of this rank for each model, with one token slice and with several, and their batches.

    Args:
        models: each with whether latents are kept.
    """
    join()
    return [
        (
            our_engine(model, cut, 1, num_stages=2, recompute=recompute, latents_kept=latents_kept),
            batches(model, for_deepspeed=False),
        )
        for model, latents_kept in models
        for cut in (TokenSlices.uniform(model.seq_length, 1), balanced_token_slices(model, count))
    ]


def timed_step(built: list[tuple[Any, Iterator[Any]]], which: int) -> tuple[float, float, float, float]:
    """Train one step: its seconds, those that the core of this rank computed, bubble ratio and loss."""
    engine, data = built[which]
    start, computed = time.perf_counter(), time.process_time()
    with engine.timeline() as timelines:
        loss = engine.train_batch(data)
    computed = time.process_time() - computed
    return time.perf_counter() - start, computed, timelines[0].bubble_ratio, loss.item()


def counted_step(built: list[tuple[Any, Iterator[Any]]], which: int) -> tuple[float, int, float]:
    """Train one step: its seconds, peak bytes of the tensors that it allocates, and loss."""
    engine, data = built[which]
    start = time.perf_counter()
    with LiveBytes() as live:
        loss = engine.train_batch(data)
    return time.perf_counter() - start, live.peak, loss.item()


def speed(options: argparse.Namespace) -> Section:
    """Time a step of two stages with one token slice and with several, in turns, after one that warms up."""
    model = long_model(options.tokens, options.layers, options.window)
    count = options.token_slices
    section = Section(
        f"{model.seq_length:,} tokens, one sequence, two stages, recompute {options.recompute}, fp32",
        ("token slices", "median s", "speed-up", "computed s, both ranks", "bubble", "loss"),
    )
    times: list[list[float]] = [[], []]
    last = [(0.0, 0.0, 0.0)] * 2
    built = ([(model, False)], count, options.recompute)
    with World(2, build_each, *built, variables=[{"OMP_NUM_THREADS": "1"}] * 2) as world:
        for turn in range(options.rounds + options.warm_up):
            for which in range(2):
                found = world.run(timed_step, which)
                last[which] = sum(each[1] for each in found), *found[0][2:]
                if turn >= options.warm_up:
                    times[which].append(max(seconds for seconds, *_ in found))
    base = median(times[0])
    for which, name in enumerate(("1", f"{count} balanced")):
        middle = median(times[which])
        computed, bubble, loss = last[which]
        row = (f"{middle:.2f}", f"{base / middle:.2f}", f"{computed:.2f}", f"{bubble:.1%}", f"{loss:.6f}")
        section.add(name, *row)
    bound = 2 * count / (count + 1)
    section.notes.append(f"Equal token slices without any overhead would take 1 / {bound:.2f} of one: 2 S / (S + 1).")
    return section


def mixer_model(tokens: int, num_layers: int, symbol: str) -> ModelConfig:
    """A model of 64 channels with two heads, of token mixers and MLPs in turn.

    Args:
        symbol: of the mixer, M for Mamba-2 and A for attention.
    """
    return ModelConfig(
        num_layers=2 * num_layers,
        hybrid_layer_pattern=f"{symbol}-" * num_layers,
        mamba_num_heads=2,
        mamba_head_dim=32,
        mamba_num_groups=2,
        mamba_state_dim=32,
        **_small(tokens, 64),
    )


def latent_model(tokens: int, num_layers: int, width: int) -> ModelConfig:
    """A model with latent attention, with a head of 16 + 8 and 16 channels for each 32 of the hidden size.

    Args:
        width: hidden size, eight times the width of latents.
    """
    return ModelConfig(
        num_layers=num_layers,
        multi_latent_attention=True,
        kv_lora_rank=width // 8,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=16,
        qk_norm="head",
        **_small(tokens, width),
    )


def _small(tokens: int, width: int) -> dict[str, Any]:
    """Settings of both."""
    return {
        "hidden_size": width,
        "num_attention_heads": width // HEAD_DIM,
        "seq_length": tokens,
        "vocab_size": 256,
        "position_embedding_type": "rope",
        "normalization": "rmsnorm",
        "disable_bias_linear": True,
    }


def mixers(options: argparse.Namespace) -> Section:
    """Time and peak of a step of two stages with a state, and with attention, each with one token slice and several."""
    names = {"Mamba-2": "M", "attention": "A"}
    models = {name: (mixer_model(options.tokens, options.layers, symbol), False) for name, symbol in names.items()}
    return compared(models, options, f"{options.layers} mixers")


def latents(options: argparse.Namespace) -> Section:
    """Time and peak of a step of two stages with latent attention, keys and values or latents kept."""
    model = latent_model(options.tokens, options.layers, options.width)
    return compared({"expanded": (model, False), "latent": (model, True)}, options, f"{options.layers} layers")


def compared(models: dict[str, tuple[ModelConfig, bool]], options: argparse.Namespace, layers: str) -> Section:
    """Time and peak of each model, with one token slice and with several.

    Args:
        models: by name, each with whether latents are kept.
        layers: their layers, for the title.
    """
    count = options.token_slices
    section = Section(
        f"{options.tokens:,} tokens, {layers}, two stages, recompute {options.recompute}, fp32",
        ("model", "token slices", "median s", "speed-up", "peak MB, larger rank", "of one token slice", "loss"),
    )
    ways = list(product(models, (1, count)))
    steps: list[list[float]] = [[] for _ in ways]
    peaks, losses = [0] * len(ways), [0.0] * len(ways)
    built = (list(models.values()), count, options.recompute)
    with World(2, build_each, *built, variables=[{"OMP_NUM_THREADS": "1"}] * 2) as world:
        for _ in range(options.rounds):
            for which, seconds in enumerate(steps):
                times, allocated, (losses[which], _) = zip(*world.run(counted_step, which), strict=True)
                seconds.append(max(times))
                peaks[which] = max(allocated)
                progress(f"{ways[which]}: {seconds[-1]:.2f} s")
    for which, (name, slices) in enumerate(ways):
        one = which - which % 2
        faster, smaller = median(steps[one]) / median(steps[which]), peaks[which] / peaks[one]
        row = f"{median(steps[which]):.2f}", f"{faster:.2f}", f"{peaks[which] / 1e6:,.0f}", f"{smaller:.2f}"
        section.add(name, str(slices), *row, f"{losses[which]:.6f}")
    return section


def sequences(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = Parser(description=__doc__)
    parser.add_argument("what", choices=("memory", "speed", "mixers", "latents"))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--token-slices", type=int, default=16, metavar="S")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--width", type=int, default=HIDDEN, help="hidden size of `memory` and `latents`, a multiple of 64"
    )
    parser.add_argument("--stages", type=int, default=1, help="of `memory`, each in a process of its own")
    parser.add_argument("--window", type=int, metavar="W", help="sliding window of all layers")
    parser.add_argument("--only", nargs="+", choices=("stage", "bf16", "offload", "whole"), help="ways of `memory`")
    parser.add_argument("--threads", type=int, default=1, help="of the rank of `memory`")
    parser.add_argument("--recompute", choices=("none", "stage", "full"), default="none", help="of all but `memory`")
    parser.add_argument("--rounds", type=int, default=3, help="of all but `memory`")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds of `speed` that are not counted")
    options = parser.parse_args(argv)
    print({"memory": memory, "speed": speed, "mixers": mixers, "latents": latents}[options.what](options).markdown())


PREDICTIONS = Path(__file__).parents[1] / "docs" / "benchmarks" / "long-sequences-h100.csv"
MODELS = ("llama3-8b", "llama3-70b")
LENGTHS = tuple(1024 * thousands for thousands in (128, 512, 1024, 2048))
DEVICES = (8, 32, 64, 256)
USUAL = ("dp 1", "micro-batch 1", "ZeRO 1")
"""Parts of a strategy that the table leaves out."""
MOST_DOUBLINGS = 3
"""How often the sequences of a step are doubled until something fits."""


@dataclass(frozen=True, kw_only=True)
class Ours:
    """Our best strategy."""

    strategy: str
    simulated_s: float
    """Seconds of an iteration on its schedule."""
    closed_form_s: float
    """The same in closed form."""
    device_bytes: float
    host_bytes: float
    """Of the fullest host, for copies; 0 = none."""
    mfu_causal: float
    """Without the scores that causal attention never computes."""
    could_save: float
    """Share of the time that a strategy which was not simulated could save at most."""


@dataclass(frozen=True, kw_only=True)
class Theirs:
    """The rival."""

    num_ranks: int
    ranks_of_sequence: int
    """Those that share a sequence."""
    on_host: tuple[str, ...]
    time_s: float
    """Seconds of an iteration."""
    device_bytes: float
    host_bytes: float
    mfu_causal: float
    """Of the devices in use."""
    why_not: str | None
    """Why it does not fit; None = it fits."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a table: one model, length and cluster."""

    model: str
    seq_length: int
    num_devices: int
    least_sequences: int
    global_batch_size: int
    ours: Ours | None
    theirs: Theirs | None

    @property
    def key(self) -> tuple[str, int, int, int]:
        """Model, length, devices and sequences."""
        return self.model, self.seq_length, self.num_devices, self.least_sequences

    @property
    def sequences_for_all_devices(self) -> int:
        """Sequences of a step with which the rival uses all devices."""
        if self.theirs is None:
            return self.global_batch_size
        return self.global_batch_size * self.num_devices // self.theirs.num_ranks

    @classmethod
    def read(cls, line: str) -> "Row":
        """Return the row of a line of JSON."""
        values = json.loads(line)
        for name, kind in (("ours", Ours), ("theirs", Theirs)):
            values[name] = None if values[name] is None else kind(**values[name])
        return cls(**values)


def cluster_of(num_devices: int) -> Cluster:
    """Return so many H100 with 80 GB, eight on a node."""
    return parse_cluster({"nodes": [{"machine": "dgx-h100", "count": num_devices // 8}]}, "table")[0]


def found(workload: Workload, cluster: Cluster, global_batch_size: int) -> tuple[Pricing, SearchResult]:
    """Return the pricing of the strategies, and the best of them."""
    problem = SearchProblem(workload=workload, cluster=cluster, global_batch_size=global_batch_size)
    pricing = Pricing(workload, cluster)
    return pricing, search(problem, all_choices(problem), lambda nodes: Pricing(workload, nodes), top=3)


def row_of(model: str, seq_length: int, num_devices: int, least_sequences: int) -> Row:
    """Return one line of a table; `least_sequences` are doubled until something fits. It takes some seconds."""
    workload, cluster = read_workload(model, {"seq_length": seq_length}), cluster_of(num_devices)
    global_batch_size, winner, could_save = least_sequences, None, 0.0
    for sequences in (least_sequences * 2**doublings for doublings in range(MOST_DOUBLINGS + 1)):
        pricing, result = found(workload, cluster, sequences)
        winner, could_save = next(iter(result.entries), None), result.could_save
        if winner is not None:
            global_batch_size = sequences
            break
    of_alst = Pricing(workload, cluster, software=ALST)
    rival = best_rival(of_alst, global_batch_size, headroom=MEMORY_HEADROOM)
    theirs = None if rival is None else _theirs(rival, of_alst)
    return Row(
        model=model,
        seq_length=seq_length,
        num_devices=num_devices,
        least_sequences=least_sequences,
        global_batch_size=global_batch_size,
        ours=None if winner is None else _ours(winner, pricing, could_save),
        theirs=theirs,
    )


def causal_mfu(strategy: Strategy, pricing: Pricing, time_s: float) -> float:
    """Return the causal MFU of an iteration of `time_s` seconds, in [0, 1]."""
    batch = strategy.num_sequences
    problem = SearchProblem(workload=pricing.workload, cluster=pricing.cluster, global_batch_size=batch)
    found = speed_of(problem, strategy, time_s).mfu_causal
    assert found is not None, "the devices are in the library"
    return found


def _ours(winner: Ranked, pricing: Pricing, could_save: float) -> Ours:
    assert winner.prediction is not None
    simulated_s = winner.prediction.iteration_time_s
    return Ours(
        strategy=strategy_text(winner.strategy),
        simulated_s=simulated_s,
        closed_form_s=float(pricing.cost_model.closed_form_s(winner.strategy)[0]),
        device_bytes=winner.prediction.peak_memory_bytes,
        host_bytes=host_bytes(winner.strategy, pricing),
        mfu_causal=causal_mfu(winner.strategy, pricing, simulated_s),
        could_save=could_save,
    )


def host_bytes(strategy: Strategy, pricing: Pricing) -> float:
    """Return the bytes that wait on the fullest host at most, each rank at the moment when it has the most there."""
    plan = pricing.host_copies(strategy)
    if plan is None:
        return 0.0
    of_rank = []
    for copies in plan.ranks:
        sizes, places = np.append(copies.size, -copies.size), np.append(copies.offload, copies.reader)
        of_rank.append(np.cumsum(sizes[np.lexsort((sizes, places))]).max(initial=0.0))
    of_host: Counter[int] = Counter()
    for rank, node in enumerate(pricing.cluster.node_of_device):
        of_host[node] += of_rank[rank * strategy.pipeline_parallel_size // strategy.world_size]
    return max(of_host.values())


def _theirs(rival: Rival, pricing: Pricing) -> Theirs:
    strategy, time_s = rival.strategy, rival.prediction.iteration_time_s
    utilization = causal_mfu(strategy, pricing, time_s)
    assert utilization is not None
    lacking = [f"{needed / 1e9:.0f} GB of a {at}, of {limit / 1e9:.0f} GB" for at, needed, limit in rival.lacking]
    return Theirs(
        num_ranks=strategy.world_size,
        ranks_of_sequence=strategy.sequence_parallel_size,
        on_host=rival.on_host,
        time_s=time_s,
        device_bytes=rival.prediction.peak_memory_bytes,
        host_bytes=rival.host_bytes,
        mfu_causal=utilization,
        why_not=f"it needs {' and '.join(lacking)}" if lacking else None,
    )


def rows_of(models: Sequence[str], path: Path | None) -> Iterator[Row]:
    """Yield all lines; those that a file has are read, the others appended to it.

    Args:
        path: of the file; None = nothing is kept.
    """
    known = {}
    if path is not None and path.exists():
        known = {row.key: row for row in map(Row.read, path.read_text(encoding="utf-8").splitlines())}

    def row(model: str, seq_length: int, num_devices: int, least_sequences: int) -> Row:
        """Return a line that is known, or find it and keep it."""
        key = model, seq_length, num_devices, least_sequences
        if key not in known:
            known[key] = row_of(*key)
            if path is not None:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(known[key])) + "\n")
        print(f"{key}: {cells(known[key])}", file=sys.stderr)
        return known[key]

    for model, seq_length, num_devices in product(models, LENGTHS, DEVICES):
        first = row(model, seq_length, num_devices, 1)
        yield first
        if first.sequences_for_all_devices > first.global_batch_size:
            yield row(model, seq_length, num_devices, first.sequences_for_all_devices)


HEAD = (
    *("model", "tokens", "devices", "batch"),
    *("strategy", "time", "closed-form time", "device memory", "host memory", "causal MFU"),
    *("ALST ranks", "ALST time", "ALST device memory", "ALST host memory", "ALST causal MFU", "ALST time / ours"),
)


def cells(row: Row) -> list[str]:
    """Return the cells of a line, as many as the head has."""
    return [
        row.model,
        f"{row.seq_length // 1024} K",
        str(row.num_devices),
        str(row.global_batch_size),
        *_of_ours(row),
        *_of_theirs(row),
    ]


def _of_ours(row: Row) -> list[str]:
    if row.ours is None:
        return ["nothing fits", *[""] * 5]
    ours = row.ours
    return [
        " · ".join(part for part in ours.strategy.split(" · ") if part not in USUAL),
        time_text(ours.simulated_s),
        time_text(ours.closed_form_s),
        f"{ours.device_bytes / GIGABYTE:.0f} GB",
        bytes_text(ours.host_bytes) if ours.host_bytes else "-",
        f"{ours.mfu_causal:.0%}",
    ]


def _of_theirs(row: Row) -> list[str]:
    if row.theirs is None:
        return [""] * 6
    theirs = row.theirs
    ranks = str(theirs.num_ranks)
    if theirs.ranks_of_sequence < theirs.num_ranks:
        ranks += f", {theirs.ranks_of_sequence} a sequence"
    memory = [f"{theirs.device_bytes / GIGABYTE:.0f} GB", bytes_text(theirs.host_bytes) if theirs.on_host else "-"]
    if theirs.why_not is not None:
        return [f"{ranks}: does not fit", "", *memory, "", ""]
    ratio = "" if row.ours is None else f"{theirs.time_s / row.ours.simulated_s:.2f}"
    return [ranks, time_text(theirs.time_s), *memory, f"{theirs.mfu_causal:.0%}", ratio]


def write_table(argv: Sequence[str] | None = None) -> None:
    """Write the predictions as a CSV."""
    parser = Parser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, help="only this one (default: all)")
    parser.add_argument("--rows", type=Path, metavar="FILE.jsonl", help="file of rows to go on with")
    parser.add_argument("--output", type=Path, default=PREDICTIONS, metavar="FILE.csv")
    options = parser.parse_args(argv)
    rows = list(rows_of((options.model,) if options.model else MODELS, options.rows))
    with options.output.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEAD, *map(cells, rows)])


VOCAB, END = 50257, 0
Result = TypeVar("Result")


def timed(what: str, action: Callable[[], Result]) -> Result:
    """Return the result of an action, and print its seconds."""
    start = time.perf_counter()
    result = action()
    print(f"  {what:44} {time.perf_counter() - start:8.3f} s", flush=True)
    return result


def prepare(prefix: Path, seq_length: int, token_slices: int) -> None:
    """Order, read and prepare one sample; print the time of each part."""
    indexed = timed("open and check the index", lambda: IndexedDataset(prefix))
    documents = range(len(indexed))
    dataset = timed(
        "order of documents and samples",
        lambda: GPTDataset(indexed, documents, seq_length=seq_length, num_samples=4, seed=1, vocab_size=VOCAB),
    )
    ids = timed("read a sample", lambda: dataset[0])
    batch = timed(
        "tokens, labels, mask, documents",
        lambda: MicroBatch.from_samples(torch.from_numpy(ids[None]), separating_eod=END, masked_eod=END),
    )
    found = Documents(batch.document_starts)
    cuts = DocumentCuts(
        seq_length=seq_length, num_token_slices=token_slices, linear_cost=24_576, attention_costs={None: 1}
    )
    cut = timed("lengths of token slices by documents", lambda: cuts.cut(batch.document_starts))
    timed("positions of all tokens", lambda: found.positions(0, seq_length))
    timed("runs of all token slices, for kernels", lambda: found.on(torch.device("meta"), TokenSlices(cut.lengths)))

    def pieces() -> int:
        return sum(
            sum(
                1
                for _ in document_attention(lambda *_: None, found, end)._pieces(
                    torch.empty(1, end - start), torch.empty(1, end)
                )
            )
            for start, end in cut.bounds()
        )

    number = timed("pieces of documents, for one layer on CPUs", pieces)
    print(f"  {len(batch.document_starts[0])} documents, {number} pieces in {len(cut)} token slices")


def samples_speed(argv: Sequence[str] | None = None) -> None:
    """Write data, measure, and print tables."""
    parser = Parser(description=__doc__)
    parser.add_argument("--seq-length", type=int, default=4_000_000)
    parser.add_argument("--document-length", type=int, default=40, help="tokens of a short document")
    parser.add_argument("--token-slices", type=int, default=64, metavar="S")
    options = parser.parse_args(argv)
    tokens = options.seq_length * 4 + 1
    for name, length in (("short documents", options.document_length), ("one long document", tokens)):
        with TemporaryDirectory() as folder:
            prefix = Path(folder) / "corpus"
            document = np.full(length, 7, np.uint16)
            document[-1] = END
            with IndexedDatasetWriter(prefix, VOCAB) as writer:
                for _ in range(-(-tokens // length)):
                    writer.add_document(document)
            print(f"a sample of {options.seq_length:,} tokens from {name} of {length:,} tokens")
            prepare(prefix, options.seq_length, options.token_slices)


def main(argv: Sequence[str] | None = None) -> object:
    """Run the named measurement, by default the first."""
    return run_named({"sequences": sequences, "table": write_table, "samples": samples_speed}, argv)


if __name__ == "__main__":
    main()
