"""Parameters, FLOPs, attended positions and activation bytes of the model: the one set of formulas, and cuts by them.

Metrics, the cost model of the search and the balanced cut into token slices all count with these. Sources:

    SC'21        Narayanan et al., Efficient Large-Scale Language Model Training, arXiv 2104.04473
    Korthikanti  Korthikanti et al., Reducing Activation Recomputation, arXiv 2205.05198

FLOPs count a multiplication and an addition as two, and only matrix products, as both papers do. A backward takes
twice its forward. Of experts only those that a token chooses count. Bytes and FLOPs are of the whole model, before any
parallelism divides them.

A token at position x attends to min(x + 1, W) positions in a sliding window of W tokens, itself included, and to x + 1
without one. For the tokens [s, e) these are, with (n)+ for max(n, 0),

    sum of x + 1                (e - s) (e + s + 1) / 2
    less sum of (x + 1 - W)+    (p - q) (p + q + 1) / 2        p = (e - W)+ and q = (s - W)+

Arguments are numbers, or arrays that broadcast; counts of whole numbers below 2^53 are exact.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING, Any, Literal

from deepspeed_ext.plan.costs import CHUNK_TOKENS
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config.layers import BlockShape, LatentSizes, Recurrence
from megatron_terapipe.config.model import ModelConfig

if TYPE_CHECKING:
    from deepspeed_ext.plan.solve.cuts import DocumentCuts


def attended_positions(start: Any, end: Any, window: int | None = None) -> Any:
    """Pairs of a token in [start, end) and a position that it attends to.

    Args:
        window: tokens that a token attends to, itself included; None for all before it.
    """
    pairs = (end - start) * (end + start + 1) / 2
    if window is None:
        return pairs
    first, last = _above_zero(start - window), _above_zero(end - window)
    return pairs - (last - first) * (last + first + 1) / 2


def positions_in_reach(start: Any, end: Any, window: int | None = None) -> Any:
    """Positions that the tokens [start, end) attend to, together.

    Args:
        window: tokens that a token attends to, itself included; None for all before it.
    """
    return end if window is None else end - _above_zero(start + 1 - window)


def _above_zero(number: Any) -> Any:
    return (number + abs(number)) / 2


BACKWARD_PER_FORWARD = 2
"""A backward computes the gradient of the input and of the weight: two products for each of the forward."""

FLASH_BACKWARD_PER_FORWARD = 2.5
"""A flash kernel keeps no scores: its backward computes them again, five products for the forward's two
(FlashAttention-2, arXiv 2307.08691 section 3.1)."""

LOG_SUM_EXP_BYTES = 4
"""Attention keeps one fp32 number per head and token, instead of a row of probabilities."""

LOGITS_AT_ONCE = 2**28
"""Logits of an output layer that a rank lets be alive: 1 GiB in fp32. Others are computed again in the backward.

With 131,072 words these are the logits of 2,048 tokens. Fewer at once would make the gradient of the weight slow, which
is read and written once for each time, 8 bytes a weight: at 2,048 tokens that is a third of the time of its product, on
a device that does 165 FLOPs a byte."""


Parallel = Literal["column", "row", "none"]
"""How tensor-parallel ranks share a matrix: by its outputs, by its inputs, or not at all."""


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product: the `inputs` numbers of each token times a weight of [inputs, outputs]."""

    inputs: int
    """Rows of the weight, before tensor-parallel ranks share it."""
    outputs: int
    parallel: Parallel = "none"

    @property
    def weights(self) -> int:
        """Entries of the weight."""
        return self.inputs * self.outputs

    def per_rank(self, tensor_parallel_size: int) -> tuple[float, float]:
        """Inputs and outputs of the part that one tensor-parallel rank computes."""
        inputs = self.inputs / tensor_parallel_size if self.parallel == "row" else float(self.inputs)
        outputs = self.outputs / tensor_parallel_size if self.parallel == "column" else float(self.outputs)
        return inputs, outputs


def block_products(model: ModelConfig, block: BlockShape) -> tuple[Product, ...]:
    """Return the matrices of a block that multiply every token, in order, without the router's."""
    hidden, of_heads = model.hidden_size, model.num_attention_heads * model.kv_channels
    found: tuple[Product, ...] = ()
    if (latent := block.latent) is not None:
        found = (
            Product(hidden, latent.query_rank + latent.kept_size),
            Product(latent.query_rank or hidden, of_heads, "column"),
            latent_expansion(model, latent),
            Product(model.num_attention_heads * latent.value_size, hidden, "row"),
        )
    elif block.num_key_value_heads:
        found = Product(hidden, query_key_value_channels(model, block), "column"), Product(of_heads, hidden, "row")
    if (sizes := block.recurrence) is not None:
        inputs = Product(hidden, recurrence_channels(sizes), "column")
        found += inputs, Product(sizes.num_heads * sizes.value_size, hidden, "row")
    if width := dense_width(block):
        found += mlp_products(model, width)
    return found + (Product(hidden, 1),) * has_shared_gate(model, block)


