"""The section of the model, and the rule for dividing its output layer among pipeline ranks."""

from dataclasses import dataclass, replace
from math import lcm, sqrt
from typing import Literal

from megatron_terapipe.config.experts import check_experts
from megatron_terapipe.config.latent import check_latent, resolve_latent
from megatron_terapipe.config.layers import (
    LAYERS_BEFORE_BLOCKS,
    BlockShape,
    block_shapes,
    canonical_layers,
    layers_of_pattern,
    prediction_layers,
    window_of_megatron,
)
from megatron_terapipe.config.options import Otherwise, check, check_bounds, option, resolve, with_value
from megatron_terapipe.config.recurrences import resolve_recurrences
from megatron_terapipe.config.rotation import RotationSettings, check_rotation, resolve_rotation
from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED, ConfigError

OF_TRAINING = {
    *("seq_length", "hidden_dropout", "attention_dropout", "mtp_loss_scaling_factor"),
    *("init_method_std", "output_layer_init_std", "embedding_init_method_std"),
    *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"),
    *("moe_input_jitter_eps", "moe_expert_capacity_factor", "moe_token_dispatcher_type"),
}
"""Fields that change neither the shape nor the meaning of a weight, nor an output of the model after its training."""


MOST_DEPTHS = 64
"""Layers that predict further tokens, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(RotationSettings):
    """Model: a GPT or a Llama, by its parts; the defaults describe GPT-2."""

    no_rope_freq: str | None = option(None, metavar="PATTERN")
    """Layers without rotations: a number N for every Nth layer, or a list with a 1 for each such layer,
    `([0]*3+[1])*8`."""

    sliding_window: int | None = option(None, also={"--window-size": window_of_megatron}, least=1, most=10**12)
    """Tokens that a token attends to, itself included. Default: all before it."""

    window_attn_skip_freq: str | None = option(None, metavar="PATTERN", needs=("sliding_window",))
    """Layers that attend to the whole sequence in spite of --sliding-window: a number N for every Nth layer, or a list
    with a 1 for each layer with a window and a 0 for each without, `([1]*5+[0])*4`."""

    qk_norm: Literal["none", "head", "head-rotated", "all-heads"] = option("none", also={"--qk-layernorm": "head"})
    """Norms on queries and on keys: over each head before it is rotated (`head`) or after (`head-rotated`), or over
    all heads together before they are rotated (`all-heads`)."""

    attention_output_gate: bool = False
    """Multiply the output of attention by the sigmoid of gates, which are projected beside the queries."""

    softmax_scale: float = option(
        derived="1 / sqrt(--kv-channels); with --mscale-all-dim and --multi-latent-attention times YaRN's factor",
        above=0,
        most=1e6,
    )
    """Factor of the scores of attention."""

    attention_softcap: float | None = option(None, above=0, most=1e9)
    """Limit c of the scores of attention: a score x becomes c tanh(x / c)."""

    softmax_type: Literal["vanilla", "learnable"] = option("vanilla", elsewhere={"off-by-one": MODEL_CANNOT_BE_TRAINED})
    """`learnable` adds sinks to attention: a learned score of each head takes part in every softmax, with a value of
    0."""

    normalization: Literal["layernorm", "layernorm-no-bias", "layernorm-no-weights", "rmsnorm"] = option(
        "layernorm", spellings={"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
    )
    """Type of the norms before attention, MLP and output layer. LayerNorm has a weight and a bias, a weight only
    (`layernorm-no-bias`), or neither (`layernorm-no-weights`)."""

    apply_layernorm_1p: bool = False
    """Keep the weights of norms less 1."""

    norm_placement: Literal["pre", "post", "both"] = "pre"
    """Where the norms of a layer are: on the inputs of attention and MLP (`pre`), on their outputs before these are
    added to the residual (`post`), or on both."""

    parallel_residual: bool = False
    """Add attention and MLP, of the same input, to the residual together."""

    shared_block_norm: bool = option(False, needs=("parallel_residual",))
    """Give attention and MLP one norm. Needs --parallel-residual."""

    residual_multiplier: float = option(1.0, above=0, most=1e6)
    """Factor of the outputs of attention and MLP as they are added to the residual."""

    embedding_multiplier: float = option(1.0, above=0, most=1e6)
    """Factor of the embedded words."""

    logit_multiplier: float = option(1.0, above=0, most=1e6)
    """Factor of the logits."""

    logit_softcap: float | None = option(None, above=0, most=1e9)
    """Limit c of the logits: a logit x becomes c tanh(x / c)."""

    activation: Literal[
        "gelu", "gelu-exact", "relu", "squared-relu", "swiglu", "geglu", "geglu-exact", "quick-geglu"
    ] = option(
        derived="gelu; gelu-exact with --disable-bias-linear or --no-bias-gelu-fusion",
        also={
            **{"--swiglu": "swiglu", "--squared-relu": "squared-relu", "--openai-gelu": "gelu"},
            "--quick-geglu": "quick-geglu",
            # In Megatron the tanh form is that of the kernel which adds the bias, too.
            "--no-bias-gelu-fusion": Otherwise("gelu-exact"),
        },
    )
    """Activation function of the MLP. `gelu` is the tanh form of GPT-2, `gelu-exact` the form with the error function.
    `swiglu`, `geglu`, `geglu-exact` and `quick-geglu`, x sigmoid(1.702 x), add a gate, which is a third matrix."""

    activation_func_clamp_value: float | None = option(None, above=0, most=1e9)
    """Limit of a gate before its function, from above, and of the gated half, from both sides."""

    glu_linear_offset: float = option(0.0, least=-1e6, most=1e6)
    """Number that is added to the gated half."""

    disable_bias_linear: bool = False
    """Use linear layers without biases."""

    add_qkv_bias: bool = False
    """Give queries, keys and values biases in spite of --disable-bias-linear."""

    add_attention_bias: bool = False
    """Give all matrices of attention biases in spite of --disable-bias-linear."""

    add_mlp_bias: bool = False
    """Give the MLP biases in spite of --disable-bias-linear."""

    vocab_size: int | None = option(None, least=1, most=10**8)
    """Tokens in the vocabulary before padding. Default: the tokenizer's."""

    vocab_rows: int | None = option(None, aliases=("--padded-vocab-size",), least=1, most=10**8)
    """Rows of the word embedding, instead of the vocabulary padded by `--make-vocab-size-divisible-by`."""

    make_vocab_size_divisible_by: int = option(128, least=1, most=1_000_000)
    """Pad the vocabulary to a multiple of this number and of the tensor-parallel size. Checkpoints then fit any
    tensor-parallel size that divides this number."""

    layernorm_epsilon: float = option(1e-5, aliases=("--norm-epsilon",), above=0, most=1)
    """Number that norms add to the variance or to the mean square."""

    init_method_std: float = option(0.02, least=0, most=1000)
    """Standard deviation of the initial weights."""

    output_layer_init_std: float = option(derived="--init-method-std / sqrt(2 x --num-layers)", least=0, most=1000)
    """Standard deviation of the initial weights of the matrices that write to the residual stream."""

    embedding_init_method_std: float = option(derived="--init-method-std", least=0, most=1000)
    """Standard deviation of the initial embeddings."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer its own weights instead of the word embedding's."""

    add_output_bias: bool = option(False, needs=("untie_embeddings_and_output_weights",))
    """Give the output layer a bias. Needs --untie-embeddings-and-output-weights."""

    mtp_num_layers: int = option(0, least=0, most=MOST_DEPTHS)
    """Layers that predict further tokens, as in DeepSeek-V3: layer k reads the hidden state of a token and the k-th
    token after it, and predicts the one after that. They are shaped as the last layer, and left out in generation."""

    mtp_loss_scaling_factor: float = option(0.1, above=0, most=1e6, needs=("mtp_num_layers",))
    """Weight of the losses of --mtp-num-layers, of which the mean is taken, beside the loss of the next token."""

    hidden_dropout: float = option(0.0, least=0, below=1)
    """Dropout after the embedding, and on the outputs of attention and MLP. Its masks depend only on the seed, the
    layer and the position of the token, so token slices, stages and ranks do not change them."""

    attention_dropout: float = option(0.0, least=0, below=1)
    """Dropout on the attention probabilities. Flash kernels do not have the position of a token, so attention is then
    computed without them, which is slower."""

    heterogeneous_layers_config_path: str | None = option(
        None, metavar="FILE", aliases=("--heterogeneous-layers-config-encoded-json",)
    )
    """JSON of the layers that are not as usual, or a file of it: {"block_configs": [{"attention":
    {"num_query_groups": 2}, "mlp": {"ffn_hidden_size": 512}}, {"mlp": {"no_op": true}}, ...]}, a layer an entry."""

    def __post_init__(self) -> None:
        check_bounds(self)
        resolve_latent(self, layernorm_epsilon=self.layernorm_epsilon)
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"--hidden-size {self.hidden_size} is not a multiple of --num-attention-heads "
                f"{self.num_attention_heads}: change one of them, or give the width of a head with "
                "--kv-channels"
            )
        resolve(self, "activation", "gelu-exact" if self.disable_bias_linear else "gelu")
        # Two thirds of 4h: the gate makes three matrices of two (Shazeer, arXiv 2002.05202 section 2); as Megatron's.
        gated_width = max(64, 8 * self.hidden_size // 3 // 64 * 64)
        resolve(self, "ffn_hidden_size", gated_width if self.gated else 4 * self.hidden_size)
        if self.num_experts is not None:
            resolve(self, "moe_ffn_hidden_size", self.ffn_hidden_size)
        resolve(self, "num_key_value_heads", self.num_attention_heads)
        resolve(self, "kv_channels", self.hidden_size // self.num_attention_heads)
        resolve(self, "max_position_embeddings", self.seq_length)
        check_bounds(self)  # Those that were derived, too.
        resolve(self, "output_layer_init_std", self.init_method_std / sqrt(2 * self.num_layers))
        resolve(self, "embedding_init_method_std", self.init_method_std)
        resolve_rotation(self)
        resolve(self, "softmax_scale", self.score_factor / sqrt(self.kv_channels))
        check(self)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"--num-key-value-heads {self.num_key_value_heads} does not divide "
                f"--num-attention-heads {self.num_attention_heads}: give one of its divisors"
            )
        if self.seq_length > self.max_position_embeddings:
            raise ConfigError(
                f"--seq-length {self.seq_length} is more than --max-position-embeddings "
                f"{self.max_position_embeddings}: lower the former, or raise the latter to {self.seq_length}"
            )
        if self.vocab_rows is not None and self.vocab_size is not None and self.vocab_rows < self.vocab_size:
            raise ConfigError(
                f"--vocab-rows {self.vocab_rows} has no room for the {self.vocab_size} tokens of --vocab-size: give "
                f"{self.vocab_size} or more"
            )
        check_rotation(self)
        check_latent(self)
        check_experts(self)
        resolve_recurrences(self, num_layers=self.num_layers, hidden_size=self.hidden_size)
        self._check_block()
        self._resolve_layers()

    def _check_block(self) -> None:
        if self.qk_norm == "all-heads" and self.normalization != "rmsnorm":
            raise ConfigError(
                f"--qk-norm all-heads is for rmsnorm, not for --normalization {self.normalization}: change one of them"
            )
        for name, value in (("activation_func_clamp_value", None), ("glu_linear_offset", 0)):
            if not self.gated and (given := getattr(self, name)) != value:
                raise ConfigError(
                    f"{with_value(name, given)} is for a gate, and --activation {self.activation} has none: drop it"
                )
        if self.parallel_residual and self.norm_placement != "pre":
            raise ConfigError(
                f"--norm-placement {self.norm_placement} does not go with --parallel-residual: use --norm-placement pre"
            )
        if self.no_rope_freq is not None and not self.rotates:
            raise ConfigError(f"--no-rope-freq {self.no_rope_freq} needs rotations: add --position-embedding-type rope")
        if self.mtp_num_layers and self.position_embedding_type == "learned_absolute":
            raise ConfigError(
                f"--mtp-num-layers {self.mtp_num_layers} adds no learned positions to the tokens that its layers read: "
                "use --position-embedding-type rope or none"
            )
        if self.mtp_num_layers >= self.seq_length:
            raise ConfigError(
                f"--mtp-num-layers {self.mtp_num_layers} predicts tokens beyond --seq-length {self.seq_length}: give "
                f"{self.seq_length - 1} or fewer"
            )

    def _resolve_layers(self) -> None:
        for name in ("hybrid_layer_pattern", "linear_attention_freq"):
            if self.heterogeneous_layers_config_path is not None and getattr(self, name) is not None:
                raise ConfigError(
                    "--heterogeneous-layers-config-path describes layers with attention, and "
                    f"--{name.replace('_', '-')} is given: drop one of them"
                )
        if self.heterogeneous_layers_config_path is not None and self.num_experts is not None:
            raise ConfigError(
                "--heterogeneous-layers-config-path describes layers with an MLP, and --num-experts is given: drop one "
                "of them; --moe-layer-freq lists the layers of experts"
            )
        if self.heterogeneous_layers_config_path is not None:
            layers = canonical_layers(self.heterogeneous_layers_config_path)
            object.__setattr__(self, "heterogeneous_layers_config_path", layers)
        described = len(self.blocks)
        if described != self.num_layers:
            raise ConfigError(
                f"--heterogeneous-layers-config-path describes {described} layers, but --num-layers is "
                f"{self.num_layers}: describe each, or set --num-layers {described}"
            )

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.activation in ("swiglu", "geglu", "geglu-exact", "quick-geglu")

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        plain = not self.multi_latent_attention
        return plain and (not self.disable_bias_linear or self.add_qkv_bias or self.add_attention_bias)

    @property
    def has_projection_bias(self) -> bool:
        """Whether the projection after attention has a bias."""
        return not self.disable_bias_linear or self.add_attention_bias

    @property
    def has_mlp_bias(self) -> bool:
        """Whether the matrices of the MLP have biases."""
        return not self.disable_bias_linear or self.add_mlp_bias

    @property
    def has_router_bias(self) -> bool:
        """Whether routers have biases of their logits."""
        return not self.disable_bias_linear

    @property
    def blocks(self) -> tuple[BlockShape, ...]:
        """Shape of each transformer layer, first to last."""
        usual = BlockShape(
            num_key_value_heads=self.num_key_value_heads, ffn_hidden_size=self.ffn_hidden_size, latent=self.latent
        )
        shapes = [usual] * self.num_layers
        if self.heterogeneous_layers_config_path is not None:
            shapes = block_shapes(
                self.heterogeneous_layers_config_path,
                usual=usual,
                num_attention_heads=self.num_attention_heads,
                hidden_size=self.hidden_size,
            )
        count = len(shapes)
        whole = unrotated = (False,) * count
        if self.window_attn_skip_freq is not None:
            # A number names the layers without a window, a list those with one.
            named = layers_of_pattern(self.window_attn_skip_freq, count, "--window-attn-skip-freq")
            whole = named if self.window_attn_skip_freq.strip().isdigit() else tuple(not each for each in named)
        if self.no_rope_freq is not None:
            unrotated = layers_of_pattern(self.no_rope_freq, count, "--no-rope-freq")
        layer_of_experts = replace(
            usual,
            ffn_hidden_size=self.moe_ffn_hidden_size or self.ffn_hidden_size,
            num_experts=self.num_experts or 0,
            shared_ffn_hidden_size=self.moe_shared_expert_intermediate_size or 0,
        )
        if self.num_experts is not None:
            shapes = [layer_of_experts if each else usual for each in self.layers_of_experts(count)]
        shapes = self.with_recurrences(shapes, usual, layer_of_experts)
        return tuple(
            replace(shape, window=None if whole[index] else self.sliding_window, rotated=not unrotated[index])
            for index, shape in enumerate(shapes)
        )

    @property
    def blocks_by_index(self) -> dict[int, BlockShape]:
        """Shape of each transformer layer by its index in the pipeline, with those that predict further tokens."""
        blocks = self.blocks
        further = dict.fromkeys(prediction_layers(self.num_layers, self.mtp_num_layers), blocks[-1])
        return dict(enumerate(blocks, LAYERS_BEFORE_BLOCKS)) | further

    @property
    def mtp_loss_factor(self) -> float:
        """Weight of the loss of one of the layers that predict further tokens."""
        return self.mtp_loss_scaling_factor / max(self.mtp_num_layers, 1)

    @property
    def embedding_is_tied(self) -> bool:
        """Whether the word embedding has several uses: also in the output layer, or where further tokens are read."""
        return not self.untie_embeddings_and_output_weights or self.mtp_num_layers > 0

    def padded_vocab_size(self, tensor_parallel_size: int = 1) -> int:
        """Rows of the word embedding.

        Megatron pads to a multiple of the product; the least common multiple is the same for most sizes, and then
        a checkpoint has one shape whatever the tensor-parallel size.
        """
        if self.vocab_rows is not None:
            return self.vocab_rows
        if self.vocab_size is None:
            raise ConfigError("--vocab-size is not known before the tokenizer is read: give it")
        multiple = lcm(self.make_vocab_size_divisible_by, tensor_parallel_size)
        return -(-self.vocab_size // multiple) * multiple


def why_vocabulary_stays_whole(model: ModelConfig, *, pipeline_ranks: int, tensor_ranks: int) -> str | None:
    """Return why a model's output layer cannot be dealt to ranks, with the remedy; None if it can."""
    if model.mtp_num_layers:
        return (
            f"--vocabulary-stages computes the logits of the next token only, and --mtp-num-layers "
            f"{model.mtp_num_layers} predicts further ones: drop one of them"
        )
    if not model.untie_embeddings_and_output_weights:
        return (
            "--vocabulary-stages cuts the weight of the output layer, which is the embedding's here: add "
            "--untie-embeddings-and-output-weights, or drop it"
        )
    parts = pipeline_ranks * tensor_ranks
    flag, rows = "--vocab-rows", model.vocab_rows
    if rows is None:
        flag, rows = "--make-vocab-size-divisible-by", model.make_vocab_size_divisible_by
    if rows % parts:
        return (
            f"--vocabulary-stages deals the rows of the output layer to {pipeline_ranks} pipeline x {tensor_ranks} "
            f"tensor-parallel ranks, and {flag} {rows} is not a multiple of {parts}: change it"
        )
    return None
