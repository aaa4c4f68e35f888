"""Layers of megatron-core as pipeline layers that compute a token slice at a time, unchanged but for attention.

`gpt_model_layers` takes the arguments of megatron-core's `GPTModel`, of which a `TransformerConfig` and the spec of a
layer are the first. In a copy of the spec it replaces

    core attention       by `SliceAttention`, which calls `past.attend`
    bias-dropout-add     by `SliceDropout`, whose masks follow from the position, as of the trainer's own layers
    torch's norms        by the same ones, for sequence parallelism too, for which megatron-core has others

and gives each `TransformerLayer` the rotary embeddings of the positions of the token slice. Tensors are [B, N, hidden]
between pipeline layers, and [N, B, hidden] within megatron-core's, for which no copy is needed.

A layer's modules are called by megatron-core, which passes no `past` to them: each layer has a `SliceView` that they
share, and that holds its `past` during its forward, also when it is computed again.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding, vocab_parallel_cross_entropy
from megatron.core.transformer import ModuleSpec, TransformerConfig, multi_latent_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention
from megatron.core.utils import GlobalMemoryBuffer
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.runtime.state.sequence_state import Past
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.model.embedding import AT_AN_END
from megatron_terapipe.model.gpt import ModelRanks
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks

Spec = ModuleSpec | TransformerBlockSubmodules

_REFUSED: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (
        "flags of the trainer set ranks, stages, recomputation and copies on the host",
        {
            **{"context_parallel_size": 1, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1},
            **{"virtual_pipeline_model_parallel_size": None, "recompute_granularity": None, "cpu_offloading": False},
            **{"fine_grained_activation_offloading": False, "cuda_graph_impl": "none", "tp_comm_overlap": False},
            **{"overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False},
            **{"defer_embedding_wgrad_compute": False, "init_model_with_meta_device": False},
        },
    ),
    (
        "the trainer computes attention",
        {
            **{"softmax_type": "vanilla", "qk_clip": False, "log_max_attention_logit": False},
            **{"experimental_attention_variant": None, "fp8_dot_product_attention": False},
            **{"fp8_multi_head_attention": False},
        },
    ),
    (
        "it depends on all tokens of a micro-batch, and a layer computes a token slice of them",
        {
            **{"moe_z_loss_coeff": None, "moe_expert_capacity_factor": None, "moe_router_enable_expert_bias": False},
            **{"moe_input_jitter_eps": None},
        },
    ),
    (
        "stages and optimizer have weights and tensors of one type",
        {"fp32_residual_connection": False, "fp8_param": False, "fp4": None},
    ),
    ("each pipeline layer is one transformer layer", {"mtp_num_layers": None, "heterogeneous_block_specs": False}),
)
"""Settings of a `TransformerConfig` that cannot hold here, by why, with the only value that can."""


_GROUPS = {
    **{"tp": "_TENSOR_MODEL_PARALLEL_GROUP", "tp_cp": "_TENSOR_AND_CONTEXT_PARALLEL_GROUP"},
    **{"expt_tp": "_EXPERT_TENSOR_PARALLEL_GROUP", "tp_ep": "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"},
    **{"pp": "_PIPELINE_MODEL_PARALLEL_GROUP", "cp": "_CONTEXT_PARALLEL_GROUP", "ep": "_EXPERT_MODEL_PARALLEL_GROUP"},
    "dp": "_DATA_PARALLEL_GROUP",
}
"""Names of the groups in `parallel_state`, by their names in a `ProcessGroupCollection`."""


def gpt_model_layers(
    config: TransformerConfig,
    transformer_layer_spec: Spec,
    vocab_size: int,
    max_sequence_length: int,
    *,
    ranks: ModelRanks,
    share_embeddings_and_output_weights: bool = False,
    position_embedding_type: str = "learned_absolute",
    rotary_percent: float = 1.0,
    rotary_base: int = 10000,
    rope_scaling: bool = False,
    rope_scaling_factor: float = 8.0,
    seq_len_interpolation_factor: float | None = None,
) -> list[LayerSpec]:
    """Return the layers of megatron-core's `GPTModel`: from token ids [B, N] to logits [B, N, own part of vocabulary].

    The arguments are `GPTModel`'s. The sizes of parallel groups in `config` are replaced by the sizes of `ranks`.

    Args:
        transformer_layer_spec: of all layers, or of each (`get_gpt_decoder_block_spec`).
        vocab_size: rows of the word embedding, a multiple of the tensor-parallel ranks.

    Raises:
        ConfigError: for a setting, a layer or a position embedding that cannot be computed in token slices.
    """
    config = _settled(config, ranks)
    groups = set_parallel_state(ranks)
    block = transformer_layer_spec
    if isinstance(block, ModuleSpec):
        block = TransformerBlockSubmodules(layer_specs=[block] * config.num_layers, layer_norm=LayerNormImpl)
    if len(block.layer_specs) != config.num_layers:
        raise ConfigError(
            f"the spec has {len(block.layer_specs)} layers of {config.num_layers}: build it for all layers, with "
            "pipeline_model_parallel_size=1"
        )
    for number, spec in enumerate(block.layer_specs):
        _check_layer(number, spec, ranks.tensor)
    rotary = None
    if position_embedding_type == "rope" and not config.multi_latent_attention:
        rotary = RotaryEmbedding(
            *(config.kv_channels, rotary_percent, config.rotary_interleaved, seq_len_interpolation_factor),
            *(rotary_base, rope_scaling, rope_scaling_factor),
            cp_group=groups.cp,
        )
    elif position_embedding_type not in ("learned_absolute", "rope", "none"):
        raise ConfigError(
            f"position_embedding_type={position_embedding_type!r} has no positions of a token slice here: use "
            "learned_absolute, rope or none"
        )
    common = config, groups, ranks.tensor
    words = partial(LayerSpec, Words)
    output = LayerSpec(Output, *common, vocab_size)
    if share_embeddings_and_output_weights:
        tied = partial(TiedLayerSpec, "embedding", Words, tied_weight_attr="word_embeddings.weight")
        words, output = tied, tied(*common, vocab_size, forward_fn=Words.logits)
    layers = [words(*common, vocab_size)]
    learned = position_embedding_type == "learned_absolute"
    if learned or config.hidden_dropout:
        layers.append(LayerSpec(Positions, *common, max_sequence_length if learned else 0))
    for number, spec in enumerate(block.layer_specs):
        layers.append(LayerSpec(Layer, *common, spec, number, rotary))
    if block.layer_norm is not None:
        layers.append(LayerSpec(FinalNorm, *common, block.layer_norm))
    return [*layers, output]


def vocabulary_loss(logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of the tokens whose loss mask is 1, by megatron-core; 0 without any.

    As in Megatron, the rows that pad the vocabulary are in the sum of exponentials.

    Args:
        logits: [B, N, own part of the vocabulary].
        labels: token ids [B, N] and the loss mask [B, N].
    """
    targets, loss_mask = (each.transpose(0, 1).contiguous() for each in labels)
    losses = vocab_parallel_cross_entropy(logits.transpose(0, 1).contiguous(), targets)
    mask = loss_mask.to(losses.dtype)
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def _settled(config: TransformerConfig, ranks: ModelRanks) -> TransformerConfig:
    """Return a copy of the settings, with the values that follow from the trainer."""
    for reason, settings in _REFUSED:
        for name, only in settings.items():
            if (value := getattr(config, name, only)) != only:
                raise ConfigError(f"TransformerConfig has {name}={value!r}, and {reason}: leave it at {only!r}")
    balancing = config.moe_router_load_balancing_type
    if config.num_moe_experts and balancing != "none" and (config.moe_aux_loss_coeff or "sinkhorn" in balancing):
        raise ConfigError(
            f"moe_router_load_balancing_type={balancing!r} balances all tokens of a micro-batch, and a layer computes "
            "a token slice of them: use 'none'"
        )
    if config.window_size and config.window_size[1] > 0:
        raise ConfigError(
            f"window_size={config.window_size} reaches tokens after a token: use ({config.window_size[0]}, 0)"
        )
    if ranks.expert is not None and ranks.expert.size > 1:
        raise ConfigError(
            f"--expert-model-parallel-size {ranks.expert.size} divides the experts among ranks, and megatron-core's "
            "have names by rank: use 1, or divide each expert with --tensor-model-parallel-size"
        )
    if config.fp8 and not HAVE_TE:
        raise ConfigError(f"fp8={config.fp8!r} needs Transformer Engine, which is not installed: leave it out")
    if config.fp8 and config.fp8_recipe == "delayed":
        raise ConfigError(
            "fp8_recipe='delayed' takes its scales from whole micro-batches before, and a layer computes token slices: "
            "use 'tensorwise', 'blockwise' or 'mxfp8'"
        )
    tensor = ranks.tensor
    settled = copy.copy(config)
    values = {
        **{"tensor_model_parallel_size": tensor.size, "expert_tensor_parallel_size": tensor.size},
        "sequence_parallel": tensor.sequence_parallel,
        # The optimizer casts weights, and has no `main_grad`; stages send their outputs themselves.
        **{"params_dtype": torch.float32, "gradient_accumulation_fusion": False, "deallocate_pipeline_outputs": False},
        # Each rank draws the whole weight on its device and takes its part: the same for any number of ranks.
        **{"perform_initialization": True, "use_cpu_initialization": True},
        # megatron-core would keep weights in FP8 until its own schedules say that an iteration begins.
        **{"disable_parameter_transpose_cache": True, "tp_only_amax_red": True},
    }
    vars(settled).update(values)
    return settled


