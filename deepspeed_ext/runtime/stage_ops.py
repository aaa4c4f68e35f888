"""The computations of a rank's ops: the layers of a stage on one token slice, the loss, and their gradients.

A stage is computed in its forward, and autograd keeps the tensors for its backward. Or it is computed twice: in the
forward without a graph, for its output and the keys and values of later token slices, and again in the backward, from
its input.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.ops import Op
from deepspeed_ext.runtime.attention.sequence_state import SequenceState
from deepspeed_ext.runtime.first_batch_checks import check_layers
from deepspeed_ext.runtime.gradients.parameter_gathers import ParameterGathers
from deepspeed_ext.runtime.gradients.reductions import Entering, GradientReductions
from deepspeed_ext.runtime.gradients.weight_gradients import WeightGradients
from deepspeed_ext.runtime.live_batch import Batch, Buffer, RandomState, bearing_gradients
from deepspeed_ext.runtime.micro_batch import BatchLoss, detached, to_device
from deepspeed_ext.runtime.module import TokenSlicePipelineModule


class StageOps:
    """Computes the stages of one pipeline rank.

    Args:
        loss_scale: scales the loss of a token slice before backward.
        reductions: sums of gradients over replicas, which start as ops complete them; None to leave them to the step.
        gathers: gathers of weights that replicas updated in parts; layers wait for them. None if the step does it.
        checks: whether to compare each stage in token slices with the whole, at its first token slice.
        key_value_gradients: type in which gradients of keys and values are kept; None for fp32 or wider.
        keys_apart: whether keys and values of token slices are kept apart, as copies to the host need them.
    """

    def __init__(
        self,
        module: TokenSlicePipelineModule,
        device: torch.device,
        *,
        loss: BatchLoss,
        loss_scale: Callable[[Tensor], Tensor],
        reductions: GradientReductions | None = None,
        gathers: ParameterGathers | None = None,
        checks: bool = False,
        key_value_gradients: torch.dtype | None = None,
        keys_apart: bool = False,
    ) -> None:
        self._module, self._device = module, device
        self._batch_loss, self._loss_scale = loss, loss_scale
        self._reductions, self._gathers = reductions, gathers
        self._unchecked = set(module.pipeline.stages_of(module.stage_id)) if checks else set()
        self._key_value_gradients, self._keys_apart = key_value_gradients, keys_apart
        self.weight_gradients = WeightGradients()
        """The products that backwards defer."""

    def begin(self, batch: Batch) -> None:
        """Start a batch."""
        self._batch = batch

    def given(self, op: Op, held: Buffer) -> tuple[Any, Mapping[str, Any]]:
        """The input of a stage, and the entries that its layers take by name, on their device."""
        if op.stage == 0:
            inputs = self._batch.parts[op.micro_batch][op.token_slice].inputs
            return (self._entries(op), {}) if isinstance(inputs, Mapping) else (inputs, {})
        return held.inputs[0] if len(held.inputs) == 1 else held.inputs, self._entries(op)

    def check(self, op: Op, inputs: Any, entries: Mapping[str, Any]) -> None:
        """Compare a stage in token slices with the whole, once, on a token slice with enough tokens."""
        if op.stage not in self._unchecked:
            return
        length = self._batch.parts_of(op.micro_batch).lengths[op.token_slice]
        if isinstance(inputs, Mapping):
            entries, inputs = inputs, inputs[self._module.data_entries.first]
        layers = self._module.stage_layers(op.stage)
        if check_layers(layers, inputs, entries, modules=self._module, seq_length=length):
            self._unchecked.discard(op.stage)

    def forward(self, op: Op, held: Buffer, inputs: Any, entries: Mapping[str, Any]) -> None:
        """Compute a stage, and store in the buffer the outputs for the next stage and the roots of its backward."""
        if self._computes_again:
            self._pass_through(op, held, inputs, entries)
        else:
            self._compute(op, held, inputs, entries)

    def backward(self, op: Op, held: Buffer, gradients: tuple[Tensor, ...]) -> None:
        """Compute the gradients of a stage's inputs and weights, given those [...] of its outputs that need one."""
        if self._computes_again:
            gradients = self._compute_again(op, held, gradients)
        roots, held.roots = held.roots, ()
        if op.stage == self._batch.shape.last_stage:
            # 1, or NaN if the loss is not finite, so that no gradient of it is finite.
            gradients = tuple(root.detach() * 0 + 1 for root in roots)
            roots = tuple(self._loss_scale(root) for root in roots)
        if roots:
            torch.autograd.backward(roots, gradients)

    # ------------------------------------------------------------------ parts of the above

    @property
    def _computes_again(self) -> bool:
        """Whether backwards compute stages again, without a graph of the forward."""
        return self._batch.training and self._module.recomputation.stages

    def _compute(self, op: Op, held: Buffer, inputs: Any, entries: Mapping[str, Any]) -> None:
        """Compute a stage, and keep the roots of its backward, and the outputs for the next stage."""
        outputs = self._module(inputs, self._state(op), op.token_slice, op.stage, entries, self._entering(op))
        if op.stage == self._batch.shape.last_stage:
            held.roots = self._loss(outputs, op)
        else:
            held.outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            held.roots = tuple(get_gradient_edge(tensor) for tensor in held.outputs if tensor.requires_grad)

    def _pass_through(self, op: Op, held: Buffer, inputs: Any, entries: Mapping[str, Any]) -> None:
        """Compute a stage without a graph, for keys and values, and the outputs for the next stage."""
        state, keeps = self._state(op), self._module.recomputation.keeps_random_state
        held.random_state = RandomState.now(self._device) if keeps else None
        is_last = op.stage == self._batch.shape.last_stage
        with torch.no_grad():
            outputs = self._module(
                *(inputs, state, op.token_slice, op.stage, entries, self._entering(op)),
                # Head and loss follow in the backward, unless the head might draw random numbers.
                up_to_past=is_last and not keeps,
            )
        state.forget_shared(op.token_slice)
        if not is_last:
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            bear = bearing_gradients(outputs, held.inputs, self._module.parameters_of(op.stage))
            held.outputs = tuple(
                output.detach().requires_grad_(bears) for output, bears in zip(outputs, bear, strict=True)
            )
            held.bear_gradients = tuple(bear)

    def _compute_again(self, op: Op, held: Buffer, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Compute a stage with a graph, and return the gradients of outputs that are part of the graph."""
        random_state, held.random_state = held.random_state, None
        with nullcontext() if random_state is None else random_state.restored():
            self._compute(op, held, *self.given(op, held))
        self._state(op).forget_shared(op.token_slice)
        outputs, held.outputs = held.outputs, ()
        bearing = [output for output, bears in zip(outputs, held.bear_gradients, strict=True) if bears]
        return tuple(gradient for output, gradient in zip(bearing, gradients, strict=True) if output.requires_grad)

    def _entries(self, op: Op) -> dict[str, Any]:
        """Entries that the layers of a stage take by name, copied to the device for one token slice."""
        parts = self._batch.parts.get(op.micro_batch)
        if parts is None or not isinstance(inputs := parts[op.token_slice].inputs, Mapping):
            return {}
        return to_device(self._module.data_entries.given_to_stage(op.stage, inputs), self._device)

    def _entering(self, op: Op) -> Entering | None:
        """The function that a forward calls with each layer it enters; None if there are no listeners."""
        listeners = [self._gathers.entering] if self._gathers is not None and self._gathers.pending else []
        if self._reductions is not None and self._batch.updates:
            reduced = self._reductions.entering(op, self._defer)
            listeners += [reduced] if reduced is not None else []

        def entering(layer: int, inputs: Any) -> None:
            for listener in listeners:
                listener(layer, inputs)

        return entering if listeners else None

    def _defer(self, action: Callable[[], None]) -> bool:
        """Add a function to the deferred products; False if products are not deferred."""
        if self.weight_gradients.collecting:
            self.weight_gradients.add(action)
            return True
        return False

    def _state(self, op: Op) -> SequenceState:
        """State of a micro-batch on a stage; empty at its first forward there."""
        key = op.stage, op.micro_batch
        if key not in self._batch.states:
            self._batch.states[key] = SequenceState(
                self._batch.token_slices_of(op.micro_batch),
                ranks=self._module.sequence_ranks,
                seed=self._module.base_seed,
                sequences=self._batch.sequences(op.micro_batch),
                documents=self._batch.documents.get(op.micro_batch),
                forward_only=not self._batch.training,
                keys_apart=self._keys_apart,
                key_value_gradients=self._key_value_gradients,
            )
        return self._batch.states[key]

    def _loss(self, outputs: Any, op: Op) -> tuple[Tensor, ...]:
        """Add a token slice's share to the loss, and return the roots of its backward."""
        if self._batch.keeps_outputs:
            with torch.no_grad():
                given = outputs if self._module.output_fn is None else self._module.output_fn(outputs)
            self._batch.outputs[op.micro_batch][op.token_slice] = detached(given)
            self._batch.labels[op.micro_batch][op.token_slice] = self._batch.parts[op.micro_batch][
                op.token_slice
            ].labels
        if not self._batch.computes_loss:
            return ()
        part, loss_fn = self._batch.parts[op.micro_batch][op.token_slice], self._module.loss_fn
        if loss_fn is None:
            loss = outputs
        elif isinstance(part.labels, Mapping):
            labels = self._module.data_entries.given_to_loss(part.labels)
            loss = loss_fn(outputs, **to_device(labels, self._device))
        else:
            loss = loss_fn(outputs, part.labels)
        loss = self._batch_loss.weigh(loss * part.loss_weight, op.micro_batch)
        self._batch.add_loss(op.micro_batch, loss)
        if self._batch.training and not loss.requires_grad:
            raise UserError(
                f"the loss of token slice {op.token_slice} depends on no weight, so later token slices could not pass "
                "gradients back through it: if no token counts, return outputs.sum() * 0"
            )
        return (loss,)
