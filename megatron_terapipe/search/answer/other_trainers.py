"""Other trainers for the same question: the best strategy of each, found by the same search.

ZeRO 3 with Ulysses (DeepSpeed's ALST) has no pipeline, and formulas of its own:

    all_strategies x ON_HOST -> rival_memory, rival_time -> best_rival: the fastest that fits, or the nearest to fitting

Bytes. Each of R ranks keeps an R-th of weights, gradients and optimizer state. A layer is recomputed from its input,
of 2h bytes for each token (arXiv 2506.13996 section 3). A rank needs the most in the
backward of one attention, whose heads have all tokens. With n = tokens of a rank, u = 2nh bytes of a hidden state and
q = 2nd a bytes of its queries (a heads of d numbers) there are

    5 u      input of the layer, both norms, the residual, and the gradient of the residual
    q        output of attention, as the product after it reads it
    2 q      queries and output, as FlashAttention's backward reads them
    2 q      gradient of the output, before and after the exchange; one where there is none
    q + 2 q  gradient of the queries, and its sum in fp32 (`dq_accum` of flash_attn 2)
    4 k      keys, values and their gradients, k = 2nd x heads of keys, copied where ranks are more than these
    2 q      gradients of keys and values for each head of queries, where heads of keys are fewer
    4na      logarithms of the softmax' sums

With h = da that is 15 u + 4 k. `tests/search/answer/test_other_trainers.py` holds it against ArcticTraining's longest
sequences.

Seconds are from the cost model with the description `ALST`, and more. Copies of checkpoints to the
host and back wait for each other and for the layer: memory there is not page-locked (ArcticTraining,
`monkey_patches.py`, `CheckpointFunctionWithCPUOffload`). MLPs run in tiles of h tokens, and forward three times: the
tiled backward repeats the recomputation (DeepSpeed, `TiledMLP`).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_terapipe.config.flops import LOG_SUM_EXP_BYTES
from megatron_terapipe.search.answer.json_documents import WhatIfPart
from megatron_terapipe.search.answer.question import Question
from megatron_terapipe.search.machine.software import Software
from megatron_terapipe.search.machine.trainers import ALST, FSDP, MEGATRON_CORE
from megatron_terapipe.search.price.cost_model import CostModel, Prediction, Pricing
from megatron_terapipe.search.price.layer_times import LayerQuery
from megatron_terapipe.search.price.links import ALONE, LayerLinks
from megatron_terapipe.search.price.memory import MemoryOverheads, RankMemory, default_overheads
from megatron_terapipe.search.price.workload import Attention, Layer, Workload
from megatron_terapipe.search.rank.grid_prices import FITS, HEADROOM
from megatron_terapipe.search.rank.search import Ranked, priced
from megatron_terapipe.search.rank.space import SearchProblem, divisors
from megatron_terapipe.strategy import Strategy
from megatron_terapipe.texts import bytes_text, layout_text, strategy_text, time_text

ON_HOST = (
    (),
    ("checkpoints",),
    ("optimizer",),
    ("checkpoints", "optimizer"),
    ("optimizer", "weights"),
    ("checkpoints", "optimizer", "weights"),
)
"""Combinations that are tried of tensors in the memory of the host: `checkpoints` (inputs of layers), `optimizer`
(gradients and state; the host steps), `weights` (the ranks' parts of them), which the recipes move last."""


def all_strategies(workload: Workload, num_devices: int, global_batch_size: int) -> Iterator[Strategy]:
    """Yield every way to run a model on as many devices as it can use.

    A group has at most as many ranks as the attention has heads, and needs a sequence: a small batch leaves devices
    unused. Only sizes that use most of them are tried.
    """
    sizes = [
        (sequence, data)
        for sequence in divisors(num_devices)
        if _can_share(workload, sequence)
        for data in divisors(num_devices // sequence)
        if global_batch_size % data == 0
    ]
    most = max((sequence * data for sequence, data in sizes), default=0)
    for sequence, data in sizes:
        for micro_batch in divisors(global_batch_size // data) if sequence * data == most else ():
            yield Strategy(
                sequence_parallel_size=sequence,
                data_parallel_size=data,
                micro_batch_size=micro_batch,
                global_batch_size=global_batch_size,
                recompute="full",
                zero_stage=3,
            )


def _can_share(workload: Workload, ranks: int) -> bool:
    """Whether ranks can share a sequence: its tokens, and all heads as `UlyssesSPAttentionHF` asks for.

    Heads of keys are copied where ranks are more.
    """
    attentions = {layer.attention for layer in workload.layers if layer.attention is not None}
    return workload.seq_length % ranks == 0 and all(
        each.query_heads % ranks == 0 and (each.key_value_heads % ranks == 0 or ranks % each.key_value_heads == 0)
        for each in attentions
    )


NUMBER = 2  # bytes of a number in bf16
OPTIMIZER_BYTES = 12  # bytes of a parameter's copy in fp32 and of its two moments (arXiv 1910.02054 section 3.1)

BUCKET_ELEMENTS = 500_000_000
"""Elements of the bucket in which gradients are reduced (`reduce_bucket_size` of DeepSpeed)."""

HOST_PARAMETER_BYTES = 26
"""Bytes of the host for each parameter whose optimizer is there. 16 are counted: copy, moments and gradient in fp32.
The rest is fitted to the longest sequences of Llama-70B on 8 to 64 H100, one of which is at the limit of the host's
memory; page-locked buffers are rounded up to powers of two."""

GATHERED_LAYERS = 2  # layers whose weights are whole at once: one computes, the next is gathered


def rival_memory(
    workload: Workload, strategy: Strategy, on_host: tuple[str, ...], overheads: MemoryOverheads, ranks_of_host: int
) -> tuple[RankMemory, float]:
    """Return the bytes of a device, and of the fullest host."""
    parameters = workload.parameters
    part = parameters / strategy.world_size
    tokens = strategy.micro_batch_size * workload.seq_length / strategy.sequence_parallel_size
    kept = overheads.state_factor * part * NUMBER
    steps = "optimizer" not in on_host
    whole = max(layer.parameters for layer in workload.layers)
    checkpoints = sum(tokens * NUMBER * layer.hidden_size for layer in workload.layers if layer.kind == "block")
    working = max(working_bytes(layer, tokens, strategy.sequence_parallel_size) for layer in workload.layers)
    held = checkpoints * ("checkpoints" in on_host) + part * (
        HOST_PARAMETER_BYTES * ("optimizer" in on_host) + NUMBER * ("weights" in on_host)
    )
    communicators = (strategy.world_size > 1) + (strategy.sequence_parallel_size > 1)
    gathered = NUMBER * (GATHERED_LAYERS * whole + min(BUCKET_ELEMENTS, parameters))
    of_device = RankMemory(
        weights=kept * ("weights" not in on_host),
        gradients=kept * steps,
        optimizer=kept * OPTIMIZER_BYTES / NUMBER * steps,
        activations=overheads.activation_factor * checkpoints * ("checkpoints" not in on_host),
        key_values=0.0,
        logits=0.0,
        buffers=gathered + overheads.activation_factor * working,
        framework=overheads.framework_bytes + communicators * overheads.communicator_bytes,
    )
    return of_device, ranks_of_host * held


def working_bytes(layer: Layer, tokens: float, sequence_parallel_size: int) -> float:
    """Return the bytes that the backward of one layer holds at its fullest, on one of the ranks that share tokens."""
    hidden = tokens * NUMBER * layer.hidden_size
    if layer.kind != "block":
        # Hidden states and gradients around the head; its logits are computed as many numbers at a time.
        return 6 * hidden
    # Tiles of h tokens: the numbers between its products, and their gradients.
    tile = min(tokens, layer.hidden_size) * NUMBER * 2 * (2 + layer.gated) * layer.activation_width
    if layer.attention is None:
        return 5 * hidden + tile
    return 5 * hidden + max(attention_bytes(layer.attention, tokens, sequence_parallel_size), tile)


def attention_bytes(attention: Attention, tokens: float, sequence_parallel_size: int) -> float:
    """Return the bytes that the backward of one attention holds on such a rank, as the text above counts them."""
    copies = max(sequence_parallel_size / attention.key_value_heads, 1.0)
    queries = tokens * NUMBER * attention.query_heads * attention.head_size
    keys = tokens * NUMBER * attention.key_value_heads * copies * attention.head_size
    grouped = attention.query_heads > attention.key_value_heads * copies
    logarithms = tokens * LOG_SUM_EXP_BYTES * attention.query_heads
    return (7 + (sequence_parallel_size > 1) + 2 * grouped) * queries + 4 * keys + logarithms


PAGEABLE_SHARE = 0.25
"""Speed of a copy from or to memory of the host that is not page-locked, relative to memory that is. A guess."""

HOST_STEP_PARAMETERS_PER_S = 4e9
"""Parameters that the Adam of one host steps in a second: ten billion took 2.6 s (ZeRO-Offload, arXiv 2101.06840 table
4; from memory)."""


def rival_time(model: CostModel, strategy: Strategy, on_host: tuple[str, ...] = ()) -> Prediction:
    """Return the time of an iteration, by a cost model of `ALST`."""
    found, workload, micro_batches = model.predict_time(strategy), model.workload, strategy.num_micro_batches
    groups = model.groups(strategy)
    nodes = [model.cluster.nodes[index] for index in set(groups.nodes.reshape(-1).tolist())]
    to_host = min(node.host.bandwidth for node in nodes) * model.efficiency.host_efficiency
    part = NUMBER * workload.parameters / strategy.world_size
    blocks = Counter(layer for layer in workload.layers if layer.kind == "block")
    again, copied, optimizer_s = 0.0, 0.0, found.breakdown.optimizer_s
    for mlp, count in ((mlp_of(layer), count) for layer, count in blocks.items()):
        queries = [
            LayerQuery(
                mlp,
                device,
                tensor_parallel_size=1.0,
                sequence_parallel_size=float(strategy.sequence_parallel_size),
                micro_batch_size=float(strategy.micro_batch_size),
                start=0.0,
                end=float(mlp.tokens),
                recompute="none",
            )
            for device in groups.devices[0]
        ]
        again += count * max(float(model.prices.of_layer(query, LayerLinks(ALONE)).forward) for query in queries)
    if "checkpoints" in on_host:
        sequences = strategy.micro_batch_size / strategy.sequence_parallel_size
        inputs = sum(NUMBER * sequences * count * layer.output_elements for layer, count in blocks.items())
        copied += 2 * inputs / (to_host * PAGEABLE_SHARE)
    if "weights" in on_host:
        # A rank's part of the weights comes from the host before each gather.
        copied += 2 * part / to_host
    if "optimizer" in on_host:
        # Gradients go to the host after each micro-batch, and weights come back.
        stepping = workload.parameters / len(nodes) / HOST_STEP_PARAMETERS_PER_S
        optimizer_s = stepping + (micro_batches + 1) * part / to_host
    breakdown = replace(
        found.breakdown,
        compute_s=found.breakdown.compute_s + micro_batches * again,
        host_copy_s=micro_batches * copied,
        optimizer_s=optimizer_s,
    )
    return replace(found, breakdown=breakdown, iteration_time_s=breakdown.total_s)


def mlp_of(layer: Layer) -> Layer:
    """Return the MLP of a layer without the rest."""
    mixes_tokens = layer.attention is not None or layer.recurrence is not None
    products = layer.products[2 if mixes_tokens else 0 :] if layer.activation_width else ()
    without = {"attention": None, "recurrence": None, "num_norms": 0, "num_biases": 0, "rotary_channels": 0}
    return replace(layer, products=products, **without)  # type: ignore[arg-type]


LEAST_TOKENS = 32_768
"""Tokens of a sequence from which a rival is priced: in shorter ones recomputation is useless."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """A way to run ZeRO 3 with Ulysses, priced."""

    strategy: Strategy
    on_host: tuple[str, ...]
    prediction: Prediction
    host_bytes: float
    """Bytes of the fullest host."""
    lacking: list[tuple[str, float, float]]
    """(place, needed, limit) of each place with too little memory."""


def has_rival(problem: SearchProblem) -> bool:
    """Whether it is priced: for a GPT without experts in bf16 with a long sequence."""
    workload = problem.workload
    is_gpt = workload.config is not None and workload.experts is None
    return is_gpt and workload.seq_length >= LEAST_TOKENS and problem.precision == "bf16"


def best_rival(pricing: Pricing, global_batch_size: int, *, headroom: float = 0.0) -> Rival | None:
    """Return the fastest way to run ZeRO 3 with Ulysses that fits, else the one nearest to fitting.

    None if there is no way: its ranks cannot share the heads, or the batch.

    Args:
        pricing: with `ALST`.
        headroom: share of each device that stays free.
    """
    workload, nodes = pricing.workload, pricing.cluster.nodes
    overheads = default_overheads(pricing.cluster, ALST)
    device_limit = min(node.device.memory_bytes for node in nodes) * overheads.usable_share * (1 - headroom)
    host_limit = min(node.host.memory_bytes for node in nodes)
    ranks_of_host = max(node.num_devices for node in nodes)
    held = {
        (each, on_host): rival_memory(workload, each, on_host, overheads, min(ranks_of_host, each.world_size))
        for each in all_strategies(workload, pricing.cluster.num_devices, global_batch_size)
        for on_host in ON_HOST
    }
    if not held:
        return None
    fullness = {each: max(memory.total / device_limit, host / host_limit) for each, (memory, host) in held.items()}
    fitting = [each for each in held if fullness[each] <= 1] or [min(held, key=fullness.__getitem__)]
    times = {each: rival_time(pricing.cost_model, *each) for each in fitting}
    best = min(times, key=lambda each: times[each].iteration_time_s)
    memory, host_bytes = held[best]
    places = ("device", memory.total, device_limit), ("host", host_bytes, host_limit)
    return Rival(
        strategy=best[0],
        on_host=best[1],
        prediction=replace(times[best], memory=(memory,)),
        host_bytes=host_bytes,
        lacking=[place for place in places if place[1] > place[2]],
    )


FASTER = 0.98  # seconds of another trainer, relative to the winner, up to which a line advises it


def other_trainers(asked: Question, winner: Ranked | None) -> Iterator[WhatIfPart]:
    """Yield the best of each other trainer on all devices; of ZeRO 3 with Ulysses only for long sequences on GPUs."""
    problem = asked.problem
    if not all(node.device.is_gpu for node in problem.cluster.nodes):
        return
    for software in (MEGATRON_CORE, FSDP):
        precisions = {each.precision for each in software.states}
        if software.name == problem.software.name or problem.precision not in precisions:
            continue
        theirs = asked.changed({}, software=software)
        result = theirs.search()
        if result.entries:
            theirs, entry = min(_exchanges(theirs, result.entries[0]), key=lambda each: each[1].iteration_time_s)
            yield _answer(problem, winner, theirs.problem.software, entry.strategy, entry.price)
        else:
            broken = [name for name, number in result.counts.rejected.items() if number][-1:]
            line = f"{software.title} cannot run it: {why_none(*broken)}"
            yield WhatIfPart(name=software.name, change=0.0, line=line)
    if has_rival(problem):
        pricing = asked.changed({}, software=ALST).pricing
        rival = best_rival(pricing, problem.global_batch_size, headroom=problem.memory_headroom)
        if rival is None:
            return
        on_host = f"; on the host: {', '.join(rival.on_host)}" if rival.on_host else ""
        found = _answer(problem, winner, ALST, rival.strategy, rival.prediction, on_host)
        lacking = [f"{bytes_text(needed)} of a {at}, of {bytes_text(limit)}" for at, needed, limit in rival.lacking]
        line = f"{ALST.title} needs {' and '.join(lacking)}"
        yield WhatIfPart(name=ALST.name, strategy=found.strategy, change=0.0, line=line) if lacking else found


def _exchanges(theirs: Question, entry: Ranked) -> Iterator[tuple[Question, Ranked]]:
    """Yield a strategy with context ranks in a ring, and with all-to-alls, where they divide the heads of keys."""
    yield theirs, entry
    software, strategy = theirs.problem.software, entry.strategy
    ranks = strategy.sequence_parallel_size * strategy.tensor_parallel_size
    heads = {layer.attention.key_value_heads for layer in theirs.problem.workload.layers if layer.attention}
    if (
        software.name == MEGATRON_CORE.name
        and strategy.sequence_parallel_size > 1
        and not any(n % ranks for n in heads)
    ):
        exchanging = replace(
            software,
            title=f"{software.title}, --cp-comm-type a2a,",
            communication=replace(software.communication, ring=False),
        )
        theirs = theirs.changed({}, software=exchanging)
        found = priced(strategy, theirs.pricing, theirs.problem.memory_headroom)
        if found is not None:
            yield theirs, found


def why_none(broken: str = "") -> str:
    """Return why another trainer cannot run it, from the rule that the last of its strategies break."""
    if broken in (FITS, HEADROOM):
        return "no strategy of it fits the memory"
    return f"the last of its strategies break the rule '{broken}'"


def _answer(
    problem: SearchProblem,
    winner: Ranked | None,
    software: Software,
    strategy: Strategy,
    price: Prediction,
    on_host: str = "",
) -> WhatIfPart:
    """Return the best strategy of a trainer, compared with the winner; None = nothing of the ranked trainer fits."""
    ratio = 0.0 if winner is None else price.iteration_time_s / winner.iteration_time_s
    compared = "" if winner is None else f", {ratio:.2f} times rank 1"
    run, ours = _measured(software, problem), _measured(problem.software, problem)
    trial = f" No published run of {problem.software.title}, of rank 1, is like this one: run a trial first."
    advised = "; see --software" if ratio <= FASTER and software is not ALST else ""
    time, measured = time_text(price.iteration_time_s), f"measured: {run}" if run else "no published run like it"
    return WhatIfPart(
        name=software.name,
        strategy=strategy,
        iteration_time_s=price.iteration_time_s,
        change=max(0.0, 1 - ratio),
        line=f"{software.name}: {time}{compared} ({layout_text(strategy)}; {measured}){advised}",
        more=f"{software.title} holds {bytes_text(price.peak_memory_bytes)} on a device with {strategy_text(strategy)}"
        f"{on_host}.{trial if run and not ours else ''}",
    )


def _measured(software: Software, problem: SearchProblem) -> str | None:
    """Return published runs of a trainer that are like a problem; None without, and for all other layers."""
    workload, cluster = problem.workload, problem.cluster
    if any(layer.recurrence or (layer.attention and layer.attention.latent) for layer in workload.layers):
        return None
    devices = dict.fromkeys(node.device for node in cluster.nodes)
    kind = "experts" if workload.experts else "dense"
    return software.measured_on(devices, cluster.num_devices, kind, workload.parameters)
