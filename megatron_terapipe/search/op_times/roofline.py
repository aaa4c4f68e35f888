"""Op times from shapes: what each kernel computes, and what it moves through memory."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deepspeed_ext.plan.costs.attention_tiles import longest_in_window
from megatron_terapipe.config.model.attended_positions import positions_in_reach
from megatron_terapipe.config.model.flops import BACKWARD_PER_FORWARD, FLASH_BACKWARD_PER_FORWARD, logits_computed_again
from megatron_terapipe.search.inputs.cluster import Device
from megatron_terapipe.search.inputs.layer import Attention, Layer, Product
from megatron_terapipe.search.op_times.attention_kernels import fused_attention
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.op_times.kernel_efficiency import reachable_bandwidth, relative_efficiency
from megatron_terapipe.search.op_times.layer_times import LayerQuery, LayerTimes, ScalarOrArray, key_heads
from megatron_terapipe.search.software.description import ELEMENT_BYTES, Operator, Software

WRITTEN_OUT_BYTES = (12, 2)
"""Bytes that one score moves where our own kernel writes them out: the product writes it in fp32 (4), its exponential
sum and its weight are computed (4 + 4); the weight, in the type of the values, is written and read (twice 2 or 4)."""

WRITTEN_OUT_BACKWARD_BYTES = 36
"""And in its backward, all in fp32: scores and gradients of weights are written (8) and read (8), weights and gradients
of scores written (8), and read by three products (12)."""

BACKWARD_MOVES = 1.5
"""Bytes that the backward of attention moves beside its products, in those of its forward: it reads gradients and what
the forward read, and writes gradients, where the forward reads and writes once."""

CORE_TILES = 1 / 108
"""A CPU core computes one tile after the other, where an A100 has a wave of 108 at once, one for each multiprocessor
(NVIDIA A100 Tensor Core GPU Architecture, table 4): so much less is unfilled at the end, and before and behind a tile
there is as little to wait for. Products of one core with 32 inputs run about as fast as those with 512."""


class _Part(NamedTuple):
    """Seconds and kernels of one part of a layer; its backward is without what recomputation repeats."""

    forward: ScalarOrArray = 0.0
    """Seconds of F."""
    input_gradient: ScalarOrArray = 0.0
    """Seconds of BI."""
    weight_gradient: ScalarOrArray = 0.0
    """Seconds of BW."""
    selective: ScalarOrArray = 0.0
    """Seconds that selective recomputation repeats."""
    forward_kernels: ScalarOrArray = 0.0
    """Kernels of F."""
    input_kernels: ScalarOrArray = 0.0
    """Kernels of BI."""
    weight_kernels: ScalarOrArray = 0.0
    """Kernels of BW."""
    selective_kernels: ScalarOrArray = 0.0
    """Kernels that selective recomputation repeats."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Times of layers from their shapes, a device's data sheet and `HardwareEfficiency`; an `OpTimes`.

    A matrix product of R rows, K inputs and N outputs takes the longer of computing and moving its operands:

        2 K R N / (peak * efficiency) * (1 + depth / K) * (1 + area / (R N))     and     bytes / memory bandwidth

    `depth` is the fixed work of each output tile, `area` the last wave of tiles, which fills the device in part: both
    are what makes small matrices slow (NVIDIA, Matrix Multiplication Background, tile and wave quantisation). All three
    are those of an A100, times what `kernel_efficiency` knows of the device's generation in half precision.
    `attention_kernels` has the form of fused attention.
    """

    efficiency: HardwareEfficiency
    """What is reached of the data sheet."""
    software: Software
    """What the trainer computes beside the matrix products."""
    precision: str = "bf16"
    """`bf16`, `fp16` or `fp32`."""

    @property
    def includes_collectives(self) -> bool:
        """Reductions are priced elsewhere, by the links that they cross."""
        return False

    @property
    def _element_bytes(self) -> int:
        return ELEMENT_BYTES[self.precision]

    def __call__(self, query: LayerQuery) -> LayerTimes:
        """Times of one layer; see `OpTimes`."""
        layer, device, tp, rows = query.layer, query.device, query.tensor_parallel_size, query.rows
        # The host launches the same kernels however small they are.
        parts = [self._product(product, device, tp, rows) for product in layer.products]
        if layer.attention is not None:
            parts.append(self._attention(query, layer.attention))
        parts += self._element_wise(query)
        if layer.kind == "head":
            parts.append(self._loss(layer, device, tp, rows))
            if self.software.logits_at_once is not None:
                twice = self._logits_again(layer, tp, query.sequences)
                # What is not kept cannot wait: the gradients of the head's weight are computed with those of its input.
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
        again: ScalarOrArray = 0.0 * whole.forward
        kernels_again: ScalarOrArray = 0.0
        # Megatron recomputes transformer layers; embedding, last norm and head stay as they are.
        if layer.kind in ("block", "other"):
            if query.recompute == "full":
                again, kernels_again = whole.forward, whole.forward_kernels
            elif query.recompute == "selective":
                again, kernels_again = whole.selective, whole.selective_kernels
        launch = self.launch_s(device)
        return LayerTimes(
            whole.forward,
            whole.input_gradient + again,
            whole.weight_gradient,
            launch * whole.forward_kernels,
            launch * (whole.input_kernels + kernels_again),
            launch * whole.weight_kernels,
        )

    def launch_s(self, device: Device) -> float:
        """Host time of one launch. A CPU calls its kernels itself, with less in between."""
        return self.efficiency.launch_s * self.software.launch_factor * (1.0 if device.is_gpu else 0.5)

    def _moving_s(self, device: Device, num_bytes: ScalarOrArray) -> ScalarOrArray:
        return num_bytes / (reachable_bandwidth(device) * self.efficiency.memory_efficiency)

    def _products_reach(self, device: Device) -> float:
        """FLOP/s of the peak, less where products reach less of it than on an A100."""
        peak = device.peak_flops(self.precision)
        return peak if self.precision == "fp32" else peak * relative_efficiency(device).products

    def product_s(
        self, device: Device, rows: ScalarOrArray, inputs: ScalarOrArray, outputs: ScalarOrArray
    ) -> ScalarOrArray:
        """Seconds of one matrix product of [rows, inputs] and [inputs, outputs]; arguments broadcast.

        Args:
            rows: rows of the first matrix.
            outputs: columns of the second matrix.
        """
        depth, area = self.efficiency.gemm_depth, self.efficiency.gemm_area
        if not device.is_gpu:
            depth, area = depth * CORE_TILES, area * CORE_TILES
        elif self.precision != "fp32":
            relative = relative_efficiency(device)
            depth, area = depth * relative.depth, area * relative.area
        reached = self._products_reach(device) * self.efficiency.gemm_efficiency
        computing = 2 * (inputs + depth) * (rows * outputs + area) / reached
        operands = rows * inputs + inputs * outputs + rows * outputs
        return np.maximum(computing, self._moving_s(device, self._element_bytes * operands))

    def _product(self, product: Product, device: Device, tp: ScalarOrArray, rows: ScalarOrArray) -> _Part:
        inputs, outputs = product.per_rank(tp)  # type: ignore[arg-type]
        forward = self.product_s(device, rows, inputs, outputs)
        input_gradient = self.product_s(device, rows, outputs, inputs)
        weight_gradient = self.product_s(device, inputs, rows, outputs)
        beside = self.software.products
        if beside.accumulates_in_place:
            read = self._element_bytes * rows * (inputs + outputs)
            moving = self._moving_s(device, read + beside.accumulation_bytes * inputs * outputs)
            weight_gradient = np.maximum(weight_gradient, moving)
        else:
            weight_gradient = weight_gradient + self._moving_s(device, beside.accumulation_bytes * inputs * outputs)
        return _Part(
            forward,
            input_gradient,
            weight_gradient,
            forward_kernels=beside.forward_kernels,
            input_kernels=beside.backward_kernels / 2,
            weight_kernels=beside.backward_kernels / 2,
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
        kept = self._moving_s(device, self._element_bytes * attention.head_size * sequences * elements / tp)
        forward = forward + kept
        again = self.software.selective_recomputes == "attention"
        before = 2 * of_keys * attention.head_size / tp * sequences * (in_reach - tokens)
        kept_bytes = ELEMENT_BYTES[query.key_value_gradients]
        adding = self._moving_s(device, core.prefix_bytes(self._element_bytes, kept_bytes) * before)
        return _Part(
            forward,
            back + BACKWARD_MOVES * kept + adding,
            selective=forward if again else 0.0,
            forward_kernels=core.forward_kernels,
            # Token slices before it are about as long as this one.
            input_kernels=core.backward_kernels + core.prefix.backward_kernels * ((in_reach - tokens) / tokens),
            selective_kernels=core.forward_kernels if again else 0.0,
        )

    def _pairs(self, query: LayerQuery, attention: Attention) -> ScalarOrArray:
        """Pairs of a token and a position whose score is computed."""
        if self.software.attention.skips_masked or not attention.causal:
            return query.sequences * attention.positions(query.start, query.end, query.layer.tokens)  # type: ignore[arg-type,operator]
        return query.rows * query.end

    def _flops_per_pair(self, query: LayerQuery, attention: Attention) -> ScalarOrArray:
        """FLOPs of a pair, more where no tensor core reads the head size; fp32 needs none, and is read by 4 bytes."""
        misaligned = attention.head_size % 8 and self.precision != "fp32"
        flops = attention.flops_per_position / query.tensor_parallel_size
        return flops / (self.efficiency.misaligned_efficiency if misaligned else 1.0)

    def _scores(self, query: LayerQuery, attention: Attention) -> tuple[ScalarOrArray, ScalarOrArray]:
        """Forward and backward seconds of attention whose matrix of scores is in memory."""
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
        kernel = fused_attention(called, query.device, self.precision, attention.head_size)
        forth, back = kernel.pairs_of_time(
            self._pairs(query, attention),
            query.rows,
            query.end - query.start,
            query.sequences * attention.query_heads / query.tensor_parallel_size,
            in_reach,
        )
        flops = self._flops_per_pair(query, attention)
        reached = query.device.peak_flops(self.precision) * self.efficiency.fused_attention
        return (
            flops * forth / (reached * kernel.forward),
            FLASH_BACKWARD_PER_FORWARD * flops * back / (reached * kernel.backward),
        )

    def _written_out(self, query: LayerQuery, attention: Attention) -> tuple[ScalarOrArray, ScalarOrArray]:
        """Forward and backward seconds of attention that our own kernel writes out, tile by tile.

        Scores are computed in fp32, and so is the whole backward (`attention_kernels.plain`). Masked ones are computed
        too; in a window those out of the reach of a tile are not.
        """
        device, tp, efficiency = query.device, query.tensor_parallel_size, self.efficiency
        window, reached = attention.sliding_window, query.end
        if window is not None:
            reached = np.minimum(reached, window - 1 + np.minimum(query.end - query.start, longest_in_window(window)))
        pairs = query.rows * reached
        # Two products of as many FLOPs: scores, and weights times values; the backward has five. In fp32 they are bound
        # by the peak, and reach what large products do.
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
        residuals = sum(product.parallel == "row" for product in layer.products)
        # Operator, how many of it, numbers that each puts out, and whether selective recomputation repeats it.
        work: list[tuple[Operator, ScalarOrArray, ScalarOrArray, bool]] = [
            (norm, layer.num_norms, hidden, True),
            (operators.residual, residuals, hidden, False),
            (activation, bool(layer.activation_width), layer.activation_width / tp, True),
            (operators.bias, layer.num_biases, layer.biased_channels / max(layer.num_biases, 1) / tp, False),
        ]
        if attention is not None:
            channels = attention.head_size / tp
            heads = 2 * (attention.query_heads + attention.key_value_heads)
            work += [
                (operators.heads, 1, heads * channels, False),
                (operators.rotary, bool(layer.rotary_channels), layer.rotary_channels / tp, False),
                (operators.head_norm, 2 * attention.normed, attention.normed_channels / 2 / tp, False),
            ]
            exchanging = np.greater(query.sequence_parallel_size, 1).astype(float)
            if np.any(exchanging):
                # Each of the two head exchanges packs a message, and takes one apart.
                there = attention.query_heads + key_heads(attention, tp * query.sequence_parallel_size)
                work.append((operators.exchange, 2 * exchanging, there * channels, False))
        norms_again = self.software.selective_recomputes == "norms"
        return [
            self._operator(operator, query.device, query.rows * numbers, count, repeated and norms_again)
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

    def _logits_again(self, layer: Layer, tp: ScalarOrArray, sequences: ScalarOrArray) -> ScalarOrArray:
        """Share of the logits of a micro-batch that are computed again."""
        assert self.software.logits_at_once is not None
        vocabulary = sum(product.outputs for product in layer.products) / tp
        return logits_computed_again(sequences * layer.tokens * vocabulary, self.software.logits_at_once)  # type: ignore[arg-type]

    def _embedding(self, layer: Layer, device: Device, tp: ScalarOrArray, rows: ScalarOrArray) -> _Part:
        """Looking rows up, and a gradient of the table, which is added to the sum; a dense one as a whole."""
        part = self._operator(self.software.operators.embedding, device, rows * layer.hidden_size)
        beside = self.software.products
        table = 0.0 if beside.accumulates_in_place else beside.accumulation_bytes * layer.parameters_per_rank(tp)  # type: ignore[arg-type]
        return part._replace(
            input_gradient=0.0,
            weight_gradient=part.input_gradient + self._moving_s(device, table),
            input_kernels=0.0,
            weight_kernels=part.input_kernels,
        )
