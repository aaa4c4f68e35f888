"""Op times from shapes: FLOPs and bytes of each kernel, at the rates that the device reaches.

Fused attention, by kernel, generation, head size and length. A kernel computes a tile of 128 queries with the tokens
that they see. For each row it works as long as `fixed` more tokens would take: it starts and ends, and computes the
masked half of the tiles on the diagonal. The last wave of tiles fills the multiprocessors in part, which costs one
wave. So attention of R rows that see `pairs` of tokens takes

    4 (pairs + fixed x R) heads x head size / (peak x share) x (1 + multiprocessors / tiles)

and a causal sequence of L tokens reaches share x L / (L + 2 fixed) of the peak, many tiles given. This form fits
3,000 times of each of a dozen kernels that the package aiconfigurator-core has with a mean error of 3 to 15 %, where
the wave is between 0.4 and 2.8 (`python -m benchmarks.kernel_efficiency`). Sources:

    flash-attention-1, which Triton's kernel of 2022 is, too
        ampere         the 25 to 40 % of arXiv 2307.08691 (abstract): 40 % forward, the backward at four fifths of it
        others         in the proportions of flash-attention-2
    flash-attention-2
        hopper         arXiv 2407.08608 figures 5 and 6: forward and backward, by length and head size
        ampere         forward: between the .60 and .69 of the package; backward, and other head sizes, in the
                       proportions of hopper. It reaches the 50 to 73 % forward and up to 63 % backward of arXiv
                       2307.08691 (abstract and section 4.1)
        ada            the package (L40S); backward in its proportion on an RTX 4090 (github.com/apache/tvm,
                       tl_doc/flash_perf.md)
        blackwell      github.com/Dao-AILab/flash-attention/issues/1589 for heads of 64, the rest as on hopper
        cdna2, cdna3   guesses
    flash-attention-3
        hopper         arXiv 2407.08608; the package agrees with its forward (.63 to .71)
    cudnn
        hopper         arXiv 2407.08608
        blackwell      forward: the package (.57 to .64); backward a guess
    memory-efficient
        ampere         in proportion to flash attention on one board, forward .62 to .8, backward .29 to .5
                       (github.com/Dao-AILab/flash-attention/issues/416)
        others         in the same proportion where flash attention runs; else guesses. On a V100 its forward is a
                       quarter faster than attention that is written out, its backward a fifth slower
                       (github.com/facebookresearch/xformers/pull/362)
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from deepspeed_ext.plan.costs import longest_in_window
from megatron_terapipe.config.flops import (
    BACKWARD_PER_FORWARD,
    FLASH_BACKWARD_PER_FORWARD,
    kept_channels,
    logits_computed_again,
    positions_in_reach,
    recurrence_flops_per_token,
)
from megatron_terapipe.config.layers import LatentSizes, Recurrence
from megatron_terapipe.devices import EIGHT_BITS, Device
from megatron_terapipe.search.machine.software import ELEMENT_BYTES, OPERAND_BYTES, Operator, Software
from megatron_terapipe.search.price.efficiency import (
    BOARD_PRODUCTS,
    GENERATIONS,
    REFERENCE,
    HardwareEfficiency,
    reachable_bandwidth,
    relative_efficiency,
)
from megatron_terapipe.search.price.layer_times import LayerQuery, LayerTimes, ScalarOrArray, held_rows, key_heads
from megatron_terapipe.search.price.workload import Attention, Experts, Layer, Product

TILE = 128
"""Queries that a kernel computes at once."""

HEAD_SIZES = (64, 128, 256)
"""Head sizes of the shares below; between them they are interpolated."""

PADDED_TO = 32
"""Kernels exist for head sizes that are multiples of it, and others are computed as the next larger one."""


class Shares(NamedTuple):
    """Shares of the peak for heads of 64, 128 and 256 numbers, with long sequences."""

    small: float
    middle: float
    large: float

    def of(self, head_size: int) -> float:
        """Share for a head size, of the FLOPs of the head as it is."""
        padded = -(-head_size // PADDED_TO) * PADDED_TO
        return float(np.interp(padded, HEAD_SIZES, self)) * head_size / padded


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """Speed of one kernel on one generation."""

    forward: Shares
    backward: Shares
    """Shares of the peak, for two and a half times the FLOPs of the forward."""
    fixed: float
    """Tokens that each row takes longer in the forward."""
    fixed_backward: float


# fmt: off
FUSED_KERNELS: Mapping[tuple[str, str], FusedKernel] = MappingProxyType({
    ("flash-attention-2", "ampere"):    FusedKernel(Shares(.59, .66, .59), Shares(.58, .63, .50), 170, 330),
    ("flash-attention-2", "ada"):       FusedKernel(Shares(.50, .53, .55), Shares(.40, .42, .36), 240, 400),
    ("flash-attention-2", "hopper"):    FusedKernel(Shares(.32, .37, .34), Shares(.31, .35, .29), 165, 330),
    ("flash-attention-2", "blackwell"): FusedKernel(Shares(.18, .20, .19), Shares(.16, .18, .15), 165, 330),
    ("flash-attention-2", "cdna2"):     FusedKernel(Shares(.30, .35, .28), Shares(.20, .25, .18), 200, 400),
    ("flash-attention-2", "cdna3"):     FusedKernel(Shares(.30, .35, .28), Shares(.20, .25, .18), 200, 400),
    ("flash-attention-3", "hopper"):    FusedKernel(Shares(.51, .69, .74), Shares(.49, .63, .56), 240, 415),
    ("cudnn", "hopper"):                FusedKernel(Shares(.41, .59, .59), Shares(.46, .57, .51), 180, 385),
    ("cudnn", "blackwell"):             FusedKernel(Shares(.38, .61, .66), Shares(.33, .45, .38), 500, 700),
    ("flash-attention-1", "ampere"):    FusedKernel(Shares(.38, .40, .30), Shares(.30, .32, .22), 170, 330),
    ("flash-attention-1", "ada"):       FusedKernel(Shares(.32, .32, .25), Shares(.21, .21, .15), 240, 400),
    ("flash-attention-1", "hopper"):    FusedKernel(Shares(.21, .22, .17), Shares(.16, .18, .13), 165, 330),
    ("memory-efficient", "pascal"):     FusedKernel(Shares(.15, .13, .09), Shares(.09, .06, .04), 170, 330),
    ("memory-efficient", "volta"):      FusedKernel(Shares(.35, .31, .22), Shares(.22, .14, .09), 170, 330),
    ("memory-efficient", "turing"):     FusedKernel(Shares(.20, .18, .13), Shares(.13, .08, .05), 170, 330),
    ("memory-efficient", "ampere"):     FusedKernel(Shares(.47, .41, .30), Shares(.29, .18, .12), 170, 330),
    ("memory-efficient", "ada"):        FusedKernel(Shares(.40, .33, .25), Shares(.20, .12, .08), 240, 400),
    ("memory-efficient", "hopper"):     FusedKernel(Shares(.25, .22, .16), Shares(.15, .10, .06), 165, 330),
    ("memory-efficient", "blackwell"):  FusedKernel(Shares(.13, .12, .09), Shares(.08, .05, .03), 165, 330),
    ("memory-efficient", "cdna2"):      FusedKernel(Shares(.20, .20, .14), Shares(.12, .10, .06), 200, 400),
    ("memory-efficient", "cdna3"):      FusedKernel(Shares(.20, .20, .14), Shares(.12, .10, .06), 200, 400),
})
# fmt: on
"""By kernel and generation."""

RUNS_INSTEAD = {
    "flash-attention-3": "flash-attention-2",
    "cudnn": "flash-attention-2",
    "flash-attention-2": "memory-efficient",
    "flash-attention-1": "memory-efficient",
}
"""The kernel that replaces another on generations without it."""

PLAIN_SHARE = 0.45
"""Share of the peak of a fused kernel in fp32, and of one on a CPU, however long the sequence. A guess."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedAttention:
    """A fused kernel on a device, for heads of one size."""

    forward: float
    backward: float
    fixed: float = 0.0
    """Tokens that each row takes longer in the forward."""
    fixed_backward: float = 0.0
    processors: int = 0
    """Multiprocessors that a wave of tiles fills; 0 on a CPU, which has none."""
    tile: int = 1

    def pairs_of_time(
        self,
        pairs: ScalarOrArray,
        rows: ScalarOrArray,
        tokens: ScalarOrArray,
        heads: ScalarOrArray,
        reach: ScalarOrArray,
    ) -> tuple[ScalarOrArray, ScalarOrArray]:
        """Pairs [...] of tokens that would take as long, forward and backward, if the share were reached at once."""
        filled = np.maximum(self.tile / tokens, 1.0)
        # The backward has a tile for each so many keys; a forward with fewer tiles than that divides the keys, too.
        filled = filled * (1 + self.processors * self.tile / (heads * np.maximum(reach, self.tile)))
        return (pairs + self.fixed * rows) * filled, (pairs + self.fixed_backward * rows) * filled


