"""A model as the search prices it: its layers by their shapes, their parameters, and a GPT as such a model.

ModelConfig --gpt_workload--> Workload(layers, dealt first..end) ; Layer = products + attention + element-wise work
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.layout import StagePartition
from megatron_terapipe.config import flops
from megatron_terapipe.config.flops import Parallel, Product, attended_positions
from megatron_terapipe.config.layers import BlockShape, LatentSizes, Recurrence
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.errors import ConfigError

__all__ = ["Parallel", "Product", "Workload"]

LayerKind = Literal["embedding", "block", "norm", "head", "other"]


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of a layer; its heads are shared by tensor-parallel ranks.

    sliding window of 3     x . . . . .        separate windows of 3     x x x . . .
    (causal)                x x . . . .        (not causal)              x x x . . .
                            x x x . . .                                  x x x . . .
                            . x x x . .                                  . . . x x x
                            . . x x x .                                  . . . x x x
                            . . . x x x                                  . . . x x x
    """

    query_heads: int
    key_value_heads: int
    """Heads of key and value, at most as many."""
    head_size: int
    causal: bool = True
    """Whether a token attends to itself and those before it only."""
    separate_window: int | None = None
    """Tokens of separate windows, which are not causal, as in Swin; None = the whole sequence."""
    sliding_window: int | None = None
    """Tokens up to its own that a token attends to, itself included, where it is causal; None = all."""
    normed: bool = False
    written_out: bool = False
    """Whether no fused kernel computes it, as with a soft cap of the scores or dropout of the weights: its scores are
    then in memory, tile by tile."""
    gated: bool = False
    """Whether its output is multiplied by gates, which are projected beside the queries."""
    latent: LatentSizes | None = None
    """Sizes of latent attention; None for another one."""

    @property
    def value_size(self) -> int:
        """Width of a head's values."""
        return self.head_size if self.latent is None else self.latent.value_size

    @property
    def normed_channels(self) -> int:
        """Channels of the queries and keys of a token that have norms, which keep them."""
        return (self.query_heads + self.key_value_heads) * self.head_size if self.normed and not self.latent else 0

    @property
    def flops_per_position(self) -> int:
        """Forward FLOPs of a token for each position that it attends to: one score and one weighted value."""
        return 2 * self.query_heads * (self.head_size + self.value_size)

    def positions(self, start: float, end: float, tokens: int) -> float:
        """Pairs of a token in [start, end) and a position that it attends to."""
        if self.separate_window is not None:
            return (end - start) * self.separate_window
        if not self.causal:
            return (end - start) * tokens
        return attended_positions(start, end, self.sliding_window)  # type: ignore[no-any-return]

    def most_positions(self, tokens: int) -> int:
        """Positions that a token attends to at most."""
        return min(self.separate_window or self.sliding_window or tokens, tokens)


IMBALANCE = 1.25
"""Tokens of the expert-parallel rank with most, relative to the mean. Published runs of one model and layout lose 8 to
20 % of their speed where real data take the place of forced balance (github.com/yanring/Megatron-MoE-ModelZoo: 389 and
357, 295 and 237 TFLOP/s a device); experts and their exchanges, which wait for that rank, are some 60 % of these."""