def query_key_value_channels(model: ModelConfig, block: BlockShape) -> int:
    """Channels of the queries, with their gates, the keys and the values of a token."""
    queries = (1 + model.attention_output_gate) * model.num_attention_heads
    return (queries + 2 * block.num_key_value_heads) * model.kv_channels


def mlp_products(model: ModelConfig, width: int) -> tuple[Product, Product]:
    """Return the matrices of one MLP, or of one expert, with a hidden layer of `width`."""
    return Product(model.hidden_size, (1 + model.gated) * width, "column"), Product(width, model.hidden_size, "row")


def latent_expansion(model: ModelConfig, sizes: LatentSizes) -> Product:
    """Return the matrix from the latent to the keys and values of all heads.

    Where latents are kept, a token slice computes its product for the tokens before it, too, and its backward again.
    """
    return Product(sizes.rank, model.num_attention_heads * (sizes.key_size + sizes.value_size), "column")


def _weights(products: Iterable[Product]) -> int:
    return sum(each.weights for each in products)


def latent_channels(sizes: LatentSizes, *, normed: bool, latents_kept: bool = False) -> int:
    """Numbers that latent attention keeps of a token for its products and norms, besides the queries of its heads.

    These are the inputs of norms and the normed query latent, or the output of the first product where queries have a
    latent without a norm; and the latent with the rotated key, the input of keys and values, unless it is kept for
    later token slices anyway.
    """
    inputs = 0 if latents_kept else sizes.kept_size
    if normed:
        return inputs + 2 * sizes.query_rank + sizes.rank
    return inputs + (sizes.query_rank + sizes.kept_size if sizes.query_rank else 0)


def recurrence_channels(sizes: Recurrence) -> int:
    """Outputs of the first projection of a recurrence: its inputs, gate, steps and, in a delta net, rates."""
    return convolved_channels(sizes) + sizes.num_heads * (sizes.value_size + 1 + (sizes.kind == "gated-delta-net"))


def convolved_channels(sizes: Recurrence) -> int:
    """Channels of queries, keys and values of a recurrence, which go through its convolution."""
    return 2 * sizes.num_groups * sizes.key_size + sizes.num_heads * sizes.value_size


def recurrence_parameters(sizes: Recurrence) -> int:
    """Parameters of a recurrence that ranks share, without its projections: convolution, decays, steps, skips, norm."""
    if sizes.kind == "gated-delta-net":
        return convolved_channels(sizes) * sizes.conv_size + 2 * sizes.num_heads
    of_heads = (3 + sizes.value_size) * sizes.num_heads
    return convolved_channels(sizes) * (sizes.conv_size + 1) + of_heads


def recurrence_flops_per_token(sizes: Recurrence) -> int:
    """Forward FLOPs of a token in the products of a recurrence, in chunks of C tokens; the same at every position.

    Of each group scores, 2CK, in a delta net also scores of its keys; of each head sums of values, 2CV, reading and
    writing the state, 4KV (Dao and Gu, arXiv 2405.21060 section 6), in a delta net reading it once more, 2KV, and a
    triangular system, C (K + V) (Yang et al., arXiv 2406.06484 section 3). Masked scores are computed.
    """
    heads, groups, key, value = sizes.num_heads, sizes.num_groups, sizes.key_size, sizes.value_size
    chunk = 2 * CHUNK_TOKENS * (groups * key + heads * value)
    states = 4 * heads * key * value
    if sizes.kind == "gated-delta-net":
        chunk += 2 * CHUNK_TOKENS * groups * key + CHUNK_TOKENS * heads * (key + value)
        states += 2 * heads * key * value
    return chunk + states


def state_bytes(sizes: Recurrence, element_bytes: int) -> int:
    """Bytes of the states of a sequence that a recurrence carries: matrices in fp32, and inputs of its convolution."""
    matrices = 4 * sizes.num_heads * sizes.key_size * sizes.value_size
    return matrices + (sizes.conv_size - 1) * convolved_channels(sizes) * element_bytes


def dense_width(block: BlockShape) -> int:
    """Width of the MLP that every token goes through: the shared experts together, or the MLP of a dense layer."""
    return block.shared_ffn_hidden_size if block.num_experts else block.ffn_hidden_size


