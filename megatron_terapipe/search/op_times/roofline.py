"""Op times from shapes: what each kernel computes, and what it moves through memory."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deepspeed_ext.plan.attention_tiles import longest_in_window
from megatron_terapipe.config.attended_positions import positions_in_reach
from megatron_terapipe.config.flops import BACKWARD_PER_FORWARD, FLASH_BACKWARD_PER_FORWARD, logits_computed_again
from megatron_terapipe.search.inputs.cluster import Device
from megatron_terapipe.search.inputs.layer import Attention, Layer, Product
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.op_times.layer_times import LayerQuery, LayerTimes, ScalarOrArray
from megatron_terapipe.search.op_times.software import ELEMENT_BYTES, Software

LAUNCHES = {"product": 3, "attention": 8, "norm": 1, "activation": 1, "residual": 1, "embedding": 6, "loss": 12}
"""Kernels that the forward of each part launches; a product's are itself, its bias, and casts or copies around it."""

SCORE_BYTES = 13
"""Bytes that one score moves where scores are written out: the product writes it (2), softmax reads and writes it (4),
dropout reads and writes it with a mask (5), the product with the values reads it (2)."""

WRITTEN_OUT_BYTES = (12, 2)
"""Bytes that one score moves where our own kernel writes them out: the product writes it in fp32 (4), its exponential
sum and its weight are computed (4 + 4); the weight, in the type of the values, is written and read (twice 2 or 4)."""

WRITTEN_OUT_BACKWARD_BYTES = 36
"""And in its backward, all in fp32: scores and gradients of weights are written (8) and read (8), weights and gradients
of scores written (8), and read by three products (12)."""

BACKWARD_MOVES = 1.5
"""Bytes that the backward of element-wise work moves, in those of its forward: it reads the gradient and an input, and
writes a gradient, where the forward reads one and writes one."""

LOGIT_BYTES = 22
"""Bytes that one logit moves in the loss: cast to fp32 (2 + 4), maximum (4), subtraction (8), exponential sum (4)."""

LOGIT_GRADIENT_BYTES = 14
"""And in its gradient: the softmax is read and scaled (8), and cast to half (4 + 2)."""

CORE_TILES = 1 / 108
"""A CPU core computes one tile after the other, where an A100 has a wave of 108 at once, one for each multiprocessor
(NVIDIA A100 Tensor Core GPU Architecture, table 4): so much less is unfilled at the end, and before and behind a tile
there is as little to wait for. Products of one core with 32 inputs run about as fast as those with 512."""

ACCUMULATION_BYTES = 8
"""Bytes that each micro-batch moves to add one weight's gradient: written (2), read with the sum (4), written (2)."""


