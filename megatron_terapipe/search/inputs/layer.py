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
    """A matrix product: the `inputs` numbers of each token times a weight of [inputs, outputs]."""

    inputs: int
    """Rows of the weight, before tensor-parallel ranks share it."""
    outputs: int
    """Columns of the weight, likewise."""
    parallel: Parallel = "none"
    """Which of the two they share."""

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
    """

    query_heads: int
    key_value_heads: int
    """Heads of key and value, at most as many."""
    head_size: int
    causal: bool = True
    """Whether a token attends to itself and those before it only."""
    separate_window: int | None = None
    """Tokens of windows that attend to themselves alone, which are not causal, as in Swin; None = the whole sequence.
    """
    sliding_window: int | None = None
    """Tokens up to its own that a token attends to, itself included, where it is causal; None = all."""
    normed: bool = False
    """Whether queries and keys have norms."""
    written_out: bool = False
    """Whether no fused kernel computes it, as with a soft cap of the scores or dropout of the weights: its scores are
    then in memory, tile by tile."""

    @property
    def normed_channels(self) -> int:
        """Channels of the queries and keys of a token that have norms, which keep them."""
        return (self.query_heads + self.key_value_heads) * self.head_size if self.normed else 0

    @property
    def flops_per_position(self) -> int:
        """Forward FLOPs of a token for each position that it attends to: one score and one weighted value."""
        return 4 * self.query_heads * self.head_size

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer that a pipeline stage can hold."""

    name: str
    kind: LayerKind
    """What it is; constant costs hang on it (an embedding looks rows up, a head is followed by the loss)."""
    tokens: int
    """Rows of one sequence that go through it; the sequence length of a GPT."""
    hidden_size: int
    """Numbers of each token that it hands to the next layer."""
    parameters: int
    """All of them, before any parallelism."""
    unshared_parameters: int = 0
    """Those of `parameters` of which every tensor-parallel rank holds a copy (norms, positions)."""
    products: tuple[Product, ...] = ()
    attention: Attention | None = None
    """Its attention, if it has one."""
    num_norms: int = 0
    kept_states: int = None  # type: ignore[assignment]
    """Hidden states of a token that stay from forward to backward; None = one for each norm."""
    normed_states: int = None  # type: ignore[assignment]
    """Those that selective recomputation computes again, outputs of norms; None = one for each part."""
    sums_at_once: bool = False
    """Whether the outputs of its matrices that are shared by their inputs are added up before ranks sum them: attention
    and MLP side by side, without dropout behind them."""
    activation_width: int = 0
    """Width of the MLP's activation; 0 without."""
    gated: bool = False
    """Whether that has a gate beside it."""
    normalization: Literal["layernorm", "rmsnorm"] = "layernorm"
    num_biases: int = 0
    biased_channels: int = 0
    """Outputs of these, all together."""
    rotary_channels: int = 0
    """Channels of the queries and keys of a token that are rotated."""
    shared_weight: str | None = None
    """Name of the weight that another layer also uses (tied embedding); None = its own alone."""
    shared_parameters: int = 0
    """Entries of that weight, which are among `parameters`."""
    extra_output_elements: int = 0
    """Numbers that it hands on once per micro-batch, whatever its size (an attention mask)."""
    forward_s: Mapping[int, float] | None = None
    """Measured seconds of the forward of one sequence, by tensor-parallel size, reductions included; None where nobody
    measured."""

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