def router_weights(model: ModelConfig, block: BlockShape) -> int:
    """Entries of the matrix of a router; each tensor- and expert-parallel rank has all of them."""
    return model.hidden_size * block.num_experts


def has_shared_gate(model: ModelConfig, block: BlockShape) -> bool:
    """Whether the shared experts of a block have a gate."""
    return bool(model.moe_shared_expert_gate and block.num_experts)


def expert_parameters(model: ModelConfig, block: BlockShape) -> int:
    """Parameters of the experts of a block without the shared ones. Expert-parallel ranks share them, others do not."""
    biases = model.has_mlp_bias * ((1 + model.gated) * block.ffn_hidden_size + model.hidden_size)
    return block.num_experts * (_weights(mlp_products(model, block.ffn_hidden_size)) + biases)


def block_parameters(model: ModelConfig, block: BlockShape) -> int:
    """Parameters of a block: matrices, their biases, and norms (SC'21 equation 2: 12h^2 + 13h)."""
    shared = _weights(each for each in block_products(model, block) if each.parallel != "none")
    if block.num_key_value_heads:
        heads = model.num_attention_heads + block.num_key_value_heads
        shared += model.has_qkv_bias * query_key_value_channels(model, block)
        shared += (model.qk_norm == "all-heads") * heads * model.kv_channels
        shared += (model.softmax_type == "learnable") * model.num_attention_heads
    if block.recurrence is not None:
        shared += recurrence_parameters(block.recurrence)
    shared += model.has_mlp_bias * (1 + model.gated) * dense_width(block)
    return shared + expert_parameters(model, block) + block_unshared_parameters(model, block)


def block_unshared_parameters(model: ModelConfig, block: BlockShape) -> int:
    """Parameters of a block of which every tensor-parallel rank has a copy.

    These are norms, router and its bias, biases after a reduction, and the matrix to latents.
    """
    has_attention, has_mlp = bool(block.num_key_value_heads), bool(dense_width(block))
    biases = has_attention * model.has_projection_bias + has_mlp * model.has_mlp_bias
    normed = 2 * model.kv_channels if block.latent is None else block.latent.query_rank + block.latent.rank
    of_heads = has_attention * (model.qk_norm in ("head", "head-rotated")) * _weights_of_norm(model) * normed
    norms = block_norms(model, block) * norm_parameters(model)
    if block.recurrence is not None and block.recurrence.kind == "gated-delta-net":
        norms += (1 + (model.normalization != "rmsnorm")) * block.recurrence.value_size
    router = router_weights(model, block) + model.has_router_bias * block.num_experts
    whole = _weights(each for each in block_products(model, block) if each.parallel == "none")
    return whole + norms + biases * model.hidden_size + of_heads + router


def block_norms(model: ModelConfig, block: BlockShape) -> int:
    """Count the norms of hidden states in a block."""
    parts = _parts(block)
    of_each = 2 if model.norm_placement == "both" else 1
    return parts * of_each - (model.shared_block_norm and parts == 2)


def _parts(block: BlockShape) -> int:
    """Count the parts of a block: attention or a recurrence, and an MLP or experts."""
    mixes_tokens = bool(block.num_key_value_heads) or block.recurrence is not None
    return mixes_tokens + bool(block.ffn_hidden_size)


def _weights_of_norm(model: ModelConfig) -> int:
    """Weights of a channel in a norm, its bias included."""
    return {"layernorm": 2, "layernorm-no-weights": 0}.get(model.normalization, 1)


def norm_parameters(model: ModelConfig) -> int:
    """Count the parameters of one norm."""
    return _weights_of_norm(model) * model.hidden_size


def embedding_parameters(model: ModelConfig) -> int:
    """Count the word embedding, padded, and the learned positions (SC'21 equation 2: (V + s)h)."""
    positions = model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else 0
    return (model.padded_vocab_size() + positions) * model.hidden_size


def output_parameters(model: ModelConfig) -> int:
    """Count the parameters that only the output layer has: none while it is tied to the word embedding."""
    tied = not model.untie_embeddings_and_output_weights
    return 0 if tied else model.padded_vocab_size() * (model.hidden_size + model.add_output_bias)


def model_parameters(model: ModelConfig, *, active: bool = False) -> int:
    """Count all parameters, tied ones once.

    Args:
        active: of the experts, count only those that a token chooses, as published for such models.
    """
    shapes = model.blocks_by_index.values()
    blocks = sum(block_parameters(model, block) for block in shapes)
    if active:
        for block in filter(lambda block: block.num_experts, shapes):
            unchosen = replace(block, num_experts=block.num_experts - model.moe_router_topk)
            blocks -= expert_parameters(model, unchosen)
    blocks += model.mtp_num_layers * prediction_parameters(model)
    return embedding_parameters(model) + blocks + norm_parameters(model) + output_parameters(model)