class _Part(NamedTuple):
    """Seconds of one part of a layer: forward, BI and BW without what is recomputed, and what recompute repeats."""

    forward: ScalarOrArray
    input_gradient: ScalarOrArray
    weight_gradient: ScalarOrArray
    selective: ScalarOrArray
    launches: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """Times of layers from their shapes, a device's data sheet and `HardwareEfficiency`; an `OpTimes`.

    A matrix product of R rows, K inputs and N outputs takes the longer of computing and moving its operands:

        2 K R N / (peak * efficiency) * (1 + depth / K) * (1 + area / (R N))     and     bytes / memory bandwidth

    `depth` is the fixed work of each output tile, `area` the last wave of tiles, which fills the device in part: both
    are what makes small matrices slow (NVIDIA, Matrix Multiplication Background, tile and wave quantisation).

    Attributes:
        efficiency: what is reached of the data sheet.
        software: what the trainer computes beside the matrix products.
        precision: `bf16`, `fp16` or `fp32`.
    """

    efficiency: HardwareEfficiency
    software: Software
    precision: str = "bf16"

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
            parts.append(self._attention(layer, device, tp, query.micro_batch_size, query.start, query.end))
        parts.append(self._element_wise(layer, device, tp, rows, query.sequence_parallel))
        if layer.kind == "head":
            parts.append(self._loss(layer, device, tp, rows))
            if self.software.logits_at_once is not None:
                again = self._logits_again(layer, tp, query.micro_batch_size)
                # What is not kept cannot wait: the gradients of the head's weight are computed with those of its input.
                parts = [
                    part._replace(
                        input_gradient=part.input_gradient + part.weight_gradient + again * part.forward,
                        weight_gradient=0.0,
                    )
                    for part in parts
                ]
        if layer.kind == "embedding":
            parts.append(self._embedding(layer, device, tp, rows))
        forward = sum(part.forward for part in parts)
        input_gradient = sum(part.input_gradient for part in parts)
        weight_gradient = sum(part.weight_gradient for part in parts)
        launch = sum(part.launches for part in parts) * self.launch_s(device)
        launch_again = 0.0
        # Megatron recomputes transformer layers; embedding, last norm and head stay as they are.
        if layer.kind in ("block", "other"):
            if query.recompute == "full":
                input_gradient = input_gradient + forward
                launch_again = launch
            elif query.recompute == "selective":
                input_gradient = input_gradient + sum(part.selective for part in parts)
                launch_again = launch / 3
        return LayerTimes(forward, input_gradient, weight_gradient, launch, launch + launch_again, launch)

    def launch_s(self, device: Device) -> float:
        """Host time of one launch. A CPU calls its kernels itself, with less in between."""
        return self.efficiency.launch_s * self.software.launch_factor * (1.0 if device.is_gpu else 0.5)

    def _moving_s(self, device: Device, num_bytes: ScalarOrArray) -> ScalarOrArray:
        return num_bytes / (device.memory_bandwidth * self.efficiency.memory_efficiency)

    def product_s(
        self, device: Device, rows: ScalarOrArray, inputs: ScalarOrArray, outputs: ScalarOrArray
    ) -> ScalarOrArray:
        """Seconds of one matrix product of [rows, inputs] and [inputs, outputs]; arguments broadcast.

        Args:
            device: device that computes it.
            rows: rows of the first matrix.
            inputs: its columns.
            outputs: columns of the second matrix.
        """
        efficiency = self.efficiency
        peak = device.peak_flops(self.precision) * efficiency.gemm_efficiency
        tiles = 1.0 if device.is_gpu else CORE_TILES
        computing = (
            2 * (inputs + efficiency.gemm_depth * tiles) * (rows * outputs + efficiency.gemm_area * tiles) / peak
        )
        operands = rows * inputs + inputs * outputs + rows * outputs
        return np.maximum(computing, self._moving_s(device, self._element_bytes * operands))

    def _product(self, product: Product, device: Device, tp: ScalarOrArray, rows: ScalarOrArray) -> _Part:
        inputs, outputs = product.per_rank(tp)  # type: ignore[arg-type]
        forward = self.product_s(device, rows, inputs, outputs)
        input_gradient = self.product_s(device, rows, outputs, inputs)
        weight_gradient = self.product_s(device, inputs, rows, outputs)
        adding = self._moving_s(device, ACCUMULATION_BYTES * inputs * outputs)
        return _Part(forward, input_gradient, weight_gradient + adding, 0.0, LAUNCHES["product"])

    def _attention(
        self,
        layer: Layer,
        device: Device,
        tp: ScalarOrArray,
        sequences: ScalarOrArray,
        start: ScalarOrArray,
        end: ScalarOrArray,
    ) -> _Part:
        attention, software, efficiency = layer.attention, self.software, self.efficiency
        assert attention is not None
        flash = software.attention == "flash"
        tokens = end - start
        if flash and attention.written_out:
            computing, computing_back, moving_scores, moving_back = self._written_out(
                attention, device, tp, sequences, start, end
            )
        else:
            if software.skips_masked_scores or not attention.causal:
                pairs = sequences * attention.positions(start, end, layer.tokens)  # type: ignore[arg-type,operator]
            else:
                pairs = sequences * tokens * end
            peak = device.peak_flops(self.precision)
            reached = peak * (efficiency.flash_efficiency if flash else efficiency.attention_efficiency)
            # fp32 is read by 4 bytes, and needs no tensor core.
            if attention.head_size % 8 and self.precision != "fp32":
                reached = reached * efficiency.misaligned_efficiency
            computing = attention.flops_per_position / tp * pairs / reached
            computing_back = (FLASH_BACKWARD_PER_FORWARD if flash else BACKWARD_PER_FORWARD) * computing
            score_bytes = 0.0 if flash else SCORE_BYTES * attention.query_heads / tp
            moving_scores = self._moving_s(device, score_bytes * pairs)
            moving_back = BACKWARD_MOVES * moving_scores
        heads = attention.query_heads + attention.key_value_heads
        in_reach = positions_in_reach(start, end, attention.sliding_window)
        elements = tokens * heads + in_reach * heads
        if flash and attention.sliding_window is not None:
            # Keys and values of the token slices in reach are put together: read, and written.
            elements = elements + 2 * 2 * in_reach * attention.key_value_heads
        kept = self._moving_s(device, self._element_bytes * attention.head_size * sequences * elements / tp)
        forward = computing + kept + moving_scores
        selective = forward if software.selective_recomputes == "attention" else 0.0
        back = computing_back + BACKWARD_MOVES * kept + moving_back
        return _Part(forward, back, 0.0, selective, LAUNCHES["attention"])

    def _written_out(
        self,
        attention: Attention,
        device: Device,
        tp: ScalarOrArray,
        sequences: ScalarOrArray,
        start: ScalarOrArray,
        end: ScalarOrArray,
    ) -> tuple[ScalarOrArray, ScalarOrArray, ScalarOrArray, ScalarOrArray]:
        """Seconds of products, forward and backward, and of moving scores, forward and backward.

        Scores are computed in fp32, and so is the whole backward (`attention_kernels.plain`). Masked ones are computed
        too; in a window those out of the reach of a tile are not.
        """
        window, reached = attention.sliding_window, end
        if window is not None:
            reached = np.minimum(end, window - 1 + np.minimum(end - start, longest_in_window(window)))
        pairs = sequences * (end - start) * reached
        # Two products of as many FLOPs: scores, and weights times values; the backward has five. In fp32 they are bound
        # by the peak, and reach what large products do.
        product, efficiency = attention.flops_per_position / tp * pairs / 2, self.efficiency
        in_fp32 = product / (device.peak_flops("fp32") * efficiency.gemm_efficiency)
        in_precision = product / (device.peak_flops(self.precision) * efficiency.attention_efficiency)
        if self.precision == "fp32":
            in_precision = in_fp32
        scores = attention.query_heads / tp * pairs
        fixed, of_element = WRITTEN_OUT_BYTES
        moving = self._moving_s(device, (fixed + of_element * self._element_bytes) * scores)
        moving_back = self._moving_s(device, WRITTEN_OUT_BACKWARD_BYTES * scores)
        return in_fp32 + in_precision, 5 * in_fp32, moving, moving_back

    def _element_wise(
        self, layer: Layer, device: Device, tp: ScalarOrArray, rows: ScalarOrArray, sequence_parallel: bool
    ) -> _Part:
        """Norms, residuals, activation function, and copies of queries, keys and values into their places."""
        size = self._element_bytes
        shared = tp if sequence_parallel else 1.0
        residuals = sum(product.parallel == "row" for product in layer.products)
        norms = 2 * size * layer.num_norms * layer.hidden_size / shared
        mask = 1 if self.software.residual_dropout else 0
        adding = (3 * size + mask) * residuals * layer.hidden_size / shared
        activation = (2 + layer.gated) * size * layer.activation_width / tp
        copying: ScalarOrArray = 0.0
        if layer.attention is not None and layer.attention.normed:
            norms += 2 * size * layer.attention.normed_channels / tp
        num_norms = layer.num_norms + 2 * (layer.attention is not None and layer.attention.normed)
        launches = LAUNCHES["norm"] * num_norms + LAUNCHES["residual"] * residuals
        launches += LAUNCHES["activation"] * bool(layer.activation_width)
        if layer.attention is not None and self.software.attention == "scores":
            heads = 2 * layer.attention.query_heads + 2 * layer.attention.key_value_heads
            copying = 2 * size * heads * layer.attention.head_size / tp
        forward = self._moving_s(device, rows * (norms + adding + activation + copying))
        selective: ScalarOrArray = 0.0
        if self.software.selective_recomputes == "norms":
            selective = self._moving_s(device, rows * (norms + activation))
        return _Part(forward, BACKWARD_MOVES * forward, 0.0, selective, launches)

    def _loss(self, layer: Layer, device: Device, tp: ScalarOrArray, rows: ScalarOrArray) -> _Part:
        vocabulary = sum(product.outputs for product in layer.products) / tp
        logits = rows * vocabulary * np.where(np.equal(tp, 1), self.efficiency.whole_loss_factor, 1.0)
        forward = self._moving_s(device, LOGIT_BYTES * logits)
        gradient = self._moving_s(device, LOGIT_GRADIENT_BYTES * logits)
        return _Part(forward, gradient, 0.0, 0.0, LAUNCHES["loss"])

    def _logits_again(self, layer: Layer, tp: ScalarOrArray, sequences: ScalarOrArray) -> ScalarOrArray:
        """Share of the logits of a micro-batch that are computed again."""
        assert self.software.logits_at_once is not None
        vocabulary = sum(product.outputs for product in layer.products) / tp
        return logits_computed_again(sequences * layer.tokens * vocabulary, self.software.logits_at_once)  # type: ignore[arg-type]

    def _embedding(self, layer: Layer, device: Device, tp: ScalarOrArray, rows: ScalarOrArray) -> _Part:
        """Looking rows up, and a dense gradient of the table, which is added to the sum."""
        size = self._element_bytes
        forward = self._moving_s(device, 4 * size * rows * layer.hidden_size)
        table = ACCUMULATION_BYTES * layer.parameters_per_rank(tp)  # type: ignore[arg-type]
        return _Part(forward, 0.0, forward + self._moving_s(device, table), 0.0, LAUNCHES["embedding"])