def kernel_that_runs(kernel: str, generation: str) -> str:
    """Return the name of the kernel that runs on devices of a generation in place of the trainer's."""
    generation = generation if generation in GENERATIONS else REFERENCE
    while (kernel, generation) not in FUSED_KERNELS:
        kernel = RUNS_INSTEAD[kernel]
    return kernel


def fused_attention(kernel: str, device: Device, precision: str, head_size: int) -> FusedAttention:
    """Return the speed of a fused kernel on a device."""
    if precision == "fp32" or not device.is_gpu:
        return FusedAttention(forward=PLAIN_SHARE, backward=PLAIN_SHARE)
    generation = device.generation if device.generation in GENERATIONS else REFERENCE
    one = FUSED_KERNELS[kernel_that_runs(kernel, generation), generation]
    # Boards with more power reach as much more of their peak in attention as in products.
    usual = GENERATIONS[generation].products
    more = BOARD_PRODUCTS.get(device.name, usual) / usual
    return FusedAttention(
        forward=more * one.forward.of(head_size),
        backward=more * one.backward.of(head_size),
        fixed=one.fixed,
        fixed_backward=one.fixed_backward,
        processors=GENERATIONS[generation].processors,
        tile=TILE,
    )


WRITTEN_OUT_BYTES = (12, 2)
"""Bytes that one score moves where our own kernel writes them out: the product writes it in fp32 (4), its exponential
sum and its weight are computed (4 + 4); the weight, in the type of the values, is written and read (twice 2 or 4)."""

