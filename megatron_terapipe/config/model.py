"""The section that says what the model is."""

from dataclasses import dataclass

from megatron_terapipe.config.options import (
    check_not_negative,
    check_positive,
    flag,
    option,
    resolve,
)
from megatron_terapipe.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Model: a GPT with learned positions, LayerNorm, GELU and tied embeddings.

    Raises:
        ConfigError: if a size is not positive, or two do not fit together.
    """

    num_layers: int
    """Transformer layers."""

    hidden_size: int
    """Width of the residual stream."""

    ffn_hidden_size: int = option(derived="4 x --hidden-size")
    """Width of the hidden layer of the MLP."""

    num_attention_heads: int
    """Query heads of each attention."""

    num_key_value_heads: int = option(derived="--num-attention-heads", aliases=("--num-query-groups",))
    """Key and value heads of each attention. Fewer than the query heads is grouped-query attention."""

    kv_channels: int = option(derived="--hidden-size / --num-attention-heads")
    """Width of one head."""

    seq_length: int
    """Tokens of one training sequence."""

    max_position_embeddings: int = option(derived="--seq-length")
    """Learned positions, the longest sequence that the model can ever see."""

    vocab_size: int | None = None
    """Tokens in the vocabulary before padding. Left out, the tokenizer's."""

    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""

    layernorm_epsilon: float = 1e-5
    """Added to the variance in LayerNorm."""

    init_method_std: float = 0.02
    """Standard deviation of the initial weights. Projections back into the residual stream take this / sqrt(2 x
    layers)."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer weights of its own instead of those of the word embedding."""

    hidden_dropout: float = 0.0
    """Dropout on the residual stream. Only 0 in this version."""

    attention_dropout: float = 0.0
    """Dropout on the attention probabilities. Only 0 in this version."""

    def __post_init__(self) -> None:
        """Fill in the derived sizes, then check."""
        check_positive(self, "num_layers", "hidden_size", "num_attention_heads", "seq_length")
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"--hidden-size {self.hidden_size} is not a multiple of --num-attention-heads "
                f"{self.num_attention_heads}: change one of them, or give the width of a head with "
                "--kv-channels"
            )
        resolve(self, "ffn_hidden_size", 4 * self.hidden_size)
        resolve(self, "num_key_value_heads", self.num_attention_heads)
        resolve(self, "kv_channels", self.hidden_size // self.num_attention_heads)
        resolve(self, "max_position_embeddings", self.seq_length)
        check_positive(
            self,
            "ffn_hidden_size",
            "num_key_value_heads",
            "kv_channels",
            "max_position_embeddings",
            "vocab_size",
            "make_vocab_size_divisible_by",
            "layernorm_epsilon",
        )
        check_not_negative(self, "init_method_std")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"--num-key-value-heads {self.num_key_value_heads} does not divide "
                f"--num-attention-heads {self.num_attention_heads}: give one of its divisors"
            )
        if self.seq_length > self.max_position_embeddings:
            raise ConfigError(
                f"--seq-length {self.seq_length} is more than --max-position-embeddings "
                f"{self.max_position_embeddings}: raise the latter to {self.seq_length}"
            )
        for name in ("hidden_dropout", "attention_dropout"):
            if getattr(self, name) != 0:
                raise ConfigError(
                    f"{flag(name)} {getattr(self, name)}: dropout comes with a later version: set it to 0"
                )

    def padded_vocab_size(self, tensor_parallel_size: int = 1) -> int:
        """Rows of the word embedding.

        Raises:
            ConfigError: if the vocabulary is still the tokenizer's, and not filled in.
        """
        if self.vocab_size is None:
            raise ConfigError("--vocab-size is not known before the tokenizer is read: give it")
        multiple = self.make_vocab_size_divisible_by * tensor_parallel_size
        return -(-self.vocab_size // multiple) * multiple