Dispatcher = Literal["alltoall", "allgather"]
DISPATCHERS: tuple[Dispatcher, ...] = get_args(Dispatcher)


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The experts of a layer among which a router chooses for each token; expert-parallel ranks share them.

    Shared experts, which every token goes through, are products of the layer itself.
    """

    number: int
    chosen: int
    """Experts of each token."""
    width: int
    """Width of the hidden layer of one."""
    products: tuple[Product, ...]
    """Matrices of one; tensor-parallel ranks share them only where a trainer cuts experts."""
    parameters: int
    """Parameters of all experts, which `Layer.parameters` includes."""
    dispatcher: Literal["auto"] | Dispatcher = "auto"
    """How tokens travel, as `--moe-token-dispatcher-type`."""
    imbalance: float = IMBALANCE

    @property
    def sends_to_all(self) -> bool:
        """Whether every token goes to all expert-parallel ranks, which then have rows for all of its choices."""
        return self.dispatcher == "allgather"

    @property
    def weights(self) -> int:
        """Entries of the matrices of one."""
        return sum(product.weights for product in self.products)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer that a pipeline stage can hold."""

    name: str
    kind: LayerKind
    """Kind, on which fixed costs depend (an embedding looks rows up, a head is followed by the loss)."""
    tokens: int
    """Rows of one sequence that go through it; the sequence length of a GPT."""
    hidden_size: int
    """Numbers of each token in its output."""
    parameters: int
    """All of them, before any parallelism."""
    unshared_parameters: int = 0
    """Part of `parameters` of which every tensor-parallel rank holds a copy (norms, positions)."""
    products: tuple[Product, ...] = ()
    attention: Attention | None = None
    recurrence: Recurrence | None = None
    """Token mixer with a state, in place of attention."""
    experts: Experts | None = None
    num_norms: int = 0
    kept_states: int = None  # type: ignore[assignment]
    """Hidden states of a token that stay from forward to backward; None = one for each norm."""
    normed_states: int = None  # type: ignore[assignment]
    """Those that selective recomputation recomputes, outputs of norms; None = one for each part."""
    sums_at_once: bool = False
    """Whether the outputs of its matrices that are shared by their inputs are added up before ranks sum them: parallel
    attention and MLP, without dropout after them."""
    activation_width: int = 0
    """Width of the MLP's activation; 0 without."""
    gated: bool = False
    clamped: bool = False
    """Whether the inputs of a gated activation are clamped before it."""
    normalization: Literal["layernorm", "rmsnorm"] = "layernorm"
    num_biases: int = 0
    biased_channels: int = 0
    """Outputs of these, all together."""
    rotary_channels: int = 0
    """Channels of the queries and keys of a token that are rotated."""
    scales_rotations: bool = False
    """Whether these have a factor, as with YaRN."""
    shared_weight: str | None = None
    """Name of the weight that another layer also uses (tied embedding); None = no shared weight."""
    shared_parameters: int = 0
    """Entries of that weight, which are among `parameters`."""
    recomputed: bool = True
    """Whether recompute "full" runs it again; else it does so for other layers only."""
    extra_output_elements: int = 0
    """Numbers in its output once per micro-batch, whatever its size (an attention mask)."""

    def __post_init__(self) -> None:
        parts = (self.attention is not None or self.recurrence is not None) + self.has_mlp
        for name, count in (("kept_states", max(self.num_norms, parts)), ("normed_states", parts)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, count)

    @property
    def linear_flops_per_token(self) -> int:
        """Forward FLOPs of a token in matrix products, the same at every position; of experts, in the chosen ones."""
        experts = self.experts
        routed = 0 if experts is None else self.hidden_size * experts.number + experts.chosen * experts.weights
        mixing = 0 if self.recurrence is None else flops.recurrence_flops_per_token(self.recurrence)
        return 2 * (sum(product.weights for product in self.products) + routed) + mixing

    def dispatched_by(self, dispatcher: Dispatcher) -> "Layer":
        """Return the same with a dispatcher in place of `auto`."""
        if self.experts is None or self.experts.dispatcher != "auto":
            return self
        return replace(self, experts=replace(self.experts, dispatcher=dispatcher))

    @property
    def never_measured(self) -> str | None:
        """Kind of layers in words, if no profile of a GPT has them; None for others."""
        if self.experts is not None:
            return "layers of experts"
        return "layers that predict further tokens" if self.name == PREDICTION else None

    @property
    def is_block(self) -> bool:
        """Whether it is one of the layers that are recomputed: not the embedding, the last norm or the head."""
        return self.kind in ("block", "other")

    @property
    def has_mlp(self) -> bool:
        """Whether it has an MLP, or experts in its place."""
        return self.activation_width > 0 or self.experts is not None

    @property
    def num_residuals(self) -> int:
        """Sums with the residual."""
        sums = sum(product.parallel == "row" for product in self.products)
        return sums + (self.experts is not None and not self.activation_width)

    @property
    def is_divided(self) -> bool:
        """Whether tensor-parallel ranks share its work; otherwise each rank computes, and keeps, all of it."""
        return any(product.parallel != "none" for product in self.products)

    @property
    def output_elements(self) -> int:
        """Numbers of one sequence in its output."""
        return self.tokens * self.hidden_size

    def forward_flops(self, start: float, end: float) -> float:
        """Forward FLOPs of the tokens [start, end) of one sequence."""
        attention = 0.0
        if self.attention is not None:
            attention = self.attention.flops_per_position * self.attention.positions(start, end, self.tokens)
        return (end - start) * self.linear_flops_per_token + attention

    def model_flops(self, *, causal: bool) -> float:
        """Forward FLOPs of one sequence: of the scores that are computed, or of the most of a token for each."""
        if causal or self.attention is None:
            return self.forward_flops(0, self.tokens)
        positions = self.attention.most_positions(self.tokens)
        return self.tokens * (self.linear_flops_per_token + positions * self.attention.flops_per_position)

    def parameters_per_rank(self, tensor_parallel_size: int) -> float:
        """Parameters that one tensor-parallel rank holds, without experts."""
        shared = self.parameters - self.unshared_parameters - self.expert_parameters
        return self.unshared_parameters + shared / tensor_parallel_size

    @property
    def expert_parameters(self) -> int:
        """Part of `parameters` that expert-parallel ranks share."""
        return 0 if self.experts is None else self.experts.parameters


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model by its layers.

    A stage partition counts the layers from `first_dealt` to `last_dealt`. Of a GPT those are its transformer layers:
    the embedding goes with the first stage, the last norm and the head with the last. Of other models they are all.
    """

    name: str
    layers: tuple[Layer, ...]
    seq_length: int
    first_dealt: int
    """First layer that a stage partition counts."""
    end_dealt: int
    config: ModelConfig | None = None
    """The model section of the trainer; None = a model that the trainer cannot build."""

    @property
    def num_dealt_layers(self) -> int:
        """Layers that a stage partition counts."""
        return self.end_dealt - self.first_dealt

    @cached_property
    def parameters(self) -> int:
        """All parameters; a shared weight counts once."""
        total, seen = 0, set()
        for layer in self.layers:
            total += layer.parameters
            if layer.shared_weight is not None:
                if layer.shared_weight in seen:
                    total -= layer.shared_parameters
                seen.add(layer.shared_weight)
        return total

    def dispatched_by(self, dispatcher: Dispatcher) -> "Workload":
        """Return the same with a dispatcher in place of `auto`."""
        return replace(self, layers=tuple(each.dispatched_by(dispatcher) for each in self.layers))

    @cached_property
    def experts(self) -> Experts | None:
        """Experts of one layer; other layers have as many. None without any."""
        return next((layer.experts for layer in self.layers if layer.experts is not None), None)

    @cached_property
    def can_cut_tokens(self) -> bool:
        """Whether sequences can be cut into token slices: all layers have the same tokens, and attention is causal."""
        return all(
            layer.tokens == self.seq_length
            and (layer.attention is None or (layer.attention.causal and layer.attention.separate_window is None))
            for layer in self.layers
        )

    def partition(self, stage_partition: str | tuple[int, ...], num_stages: int) -> StagePartition:
        """Layers of each stage, counted among the layers that a partition distributes."""
        try:
            if isinstance(stage_partition, str):
                if stage_partition in ("uniform", "auto"):
                    return StagePartition.uniform(self.num_dealt_layers, num_stages)
                if stage_partition == "parameters":
                    weights = [layer.parameters for layer in self.layers[self.first_dealt : self.end_dealt]]
                    return StagePartition.balanced(weights, num_stages)
                parsed = StagePartition.parse(stage_partition)
            else:
                parsed = StagePartition(stage_partition)
            return parsed.covering(self.num_dealt_layers, num_stages)
        except PlanError as error:
            raise ConfigError(f"strategy: stage_partition: {error}") from None

    def stages(self, partition: StagePartition) -> list[range]:
        """Indices of the layers of each stage, those at both ends included."""
        bounds = [self.first_dealt + bound for bound in partition.bounds]
        bounds[0], bounds[-1] = 0, len(self.layers)
        return [range(*pair) for pair in pairwise(bounds)]


PREDICTION = "prediction"
"""Name of a layer that predicts a further token."""

WORD_EMBEDDING = "word embedding"
"""The weight that a tied embedding and head share."""


def gpt_workload(model: ModelConfig, name: str = "", *, imbalance: float = IMBALANCE) -> Workload:
    """Return the layers of a GPT: embedding, transformer layers, last norm, head; `imbalance`: see `Experts`.

    Those that predict further tokens, each with an embedding, come before the norm; the head has a product for each.
    """
    words = model.padded_vocab_size() * model.hidden_size
    positions = flops.embedding_parameters(model) - words
    tied = not model.untie_embeddings_and_output_weights
    # Rows of one kind of block are the same object, so that costs computed for one serve all.
    blocks = {shape: _block(model, shape, imbalance) for shape in set(model.blocks)}

    def end(kind: str, parameters: int, **more: object) -> Layer:
        values = {"tokens": model.seq_length, "hidden_size": model.hidden_size, "parameters": parameters, **more}
        return Layer(name=kind, kind=kind, **values)  # type: ignore[arg-type]

    shared: dict[str, object] = {"shared_weight": WORD_EMBEDDING, "shared_parameters": words}
    further = (end("embedding", words, **shared), _prediction(model, blocks[model.blocks[-1]]))
    logits = Product(model.hidden_size, model.padded_vocab_size(), "column")
    layers = (
        end(
            "embedding",
            words + positions,
            unshared_parameters=positions,
            **(shared if model.embedding_is_tied else {}),
        ),
        *(blocks[shape] for shape in model.blocks),
        *further * model.mtp_num_layers,
        end(
            "norm",
            flops.norm_parameters(model),
            unshared_parameters=flops.norm_parameters(model),
            num_norms=1,
            normalization="rmsnorm" if model.normalization == "rmsnorm" else "layernorm",
        ),
        end(
            "head",
            words if tied else flops.output_parameters(model),
            products=(logits,) * (1 + model.mtp_num_layers),
            **(shared if tied else {}),
        ),
    )
    return Workload(
        name=name or model.model_preset or f"{model.num_layers}x{model.hidden_size}",
        layers=layers,
        seq_length=model.seq_length,
        first_dealt=1,
        end_dealt=1 + model.num_layers,
        config=model,
    )


def _prediction(model: ModelConfig, block: Layer) -> Layer:
    """A layer that predicts a further token: a transformer layer, three norms and a product.

    It also keeps the embedded word, both outputs of the norms before, which are joined, the input of the last norm, and
    its output, from which the head computes logits.
    """
    more = flops.prediction_parameters(model)
    return replace(
        block,
        name=PREDICTION,
        parameters=block.parameters + more,
        unshared_parameters=block.unshared_parameters + more,
        products=(Product(2 * model.hidden_size, model.hidden_size), *block.products),
        num_norms=block.num_norms + 3,
        kept_states=block.kept_states + 5,
    )


def _block(model: ModelConfig, shape: BlockShape, imbalance: float) -> Layer:
    hidden, heads, head_size = model.hidden_size, model.num_attention_heads, model.kv_channels
    attention = None
    num_biases = biased_channels = 0
    if shape.num_key_value_heads:
        attention = Attention(
            heads,
            shape.num_key_value_heads,
            head_size,
            # A window as long as the sequence masks no token, and the trainer treats it as none.
            sliding_window=shape.window if (shape.window or model.seq_length) < model.seq_length else None,
            normed=model.qk_norm != "none",
            written_out=model.attention_softcap is not None or model.attention_dropout > 0,
            gated=model.attention_output_gate,
            latent=shape.latent,
        )
        num_biases += model.has_qkv_bias + model.has_projection_bias
        biased_channels += model.has_qkv_bias * flops.query_key_value_channels(model, shape)
        biased_channels += model.has_projection_bias * hidden
    experts, width = None, flops.dense_width(shape)
    if width:
        num_biases += 2 * model.has_mlp_bias
        biased_channels += model.has_mlp_bias * ((1 + model.gated) * width + hidden)
    if shape.num_experts:
        experts = Experts(
            number=shape.num_experts,
            chosen=model.moe_router_topk,
            width=shape.ffn_hidden_size,
            products=flops.mlp_products(model, shape.ffn_hidden_size),
            parameters=flops.expert_parameters(model, shape),
            dispatcher=model.moe_token_dispatcher_type,
            imbalance=imbalance,
        )
    rotated = model.rotates and shape.rotated
    kept_states, normed_states = flops.block_hidden_states(model, shape)
    return Layer(
        name="block",
        kind="block",
        tokens=model.seq_length,
        hidden_size=hidden,
        parameters=flops.block_parameters(model, shape),
        unshared_parameters=flops.block_unshared_parameters(model, shape),
        products=flops.block_products(model, shape),
        attention=attention,
        recurrence=shape.recurrence,
        experts=experts,
        num_norms=flops.block_norms(model, shape),
        kept_states=kept_states,
        normed_states=normed_states,
        sums_at_once=model.parallel_residual and model.hidden_dropout == 0,
        activation_width=width,
        gated=model.gated,
        clamped=model.activation_func_clamp_value is not None,
        normalization="rmsnorm" if model.normalization == "rmsnorm" else "layernorm",
        num_biases=num_biases,
        biased_channels=biased_channels,
        rotary_channels=(heads + (shape.num_key_value_heads if shape.latent is None else 1))
        * model.rotary_channels
        * rotated,
        scales_rotations=model.rotary_attention_factor != 1,
    )
