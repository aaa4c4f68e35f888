"""One layer of a model by its shapes: the matrix products and the attention of one token, and what it hands on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_terapipe.config.model.attended_positions import attended_positions

Parallel = Literal["column", "row", "none"]
"""How tensor-parallel ranks share a matrix: by its outputs, by its inputs, or not at all."""

LayerKind = Literal["embedding", "block", "norm", "head", "other"]


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product: the `inputs` numbers of each token times a weight of [inputs, outputs].

    Attributes:
        inputs: rows of the weight, before tensor-parallel ranks share it.
        outputs: columns of the weight, likewise.
        parallel: which of the two they share.
    """

    inputs: int
    outputs: int
    parallel: Parallel = "none"

    @property
    def weights(self) -> int:
        """Entries of the weight."""
        return self.inputs * self.outputs

    def per_rank(self, tensor_parallel_size: int) -> tuple[float, float]:
        """Inputs and outputs of the part that one tensor-parallel rank computes."""
        inputs = self.inputs / tensor_parallel_size if self.parallel == "row" else float(self.inputs)
        outputs = self.outputs / tensor_parallel_size if self.parallel == "column" else float(self.outputs)
        return inputs, outputs


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of a layer; its heads are shared by tensor-parallel ranks.

        sliding window of 3     x . . . . .        separate windows of 3     x x x . . .
        (causal)                x x . . . .        (not causal)              x x x . . .
                                x x x . . .                                  x x x . . .
                                . x x x . .                                  . . . x x x
                                . . x x x .                                  . . . x x x
                                . . . x x x                                  . . . x x x

    Attributes:
        query_heads: heads of the query.
        key_value_heads: heads of key and value, at most as many.
        head_size: width of a head.
        causal: whether a token attends to itself and those before it only.
        separate_window: tokens of windows that attend to themselves alone, which are not causal, as in Swin; None = the
            whole sequence.
        sliding_window: tokens up to its own that a token attends to, itself included, where it is causal; None = all.
        normed: whether queries and keys have norms.
        written_out: whether no fused kernel computes it, as with a soft cap of the scores or dropout of the weights:
            its scores are then in memory, tile by tile.
    """

    query_heads: int
    key_value_heads: int
    head_size: int
    causal: bool = True
    separate_window: int | None = None
    sliding_window: int | None = None
    normed: bool = False
    written_out: bool = False

    @property
    def normed_channels(self) -> int:
        """Channels of the queries and keys of a token that have norms, which keep them."""
        return (self.query_heads + self.key_value_heads) * self.head_size if self.normed else 0

    @property
    def flops_per_position(self) -> int:
        """Forward FLOPs of a token for each position that it attends to: one score and one weighted value."""
        return 4 * self.query_heads * self.head_size

    def positions(self, start: float, end: float, tokens: int) -> float:
        """Pairs of a token in [start, end) and a position that it attends to.

        Args:
            start: first token.
            end: token behind the last.
            tokens: tokens of the sequence.
        """
        if self.separate_window is not None:
            return (end - start) * self.separate_window
        if not self.causal:
            return (end - start) * tokens
        return attended_positions(start, end, self.sliding_window)  # type: ignore[no-any-return]

    def most_positions(self, tokens: int) -> int:
        """Positions that a token attends to at most.

        Args:
            tokens: tokens of the sequence.
        """
        return min(self.separate_window or self.sliding_window or tokens, tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer that a pipeline stage can hold.

    Attributes:
        name: for tables and errors.
        kind: what it is; constant costs hang on it (an embedding looks rows up, a head is followed by the loss).
        tokens: rows of one sequence that go through it; the sequence length of a GPT.
        hidden_size: numbers of each token that it hands to the next layer.
        parameters: all of them, before any parallelism.
        unshared_parameters: those of `parameters` of which every tensor-parallel rank holds a copy (norms, positions).
        products: its matrix products.
        attention: its attention, if it has one.
        num_norms: norms of hidden states.
        kept_states: hidden states of a token that stay from forward to backward; None = one for each norm.
        normed_states: those that selective recomputation computes again, outputs of norms; None = one for each part.
        sums_at_once: whether the outputs of its matrices that are shared by their inputs are added up before ranks sum
            them: attention and MLP side by side, without dropout behind them.
        activation_width: width of the MLP's activation; 0 without.
        gated: whether that has a gate beside it.
        normalization: `layernorm` or `rmsnorm`.
        num_biases: products with a bias.
        biased_channels: outputs of these, all together.
        rotary_channels: channels of the queries and keys of a token that are rotated.
        shared_weight: name of the weight that another layer also uses (tied embedding); None = its own alone.
        shared_parameters: entries of that weight, which are among `parameters`.
        extra_output_elements: numbers that it hands on once per micro-batch, whatever its size (an attention mask).
        forward_s: measured seconds of the forward of one sequence, by tensor-parallel size, reductions included;
            None where nobody measured.
    """

    name: str
    kind: LayerKind
    tokens: int
    hidden_size: int
    parameters: int
    unshared_parameters: int = 0
    products: tuple[Product, ...] = ()
    attention: Attention | None = None
    num_norms: int = 0
    kept_states: int = None  # type: ignore[assignment]
    normed_states: int = None  # type: ignore[assignment]
    sums_at_once: bool = False
    activation_width: int = 0
    gated: bool = False
    normalization: Literal["layernorm", "rmsnorm"] = "layernorm"
    num_biases: int = 0
    biased_channels: int = 0
    rotary_channels: int = 0
    shared_weight: str | None = None
    shared_parameters: int = 0
    extra_output_elements: int = 0
    forward_s: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        """Fill in the hidden states that stay, and those that can be computed again."""
        parts = (self.attention is not None) + (self.activation_width > 0)
        for name, count in (("kept_states", max(self.num_norms, parts)), ("normed_states", parts)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, count)

    @property
    def linear_flops_per_token(self) -> int:
        """Forward FLOPs of a token in matrix products, the same at every position."""
        return 2 * sum(product.weights for product in self.products)

    @property
    def is_divided(self) -> bool:
        """Whether tensor-parallel ranks share its work; of other layers each computes, and keeps, the whole."""
        return any(product.parallel != "none" for product in self.products)

    @property
    def output_elements(self) -> int:
        """Numbers of one sequence that it hands to the next layer."""
        return self.tokens * self.hidden_size

    def forward_flops(self, start: float, end: float) -> float:
        """Forward FLOPs of the tokens [start, end) of one sequence.

        Args:
            start: first token.
            end: token behind the last one.
        """
        attention = 0.0
        if self.attention is not None:
            attention = self.attention.flops_per_position * self.attention.positions(start, end, self.tokens)
        return (end - start) * self.linear_flops_per_token + attention

    def parameters_per_rank(self, tensor_parallel_size: int) -> float:
        """Parameters that one tensor-parallel rank holds."""
        shared = self.parameters - self.unshared_parameters
        return self.unshared_parameters + shared / tensor_parallel_size
