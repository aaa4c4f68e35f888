"""A family of models: the meaning of its `config.json`, and the names of its tensors."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import isclose
from typing import Any

from megatron_terapipe.config.model import MOST_DEPTHS, OF_TRAINING, ModelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.huggingface.families.settings import Setting, SettingsFile, refuse_experts


@dataclass(frozen=True, kw_only=True, slots=True)
class FurtherNames:
    """Names of the layers that predict further tokens, of which `begin` and `block` may have a place for the number."""

    begin: str
    """Begins the names of all their tensors."""
    block: str
    """Begins the names of their transformer layer."""
    first: int
    """Number of the first one."""
    words_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    copies: Mapping[str, str] = field(default_factory=dict)
    """Copies of `words` and of `output`, by name after `begin`; they are written, and need not be there."""

    def depth_of(self, tensor: str) -> int | None:
        """Return the number of layers before the one that a tensor belongs to; None if it belongs to none."""
        found = re.match(re.escape(self.begin).replace(re.escape("{}"), r"(\d{1,9})"), tensor)
        depth = -1 if found is None else int(found[1]) - self.first if found.lastindex else 0
        return depth if depth >= 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNames:
    """Names without `.weight` and `.bias`; in a transformer layer they follow its number."""

    prefix: str = "model."
    """Begins all names but the output layer's."""
    words: str = "embed_tokens"
    positions: str | None = None
    """Learned positions; None where there are none."""
    unread_positions: int = 0
    """Rows of these before the first position, which no token reads."""
    blocks: str = "layers"
    parts: int = 1
    """Layers of ours in one of these: 2 where attention or a state and the part after it are one layer."""
    mixer: str = "mixer"
    """Layers of Mamba-2."""
    query_key_value: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Queries, keys and values, each by itself or all in one; with gates of queries by themselves, these last."""
    grouped: bool = False
    """Whether, in one, they are ordered as ours: for each key head its query heads, its key and its value. Otherwise
    all queries come first, then all keys, then all values. Likewise in a gated delta net."""
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    projection: str = "self_attn.o_proj"
    sinks: str = "self_attn.sinks"
    """The whole name."""
    query_down: str = "self_attn.q_a_proj"
    """Latent attention: the matrices to the latents of queries and of keys, their norms, and the matrices from them."""
    latent_down: str = "self_attn.kv_a_proj_with_mqa"
    query_latent_norm: str = "self_attn.q_a_layernorm"
    latent_norm: str = "self_attn.kv_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    latent_up: str = "self_attn.kv_b_proj"
    latent_query: str = "self_attn.q_proj"
    """The matrix of queries without a latent of them."""
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """The matrices to the hidden layer of the MLP: gate and gated half, separate or both in one."""
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    router_bias: str = "mlp.gate.e_score_correction_bias"
    """Its bias, the whole name."""
    router_bias_of_row: bool = False
    """Whether that tensor is [1, experts]."""
    expert_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    """The same matrices of experts: each expert's by its number, or all experts in one."""
    expert_down: str = "mlp.experts.{}.down_proj"
    alternating_experts: bool = False
    """Whether experts are [E, in, out], with rows of the gate and of the gated half in turn, and names without
    `.weight`."""
    shared_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate: str = "mlp.shared_expert_gate.weight"
    """The gate of the shared experts, the whole name."""
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention_output_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = "post_feedforward_layernorm"
    final_norm: str = "norm"
    """Norm before the output layer."""
    output: str = "lm_head"
    transposed: bool = False
    """Whether matrices are [in, out], and not [out, in]."""
    not_weights: tuple[str, ...] = (".rotary_emb.inv_freq",)
    """Ends of the names of tensors that are not weights, such as masks."""
    unread: str | None = None
    """Beginning of the names of tensors that transformers does not read either."""
    further: FurtherNames | None = None
    """Layers that predict further tokens, which transformers reads apart from the model; None where there are none."""

    def is_weight(self, tensor: str, model: ModelConfig) -> bool:
        """Whether a tensor of a file is a weight of a model, and not a mask or a copy."""
        if tensor.endswith(self.not_weights) or (self.unread is not None and tensor.startswith(self.unread)):
            return False
        if self.further is not None and (depth := self.further.depth_of(tensor)) is not None:
            copied = tensor.endswith(tuple(f".{name}.weight" for name in self.further.copies))
            return depth < model.mtp_num_layers and not copied
        return model.untie_embeddings_and_output_weights or tensor != f"{self.output}.weight"

    def canonical(self, tensor: str) -> str:
        """Return the whole name of a tensor, which a file may store without the beginning of the prefix.

        A model that was saved without its output layer leaves that out.
        """
        base = self.prefix.partition(".")[0] + "."
        if not self.prefix or (self.further is not None and self.further.depth_of(tensor) is not None):
            return tensor
        return tensor if tensor.startswith((base, f"{self.output}.")) else base + tensor


