"""GPT-2."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.huggingface.family import Requirement, expect
from megatron_terapipe.huggingface.weight_rules import Heads, WeightRule, fused_attention, same, transposed, vocabulary
from megatron_terapipe.model.gpt import LAYERS_BEFORE_BLOCKS

_ACTIVATIONS = {"gelu": "gelu_new", "gelu-exact": "gelu", "relu": "relu"}
"""Theirs by ours. Theirs has further names for the first."""
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")

PREFIX = "transformer."


class GPT2:
    """Learned positions, LayerNorm, biases. Its matrices lie the other way round."""

    name = "gpt2"

    def requirements(self, model: ModelConfig) -> Sequence[Requirement]:
        """Conditions under which a model of ours can be written as a GPT-2."""
        positions, activation = model.position_embedding_type, model.activation
        width = model.hidden_size // model.num_attention_heads
        return [
            Requirement(
                positions == "learned_absolute", f"--position-embedding-type {positions}", "learned positions alone"
            ),
            Requirement(
                model.normalization == "layernorm", f"--normalization {model.normalization}", "LayerNorm alone"
            ),
            Requirement(activation in _ACTIVATIONS, f"--activation {activation}", "gelu, gelu-exact and relu alone"),
            Requirement(not model.disable_bias_linear, "--disable-bias-linear", "biases"),
            Requirement(
                model.num_key_value_heads == model.num_attention_heads,
                f"--num-key-value-heads {model.num_key_value_heads}",
                "a key head for each query head",
            ),
            Requirement(
                model.kv_channels == width and model.hidden_size % model.num_attention_heads == 0,
                f"--kv-channels {model.kv_channels}",
                "heads that are as wide as the model together",
            ),
            Requirement(
                model.heterogeneous_layers_config_path is None, "layers of several shapes", "layers of one shape"
            ),
        ]

    def settings(self, model: ModelConfig) -> dict[str, Any]:
        """Contents of `config.json`, without what says only how to sample."""
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": self.name,
            "vocab_size": model.vocab_size,
            "n_positions": model.max_position_embeddings,
            "n_embd": model.hidden_size,
            "n_layer": model.num_layers,
            "n_head": model.num_attention_heads,
            "n_inner": model.ffn_hidden_size,
            "activation_function": _ACTIVATIONS[model.activation],
            "layer_norm_epsilon": model.layernorm_epsilon,
            "initializer_range": model.init_method_std,
            "resid_pdrop": model.hidden_dropout,
            "embd_pdrop": model.hidden_dropout,
            "attn_pdrop": model.attention_dropout,
            "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        }

    def model(self, settings: Mapping[str, Any]) -> ModelConfig:
        """The model that `config.json` describes.

        Raises:
            ConfigError: if it asks for what our models do not have.
        """
        known = {**{theirs: ours for ours, theirs in _ACTIVATIONS.items()}, **dict.fromkeys(_TANH_GELU, "gelu")}
        activation = known[expect(settings, "activation_function", known, "gelu_new")]
        expect(settings, "scale_attn_weights", (True,), True)
        expect(settings, "scale_attn_by_inverse_layer_idx", (False,), False)
        expect(settings, "add_cross_attention", (False,), False)
        positions = settings.get("n_positions", 1024)
        return ModelConfig(
            num_layers=settings.get("n_layer", 12),
            hidden_size=settings.get("n_embd", 768),
            num_attention_heads=settings.get("n_head", 12),
            ffn_hidden_size=settings.get("n_inner") or 4 * settings.get("n_embd", 768),
            seq_length=positions,
            max_position_embeddings=positions,
            activation=activation,
            vocab_size=settings.get("vocab_size", 50257),
            layernorm_epsilon=settings.get("layer_norm_epsilon", 1e-5),
            init_method_std=settings.get("initializer_range", 0.02),
            untie_embeddings_and_output_weights=not settings.get("tie_word_embeddings", True),
        )

    def rules(self, model: ModelConfig) -> Mapping[int, Sequence[WeightRule]]:
        """Rules of the weights, by our pipeline layer."""
        words, rows = model.vocab_size or 0, model.padded_vocab_size()
        last = LAYERS_BEFORE_BLOCKS + model.num_layers
        layers: dict[int, Sequence[WeightRule]] = {
            0: [vocabulary("weight", f"{PREFIX}wte.weight", words=words, rows=rows)],
            1: [same("weight", f"{PREFIX}wpe.weight")],
            last: [same(kind, f"{PREFIX}ln_f.{kind}") for kind in ("weight", "bias")],
        }
        if model.untie_embeddings_and_output_weights:
            layers[last + 1] = [vocabulary("linear.weight", "lm_head.weight", words=words, rows=rows)]
        heads = Heads(model.num_attention_heads, 1, model.kv_channels)
        for number in range(model.num_layers):
            block = f"{PREFIX}h.{number}"
            layers[LAYERS_BEFORE_BLOCKS + number] = [
                rule
                for kind in ("weight", "bias")
                for rule in (
                    same(f"attention_norm.{kind}", f"{block}.ln_1.{kind}"),
                    fused_attention(f"attention.query_key_value.{kind}", f"{block}.attn.c_attn.{kind}", heads),
                    transposed(f"attention.projection.{kind}", f"{block}.attn.c_proj.{kind}"),
                    same(f"mlp_norm.{kind}", f"{block}.ln_2.{kind}"),
                    transposed(f"mlp.up.{kind}", f"{block}.mlp.c_fc.{kind}"),
                    transposed(f"mlp.down.{kind}", f"{block}.mlp.c_proj.{kind}"),
                )
            ]
        return layers

    def is_ignored(self, tensor: str, model: ModelConfig) -> bool:
        """Whether a tensor of their file is no weight: the causal mask, or a copy of the word embedding.

        Args:
            tensor: its name there.
            model: the model section.
        """
        tied = not model.untie_embeddings_and_output_weights
        return tensor.endswith((".attn.bias", ".attn.masked_bias")) or (tied and tensor == "lm_head.weight")

    def canonical(self, tensor: str) -> str:
        """The name that `rules` has for a tensor: the first GPT-2 was published without the prefix."""
        return tensor if tensor.startswith((PREFIX, "lm_head.")) else PREFIX + tensor