def prediction_parameters(model: ModelConfig) -> int:
    """Count the parameters of a layer that predicts a further token besides its transformer layer: norms, a product.

    Tensor-parallel ranks have all of them whole.
    """
    return 3 * norm_parameters(model) + prediction_weights(model)


def prediction_weights(model: ModelConfig) -> int:
    """Entries of the matrix from a hidden state and an embedded word to one hidden state."""
    return 2 * model.hidden_size**2


def linear_flops_per_token(model: ModelConfig, block: BlockShape) -> int:
    """Forward FLOPs of a token in one block without attention, the same at every position; in the chosen experts."""
    recurrence = 0 if block.recurrence is None else recurrence_flops_per_token(block.recurrence)
    weights = _weights(block_products(model, block)) + router_weights(model, block)
    chosen = model.moe_router_topk if block.num_experts else 0
    return 2 * (weights + chosen * _weights(mlp_products(model, block.ffn_hidden_size))) + recurrence


def attention_flops_per_position(model: ModelConfig, block: BlockShape) -> int:
    """Forward FLOPs of a token in one block for each position that it attends to: one score and one weighted value."""
    if not block.num_key_value_heads:
        return 0
    return 2 * model.num_attention_heads * (model.kv_channels + value_size(model, block))


def value_size(model: ModelConfig, block: BlockShape) -> int:
    """Width of a head's values; `kv_channels` is the width of its queries and keys."""
    return model.kv_channels if block.latent is None else block.latent.value_size


def block_forward_flops(model: ModelConfig, block: BlockShape, num_tokens: int, prefix_len: int = 0) -> int:
    """Forward FLOPs in one block of a token slice, causal attention and sliding windows counted exactly."""
    positions = int(attended_positions(prefix_len, prefix_len + num_tokens, block.window))
    linear = num_tokens * linear_flops_per_token(model, block)
    return linear + attention_flops_per_position(model, block) * positions


def logits_flops_per_token(model: ModelConfig) -> int:
    """Forward FLOPs of a token in the output layer."""
    return 2 * model.hidden_size * model.padded_vocab_size()


def logits_computed_again(num_logits: float, at_once: float = LOGITS_AT_ONCE) -> float:
    """Share of its logits that the backward of a micro-batch computes again; of numbers, or of arrays."""
    over = num_logits - at_once
    return (over + abs(over)) / 2 / num_logits


def iteration_flops(model: ModelConfig, num_sequences: int, *, causal: bool = False, recompute: bool = False) -> int:
    """FLOPs of one optimizer step: forward and backward of `num_sequences` sequences.

    Without options these are the model FLOPs of Korthikanti appendix A, 72BLsh^2(1 + s/6h + V/12hL): every token
    counted as if it attended to the whole sequence, or to a whole window, as in most published utilizations (PaLM,
    arXiv 2204.02311 appendix B; Megatron-LM until 2025). With `recompute` these are the hardware FLOPs of SC'21
    equation 3, 96BLsh^2(1 + s/6h + V/16Lh).

    Args:
        num_sequences: global batch size B, in sequences of `model.seq_length` tokens.
        causal: whether only scores that are computed count, as in Megatron-LM since 2025. Documents are not counted.
    """
    seq_length, shapes, depths = model.seq_length, model.blocks_by_index.values(), model.mtp_num_layers
    if causal:
        blocks = sum(block_forward_flops(model, block, seq_length) for block in shapes)
    else:
        blocks = seq_length * sum(block_forward_flops(model, block, 1, seq_length - 1) for block in shapes)
    blocks += seq_length * depths * 2 * prediction_weights(model)
    passes = 1 + BACKWARD_PER_FORWARD
    blocks *= passes + recompute
    return num_sequences * (blocks + passes * seq_length * (1 + depths) * logits_flops_per_token(model))


def expanded_channels(latent: LatentSizes) -> tuple[int, int]:
    """Numbers of a head and a token in reach, where latents are kept: its key and value, and all that a backward holds.

    The latter are products, keys, values that are as wide as they, and the gradients of both.
    """
    products = latent.key_size + latent.value_size
    return products + latent.rotated_size, products + 4 * latent.head_size


