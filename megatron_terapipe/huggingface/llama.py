"""Llama."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.huggingface.family import Requirement, expect
from megatron_terapipe.huggingface.weight_rules import Heads, WeightRule, attention, same, stacked, vocabulary
from megatron_terapipe.model.gpt import LAYERS_BEFORE_BLOCKS

PREFIX = "model."


class Llama:
    """Rotary positions, RMSNorm, SwiGLU, grouped-query attention. Rotations are in halves there, too."""

    name = "llama"

    def requirements(self, model: ModelConfig) -> Sequence[Requirement]:
        """Conditions under which a model of ours can be written as a Llama."""
        positions, normalization, activation = model.position_embedding_type, model.normalization, model.activation
        return [
            Requirement(positions == "rope", f"--position-embedding-type {positions}", "rope alone"),
            Requirement(
                model.rotary_percent == 1, f"--rotary-percent {model.rotary_percent}", "heads that are rotated whole"
            ),
            Requirement(normalization == "rmsnorm", f"--normalization {normalization}", "rmsnorm alone"),
            Requirement(activation == "swiglu", f"--activation {activation}", "swiglu alone"),
            Requirement(
                model.heterogeneous_layers_config_path is None, "layers of several shapes", "layers of one shape"
            ),
        ]

    def settings(self, model: ModelConfig) -> dict[str, Any]:
        """Contents of `config.json`, without what says only how to sample."""
        has_biases = not model.disable_bias_linear
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": self.name,
            "vocab_size": model.vocab_size,
            "max_position_embeddings": model.max_position_embeddings,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_hidden_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_key_value_heads,
            "head_dim": model.kv_channels,
            "hidden_act": "silu",
            "rms_norm_eps": model.layernorm_epsilon,
            "rope_theta": model.rotary_base,
            "rope_scaling": None,
            "attention_bias": has_biases,
            "mlp_bias": has_biases,
            "attention_dropout": model.attention_dropout,
            "initializer_range": model.init_method_std,
            "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        }

    def model(self, settings: Mapping[str, Any]) -> ModelConfig:
        """The model that `config.json` describes.

        Raises:
            ConfigError: if it asks for what our models do not have.
        """
        expect(settings, "hidden_act", ("silu", "swish"), "silu")
        has_biases = expect(settings, "attention_bias", (True, False), False)
        expect(settings, "mlp_bias", (has_biases,), False)
        expect(settings, "pretraining_tp", (1, None), 1)
        heads, hidden_size = settings.get("num_attention_heads", 32), settings.get("hidden_size", 4096)
        positions = settings.get("max_position_embeddings", 2048)
        return ModelConfig(
            num_layers=settings.get("num_hidden_layers", 32),
            hidden_size=hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=settings.get("num_key_value_heads") or heads,
            kv_channels=settings.get("head_dim") or hidden_size // heads,
            ffn_hidden_size=settings.get("intermediate_size", 11008),
            seq_length=positions,
            max_position_embeddings=positions,
            position_embedding_type="rope",
            rotary_base=_rotary_base(settings),
            normalization="rmsnorm",
            activation="swiglu",
            disable_bias_linear=not has_biases,
            vocab_size=settings.get("vocab_size", 32000),
            layernorm_epsilon=settings.get("rms_norm_eps", 1e-6),
            init_method_std=settings.get("initializer_range", 0.02),
            untie_embeddings_and_output_weights=not settings.get("tie_word_embeddings", False),
        )

    def rules(self, model: ModelConfig) -> Mapping[int, Sequence[WeightRule]]:
        """Rules of the weights, by our pipeline layer."""
        words, rows = model.vocab_size or 0, model.padded_vocab_size()
        last = LAYERS_BEFORE_BLOCKS + model.num_layers
        layers: dict[int, Sequence[WeightRule]] = {
            0: [vocabulary("weight", f"{PREFIX}embed_tokens.weight", words=words, rows=rows)],
            1: [],
            last: [same("weight", f"{PREFIX}norm.weight")],
        }
        if model.untie_embeddings_and_output_weights:
            layers[last + 1] = [vocabulary("linear.weight", "lm_head.weight", words=words, rows=rows)]
        for number in range(model.num_layers):
            layers[LAYERS_BEFORE_BLOCKS + number] = _block(model, f"{PREFIX}layers.{number}")
        return layers

    def is_ignored(self, tensor: str, model: ModelConfig) -> bool:
        """Whether a tensor of their file is no weight: frequencies, or a copy of the word embedding.

        Args:
            tensor: its name there.
            model: the model section.
        """
        tied = not model.untie_embeddings_and_output_weights
        return tensor.endswith(".rotary_emb.inv_freq") or (tied and tensor == "lm_head.weight")

    def canonical(self, tensor: str) -> str:
        """The name that `rules` has for a tensor."""
        return tensor if tensor.startswith((PREFIX, "lm_head.")) else PREFIX + tensor


def _block(model: ModelConfig, block: str) -> list[WeightRule]:
    heads = Heads(model.num_key_value_heads, model.num_attention_heads // model.num_key_value_heads, model.kv_channels)
    kinds = ("weight",) if model.disable_bias_linear else ("weight", "bias")
    rules = [
        same("attention_norm.weight", f"{block}.input_layernorm.weight"),
        same("mlp_norm.weight", f"{block}.post_attention_layernorm.weight"),
    ]
    for kind in kinds:
        projections = [f"{block}.self_attn.{name}_proj.{kind}" for name in ("q", "k", "v")]
        rules += [
            attention(f"attention.query_key_value.{kind}", projections, heads),
            same(f"attention.projection.{kind}", f"{block}.self_attn.o_proj.{kind}"),
            stacked(f"mlp.up.{kind}", [f"{block}.mlp.{name}_proj.{kind}" for name in ("gate", "up")]),
            same(f"mlp.down.{kind}", f"{block}.mlp.down_proj.{kind}"),
        ]
    return rules


def _rotary_base(settings: Mapping[str, Any]) -> float:
    """The base, which newer files keep in a section with the scaling that our rotations do not have."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(
            f"config.json scales the rotations of positions ({kind}), and ours are not scaled: convert a model without "
            "rope_scaling"
        )
    return float(rope.get("rope_theta", settings.get("rope_theta", 10000.0)))
