"""Layers of megatron-core as pipeline layers that compute a token slice at a time, unchanged but for attention.

`gpt_model_layers` takes the arguments of megatron-core's `GPTModel`, of which a `TransformerConfig` and the spec of a
layer are the first. In a copy of the spec it replaces

    core attention       by `SliceAttention`, which calls `past.attend`
    bias-dropout-add     by one whose masks depend only on the position, as the trainer's own
    torch's norms        by themselves with sequence parallelism, which megatron-core leaves to other norms

lets schedules defer the weight gradients of megatron-core's own linear layers, where a product and no exchange is left,
and gives each `TransformerLayer` the rotary embeddings of the positions of the token slice. Tensors are [B, N, hidden]
between pipeline layers and [N, B, hidden] within megatron-core's, mostly without a copy.

megatron-core calls the modules within a layer, and passes them no `past`: each layer has a `SliceView` that they share,
and that holds its `past` during its forward, also when the layer is computed again.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
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

_REFUSED: Mapping[str, Mapping[str, Any]] = {
    "flags of the trainer set ranks, stages, recomputation and copies on the host": {
        **dict.fromkeys(("context_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"), 1),
        **dict.fromkeys(("virtual_pipeline_model_parallel_size", "recompute_granularity"), None),
        **dict.fromkeys(("cpu_offloading", "fine_grained_activation_offloading", "tp_comm_overlap"), False),
        **dict.fromkeys(("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"), False),
        **dict.fromkeys(("defer_embedding_wgrad_compute", "init_model_with_meta_device"), False),
        "cuda_graph_impl": "none",
    },
    "the trainer computes attention": {
        **dict.fromkeys(("qk_clip", "log_max_attention_logit"), False),
        **dict.fromkeys(("fp8_dot_product_attention", "fp8_multi_head_attention"), False),
        **{"softmax_type": "vanilla", "experimental_attention_variant": None},
    },
    "it depends on all tokens of a micro-batch, and a layer computes a token slice of them": {
        **dict.fromkeys(("moe_z_loss_coeff", "moe_expert_capacity_factor", "moe_input_jitter_eps"), None),
        "moe_router_enable_expert_bias": False,
    },
    "weights and tensors have one type": {"fp32_residual_connection": False, "fp8_param": False, "fp4": None},
    "each pipeline layer is one transformer layer": {"mtp_num_layers": None, "heterogeneous_block_specs": False},
}
"""Settings of a `TransformerConfig` that cannot hold here, by the reason, with the only value that can."""

_GROUPS = {
    **{"tp": "_TENSOR_MODEL_PARALLEL_GROUP", "tp_cp": "_TENSOR_AND_CONTEXT_PARALLEL_GROUP"},
    **{"expt_tp": "_EXPERT_TENSOR_PARALLEL_GROUP", "tp_ep": "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"},
    **{"pp": "_PIPELINE_MODEL_PARALLEL_GROUP", "cp": "_CONTEXT_PARALLEL_GROUP", "ep": "_EXPERT_MODEL_PARALLEL_GROUP"},
    "dp": "_DATA_PARALLEL_GROUP",
}
"""Names of the groups in `parallel_state`, by their names in a `ProcessGroupCollection`: first the tensor-parallel."""


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
        raise ConfigError(
            f"the spec has {len(block.layer_specs)} layers of {config.num_layers}: build it for all of them"
        )
    for number, spec in enumerate(block.layer_specs):
        _check_layer(number, spec, ranks.tensor)
    if position_embedding_type not in ("learned_absolute", "rope", "none"):
        raise ConfigError(
            f"position_embedding_type={position_embedding_type!r} is not computed for token slices: use rope, "
            "learned_absolute or none"
        )
    shared = Shared(config, set_parallel_state(ranks), ranks.tensor)
    turns = None
    if position_embedding_type == "rope" and not config.multi_latent_attention:
        fixed = {"rotary_interleaved": config.rotary_interleaved, "cp_group": shared.groups.cp}
        turns = RotaryEmbedding(config.kv_channels, **({"rotary_percent": 1.0} | rotary | fixed))
    words, output = LayerSpec(Words, shared, vocab_size), LayerSpec(Output, shared, vocab_size)
    if share_embeddings_and_output_weights:
        tied = partial(TiedLayerSpec, "embedding", Words, shared, vocab_size, tied_weight_attr="word_embeddings.weight")
        words, output = tied(), tied(forward_fn=Words.logits)
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
    losses = vocab_parallel_cross_entropy(logits.transpose(0, 1).contiguous(), targets)
    mask = loss_mask.to(losses.dtype)
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def _settled(config: TransformerConfig, ranks: ModelRanks) -> TransformerConfig:
    """Return a copy of the settings, with the values that follow from the trainer."""
    for reason, settings in _REFUSED.items():
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
            f"window_size={config.window_size} has tokens after a token: use ({config.window_size[0]}, 0)"
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
    settled, size = copy.copy(config), ranks.tensor.size
    vars(settled).update(
        **{"tensor_model_parallel_size": size, "expert_tensor_parallel_size": size},
        sequence_parallel=ranks.tensor.sequence_parallel,
        # The optimizer casts weights, and has no `main_grad`; stages send their outputs themselves.
        **{"params_dtype": torch.float32, "gradient_accumulation_fusion": False, "deallocate_pipeline_outputs": False},
        # Each rank draws the whole weight on its device and takes its part: the same for any number of ranks.
        **{"perform_initialization": True, "use_cpu_initialization": True},
        # megatron-core would keep weights in FP8 until its own schedules say that an iteration begins.
        **{"disable_parameter_transpose_cache": True, "tp_only_amax_red": True},
    )
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
            f"layer {number} of the spec has latent attention, for which megatron-core's tensor-parallel ranks do not "
            "sum the gradient of the shared key: use 1, or --sequence-parallel with Transformer Engine's spec"
        )


def set_parallel_state(ranks: ModelRanks) -> ProcessGroupCollection:
    """Set megatron-core's `parallel_state` to the groups of this rank's layers, and return them.

    It takes each rank for the only replica: settings that need the others are refused.
    """
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    tensor = ranks.tensor.group or alone
    groups = {name: tensor if "tp" in name else alone for name in _GROUPS}
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
    """The token slice that a layer computes, for the modules within it."""

    def __init__(self, ranks: TensorParallelRanks) -> None:
        self.ranks, self.past = ranks, None


class PipelineLayer(nn.Module):
    """A part of the model for a token slice: hidden states are [B, n, hidden], of the tokens between the matrices."""

    prefix = ""
    """Beginning of the names of its weights in a checkpoint of Megatron."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.config, self.groups, self.ranks = shared
        # FP8's states begin anew; megatron-core's own layers have empty ones.
        self.register_state_dict_post_hook(_without_extra_states)

    def megatron_name(self, name: str) -> str:
        """Return the name of one of its weights in a checkpoint of Megatron."""
        return self.prefix + name.removeprefix("layer.")

    def tokens(self, hidden: Tensor) -> int:
        """Return the number of tokens of the token slice."""
        return hidden.shape[1] * (self.ranks.size if self.ranks.sequence_parallel else 1)

    def logits_of(self, output_layer: ColumnParallelLinear, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the logits [B, N, own part of the vocabulary]."""
        return output_layer(hidden.transpose(0, 1).contiguous(), weight=weight)[0].transpose(0, 1)

    def output_layer_of(self, vocab_size: int, **settings: Any) -> ColumnParallelLinear:
        """Return megatron-core's output layer."""
        config = self.config
        fixed = {"bias": False, "skip_bias_add": False, "gather_output": False, "tp_group": self.groups.tp}
        return ColumnParallelLinear(
            config.hidden_size, vocab_size, config=config, init_method=config.init_method, **fixed, **settings
        )


def _defer_products(module: nn.Module) -> None:
    """Let schedules defer the weight gradients of megatron-core's own linear layers."""
    for each in module.modules():
        if isinstance(each, ColumnParallelLinear | RowParallelLinear):
            each._forward_impl = partial(_product, each._forward_impl)


def _product(
    theirs: Callable[..., Tensor], *, input: Tensor, weight: Tensor, bias: Tensor | None, **settings: Any
) -> Tensor:
    """Return inputs @ weight.T + bias, by megatron-core where its backward exchanges gradients with other ranks."""
    if settings["allreduce_dgrad"] or settings["sequence_parallel"]:
        return theirs(input=input, weight=weight, bias=bias, **settings)
    return linear(input, weight, bias)


def _without_extra_states(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    for name in [name for name in state if name.endswith("_extra_state")]:
        del state[name]


class Words(PipelineLayer):
    """megatron-core's word embedding, and the output layer that may share its weight."""

    prefix = "embedding."

    def __init__(self, shared: Shared, vocab_size: int) -> None:
        super().__init__(shared)
        config = shared.config
        self.word_embeddings = VocabParallelEmbedding(
            *(vocab_size, config.hidden_size),
            init_method=config.embedding_init_method,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
            tp_group=shared.groups.tp,
        )
        setattr(self.word_embeddings.weight, AT_AN_END, True)
        self.output_layer = self.output_layer_of(vocab_size, skip_weight_param_allocation=True)
        _defer_products(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden states of token ids [B, N]."""
        words = self.word_embeddings(tokens)
        return words.transpose(0, 1) if self.ranks.sequence_parallel else words

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [B, N, own part of the vocabulary]."""
        return self.logits_of(self.output_layer, hidden, self.word_embeddings.weight)


class Positions(PipelineLayer):
    """Adds learned positions to the words, if the model has `rows` of them, and applies dropout."""

    prefix = "embedding."

    def __init__(self, shared: Shared, rows: int) -> None:
        super().__init__(shared)
        self.position_embeddings = None
        if rows:
            self.position_embeddings = nn.Embedding(rows, self.config.hidden_size)
            self.config.embedding_init_method(self.position_embeddings.weight)
            self.position_embeddings.weight.sequence_parallel = self.ranks.sequence_parallel

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        """Return the input of the first transformer layer."""
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

    def __init__(self, shared: Shared, spec: ModuleSpec, number: int, rotary: RotaryEmbedding | None) -> None:
        super().__init__(shared)
        self.number, self.prefix, self.view = number, f"decoder.layers.{number}.", SliceView(shared.ranks)
        self.rotary = rotary and SliceRotary(rotary, self.view)
        parts, attention = spec.submodules, spec.submodules.self_attention
        core = ModuleSpec(SliceAttention, params={"view": self.view})
        within = _with_norms(attention.submodules, core_attention=core)
        sites = {"self_attn_bda": 1, "mlp_bda": 2}
        added = {name: self._dropout(sites[name]) for name in sites if getattr(parts, name) is get_bias_dropout_add}
        parts = _with_norms(parts, self_attention=replace(attention, submodules=within), **added)
        spec = replace(spec, submodules=parts)
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
            first = self.ranks.first_token(len(output))
            output, residual = output.transpose(0, 1), residual.transpose(0, 1)
            masked = self.view.past.dropout(output, dropout, site=site, first_token=first, residual=residual)
            return masked.transpose(0, 1)

        def in_place_of_bias_dropout_add(training: bool, fused: bool) -> Callable[..., Tensor]:
            return partial(add, training)

        return in_place_of_bias_dropout_add

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        """Return the output of the layer."""
        self.view.past = past
        try:
            rotary = None if self.rotary is None else self.rotary(self.tokens(hidden))
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


class Output(PipelineLayer):
    """megatron-core's output layer, with a weight of its own."""

    def __init__(self, shared: Shared, vocab_size: int) -> None:
        super().__init__(shared)
        self.output_layer = self.output_layer_of(vocab_size)
        _defer_products(self)
        setattr(self.output_layer.weight, AT_AN_END, True)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits [B, N, own part of the vocabulary]."""
        return self.logits_of(self.output_layer, hidden)


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
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.view, self.scale, self.dropout, self.window = view, softmax_scale, config.attention_dropout, None
        self.first_head = view.ranks.rank * config.num_attention_heads // view.ranks.size
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            # megatron-core counts the tokens before a token.
            self.window = config.window_size[0] + 1 or None

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