def _check_layer(number: int, spec: ModuleSpec, ranks: TensorParallelRanks) -> None:
    attention = getattr(spec.submodules, "self_attention", None)
    is_layer = isinstance(spec.module, type) and issubclass(spec.module, TransformerLayer)
    if not is_layer or not hasattr(getattr(attention, "submodules", None), "core_attention"):
        raise ConfigError(
            f"layer {number} of the spec has no core attention, by which it would read earlier token slices: use a "
            "TransformerLayer with SelfAttention or MLASelfAttention"
        )
    if attention.params.get("attn_mask_type") is not AttnMaskType.causal:
        raise ConfigError(
            f"layer {number} of the spec attends without a causal mask, which token slices need: add "
            "params={'attn_mask_type': AttnMaskType.causal}"
        )
    down = getattr(attention.submodules, "linear_kv_down_proj", None)
    if down is not None and ranks.size > 1 and (down is ColumnParallelLinear or not ranks.sequence_parallel):
        raise ConfigError(
            f"layer {number} of the spec has latent attention, of which megatron-core's tensor-parallel ranks sum only "
            "a part of a gradient: use 1, or --sequence-parallel with Transformer Engine's spec"
        )


def set_parallel_state(ranks: ModelRanks) -> ProcessGroupCollection:
    """Set megatron-core's `parallel_state` to the groups of this rank's layers, and return them.

    It takes each rank for the only replica: settings that need the others are refused.
    """
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    tensor = ranks.tensor.group or alone
    groups = {
        **{"tp": tensor, "tp_cp": tensor, "expt_tp": tensor, "tp_ep": tensor},
        **{"pp": alone, "cp": alone, "ep": alone, "dp": alone},
    }
    for name, group in groups.items():
        setattr(parallel_state, _GROUPS[name], group)
    parallel_state._TENSOR_MODEL_PARALLEL_GLOBAL_RANKS = dist.get_process_group_ranks(tensor)
    parallel_state._GLOBAL_MEMORY_BUFFER = GlobalMemoryBuffer()
    if not torch.cuda.is_available():
        # Where megatron-core makes a tensor, it names CUDA's device.
        torch.cuda.current_device = lambda: torch.device("cpu")
    if not HAVE_TE:  # Release 0.16 reads a name that is not defined, and takes a class that is None for one.
        vars(moe_utils).setdefault("te_general_gemm", None)
        multi_latent_attention.HAVE_TE = False
    return ProcessGroupCollection(**groups, expt_dp=None, tp_dp_cp=None)


