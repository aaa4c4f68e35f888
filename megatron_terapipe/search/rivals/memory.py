"""Bytes of ZeRO 3 with Ulysses, on a device and on a host.

Each of R ranks keeps an R-th of weights, gradients and optimizer state. A layer is recomputed from its input, which is
all that stays of it: 2h bytes of each token (arXiv 2506.13996 section 3). What is left is the moment in which a rank
needs the most: the backward of one attention, whose heads have all tokens. With n = tokens of a rank, u = 2nh bytes of
a hidden state and q = 2nd a bytes of its queries (a heads of d numbers) there are

    5 u      input of the layer, both norms, the residual, and the gradient of the residual
    q        output of attention, as the product behind it reads it
    2 q      queries and output, as FlashAttention's backward reads them
    2 q      gradient of the output, before and behind the exchange; one where there is none
    q + 2 q  gradient of the queries, and its sum in fp32 (`dq_accum` of flash_attn 2)
    4 k      keys, values and their gradients, k = 2nd x heads of keys, copied where ranks are more than these
    2 q      gradients of keys and values for each head of queries, where heads of keys are fewer
    4na      logarithms of the softmax' sums

With h = da that is 15 u + 4 k. `tests/search/rivals` holds it against the longest sequences of ArcticTraining's
recipes.
"""

from dataclasses import dataclass, fields

from megatron_terapipe.config.model.flops import LOG_SUM_EXP_BYTES
from megatron_terapipe.search.cost.memory.overheads import MemoryOverheads
from megatron_terapipe.search.inputs.layer import Attention, Layer
from megatron_terapipe.search.inputs.workload import Workload
from megatron_terapipe.search.rivals.settings import RivalSettings

NUMBER = 2
"""Bytes of a number in bf16."""

OPTIMIZER_BYTES = 12
"""Bytes of a parameter's copy in fp32 and of its two moments (arXiv 1910.02054 section 3.1)."""

BUCKET_ELEMENTS = 500_000_000
"""Elements of the bucket in which gradients are reduced (`reduce_bucket_size` of DeepSpeed)."""

HOST_PARAMETER_BYTES = 26
"""Bytes of the host for each parameter whose optimizer is there. 16 are counted: copy, moments and gradient in fp32.
The rest is fitted to the longest sequences of Llama-70B on 8 to 64 H100, one of which is said to be at the brink of the
host's memory; page-locked buffers, for one, are rounded up to powers of two."""

GATHERED_LAYERS = 2
"""Layers whose weights are whole at once: one computes, the next is gathered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RivalMemory:
    """Bytes on one device, which add up, and on the fullest host."""

    states: float
    """Parts of weights, gradients and optimizer state."""
    gathered: float
    """Weights of whole layers, their gradients, and the bucket."""
    checkpoints: float
    """Inputs of all layers, where they stay on the device."""
    working: float
    """What the backward of one layer holds."""
    framework: float
    """Context of the device and communicators."""
    host: float
    """Bytes on one host."""

    @property
    def device(self) -> float:
        """Bytes on one device."""
        return float(sum(getattr(self, each.name) for each in fields(self) if each.name != "host"))


def rival_memory(
    workload: Workload, settings: RivalSettings, overheads: MemoryOverheads, ranks_of_host: int
) -> RivalMemory:
    """Return the bytes of a way to run a model."""
    parameters = workload.parameters
    part = parameters / settings.num_ranks
    tokens = settings.micro_batch_size * workload.seq_length / settings.sequence_parallel_size
    weights = 0 if settings.offloads_weights else NUMBER
    stepped = 0 if settings.offloads_optimizer else NUMBER + OPTIMIZER_BYTES
    whole = max(layer.parameters for layer in workload.layers)
    checkpoints = sum(tokens * NUMBER * layer.hidden_size for layer in workload.layers if layer.kind == "block")
    working = max(working_bytes(layer, tokens, settings.sequence_parallel_size) for layer in workload.layers)
    on_host = checkpoints * settings.offloads_checkpoints + part * (
        HOST_PARAMETER_BYTES * settings.offloads_optimizer + NUMBER * settings.offloads_weights
    )
    communicators = (settings.num_ranks > 1) + (settings.sequence_parallel_size > 1)
    return RivalMemory(
        states=overheads.state_factor * part * (weights + stepped),
        gathered=NUMBER * (GATHERED_LAYERS * whole + min(BUCKET_ELEMENTS, parameters)),
        checkpoints=overheads.activation_factor * checkpoints * (not settings.offloads_checkpoints),
        working=overheads.activation_factor * working,
        framework=overheads.framework_bytes + communicators * overheads.communicator_bytes,
        host=ranks_of_host * on_host,
    )


def working_bytes(layer: Layer, tokens: float, sequence_parallel_size: int) -> float:
    """Return the bytes that the backward of one layer holds on a rank, at its fullest.

    Args:
        tokens: tokens of the rank.
        sequence_parallel_size: ranks that share them.
    """
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
    """Return the bytes that the backward of one attention holds on a rank, as the text above counts them.

    Args:
        tokens: tokens of the rank.
        sequence_parallel_size: ranks that share them.
    """
    copies = max(sequence_parallel_size / attention.key_value_heads, 1.0)
    queries = tokens * NUMBER * attention.query_heads * attention.head_size
    keys = tokens * NUMBER * attention.key_value_heads * copies * attention.head_size
    grouped = attention.query_heads > attention.key_value_heads * copies
    logarithms = tokens * LOG_SUM_EXP_BYTES * attention.query_heads
    return (7 + (sequence_parallel_size > 1) + 2 * grouped) * queries + 4 * keys + logarithms