WRITTEN_OUT_BACKWARD_BYTES = 36
"""And in its backward, all in fp32: scores and gradients of weights are written (8) and read (8), weights and gradients
of scores written (8), and read by three products (12)."""

BACKWARD_MOVES = 1.5
"""Bytes that the backward of attention moves outside of its products, relative to the forward: it reads gradients and
the inputs of the forward, and writes gradients, where the forward reads and writes once."""

CAST_BYTES = 4
"""Bytes that a number moves on its way into products in 8 bits: read in half precision (2), written by rows and by
columns (1 + 1), of which one is for the product of the weight's gradient (docs.nvidia.com/deeplearning/
transformer-engine, `nvte_cast_transpose`)."""

PADDING = Operator(forward=4, backward=4, forward_kernels=2, backward_kernels=2)
"""Copies of the rows of experts before and after their products in 8 bits, which take a multiple of 16 rows of each
(`fp8_padding` and `fp8_unpadding` of megatron/core/transformer/moe/experts.py) [hidden state of a row]."""

FUSED_EXPERTS = Operator(forward_bytes=2, backward_bytes=8, forward_kernels=0, backward_kernels=0)
"""The activation of gated experts inside products in 8 bits: its output is written by rows and by columns (1 + 1);
back both inputs are read in half precision (4), and both gradients written so (4). `forward_grouped_mlp` and
`backward_grouped_mlp` of Transformer Engine's `pytorch/ops/fused` [number that the activation puts out]."""

RECURRENCE_KERNELS = 12
"""Kernels of the forward of a recurrence: convolution, activation, steps, scan in a few kernels, norm and gate."""

CORE_TILES = 1 / 108
"""A CPU core computes one tile after the other, where an A100 has a wave of 108 at once, one for each multiprocessor
(NVIDIA A100 Tensor Core GPU Architecture, table 4): so much less is unfilled at the end, and the
prologue and epilogue of a tile are as short. Products of one core are about as fast with 32 inputs as with 512."""


NOT_GROUPED = ("pascal", "volta", "turing")
"""Generations of GPUs without a kernel for the products of all experts."""


class _Part(NamedTuple):
    """Seconds and kernels of one part of a layer; the backward is without recomputation."""

    forward: ScalarOrArray = 0.0
    input_gradient: ScalarOrArray = 0.0
    weight_gradient: ScalarOrArray = 0.0
    selective: ScalarOrArray = 0.0
    forward_kernels: ScalarOrArray = 0.0
    input_kernels: ScalarOrArray = 0.0
    weight_kernels: ScalarOrArray = 0.0
    selective_kernels: ScalarOrArray = 0.0