class SliceView:
    """The token slice that a layer computes: its `past`, for the modules within it."""

    past: Past | None = None


class PipelineLayer(nn.Module):
    """A layer of megatron-core for a token slice: [B, n, hidden] of the tokens between the matrices in and out."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection, ranks: TensorParallelRanks) -> None:
        super().__init__()
        self.config, self.groups, self.ranks = config, groups, ranks
        # States of FP8, which begin anew, and megatron-core's empty ones.
        self.register_state_dict_post_hook(_without_extra_states)

    def megatron_name(self, name: str) -> str:
        """Return the name of one of its weights in a checkpoint of Megatron-LM."""
        return name

    def tokens(self, hidden: Tensor) -> int:
        """Return the tokens of the token slice, for its part [B, n, hidden]."""
        return hidden.shape[1] * (self.ranks.size if self.ranks.sequence_parallel else 1)

    def whole(self, *weights: Tensor | None) -> None:
        """Mark weights that each rank has whole, and applies to its own tokens."""
        for weight in filter(lambda each: each is not None, weights):
            weight.sequence_parallel = self.ranks.sequence_parallel


def _without_extra_states(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    for name in [name for name in state if name.endswith("_extra_state")]:
        del state[name]


class Words(PipelineLayer):
    """megatron-core's word embedding, and the output layer that shares its weight."""

    def __init__(
        self, config: TransformerConfig, groups: ProcessGroupCollection, ranks: TensorParallelRanks, vocab_size: int
    ) -> None:
        super().__init__(config, groups, ranks)
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            init_method=config.embedding_init_method,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
            tp_group=groups.tp,
        )
        setattr(self.word_embeddings.weight, AT_AN_END, True)
        self.output_layer = _output_layer(config, groups, vocab_size, skip_weight_param_allocation=True)

    def megatron_name(self, name: str) -> str:  # noqa: D102
        return f"embedding.{name}"

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [B, N] in, [B, n, hidden] out."""
        words = self.word_embeddings(tokens)
        return words.transpose(0, 1) if self.ranks.sequence_parallel else words

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, n, hidden] in, [B, N, own part of the vocabulary] out."""
        return _logits(self.output_layer, hidden, weight=self.word_embeddings.weight)