_WITHOUT_EFFECT = {*OF_TRAINING, "model_preset", "make_vocab_size_divisible_by", "vocab_rows", "mtp_num_layers"}
"""Fields of the model section that change no output of a model after its training."""

_BY_PROPERTY = {
    *("disable_bias_linear", "add_qkv_bias", "add_attention_bias", "add_mlp_bias", "heterogeneous_layers_config_path"),
    *("sliding_window", "window_attn_skip_freq", "no_rope_freq"),
    *("ffn_hidden_size", "moe_ffn_hidden_size", "moe_layer_freq", "linear_attention_freq"),
}
"""Fields that express the same in several ways; the result is compared."""

_OF_SCALING = {
    "rotary_original_length": ("llama3", "yarn", "dynamic", "longrope"),
    "rotary_low_frequency_factor": ("llama3",),
    "rotary_high_frequency_factor": ("llama3",),
    "rotary_beta_slow": ("yarn",),
    "rotary_unrounded_ramp": ("yarn",),
    "rotary_beta_fast": ("yarn",),
    # With dynamic, the positions of their files are the length before scaling, and sequences may be longer.
    "max_position_embeddings": ("none", "linear", "llama3", "yarn", "longrope"),
}
"""Fields that matter only with some scalings of rotations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """An architecture of Hugging Face's library, or of another trainer."""

    name: str
    owner: str = "Hugging Face's "
    """Words before the name, in messages."""
    architecture: str
    settings: tuple[Setting, ...]
    """Settings of its keys; each may use the fields that those before it have read."""
    tensors: TensorNames | Callable[[ModelConfig], TensorNames] = TensorNames()
    """Names of its tensors, or a function from a model to them."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of its keys that transformers reads, by key."""
    ties: bool = True
    """Whether its class of transformers can tie the output layer to the embedding; if not, a copy is written."""
    remarks: Callable[[ModelConfig], Iterable[str]] = lambda model: ()
    """Versions of transformers that do not read a model of it as this one, a sentence each."""

    def fields(self, file: SettingsFile) -> dict[str, Any]:
        """Return the fields of the model section that a `config.json` sets, without the length of sequences."""
        file = file.with_aliases(self.aliases)
        own = {key for each in self.settings for key in each.keys}
        for key, (accepted, reason) in _OF_ALL.items():
            if key not in own:
                file.expect(key, accepted, accepted[0], *reason)
        found: dict[str, Any] = {}
        try:
            for each in self.settings:
                found |= each.read(file, found)
        except ArithmeticError as error:  # Of numbers that no model has.
            raise ConfigError(f"{file.where} makes no model ({error.args[-1]}): correct its numbers") from None
        # Other settings of experts count only where there are some.
        return {name: value for name, value in found.items() if "moe_" not in name or found.get("num_experts")}

    def read(self, file: SettingsFile) -> ModelConfig:
        """Return the model of a `config.json`; its sequences are as long as there are positions."""
        refuse_experts(file.contents, file.where, self.keys)
        fields = self.fields(file)
        try:
            return ModelConfig(**fields, seq_length=fields["max_position_embeddings"])
        except (ConfigError, ArithmeticError) as error:
            raise ConfigError(f"{file.where} makes no model: {error}") from None

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return the contents of a `config.json`, without settings of sampling."""
        contents: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.name}
        model = self.written(model)
        for each in self.settings:
            contents |= each.write(model)
        return contents

    def written(self, model: ModelConfig) -> ModelConfig:
        """Return a model as it is written: with an output layer of its own if the family ties none."""
        return model if self.ties else replace(model, untie_embeddings_and_output_weights=True)

    def with_named_layers(self, model: ModelConfig) -> ModelConfig:
        """Return a model without the layers that predict further tokens for which the family has no names."""
        further = self.names(model).further
        most = 0 if further is None else MOST_DEPTHS if "{}" in further.begin else 1
        return replace(model, mtp_num_layers=min(model.mtp_num_layers, most))

    def names(self, model: ModelConfig) -> TensorNames:
        """Return the names of the tensors of a model."""
        return self.tensors if isinstance(self.tensors, TensorNames) else self.tensors(model)

    @property
    def keys(self) -> frozenset[str]:
        """Keys of `config.json` that it understands."""
        return frozenset((*_OF_ALL, *self.aliases.values())) | {key for each in self.settings for key in each.keys}

    def differences(self, model: ModelConfig) -> list[str]:
        """Return the settings of a model that the family cannot express, each as `this, and Hugging Face's that`.

        The model is written and read again. So every setting of the model section is compared, also one
        without a rule here. Raises a `ConfigError` if the written file is not a valid model.
        """
        back = self.read(SettingsFile(self.write(model), self.name))
        theirs = dict(_facts(back))
        return [
            f"{_in_words(name, value)}, and {self.owner}{self.name} {_in_words(name, theirs.get(name))}"
            for name, value in _facts(self.written(model))
            if not _equal(value, theirs.get(name))
        ]


_OF_ALL: Mapping[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "quantization_config": ((None,), ("weights are read as they are trained", "give a copy of the model in bf16")),
    "is_encoder_decoder": ((False,), ()),
    "add_cross_attention": ((False,), ()),
    "pruned_heads": ((None, {}), ()),
}
"""Keys that every family may have, the values of which our models have the meaning, and words on others."""


def check_expressible(family: Family, model: ModelConfig) -> None:
    """Refuse a model that a family cannot express."""
    if differences := family.differences(model):
        raise ConfigError(
            f"the model has {'; '.join(differences)}: it cannot be written in their files without becoming another "
            "model, so keep it in ours"
        )


def _facts(model: ModelConfig) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a model that change its output, by names of flags or in words."""
    for each in fields(ModelConfig):
        name = each.name
        if name in _WITHOUT_EFFECT or name in _BY_PROPERTY:
            continue
        if name.startswith("rotary_") and not model.rotates:
            continue
        if name in _OF_SCALING and model.rotary_scaling not in _OF_SCALING[name]:
            continue
        yield f"--{name.replace('_', '-')}", getattr(model, name)
    yield "biases of queries, keys and values", model.has_qkv_bias
    yield "a bias after attention", model.has_projection_bias
    yield "biases in the MLP", model.has_mlp_bias
    blocks = model.blocks
    yield "windows", _by_layer([block.window for block in blocks])
    yield "layers without rotations", _by_layer([not block.rotated for block in blocks])
    yield "layers of several shapes", len({(block.num_key_value_heads, block.ffn_hidden_size) for block in blocks}) > 1
    yield "--ffn-hidden-size", _by_layer([block.ffn_hidden_size for block in blocks])
    yield "layers of experts", _by_layer([block.num_experts > 0 for block in blocks])
    yield "layers with a state", _by_layer([block.recurrence is not None for block in blocks])


def _by_layer(values: Iterable[Any]) -> Any:
    listed = tuple(values)
    return listed[0] if len(set(listed)) == 1 else listed


def _in_words(name: str, value: Any) -> str:
    if isinstance(value, tuple):
        return f"{name} of several kinds"
    if value is None or value is False:
        return f"no {name}"
    return name if value is True else f"{name} {value}"


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float) and isinstance(theirs, int | float):
        # Half a unit in the last place of fp32.
        return isclose(ours, theirs, rel_tol=2**-24)
    return bool(ours == theirs)
