"""The section that says what the model is."""

from dataclasses import dataclass
from math import lcm
from typing import Literal

from megatron_terapipe.config.block_shape import BlockShape, block_shapes, canonical_layers
from megatron_terapipe.config.options import (
    check_choices,
    check_not_negative,
    check_positive,
    flag,
    option,
    resolve,
)
from megatron_terapipe.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Model: a GPT or a Llama, by its parts; the defaults are those of GPT-2.

    Raises:
        ConfigError: if a size is not positive, or two do not fit together.
    """

    model_preset: str | None = None
    """Take the sizes and the parts of a published model, one of those in docs/arguments.md. Flags win over it."""

    num_layers: int
    """Transformer layers."""

    hidden_size: int
    """Width of the residual stream."""

    ffn_hidden_size: int = option(derived="4 x --hidden-size; 8/3 x --hidden-size, rounded down to 64, with swiglu")
    """Width of the hidden layer of the MLP."""

    num_attention_heads: int
    """Query heads of each attention."""

    num_key_value_heads: int = option(derived="--num-attention-heads", aliases=("--num-query-groups",))
    """Key and value heads of each attention. If there are fewer than query heads, several query heads share one
    (grouped-query attention)."""

    kv_channels: int = option(derived="--hidden-size / --num-attention-heads")
    """Width of one head."""

    seq_length: int
    """Tokens of one training sequence."""

    max_position_embeddings: int = option(derived="--seq-length")
    """Longest sequence that the model can process. With learned positions, their number."""

    position_embedding_type: Literal["learned_absolute", "rope", "none"] = option(
        "learned_absolute",
        shorthands={"--use-rotary-position-embeddings": "rope"},
        # Scripts pass it beside RoPE: it speaks of the learned positions.
        fallbacks={"--no-position-embedding": "none"},
    )
    """How the model encodes positions: `learned_absolute` adds a learned vector for each position, `rope` rotates
    queries and keys, `none` does neither."""

    rotary_base: float = option(10000.0, aliases=("--rotary-position-embeddings-theta",))
    """Base of the wavelengths of the rotations."""

    rotary_percent: float = 1.0
    """Fraction of each head that is rotated."""

    normalization: Literal["layernorm", "rmsnorm"] = option(
        "layernorm", spellings={"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
    )
    """Type of the norms before attention, MLP and output layer."""

    activation: Literal["gelu", "gelu-exact", "relu", "squared-relu", "swiglu"] = option(
        "gelu",
        shorthands={"--swiglu": "swiglu", "--squared-relu": "squared-relu", "--openai-gelu": "gelu"},
    )
    """Activation function of the MLP. `gelu` is the tanh form of GPT-2, `gelu-exact` the form with the error function.
    `swiglu` adds a gate, which is a third matrix."""

    disable_bias_linear: bool = False
    """Use linear layers without biases."""

    vocab_size: int | None = None
    """Tokens in the vocabulary before padding. Default: the tokenizer's."""

    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this number and of the tensor-parallel size. Checkpoints then fit any
    tensor-parallel size that divides this number."""

    layernorm_epsilon: float = option(1e-5, aliases=("--norm-epsilon",))
    """Number that norms add to the variance or to the mean square."""

    init_method_std: float = 0.02
    """Standard deviation of the initial weights. Projections that write to the residual stream use this / sqrt(2 x
    layers)."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer its own weights instead of those of the word embedding."""

    hidden_dropout: float = 0.0
    """Dropout after the embedding, and on the outputs of attention and MLP. Its masks depend only on the seed, the
    layer and the position of the token, so token slices, stages and ranks do not change them."""

    attention_dropout: float = 0.0
    """Dropout on the attention probabilities. Flash kernels do not know the position of a token, so attention is then
    written out, which is slower."""

    heterogeneous_layers_config_path: str | None = option(
        None, metavar="FILE", aliases=("--heterogeneous-layers-config-encoded-json",)
    )
    """JSON of the layers that are not as usual, or a file of it: {"block_configs": [{"attention":
    {"num_query_groups": 2}, "mlp": {"ffn_hidden_size": 512}}, {"mlp": {"no_op": true}}, ...]}, a layer an entry."""

    def __post_init__(self) -> None:
        """Fill in the derived sizes, then check."""
        check_positive(self, "num_layers", "hidden_size", "num_attention_heads", "seq_length")
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"--hidden-size {self.hidden_size} is not a multiple of --num-attention-heads "
                f"{self.num_attention_heads}: change one of them, or give the width of a head with "
                "--kv-channels"
            )
        # Two thirds of 4h: the gate makes three matrices of two (Shazeer, arXiv 2002.05202 section 2); as Megatron's.
        gated_width = max(64, 8 * self.hidden_size // 3 // 64 * 64)
        resolve(self, "ffn_hidden_size", gated_width if self.activation == "swiglu" else 4 * self.hidden_size)
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
            "rotary_base",
        )
        check_choices(self)
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
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is out of range: give 0 or more, below 1")
        self._check_rotation()
        self._resolve_layers()

    def _check_rotation(self) -> None:
        if not 0 < self.rotary_percent <= 1:
            raise ConfigError(f"--rotary-percent {self.rotary_percent} is out of range: give more than 0, up to 1")
        if self.position_embedding_type == "rope" and (self.rotary_channels < 2 or self.rotary_channels % 2):
            raise ConfigError(
                f"--rotary-percent {self.rotary_percent} of heads of width {self.kv_channels} rotates "
                f"{self.rotary_channels} channels, and they turn in pairs: change it, or --kv-channels"
            )

    def _resolve_layers(self) -> None:
        if self.heterogeneous_layers_config_path is None:
            return
        layers = canonical_layers(self.heterogeneous_layers_config_path)
        object.__setattr__(self, "heterogeneous_layers_config_path", layers)
        described = len(self.blocks)
        if described != self.num_layers:
            raise ConfigError(
                f"--heterogeneous-layers-config-path describes {described} layers, but --num-layers is "
                f"{self.num_layers}: describe each, or set --num-layers {described}"
            )

    @property
    def rotary_channels(self) -> int:
        """Channels of each head that RoPE rotates."""
        return int(self.kv_channels * self.rotary_percent)

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.activation == "swiglu"

    @property
    def blocks(self) -> tuple[BlockShape, ...]:
        """Shape of each transformer layer, first to last."""
        usual = BlockShape(num_key_value_heads=self.num_key_value_heads, ffn_hidden_size=self.ffn_hidden_size)
        if self.heterogeneous_layers_config_path is None:
            return (usual,) * self.num_layers
        return tuple(
            block_shapes(
                self.heterogeneous_layers_config_path,
                usual=usual,
                num_attention_heads=self.num_attention_heads,
                hidden_size=self.hidden_size,
            )
        )

    def padded_vocab_size(self, tensor_parallel_size: int = 1) -> int:
        """Rows of the word embedding.

        Megatron pads to a multiple of the product; the least common multiple is the same for most sizes, and then
        a checkpoint has one shape whatever the tensor-parallel size.

        Raises:
            ConfigError: if the vocabulary is still the tokenizer's, and not filled in.
        """
        if self.vocab_size is None:
            raise ConfigError("--vocab-size is not known before the tokenizer is read: give it")
        multiple = lcm(self.make_vocab_size_divisible_by, tensor_parallel_size)
        return -(-self.vocab_size // multiple) * multiple