class Positions(PipelineLayer):
    """Adds learned positions to the words, if the model has `rows` of them, and applies dropout."""

    def __init__(
        self, config: TransformerConfig, groups: ProcessGroupCollection, ranks: TensorParallelRanks, rows: int
    ) -> None:
        super().__init__(config, groups, ranks)
        self.position_embeddings = None
        if rows:
            self.position_embeddings = nn.Embedding(rows, config.hidden_size)
            config.embedding_init_method(self.position_embeddings.weight)
            self.whole(self.position_embeddings.weight)

    def megatron_name(self, name: str) -> str:  # noqa: D102
        return f"embedding.{name}"

    def forward(self, hidden: Tensor, past: Past) -> Tensor:  # noqa: D102
        if self.position_embeddings is not None:
            positions = past.positions(self.tokens(hidden), hidden.device)
            hidden = hidden + self.position_embeddings(self.ranks.own_tokens(positions))
        if not (self.training and self.config.hidden_dropout):
            return hidden
        first = self.ranks.first_token(hidden.shape[1])
        return past.dropout(hidden, self.config.hidden_dropout, site=1, first_token=first)


class Layer(PipelineLayer):
    """A `TransformerLayer` of megatron-core.

    Args:
        spec: of the layer, whose core attention is replaced.
        number: of the layer, from 0.
        rotary: megatron-core's rotary embedding; None without, or where attention has its own.
    """

    def __init__(
        self,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        ranks: TensorParallelRanks,
        spec: ModuleSpec,
        number: int,
        rotary: RotaryEmbedding | None,
    ) -> None:
        super().__init__(config, groups, ranks)
        self.number, self.view = number, SliceView()
        self.rotary = rotary and SliceRotary(rotary, self.view)
        spec = self._for_slices(spec)
        self.layer = build_module(spec, config=config, layer_number=number + 1, pg_collection=groups)
        attention = self.layer.self_attention
        if config.multi_latent_attention:
            attention.rotary_pos_emb = SliceRotary(attention.rotary_pos_emb, self.view)
        elif ranks.size > 1:  # Each rank applies the norms of heads to its own.
            for norm in (attention.q_layernorm, attention.k_layernorm):
                for weight in () if norm is None else norm.parameters():
                    weight.sequence_parallel = True

    def megatron_name(self, name: str) -> str:  # noqa: D102
        return f"decoder.layers.{self.number}.{name.removeprefix('layer.')}"

    def _for_slices(self, spec: ModuleSpec) -> ModuleSpec:
        """Return the spec of the layer for token slices."""
        parts = spec.submodules
        attention = parts.self_attention
        core = ModuleSpec(SliceAttention, params={"view": self.view})
        within = self._with_norms(replace(attention.submodules, core_attention=core))
        parts = self._with_norms(replace(parts, self_attention=replace(attention, submodules=within)))
        for site, name in enumerate(("self_attn_bda", "mlp_bda"), 1):
            if getattr(parts, name) is get_bias_dropout_add:
                added = ModuleSpec(SliceDropout, params={"view": self.view, "ranks": self.ranks, "site": site})
                parts = replace(parts, **{name: added})
        return replace(spec, submodules=parts)

    def _with_norms(self, parts: Any) -> Any:
        """Return submodules whose norms of torch are computed under sequence parallelism, too."""
        norms = [name for name, each in vars(parts).items() if each is WrappedTorchNorm]
        return replace(parts, **dict.fromkeys(norms, TorchNorm))

    def forward(self, hidden: Tensor, past: Past) -> Tensor:  # noqa: D102
        self.view.past = past
        rotary = None if self.rotary is None else self.rotary(self.tokens(hidden))
        try:
            with get_fp8_context(self.config, self.number):
                inputs = hidden.transpose(0, 1).contiguous()
                output, _ = self.layer(inputs, attention_mask=None, rotary_pos_emb=rotary)
        finally:
            self.view.past = None
        return output.transpose(0, 1)


