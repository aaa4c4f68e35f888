"""The sizes of a model, the first fields of its section."""

from dataclasses import dataclass

from megatron_terapipe.config.layers import MOST_HEADS, MOST_WIDTH
from megatron_terapipe.config.options import option


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """Sizes of a model."""

    model_preset: str | None = option(None, metavar="NAME|PATH")
    """Take the sizes and the parts of a published model: its name (an unknown name lists them), or a
    config.json of Hugging Face, or the folder that holds one. Flags win over it."""

    num_layers: int = option(least=1, most=10_000)
    """Transformer layers."""

    hidden_size: int = option(least=1, most=1_000_000)
    """Width of the residual stream."""

    ffn_hidden_size: int = option(
        derived="4 x --hidden-size; 8/3 x --hidden-size, rounded down to 64, with a gate", least=1, most=MOST_WIDTH
    )
    """Width of the hidden layer of the MLP."""

    num_attention_heads: int = option(least=1, most=MOST_HEADS)
    """Query heads of each attention."""

    num_key_value_heads: int = option(
        derived="--num-attention-heads", aliases=("--num-query-groups",), least=1, most=MOST_HEADS
    )
    """Key and value heads of each attention. If there are fewer than query heads, several query heads share one
    (grouped-query attention)."""

    kv_channels: int = option(derived="--hidden-size / --num-attention-heads", least=1, most=1_000_000)
    """Width of one head."""

    seq_length: int = option(least=1, most=10**9)
    """Tokens of one training sequence."""

    max_position_embeddings: int = option(derived="--seq-length", least=1, most=10**9)
    """Longest sequence that the model can process. With learned positions, their number."""
