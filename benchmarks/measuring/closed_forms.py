"""Closed forms of activation memory, to compare measured bytes and the search's memory model with."""

from megatron_terapipe.config import ModelConfig, flops
from megatron_terapipe.config.layers import BlockShape


def key_value_bytes_per_token(
    model: ModelConfig, block: BlockShape, element_bytes: int, *, latents_kept: bool = False
) -> int:
    """Bytes of the cached key and value of a token in one block, kept even when activations are recomputed.

    Args:
        latents_kept: whether layers with latent attention keep latents in their place.
    """
    if latents_kept and block.latent is not None:
        return block.latent.kept_size * element_bytes
    return block.num_key_value_heads * (model.kv_channels + flops.value_size(model, block)) * element_bytes


def block_activation_bytes_per_token(
    model: ModelConfig, block: BlockShape, element_bytes: int, recompute: str = "none", *, latents_kept: bool = False
) -> int:
    """Bytes that one block keeps of a token from its forward to its backward.

    Nothing recomputed, these are the inputs of both norms, of the query-key-value product, of the projection (which
    is also the output that attention saves), of the MLP's first product, of its activation (with a gate, two) and of
    its last product; query, key and value; and the log-sum-exp of each head. That is Korthikanti equation 1,
    sbh(34 + 5as/h), less the two dropout masks (2sbh), which are drawn again in the backward, and the s x s scores,
    masks and probabilities (5as^2b) that a flash kernel never stores. `selective` computes the outputs of norms and
    of the activation again: of each norm and of the activation only the input is kept. `full` keeps the input of the
    block, and keys and values; `stage` only keys and values, besides `stage_input_bytes_per_token`. Norms elsewhere,
    and of queries and keys, are in `flops.block_hidden_states` and `_normed_channels`, and experts in
    `flops.routed_activation_bytes`. Not counted are the one or two numbers that a norm keeps of a token, or of a head.

    Args:
        element_bytes: bytes of one activation: 2 in fp16 and bf16, 4 in fp32.
    """
    key_value = key_value_bytes_per_token(model, block, element_bytes, latents_kept=latents_kept)
    if recompute == "full":
        return model.hidden_size * element_bytes + key_value
    if recompute == "stage":
        return key_value
    stay, normed = flops.block_hidden_states(model, block)
    elements = (stay + (normed if recompute == "none" else 0)) * model.hidden_size
    kept = 0
    if block.num_key_value_heads:
        heads = model.num_attention_heads * (model.kv_channels + flops.value_size(model, block))
        elements += heads + _normed_channels(model, block, latents_kept)
        kept = key_value + flops.LOG_SUM_EXP_BYTES * model.num_attention_heads
    if block.recurrence is not None:
        elements += flops.kept_channels(block.recurrence)
    if block.num_experts:
        sizes = block.num_experts, model.moe_router_topk, model.hidden_size, block.ffn_hidden_size
        kept += int(flops.routed_activation_bytes(*sizes, model.gated, element_bytes))
    # The gradient of ReLU is read off its output, which the last product keeps anyway. Shared experts keep theirs.
    keeps_activated = (recompute == "none" or bool(block.num_experts)) and model.activation != "relu"
    widths = 1 + model.gated + keeps_activated
    return (elements + widths * flops.dense_width(block)) * element_bytes + kept


def _normed_channels(model: ModelConfig, block: BlockShape, latents_kept: bool) -> int:
    """Channels of a token that norms of queries and keys keep, and gates: their sigmoid, and the gated output.

    Of latent attention, those that its norms and products keep.
    """
    queries, keys = model.num_attention_heads, block.num_key_value_heads
    if block.latent is not None:
        return flops.latent_channels(block.latent, normed=model.qk_norm != "none", latents_kept=latents_kept)
    return model.kv_channels * (
        (model.qk_norm != "none") * (queries + keys) + 2 * model.attention_output_gate * queries
    )


def stage_input_bytes_per_token(model: ModelConfig, element_bytes: int) -> int:
    """Bytes of the input that a stage keeps of a token where whole stages are computed again; the first keeps tokens.

    A stage of L layers so keeps 2 G d + h / L elements of a token and layer (G key heads of d channels, hidden size h),
    where trainers that checkpoint every layer, such as ALST (arXiv 2506.13996), keep h: 2 h bytes in bf16.
    """
    return model.hidden_size * element_bytes