class FinalNorm(PipelineLayer):
    """The norm after the last layer."""

    def __init__(
        self, config: TransformerConfig, groups: ProcessGroupCollection, ranks: TensorParallelRanks, norm: Any
    ) -> None:
        super().__init__(config, groups, ranks)
        norm = TorchNorm if norm is WrappedTorchNorm else norm
        sizes = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.final_layernorm = build_module(norm, config=config, **sizes)

    def megatron_name(self, name: str) -> str:  # noqa: D102
        return f"decoder.{name}"

    def forward(self, hidden: Tensor) -> Tensor:  # noqa: D102
        return self.final_layernorm(hidden)


class Output(PipelineLayer):
    """megatron-core's output layer, with a weight of its own."""

    def __init__(
        self, config: TransformerConfig, groups: ProcessGroupCollection, ranks: TensorParallelRanks, vocab_size: int
    ) -> None:
        super().__init__(config, groups, ranks)
        self.output_layer = _output_layer(config, groups, vocab_size)
        setattr(self.output_layer.weight, AT_AN_END, True)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, n, hidden] in, [B, N, own part of the vocabulary] out."""
        return _logits(self.output_layer, hidden)


def _output_layer(
    config: TransformerConfig, groups: ProcessGroupCollection, vocab_size: int, **settings: Any
) -> ColumnParallelLinear:
    fixed = {"bias": False, "skip_bias_add": False, "gather_output": False, "tp_group": groups.tp}
    return ColumnParallelLinear(
        config.hidden_size, vocab_size, config=config, init_method=config.init_method, **fixed, **settings
    )


def _logits(output_layer: ColumnParallelLinear, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
    logits, _ = output_layer(hidden.transpose(0, 1).contiguous(), weight=weight)
    return logits.transpose(0, 1)


class TorchNorm:
    """megatron-core's `WrappedTorchNorm`, also where tensor-parallel ranks share the tokens."""

    def __new__(cls, config: TransformerConfig, **settings: Any) -> nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = WrappedTorchNorm(config=plain, **settings)
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel
        return norm