def block_hidden_states(model: ModelConfig, block: BlockShape) -> tuple[int, int]:
    """Count the hidden states that a block keeps of a token: those that must stay, and outputs of norms.

    The outputs of norms are inputs of products, and can be recomputed from the input of each norm, which stays.
    The input of a block is the input of two norms where attention and MLP are parallel. A norm of an output keeps that
    output; where there is no other norm, the product before keeps its input as it is.
    """
    parts = _parts(block)
    match model.norm_placement:
        case "post":
            stay, normed = 2 * parts, 0
        case "both":
            stay, normed = 2 * parts, parts
        case _:
            stay, normed = (1 if model.parallel_residual and parts else parts), block_norms(model, block)
    # Several products that read the output of a norm keep it: router and experts, and latents beside queries.
    queries_beside = block.latent is not None and not block.latent.query_rank
    kept = (bool(block.num_experts) + queries_beside) * bool(normed)
    return stay + kept + has_shared_gate(model, block), normed - kept


def kept_channels(sizes: Recurrence) -> int:
    """Numbers that a recurrence keeps of a token between its projections, where the rest is computed again.

    These are the outputs of the first projection, and its own output before and after the norm.
    """
    return recurrence_channels(sizes) + 2 * sizes.num_heads * sizes.value_size


CHOICE_BYTES = 4 + 8 + 8 + 2
"""Bytes of a choice of a token: its weight, its expert as a number of 64 bits and of 16, its place among the rows."""
ROW_BYTES = 4 + 8
"""Bytes of a row of an expert: its weight in fp32, and its place among the choices."""


def routed_activation_bytes(
    experts: int, chosen: int, hidden_size: int, width: int, gated: bool, element_bytes: int, rows: Any = 1.0
) -> Any:
    """Bytes that experts without biases keep of a token, shared experts apart.

    These are a score of each expert in fp32, its choices, and of each row its input and the input of the activation,
    which is computed again in the backward.

    Args:
        width: width of the hidden layer of one.
        rows: rows of the rank's experts for each choice of its own tokens; 1 where experts get as many as their mean.
    """
    row = (hidden_size + (1 + gated) * width) * element_bytes + ROW_BYTES
    return chosen * (rows * row + CHOICE_BYTES) + 4 * experts


TILE = 16
"""Tokens that lengths are rounded to: kernels work in tiles, and an odd length costs a whole one."""


def balanced_token_slices(model: ModelConfig, num_token_slices: int, *, granularity: int = 1) -> TokenSlices:
    """Cut a sequence so that forward plus backward of every token slice cost the same.

    Later token slices attend to more, and a flash kernel's backward costs more of its forward than a matrix product's
    does; so the first token slices are longer than a balance of only forward FLOPs would make them. Once a sliding
    window is full, every token attends to as much, and token slices are equally long.

    Args:
        granularity: every length is a multiple of this.
    """
    granularity = granularity_of(model.seq_length, num_token_slices, granularity)
    linear, attention = _flops_of_layers(model)

    def cost(tokens: float) -> float:
        attended = sum(each * float(attended_positions(0, tokens, window)) for window, each in attention.items())
        return linear * tokens + attended

    return TokenSlices.of_equal_cost(model.seq_length, num_token_slices, cost, granularity=granularity)


def document_cuts(model: ModelConfig, num_token_slices: int, *, granularity: int = 1) -> "DocumentCuts":
    """Return the cuts of micro-batches with which token slices cost the same, by the documents of each micro-batch.

    Args:
        granularity: every length is a multiple of this.
    """
    # Its package has solvers that are compiled, which takes a second to load.
    from deepspeed_ext.plan.solve.cuts import DocumentCuts

    linear, attention = _flops_of_layers(model)
    return DocumentCuts(
        seq_length=model.seq_length,
        num_token_slices=num_token_slices,
        linear_cost=linear,
        attention_costs=attention,
        granularity=granularity_of(model.seq_length, num_token_slices, granularity),
    )


def _flops_of_layers(model: ModelConfig) -> tuple[float, dict[int | None, float]]:
    """FLOPs of all layers, forward and backward: of a token, and of a token and attended position by window."""
    shapes = model.blocks_by_index.values()
    linear = sum(linear_flops_per_token(model, block) for block in shapes)
    linear *= 1 + BACKWARD_PER_FORWARD
    attention: dict[int | None, float] = defaultdict(float)
    for block in shapes:
        per_position = attention_flops_per_position(model, block)
        attention[block.window] += per_position * (1 + FLASH_BACKWARD_PER_FORWARD)
    return linear, dict(attention)


def granularity_of(seq_length: int, num_token_slices: int, needed: int) -> int:
    """Tokens that token-slice lengths are multiples of: whole tiles, where token slices are long enough for that."""
    whole_tiles = lcm(TILE, needed)
    return whole_tiles if seq_length >= 4 * whole_tiles * num_token_slices else needed