@dataclass(frozen=True, slots=True)
class Roofline:
    """Times of layers from their shapes, a device's data sheet and `HardwareEfficiency`; an `OpTimes`.

    A matrix product of R rows, K inputs and N outputs takes the longer of computing and moving its operands:

        2 K R N / (peak * efficiency) * (1 + depth / K) * (1 + area / (R N))     and     bytes / memory bandwidth

    `depth` is the fixed work of each output tile, `area` the last wave of tiles, which fills the device in part: both
    make small matrices slow (NVIDIA, Matrix Multiplication Background, tile and wave quantisation). All three are
    for an A100, times the ratio of the device's generation in half precision (`GENERATIONS`).
    `FusedAttention` has the form of fused attention.
    """

    efficiency: HardwareEfficiency
    software: Software
    precision: str = "bf16"

    @property
    def _element_bytes(self) -> int:
        return ELEMENT_BYTES[self.precision]

    @property
    def _casts(self) -> bool:
        return self.precision in EIGHT_BITS

    @property
    def _attention_precision(self) -> str:
        return "bf16" if self._casts else self.precision

    def __call__(self, query: LayerQuery) -> LayerTimes:
        """Times of one layer; see `OpTimes`."""
        layer, device, tp, rows = query.layer, query.device, query.tensor_parallel_size, query.rows
        if self._casts and layer.kind == "head":
            # Transformer Engine's recipes leave logits in half precision.
            return replace(self, precision="bf16")(query)
        # The host launches the same kernels however small they are.
        parts = [self._product(product, device, tp, rows) for product in layer.products]
        of_shared_experts = (
            sum(part.forward for part in parts[-2:]) if layer.experts and layer.activation_width else 0.0
        )
        of_attention: ScalarOrArray = 0.0
        if layer.attention is not None:
            parts.append(self._attention(query, layer.attention))
            of_attention = parts[-1].forward
        if layer.recurrence is not None:
            parts.append(self._recurrence(query, layer.recurrence))
        if layer.experts is not None:
            parts += self._experts(query, layer.experts)
        parts += self._element_wise(query)
        if layer.kind == "head":
            parts.append(self._loss(layer, device, tp, rows))
            if self.software.logits_at_once is not None:
                logits = query.sequences * layer.tokens * sum(product.outputs for product in layer.products) / tp
                twice = logits_computed_again(logits, self.software.logits_at_once)  # type: ignore[arg-type]
                # Logits are not kept: the gradients of the head's weight and input are computed together.
                parts = [
                    part._replace(
                        input_gradient=part.input_gradient + part.weight_gradient + twice * part.forward,
                        weight_gradient=0.0,
                    )
                    for part in parts
                ]
        if layer.kind == "embedding":
            parts.append(self._embedding(layer, device, tp, rows))
        whole = _Part(*(sum(each) for each in zip(*parts, strict=True)))
        full, selective = query.again("full"), query.again("selective")
        again = full * whole.forward + selective * whole.selective
        kernels_again = full * whole.forward_kernels + selective * whole.selective_kernels
        launch = self.launch_s(device)
        return LayerTimes(
            whole.forward,
            whole.input_gradient + again,
            whole.weight_gradient,
            launch * whole.forward_kernels,
            launch * (whole.input_kernels + kernels_again),
            launch * whole.weight_kernels,
            of_shared_experts,
            of_attention,
        )

    def launch_s(self, device: Device) -> float:
        """Host time of one launch, which is shorter on a CPU."""
        return self.efficiency.launch_s * self.software.launch_factor * (1.0 if device.is_gpu else 0.5)

    def _moving_s(self, device: Device, num_bytes: ScalarOrArray) -> ScalarOrArray:
        return num_bytes / (reachable_bandwidth(device) * self.efficiency.memory_efficiency)

    def _cast_s(self, device: Device, numbers: ScalarOrArray) -> ScalarOrArray:
        """Seconds in which numbers become operands in 8 bits; 0 in other precisions."""
        return self._moving_s(device, self._casts * CAST_BYTES * numbers)

    def _products_reach(self, device: Device) -> float:
        """FLOP/s of the peak, less where products reach less of it than on an A100."""
        peak = device.peak_flops(self.precision)
        return peak if self.precision == "fp32" else peak * relative_efficiency(device, self.precision).products

    def product_s(
        self,
        device: Device,
        rows: ScalarOrArray,
        inputs: ScalarOrArray,
        outputs: ScalarOrArray,
        matrices: ScalarOrArray = 1.0,
    ) -> ScalarOrArray:
        """Seconds of one matrix product of [rows, inputs] and [inputs, outputs]; arguments broadcast.

        Args:
            matrices: number of [inputs, outputs], of which each row has one: a grouped product.
        """
        depth, area = self.efficiency.gemm_depth, self.efficiency.gemm_area
        if not device.is_gpu:
            depth, area = depth * CORE_TILES, area * CORE_TILES
        elif self.precision != "fp32":
            relative = relative_efficiency(device, self.precision)
            depth, area = depth * relative.depth, area * relative.area
        reached = self._products_reach(device) * self.efficiency.gemm_efficiency
        computing = 2 * (inputs + depth) * (rows * outputs + area) / reached
        read = OPERAND_BYTES[self.precision] * (rows * inputs + matrices * inputs * outputs)
        return np.maximum(computing, self._moving_s(device, read + self._element_bytes * rows * outputs))

    def _product(self, product: Product, device: Device, tp: ScalarOrArray, rows: ScalarOrArray) -> _Part:
        inputs, outputs = product.per_rank(tp)  # type: ignore[arg-type]
        forward = self.product_s(device, rows, inputs, outputs)
        input_gradient = self.product_s(device, rows, outputs, inputs)
        weight_gradient = self.product_s(device, inputs, rows, outputs)
        kernels = self.software.products
        forward = forward + self._cast_s(device, rows * inputs)
        input_gradient = input_gradient + self._cast_s(device, rows * outputs)
        if kernels.accumulates_in_place:
            read = OPERAND_BYTES[self.precision] * rows * (inputs + outputs)
            moving = self._moving_s(device, read + kernels.accumulation_bytes * inputs * outputs)
            weight_gradient = np.maximum(weight_gradient, moving)
        else:
            weight_gradient = weight_gradient + self._moving_s(device, kernels.accumulation_bytes * inputs * outputs)
        again = 0.5 * (product.parallel == "column" and self.software.selective_recomputes == "operators")
        return _Part(
            forward,
            input_gradient,
            weight_gradient,
            again * forward,
            forward_kernels=kernels.forward_kernels + self._casts,
            input_kernels=kernels.backward_kernels / 2 + self._casts,
            weight_kernels=kernels.backward_kernels / 2,
            selective_kernels=again * (kernels.forward_kernels + self._casts),
        )

    def _experts(self, query: LayerQuery, experts: Experts) -> Iterator[_Part]:
        """Yield the router, its choice, and the products and activations of the experts of the rank with most rows."""
        device, operators, hidden = query.device, self.software.operators, query.layer.hidden_size
        cut = query.tensor_parallel_size if self.software.communication.cuts_experts else 1.0
        rows, here = cut * query.expert_rows(experts), cut * experts.number / query.expert_parallel_size
        fused = self._casts and query.layer.gated and self.software.products.fuses_experts
        entering, leaving = experts.products[0], experts.products[-1]
        for product in experts.products:
            # The activation between them is in 8 bits, and so is its gradient.
            casts = (product is not leaving or not fused, product is not entering or not fused)
            yield self._expert_product(product, device, rows, here, cut, casts=casts)
        if self._casts and not fused:
            yield self._operator(PADDING, device, rows * hidden)
        if experts.parameters > experts.number * experts.weights:
            bias = self._operator(operators.expert_bias, device, rows * hidden)
            kernels = {name: here * getattr(bias, name) for name in ("forward_kernels", "input_kernels")}
            yield bias._replace(**kernels)
        router = Product(hidden, experts.number)
        yield replace(self, precision=self.software.products.router_precision)._product(
            router, device, 1.0, query.routed_tokens
        )
        held = query.routed_tokens * experts.chosen * held_rows(experts, query.expert_parallel_size)
        # Rows that come from other ranks are sorted once more; tokens that are sent once become rows only there.
        sorts = np.where(np.greater(query.expert_parallel_size, 1), 2.0, 1.0)
        moved = held / sorts if self.software.communication.sends_once else held
        yield self._operator(operators.routing, device, moved * hidden, sorts)
        activation = FUSED_EXPERTS if fused else operators.expert_activation
        yield self._operator(activation, device, held * experts.width)
        if query.layer.clamped and not fused:
            yield self._operator(operators.expert_clamp, device, held * experts.width)

    def _expert_product(
        self,
        product: Product,
        device: Device,
        rows: ScalarOrArray,
        matrices: ScalarOrArray,
        cut: ScalarOrArray,
        *,
        casts: tuple[bool, bool] = (True, True),
    ) -> _Part:
        """A product of some experts that have so many rows together: one kernel in half precision from Ampere on.

        Rows of an expert fill tiles of `TILE` rows, the last one by half.

        Args:
            casts: whether its input, and the gradient of its output, are cast to 8 bits before it.
        """
        kernels = self.software.products
        in_half = device.is_gpu and self.precision != "fp32"
        is_grouped = kernels.groups_experts and in_half and device.generation not in NOT_GROUPED
        inputs, outputs = product.per_rank(cut)  # type: ignore[arg-type]
        filled = rows + matrices * TILE / 2 * device.is_gpu
        weights, launches = matrices * inputs * outputs, 1.0 if is_grouped else matrices
        adding = kernels.expert_accumulation_bytes * is_grouped
        if not kernels.accumulates_in_place:
            adding = kernels.accumulation_bytes
        return _Part(
            self.product_s(device, filled, inputs, outputs, matrices) + casts[0] * self._cast_s(device, rows * inputs),
            self.product_s(device, filled, outputs, inputs, matrices) + casts[1] * self._cast_s(device, rows * outputs),
            self.product_s(device, matrices * inputs, rows / matrices, outputs, matrices)
            + self._moving_s(device, adding * weights),
            forward_kernels=launches * kernels.forward_kernels + matrices * self._casts,
            input_kernels=launches * kernels.backward_kernels / 2 + matrices * self._casts,
            weight_kernels=launches * kernels.backward_kernels / 2,
        )

    def _attention(self, query: LayerQuery, attention: Attention) -> _Part:
        core, device, tp = self.software.attention, query.device, query.tensor_parallel_size
        in_reach = positions_in_reach(query.start, query.end, attention.sliding_window)
        tokens, sequences = query.end - query.start, query.sequences
        if core.writes_scores:
            forward, back = self._scores(query, attention)
        elif attention.written_out:
            forward, back = self._written_out(query, attention)
        else:
            forward, back = self._fused(query, attention, in_reach)
        of_keys = key_heads(attention, tp * query.sequence_parallel_size)
        heads = attention.query_heads + of_keys
        elements = tokens * heads + in_reach * heads
        if not core.writes_scores and attention.sliding_window is not None:
            # Keys and values of the token slices in reach are put together: read, and written.
            elements = elements + 2 * 2 * in_reach * of_keys
        width = (attention.head_size + attention.value_size) / 2
        kept = self._moving_s(device, self._element_bytes * width * sequences * elements / tp)
        forward = forward + kept
        again = self.software.selective_recomputes == "attention"
        before = 2 * of_keys * width / tp * sequences * (in_reach - tokens)
        kept_bytes = ELEMENT_BYTES[query.kept_keys.gradients]
        expanding = expanding_back = 0.0 * before
        if attention.latent is not None and query.kept_keys.latents:
            before = attention.latent.kept_size * sequences * (in_reach - tokens)
            expanding, expanding_back = self._expansion(query, attention, attention.latent, in_reach)
        adding = self._moving_s(device, core.prefix_bytes(self._element_bytes, kept_bytes) * before)
        return _Part(
            forward + expanding,
            back + BACKWARD_MOVES * kept + adding + expanding_back,
            selective=forward if again else 0.0,
            forward_kernels=core.forward_kernels,
            input_kernels=core.backward_kernels + core.prefix.backward_kernels * np.greater(in_reach, tokens),
            selective_kernels=core.forward_kernels if again else 0.0,
        )

    def _expansion(
        self, query: LayerQuery, attention: Attention, sizes: LatentSizes, in_reach: ScalarOrArray
    ) -> tuple[ScalarOrArray, ScalarOrArray]:
        """Seconds of keys and values from kept latents, beyond the products of a token slice's own tokens.

        A forward computes them of the tokens before it, too; its backward of all in reach once more, and the gradients
        of latents and weights of the tokens before it.
        """
        columns = attention.query_heads * (sizes.key_size + sizes.value_size) / query.tensor_parallel_size
        before = np.maximum(query.sequences * (in_reach - query.end + query.start), 0.0)
        forward, again = (
            np.where(np.greater(rows, 0), self.product_s(query.device, np.maximum(rows, 1.0), sizes.rank, columns), 0.0)
            for rows in (before, query.sequences * in_reach)
        )
        return forward, again + BACKWARD_PER_FORWARD * forward

    def _recurrence(self, query: LayerQuery, sizes: Recurrence) -> _Part:
        """Small products between two projections, which the backward computes again; memory moves as in attention.

        Times are as of attention with as many FLOPs, as no published ones of such kernels are used.
        """
        device, tp = query.device, query.tensor_parallel_size
        reached = self._products_reach(device) * self.efficiency.attention_efficiency
        computing = recurrence_flops_per_token(sizes) / tp * query.rows / reached
        moved = self._moving_s(device, self._element_bytes * kept_channels(sizes) / tp * query.rows)
        forward = np.maximum(computing, moved)
        backward = (1 + BACKWARD_PER_FORWARD) * forward
        kernels = RECURRENCE_KERNELS
        return _Part(forward, backward, forward_kernels=kernels, input_kernels=3 * kernels)

    def _pairs(self, query: LayerQuery, attention: Attention) -> ScalarOrArray:
        """Pairs of a token and a position with a computed score."""
        if self.software.attention.skips_masked or not attention.causal:
            return query.sequences * attention.positions(query.start, query.end, query.layer.tokens)  # type: ignore[arg-type,operator]
        return query.rows * query.end

    def _flops_per_pair(self, query: LayerQuery, attention: Attention) -> ScalarOrArray:
        """FLOPs of a pair, more where no tensor core reads the head size; fp32 needs none, and is read by 4 bytes."""
        misaligned = attention.head_size % 8 and self.precision != "fp32"
        flops = attention.flops_per_position / query.tensor_parallel_size
        return flops / (self.efficiency.misaligned_efficiency if misaligned else 1.0)

    def _scores(self, query: LayerQuery, attention: Attention) -> tuple[ScalarOrArray, ScalarOrArray]:
        """Forward and backward seconds of attention with its matrix of scores in memory."""
        pairs, heads = self._pairs(query, attention), attention.query_heads / query.tensor_parallel_size
        reached = self._products_reach(query.device) * self.efficiency.attention_efficiency
        computing = self._flops_per_pair(query, attention) * pairs / reached
        core = self.software.attention
        moving = self._moving_s(query.device, core.score_bytes * heads * pairs)
        moving_back = BACKWARD_MOVES * moving
        if core.score_bytes_backward is not None:
            moving_back = self._moving_s(query.device, core.score_bytes_backward * heads * pairs)
        return computing + moving, BACKWARD_PER_FORWARD * computing + moving_back

    def _fused(
        self, query: LayerQuery, attention: Attention, in_reach: ScalarOrArray
    ) -> tuple[ScalarOrArray, ScalarOrArray]:
        """Forward and backward seconds of the fused kernel that runs on the device."""
        called = self.software.attention.kernel_on(query.device.generation)
        kernel = fused_attention(called, query.device, self._attention_precision, attention.head_size)
        forth, back = kernel.pairs_of_time(
            self._pairs(query, attention),
            query.rows,
            query.end - query.start,
            query.sequences * attention.query_heads / query.tensor_parallel_size,
            in_reach,
        )
        flops = self._flops_per_pair(query, attention)
        if called != "cudnn":
            # Other kernels take values as wide as queries.
            flops = flops * 2 * attention.head_size / (attention.head_size + attention.value_size)
        reached = query.device.peak_flops(self._attention_precision) * self.efficiency.fused_attention
        return (
            flops * forth / (reached * kernel.forward),
            FLASH_BACKWARD_PER_FORWARD * flops * back / (reached * kernel.backward),
        )

    def _written_out(self, query: LayerQuery, attention: Attention) -> tuple[ScalarOrArray, ScalarOrArray]:
        """Forward and backward seconds of attention that our own kernel writes out, tile by tile.

        Scores are computed in fp32, and so is the whole backward (`attention.kernels`). Masked ones are computed
        too; in a window those out of the reach of a tile are not.
        """
        device, tp, efficiency = query.device, query.tensor_parallel_size, self.efficiency
        window, reached = attention.sliding_window, query.end
        if window is not None:
            reached = np.minimum(reached, window - 1 + np.minimum(query.end - query.start, longest_in_window(window)))
        pairs = query.rows * reached
        # Two products of as many FLOPs: scores, and weights times values; the backward has five. In fp32 they are bound
        # by the peak, and reach the efficiency of large products.
        product = attention.flops_per_position / tp * pairs / 2
        in_fp32 = product / (device.peak_flops("fp32") * efficiency.gemm_efficiency)
        in_precision = product / (self._products_reach(device) * efficiency.attention_efficiency)
        if self.precision == "fp32":
            in_precision = in_fp32
        scores = attention.query_heads / tp * pairs
        fixed, of_element = WRITTEN_OUT_BYTES
        moving = self._moving_s(device, (fixed + of_element * self._element_bytes) * scores)
        moving_back = self._moving_s(device, WRITTEN_OUT_BACKWARD_BYTES * scores)
        return in_fp32 + in_precision + moving, 5 * in_fp32 + moving_back

    def _element_wise(self, query: LayerQuery) -> list[_Part]:
        """Norms, residuals, activation function, biases, rotation, and copies of heads into their places."""
        operators, layer, tp = self.software.operators, query.layer, query.tensor_parallel_size
        attention = layer.attention
        shared = tp if query.sequence_parallel else 1.0
        hidden = layer.hidden_size / shared
        norm = operators.rmsnorm if layer.normalization == "rmsnorm" else operators.layernorm
        activation = operators.gated_activation if layer.gated else operators.activation
        # Operator, how many of it, numbers that each puts out, and whether selective recomputation repeats it.
        work: list[tuple[Operator, ScalarOrArray, ScalarOrArray, bool]] = [
            (norm, layer.num_norms, hidden, True),
            (operators.residual, layer.num_residuals, hidden, False),
            (activation, bool(layer.activation_width), layer.activation_width / tp, True),
            (operators.bias, layer.num_biases, layer.biased_channels / max(layer.num_biases, 1) / tp, False),
        ]
        if attention is not None:
            channels = attention.head_size / tp
            heads = 2 * (attention.query_heads + attention.key_value_heads)
            rotary = operators.scaled_rotary if layer.scales_rotations else None
            work += [
                (operators.heads, 1, heads * channels, False),
                (rotary or operators.rotary, bool(layer.rotary_channels), layer.rotary_channels / tp, False),
                (operators.head_norm, 2 * attention.normed, attention.normed_channels / 2 / tp, False),
                (operators.gated_activation, attention.gated, attention.query_heads * channels, False),
            ]
            exchanging = np.greater(query.sequence_parallel_size, 1).astype(float)
            if np.any(exchanging):
                # Each of the two head exchanges packs a message, and takes one apart.
                there = attention.query_heads + key_heads(attention, tp * query.sequence_parallel_size)
                work.append((operators.exchange, 2 * exchanging, there * channels, False))
        again = {"norms": (True,), "operators": (True, False)}.get(self.software.selective_recomputes, ())
        return [
            self._operator(operator, query.device, query.rows * numbers, count, repeated in again)
            for operator, count, numbers, repeated in work
            if np.any(count)
        ]

    def _operator(
        self,
        operator: Operator,
        device: Device,
        numbers: ScalarOrArray,
        count: ScalarOrArray = 1,
        repeated: bool = False,
    ) -> _Part:
        """Element-wise work: `count` operators that put out so many numbers each."""
        size = self._element_bytes
        forward = count * self._moving_s(device, operator.bytes_forward(size) * numbers)
        return _Part(
            forward,
            count * self._moving_s(device, operator.bytes_backward(size) * numbers),
            selective=forward if repeated else 0.0,
            forward_kernels=count * operator.forward_kernels,
            input_kernels=count * operator.backward_kernels,
            selective_kernels=count * operator.forward_kernels if repeated else 0.0,
        )

    def _loss(self, layer: Layer, device: Device, tp: ScalarOrArray, rows: ScalarOrArray) -> _Part:
        vocabulary = sum(product.outputs for product in layer.products) / tp
        logits = rows * vocabulary * np.where(np.equal(tp, 1), self.efficiency.whole_loss_factor, 1.0)
        return self._operator(self.software.operators.loss, device, logits)

    def _embedding(self, layer: Layer, device: Device, tp: ScalarOrArray, rows: ScalarOrArray) -> _Part:
        """Looking rows up, and a gradient of the table, which is added to the sum; a dense one as a whole."""
        part = self._operator(self.software.operators.embedding, device, rows * layer.hidden_size)
        kernels, table = self.software.products, 0.0
        if not kernels.accumulates_in_place:
            table = kernels.accumulation_bytes * layer.parameters_per_rank(tp)  # type: ignore[arg-type]
        return part._replace(
            input_gradient=0.0,
            weight_gradient=part.input_gradient + self._moving_s(device, table),
            input_kernels=0.0,
            weight_kernels=part.input_kernels,
        )
