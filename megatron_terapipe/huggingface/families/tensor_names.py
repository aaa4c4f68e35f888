"""Names of the tensors of a family, by what they are in our models."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNames:
    """Names without `.weight` and `.bias`; those of a transformer layer come behind its number."""

    prefix: str = "model."
    """Begins all names but that of the output layer."""
    words: str = "embed_tokens"
    positions: str | None = None
    """Learned positions; None where there are none."""
    unread_positions: int = 0
    """Rows of these before the first position, which no token reads."""
    blocks: str = "layers"
    query_key_value: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Queries, keys and values, each by itself or all in one."""
    grouped: bool = False
    """Whether, in one, they lie as ours: for each key head its query heads, its key and its value. Otherwise all
    queries come first, then all keys, then all values."""
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    projection: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """The matrices to the hidden layer of the MLP: gate and what it gates, each by itself or both in one."""
    down: str = "mlp.down_proj"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention_output_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = "post_feedforward_layernorm"
    final_norm: str = "norm"
    """Norm before the output layer."""
    output: str = "lm_head"
    transposed: bool = False
    """Whether matrices lie [in, out], and not [out, in]."""
    not_weights: tuple[str, ...] = (".rotary_emb.inv_freq",)
    """Ends of the names of tensors that are no weights, such as masks."""

    def is_weight(self, tensor: str, *, tied: bool) -> bool:
        """Whether a tensor of a file is a weight of its own, and not a mask or a copy.

        Args:
            tied: whether the output layer shares the word embedding, so that its tensor is a copy.
        """
        return not tensor.endswith(self.not_weights) and not (tied and tensor.startswith(f"{self.output}."))

    def canonical(self, tensor: str) -> str:
        """Return the whole name of a tensor, which may stand in a file without the beginning of the prefix.

        A model that was saved without its output layer leaves that out.
        """
        base = self.prefix.partition(".")[0] + "."
        return tensor if tensor.startswith((base, f"{self.output}.")) else base + tensor