class SliceRotary(nn.Module):
    """megatron-core's rotary embedding of the positions of a token slice, which layers of a stage share."""

    def __init__(self, rotary: nn.Module, view: SliceView) -> None:
        super().__init__()
        self.rotary, self.view = rotary, view
        self.get_rotary_seq_len = rotary.get_rotary_seq_len

    def forward(self, length: int, packed_seq: bool = False) -> Any:
        """Return angles [N, 1 or B, 1, D], in a tuple where megatron-core's own are."""
        past = self.view.past
        return past.cached_for_slice("megatron-core's rotary angles", partial(self._angles, past, length))

    def _angles(self, past: Past, length: int) -> Any:
        if not past.positions_restart:
            return self.rotary.get_emb(length, past.prefix_len)
        found = self.rotary.get_emb(past.seq_length)
        angles, *others = found if isinstance(found, tuple) else (found,)
        angles = angles[past.positions(length, angles.device).t(), 0]
        return (angles, *others) if others else angles


class SliceAttention(nn.Module):
    """megatron-core's core attention of a token slice, to itself and to those before it.

    Latent attention has values that are narrower than its keys; zeros make them as wide.
    """

    def __init__(
        self,
        view: SliceView,
        *,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        attention_dropout: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.view, self.scale = view, softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.first_head = pg_collection.tp.rank() * config.num_attention_heads // pg_collection.tp.size()
        self.window = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            before, _ = config.window_size
            self.window = None if before < 0 else before + 1

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Query [N, B, heads, D], key [N, B, groups, D] and value [N, B, groups, V] in, [N, B, heads V] out."""
        width, widest = value.shape[-1], max(query.shape[-1], value.shape[-1])
        attended = self.view.past.attend(
            *(F.pad(each.transpose(0, 1), (0, widest - each.shape[-1])) for each in (query, key, value)),
            scale=query.shape[-1] ** -0.5 if self.scale is None else self.scale,
            dropout=self.dropout if self.training else 0.0,
            first_head=self.first_head,
            window=self.window,
        )
        return attended[..., :width].transpose(0, 1).flatten(2)


class SliceDropout:
    """megatron-core's bias-dropout-add, with masks that depend only on the position."""

    def __init__(self, view: SliceView, ranks: TensorParallelRanks, site: int) -> None:
        self.view, self.ranks, self.site = view, ranks, site

    def __call__(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        """Return the function of an output [n, B, hidden] with its bias, a residual, and a probability."""
        return partial(self._add, training)

    def _add(
        self, training: bool, output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float
    ) -> Tensor:
        output, bias = output_with_bias
        output = output if bias is None else output + bias
        if not (training and probability):
            return residual + output
        first = self.ranks.first_token(len(output))
        output, residual = output.transpose(0, 1), residual.transpose(0, 1)
        masked = self.view.past.dropout(output, probability, site=self.site, first_token=first, residual=residual)
        return masked.transpose(0, 1)
