"""Layers of megatron-core as pipeline layers that compute a token slice at a time, unchanged but for attention.

`gpt_model_layers` takes the arguments of megatron-core's `GPTModel`, of which a `TransformerConfig` and the spec of a
layer are the first. In a copy of the spec it replaces

    core attention       by `SliceAttention`, which calls `past.attend`
    bias-dropout-add     by one whose masks depend only on the position, as the trainer's own
    torch's norms        by themselves with sequence parallelism, which megatron-core leaves to other norms

and gives each `TransformerLayer` the rotary embeddings of the positions of the token slice. Schedules may defer weight
gradients of megatron-core's own linear layers, where a backward has no exchange. megatron-core passes no `past` to the
modules within a layer: they share a view, which holds it during a forward, also when the layer is computed again.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from megatron.core import parallel_state, tensor_parallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
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

from deepspeed_ext.runtime.gradients.weight_gradients import linear
from deepspeed_ext.runtime.state.sequence_state import Past
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.model.embedding import AT_AN_END
from megatron_terapipe.model.gpt import ModelRanks
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks

__all__ = ["gpt_model_layers", "vocabulary_loss"]

_ONLY = {
    **dict.fromkeys(("recompute_granularity", "mtp_num_layers", "experimental_attention_variant", "fp4"), None),
    **dict.fromkeys(("moe_z_loss_coeff", "moe_expert_capacity_factor"), None),
    **dict.fromkeys(("moe_router_enable_expert_bias", "fp32_residual_connection", "delay_wgrad_compute"), False),
    **dict.fromkeys(("heterogeneous_block_specs", "qk_clip", "fp8_param"), False),
    **{"softmax_type": "vanilla", "cuda_graph_impl": "none"},
}
"""Settings of a `TransformerConfig` that would be wrong or without effect here, with the only value that holds."""


class Shared(NamedTuple):
    """The arguments that all layers have."""

    config: TransformerConfig
    groups: ProcessGroupCollection
    ranks: TensorParallelRanks


def gpt_model_layers(
    config: TransformerConfig,
    transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
    vocab_size: int,
    max_sequence_length: int,
    *,
    ranks: ModelRanks,
    share_embeddings_and_output_weights: bool = False,
    position_embedding_type: str = "learned_absolute",
    **rotary: Any,
) -> list[LayerSpec]:
    """Return the layers of megatron-core's `GPTModel`: from token ids [B, N] to logits [B, N, own part of vocabulary].

    The arguments are `GPTModel`'s. The sizes of parallel groups in `config` are replaced by the sizes of `ranks`.

    Args:
        transformer_layer_spec: of all layers, or of each (`get_gpt_decoder_block_spec`).
        vocab_size: rows of the word embedding, a multiple of the tensor-parallel ranks.
        **rotary: `rotary_percent`, `rotary_base`, `rope_scaling` and others, as of `GPTModel`.

    Raises:
        ConfigError: for a setting, a layer or a position embedding that cannot be computed in token slices.
    """
    config = _settled(config, ranks)
    block = transformer_layer_spec
    if isinstance(block, ModuleSpec):
        block = TransformerBlockSubmodules(layer_specs=[block] * config.num_layers, layer_norm=LayerNormImpl)
    if len(block.layer_specs) != config.num_layers:
        raise ConfigError(f"the spec has {len(block.layer_specs)} layers of {config.num_layers}: build it for all")
    for number, spec in enumerate(block.layer_specs):
        _check_layer(number, spec, ranks.tensor)
    if position_embedding_type not in ("learned_absolute", "rope", "none"):
        raise ConfigError(
            f"position_embedding_type={position_embedding_type!r} is not computed for token slices: use rope, "
            "learned_absolute or none"
        )
    shared, turns = Shared(config, _set_parallel_state(ranks.tensor), ranks.tensor), None
    if position_embedding_type == "rope" and not config.multi_latent_attention:
        fixed = {"rotary_interleaved": config.rotary_interleaved, "cp_group": shared.groups.cp}
        turns = RotaryEmbedding(config.kv_channels, **({"rotary_percent": 1.0} | rotary | fixed))
    words, output = LayerSpec(Words, shared, vocab_size), LayerSpec(Output, shared, vocab_size)
    if share_embeddings_and_output_weights:
        tied = partial(TiedLayerSpec, "embedding", Words, shared, vocab_size, tied_weight_attr="word_embeddings.weight")
        words, output = tied(), tied(forward_fn=Output.forward)
    rows = max_sequence_length if position_embedding_type == "learned_absolute" else 0
    blocks = [LayerSpec(Layer, shared, spec, number, turns) for number, spec in enumerate(block.layer_specs)]
    norm = [] if block.layer_norm is None else [LayerSpec(FinalNorm, shared, block.layer_norm)]
    return [words, LayerSpec(Positions, shared, rows), *blocks, *norm, output]


def vocabulary_loss(logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of the tokens whose loss mask is 1, by megatron-core; 0 without any.

    As in Megatron, the rows that pad the vocabulary are in the sum of exponentials.

    Args:
        logits: [B, N, own part of the vocabulary].
        labels: token ids [B, N] and the loss mask [B, N].
    """
    targets, loss_mask = (each.transpose(0, 1).contiguous() for each in labels)
    losses = tensor_parallel.vocab_parallel_cross_entropy(logits.transpose(0, 1).contiguous(), targets)
    mask = loss_mask.to(losses.dtype)
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def _settled(config: TransformerConfig, ranks: ModelRanks) -> TransformerConfig:
    """Return a copy of the settings, with the values that follow from the trainer."""
    for name, only in _ONLY.items():
        if (value := getattr(config, name, only)) != only:
            raise ConfigError(
                f"TransformerConfig has {name}={value!r}, which layers cannot follow in token slices, or a flag of the "
                f"trainer sets: leave it at {only!r}"
            )
    balancing = config.moe_router_load_balancing_type
    if config.num_moe_experts and balancing != "none" and (config.moe_aux_loss_coeff or "sinkhorn" in balancing):
        raise ConfigError(
            f"moe_router_load_balancing_type={balancing!r} balances all tokens of a micro-batch, and a layer computes "
            "a token slice of them: use 'none'"
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
    settled, tensor = copy.copy(config), ranks.tensor
    vars(settled).update(
        **{"tensor_model_parallel_size": tensor.size, "expert_tensor_parallel_size": tensor.size},
        **dict.fromkeys(("context_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"), 1),
        **{"virtual_pipeline_model_parallel_size": None, "sequence_parallel": tensor.sequence_parallel},
        # The optimizer casts weights, and has no `main_grad`; stages send their outputs themselves.
        **{"params_dtype": torch.float32, "gradient_accumulation_fusion": False, "deallocate_pipeline_outputs": False},
        # Each rank draws the whole weight on its device and takes its part: the same for any number of ranks.
        **{"perform_initialization": True, "use_cpu_initialization": True},
        # megatron-core would keep weights in FP8 until its own schedules say that an iteration begins.
        **{"disable_parameter_transpose_cache": True, "tp_only_amax_red": True},
        defer_embedding_wgrad_compute=False,
    )
    return settled


def _check_layer(number: int, spec: ModuleSpec, ranks: TensorParallelRanks) -> None:
    attention = getattr(spec.submodules, "self_attention", None)
    is_layer = isinstance(spec.module, type) and issubclass(spec.module, TransformerLayer)
    attends = is_layer and hasattr(getattr(attention, "submodules", None), "core_attention")
    if not attends or attention.params.get("attn_mask_type") is not AttnMaskType.causal:
        raise ConfigError(
            f"layer {number} of the spec has no causal core attention, by which it would read earlier token slices: "
            "use a TransformerLayer with attention and params={'attn_mask_type': AttnMaskType.causal}"
        )
    down = getattr(attention.submodules, "linear_kv_down_proj", None)
    divided = down is tensor_parallel.ColumnParallelLinear or not ranks.sequence_parallel
    if down is not None and ranks.size > 1 and divided:
        raise ConfigError(
            f"layer {number} of the spec has latent attention, for which megatron-core's tensor-parallel ranks do not "
            "sum the gradient of the shared key: use 1, or --sequence-parallel with Transformer Engine's spec"
        )


def _set_parallel_state(ranks: TensorParallelRanks) -> ProcessGroupCollection:
    """Set megatron-core's `parallel_state` to the groups of this rank's layers, and return them.

    It takes each rank for the only replica: settings that need the others are refused.
    """
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    tensor = ranks.group or alone
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = parallel_state._TENSOR_AND_CONTEXT_PARALLEL_GROUP = tensor
    parallel_state._EXPERT_TENSOR_PARALLEL_GROUP = parallel_state._EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP = tensor
    parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = parallel_state._CONTEXT_PARALLEL_GROUP = alone
    parallel_state._EXPERT_MODEL_PARALLEL_GROUP = parallel_state._DATA_PARALLEL_GROUP = alone
    parallel_state._TENSOR_MODEL_PARALLEL_GLOBAL_RANKS = dist.get_process_group_ranks(tensor)
    parallel_state._GLOBAL_MEMORY_BUFFER = GlobalMemoryBuffer()
    if not torch.cuda.is_available():
        # megatron-core makes tensors on this device, in backwards, too, where nothing of ours is around it; it raises.
        torch.cuda.current_device = lambda: torch.device("cpu")
    if not HAVE_TE:  # Release 0.16 reads a name that is not defined, and takes a class that is None for one.
        vars(moe_utils).setdefault("te_general_gemm", None)
        multi_latent_attention.HAVE_TE = False
    groups = {**dict.fromkeys(("tp", "tp_cp", "expt_tp", "tp_ep"), tensor), **dict.fromkeys(("pp", "cp", "ep"), alone)}
    return ProcessGroupCollection(**groups, expt_dp=None, tp_dp_cp=None)


class PipelineLayer(nn.Module):
    """A part of the model for a token slice: hidden states are [B, n, hidden], of the tokens between the matrices."""

    prefix = ""
    """Beginning of the names of its weights in a checkpoint of Megatron."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.config, self.groups, self.ranks = shared
        self.num_parts = self.ranks.size if self.ranks.sequence_parallel else 1
        # FP8's states begin anew; megatron-core's own layers have empty ones.
        self.register_state_dict_post_hook(_without_extra_states)

    def megatron_name(self, name: str) -> str:
        """Return the name of one of its weights in a checkpoint of Megatron."""
        return self.prefix + name.removeprefix("layer.")


def _without_extra_states(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    for name in [name for name in state if name.endswith("_extra_state")]:
        del state[name]


def _defer_products(module: nn.Module) -> None:
    """Let schedules defer the weight gradients of megatron-core's own linear layers."""
    for each in module.modules():
        if isinstance(each, tensor_parallel.ColumnParallelLinear | tensor_parallel.RowParallelLinear):
            each._forward_impl = partial(_product, each._forward_impl)


def _product(theirs: Any, *, input: Tensor, weight: Tensor, bias: Tensor | None, **settings: Any) -> Tensor:
    """Return inputs @ weight.T + bias, by megatron-core where its backward exchanges gradients with other ranks."""
    if settings["allreduce_dgrad"] or settings["sequence_parallel"]:
        return theirs(input=input, weight=weight, bias=bias, **settings)
    return linear(input, weight, bias)


class Output(PipelineLayer):
    """megatron-core's output layer."""

    shared_weight: Tensor | None = None
    """The weight of the word embedding; None for one of its own."""

    def __init__(self, shared: Shared, vocab_size: int, **settings: Any) -> None:
        super().__init__(shared)
        fixed = {"bias": False, "skip_bias_add": False, "gather_output": False, "tp_group": self.groups.tp}
        fixed |= {"config": self.config, "init_method": self.config.init_method}
        self.output_layer = tensor_parallel.ColumnParallelLinear(
            self.config.hidden_size, vocab_size, **fixed, **settings
        )
        _defer_products(self)
        for weight in self.parameters():
            setattr(weight, AT_AN_END, True)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits [B, N, own part of the vocabulary]."""
        return self.output_layer(hidden.transpose(0, 1).contiguous(), weight=self.shared_weight)[0].transpose(0, 1)


class Words(Output):
    """megatron-core's word embedding, and the output layer that may share its weight."""

    prefix = "embedding."

    def __init__(self, shared: Shared, vocab_size: int) -> None:
        super().__init__(shared, vocab_size, skip_weight_param_allocation=True)
        settings = {"init_method": self.config.embedding_init_method, "config": self.config, "tp_group": self.groups.tp}
        self.word_embeddings = tensor_parallel.VocabParallelEmbedding(
            vocab_size, self.config.hidden_size, reduce_scatter_embeddings=self.config.sequence_parallel, **settings
        )
        setattr(self.word_embeddings.weight, AT_AN_END, True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden states of token ids [B, N]."""
        words = self.word_embeddings(tokens)
        return words.transpose(0, 1) if self.ranks.sequence_parallel else words

    @property
    def shared_weight(self) -> Tensor:
        return self.word_embeddings.weight


class Positions(PipelineLayer):
    """Adds learned positions to the words, if the model has `rows` of them, and applies dropout."""

    prefix = "embedding."

    def __init__(self, shared: Shared, rows: int) -> None:
        super().__init__(shared)
        self.position_embeddings = nn.Embedding(rows, self.config.hidden_size) if rows else None
        for weight in self.parameters():
            self.config.embedding_init_method(weight)
            weight.sequence_parallel = self.ranks.sequence_parallel

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        """Return the input of the first transformer layer."""
        if self.position_embeddings is not None:
            positions = past.positions(hidden.shape[1] * self.num_parts, hidden.device)
            hidden = hidden + self.position_embeddings(self.ranks.own_tokens(positions))
        if not (self.training and self.config.hidden_dropout):
            return hidden
        first = self.ranks.first_token(hidden.shape[1])
        return past.dropout(hidden, self.config.hidden_dropout, site=1, first_token=first)


class Layer(PipelineLayer):
    """A `TransformerLayer` of megatron-core; its rotary embedding is None without, or where attention has its own."""

    def __init__(self, shared: Shared, spec: ModuleSpec, number: int, rotary: RotaryEmbedding | None) -> None:
        super().__init__(shared)
        self.number, self.prefix = number, f"decoder.layers.{number}."
        self.view = SimpleNamespace(past=None, ranks=self.ranks)
        self.rotary = rotary and SliceRotary(rotary, self.view)
        parts, attention = spec.submodules, spec.submodules.self_attention
        core = ModuleSpec(SliceAttention, params={"view": self.view})
        sites = {"self_attn_bda": 1, "mlp_bda": 2}
        added = {name: self._dropout(sites[name]) for name in sites if getattr(parts, name) is get_bias_dropout_add}
        within = replace(attention, submodules=_with_norms(attention.submodules, core_attention=core))
        spec = replace(spec, submodules=_with_norms(parts, self_attention=within, **added))
        self.layer = build_module(spec, config=self.config, layer_number=number + 1, pg_collection=self.groups)
        _defer_products(self)
        own = self.layer.self_attention
        if self.config.multi_latent_attention:
            own.rotary_pos_emb = SliceRotary(own.rotary_pos_emb, self.view)
        elif self.ranks.size > 1:  # Each rank applies the norms of heads to its own.
            for norm in filter(None, (own.q_layernorm, own.k_layernorm)):
                for weight in norm.parameters():
                    weight.sequence_parallel = True

    def _dropout(self, site: int) -> Callable[[bool, bool], Callable[..., Tensor]]:
        """Return the function in place of `get_bias_dropout_add`."""

        def add(training: bool, with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = with_bias
            output = output if bias is None else output + bias
            if not (training and dropout):
                return residual + output
            settings = {"site": site, "first_token": self.ranks.first_token(len(output))}
            output, residual = output.transpose(0, 1), residual.transpose(0, 1)
            return self.view.past.dropout(output, dropout, residual=residual, **settings).transpose(0, 1)

        return lambda training, fused: partial(add, training)

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        """Return the output of the layer."""
        self.view.past = past
        try:
            rotary = None if self.rotary is None else self.rotary(hidden.shape[1] * self.num_parts)
            with get_fp8_context(self.config, self.number):
                inputs = hidden.transpose(0, 1).contiguous()
                output, _ = self.layer(inputs, attention_mask=None, rotary_pos_emb=rotary)
        finally:
            self.view.past = None
        return output.transpose(0, 1)


class FinalNorm(PipelineLayer):
    """The norm after the last layer."""

    prefix = "decoder."

    def __init__(self, shared: Shared, norm: Any) -> None:
        super().__init__(shared)
        sizes = {"hidden_size": self.config.hidden_size, "eps": self.config.layernorm_epsilon}
        norm = TorchNorm if norm is WrappedTorchNorm else norm
        self.final_layernorm = build_module(norm, config=self.config, **sizes)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the input of the output layer."""
        return self.final_layernorm(hidden)


def _with_norms(parts: Any, **others: Any) -> Any:
    """Return submodules with other ones, and with norms of torch that are computed under sequence parallelism, too."""
    norms = [name for name, each in vars(parts).items() if each is WrappedTorchNorm]
    return replace(parts, **dict.fromkeys(norms, TorchNorm), **others)


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

    def __init__(self, rotary: nn.Module, view: SimpleNamespace) -> None:
        super().__init__()
        self.rotary, self.view, self.get_rotary_seq_len = rotary, view, rotary.get_rotary_seq_len

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

    Latent attention has values and keys of two widths; zeros make them equal.
    """

    def __init__(
        self, view: Any, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__()
        self.view, self.scale, self.dropout, self.window = view, softmax_scale, config.attention_dropout, None
        self.first_head = view.ranks.rank * config.num_attention_heads // view.ranks.size
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            # megatron-core counts the tokens before a token.
            self.window = config.window_size[0] + 1 or None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Query [N, B, heads, D], key [N, B, groups, D] and value [N, B, groups, V] in, [N, B, heads V] out."""
        width, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
        query, key, value = (each.transpose(0, 1) for each in (query, key, value))
        attended = self.view.past.attend(
            *(F.pad(each, (0, -missing)) if missing < 0 else each for each in (query, key)),
            F.pad(value, (0, missing)) if missing > 0 else value,
            scale=query.shape[-1] ** -0.5 if self.scale is None else self.scale,
            dropout=self.dropout if self.training else 0.0,
            first_head=self.first_head,
            window=self.window,
        )
        return attended[..., :width].transpose(0, 1).flatten(2)
