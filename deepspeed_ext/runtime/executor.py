"""Runs the program of one pipeline rank, instruction by instruction, on the layers of its stages.

`Executor.run` is the loop of a step. Each op first waits for its inputs (a fence), and then computes; all other
instructions are posted, and wait for nothing but the completion of a send. The end of a step, reductions and optimizer,
is in the engine.

A stage is computed in its forward, and autograd keeps the tensors for its backward. Or it is computed twice: in the
forward without a graph, for its output and the keys and values of later token slices, and again in the backward, from
its input.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.ops import Op, OpKind
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.program import (
    COMPUTES,
    HOST_COPIES,
    Instruction,
    InstructionKind,
    Program,
    reader_of_message,
)
from deepspeed_ext.runtime.channels import RankLinks
from deepspeed_ext.runtime.clocks import Observer
from deepspeed_ext.runtime.first_batch_checks import AGAIN_AFTER, check_layers
from deepspeed_ext.runtime.gradients.parameter_gathers import ParameterGathers
from deepspeed_ext.runtime.gradients.reductions import Entering, GradientReductions
from deepspeed_ext.runtime.gradients.weight_gradients import OptimizerGradients, WeightGradients, compute
from deepspeed_ext.runtime.health.ledger import OpLedger
from deepspeed_ext.runtime.live_batch import BatchLoss, Buffer, LiveBatch, RandomState
from deepspeed_ext.runtime.micro_batch import MicroBatchReader, detached, parts_on_device, to_device
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from deepspeed_ext.runtime.offload import HostCopies
from deepspeed_ext.runtime.state.counts import Tallies
from deepspeed_ext.runtime.state.sequence_state import SequenceState


class Executor:
    """Runs the stages of one pipeline rank, batch by batch.

    Args:
        accumulated: sums of the optimizer, to which the gradients of a backward are moved; None to leave them to torch.
        reductions: sums of gradients over replicas, which start as ops complete them; None to leave them to the step.
        gathers: gathers of weights that replicas updated in parts; layers wait for them. None if the step does it.
        checks: whether to compare each stage in token slices with the whole, at its first token slice.
        key_value_gradients: type in which gradients of keys and values are kept; None for fp32 or wider.
    """

    def __init__(
        self,
        module: TokenSlicePipelineModule,
        links: RankLinks,
        device: torch.device,
        *,
        data: MicroBatchReader,
        loss: BatchLoss,
        loss_scale: Callable[[Tensor], Tensor],
        observers: Observer,
        ledger: OpLedger,
        accumulated: OptimizerGradients | None,
        reductions: GradientReductions | None,
        gathers: ParameterGathers | None,
        tallies: Tallies,
        checks: bool,
        key_value_gradients: torch.dtype | None,
        host_copies: HostCopySettings | None,
    ) -> None:
        self._module, self._links, self._device, self._data = module, links, device, data
        self._batch_loss, self._loss_scale, self._observers, self._ledger = loss, loss_scale, observers, ledger
        self._accumulated, self._reductions, self._gathers, self._tallies = accumulated, reductions, gathers, tallies
        self._key_value_gradients = key_value_gradients
        self._weight_gradients, self._attached = WeightGradients(), False
        if accumulated is not None:
            self._attach_weight_gradients()
        self.copies = None if host_copies is None else HostCopies(device, host_copies)
        """Copies in the memory of the host; None without."""
        self._stages = list(module.pipeline.stages_of(module.stage_id))
        self._unchecked = set(self._stages) if checks else set()
        self._batches_to_check = AGAIN_AFTER if checks else 0
        self._cutting_stages = {stage for rank in module.cutting_ranks for stage in module.pipeline.stages_of(rank)}

    # ------------------------------------------------------------------ the loop of a step

    def begin(self, batch: LiveBatch, program: Program) -> None:
        """Start a batch."""
        self.batch = batch
        if self._batches_to_check and batch.plan.training:
            self._batches_to_check -= 1
            if not self._batches_to_check:
                self._unchecked = set(self._stages)
        if self.copies is not None:
            self.copies.begin(batch.plan.shape)
        if any(instruction.kind is InstructionKind.WEIGHT_GRADIENT for instruction in program.instructions):
            self._attach_weight_gradients()

    def run(self, program: Program) -> None:
        """Run the instructions of a batch, one after the other."""
        for instruction in program.instructions:
            self.execute(instruction)
            self._ledger.done()

    def execute(self, instruction: Instruction) -> None:
        """Run one instruction: an op waits for its inputs, computes, and frees tensors that no later op reads."""
        if instruction.kind not in COMPUTES:
            METHODS[instruction.kind](self, instruction)
            return
        op, held = instruction.op, self.batch.buffers[instruction.buffer]
        self._fence(op, held)
        with self._observers.op(op):
            METHODS[instruction.kind](self, op, held)
            # Deferred products accumulate by themselves.
            if self._accumulated is not None and op.kind in (OpKind.BACKWARD, OpKind.INPUT_GRADIENT):
                self._accumulated.collect()
        self._release(op)

    def finish(self, batch: LiveBatch) -> None:
        """Free all tensors of a batch, which may have ended early."""
        batch.clear()
        if self.copies is not None:
            self.copies.finish()

    def _fence(self, op: Op, held: Buffer) -> None:
        """Wait for the inputs of an op: results of another stage, and tensors that were fetched from the host."""
        if op.kind is OpKind.FORWARD:
            if op.stage:
                held.inputs = self._read(op)
            held.given = self._given(op, held)
            if op.stage in self._unchecked:
                self._check(op, *held.given)
        elif op.kind is not OpKind.WEIGHT_GRADIENT:
            if op.stage != self.batch.plan.shape.last_stage:
                held.gradients = self._read(op._replace(kind=OpKind.INPUT_GRADIENT))
            if self.copies is not None:
                self.copies.put_back(op, held, self.batch.states[op.stage, op.micro_batch])

    def _release(self, op: Op) -> None:
        """Free the state of a micro-batch on a stage after its last op, and start the sums of its counts before."""
        plan = self.batch.plan
        if op.kind is OpKind.FORWARD and op.token_slice == plan.shape.last_token_slice:
            if not plan.training:
                self._forget(op, last_stage=self._stages[-1])
            elif self._tallies.any:
                self._tallies.close(self._state(op).counts.values(), op.stage, plan.shape.num_micro_batches)
        elif op.kind in (OpKind.BACKWARD, OpKind.INPUT_GRADIENT) and op.token_slice == 0:
            self._forget(op, last_stage=self._stages[0])

    # ------------------------------------------------------------------ ops

    def forward(self, op: Op, held: Buffer) -> None:
        """Compute a stage on a token slice."""
        given, held.given = held.given, (None, {})
        compute_stage = self._pass_through if self._computes_again else self._compute
        compute_stage(op, held, *given)

    def backward(self, op: Op, held: Buffer) -> None:
        """Compute the gradients of a stage's inputs and weights for a token slice."""
        gradients, held.gradients = held.gradients, ()
        if self._computes_again:
            gradients = self._compute_again(op, held, gradients)
        roots, held.roots = held.roots, ()
        if op.stage == self.batch.plan.shape.last_stage:
            # 1, or NaN if the loss is not finite, so that no gradient of it is finite.
            gradients = tuple(root.detach() * 0 + 1 for root in roots)
            roots = tuple(self._loss_scale(root) for root in roots)
        for edge, gradient in self._state(op).carried.roots(op.token_slice):
            roots, gradients = (*roots, edge), (*gradients, gradient)
        if roots:
            torch.autograd.backward(roots, gradients)

    def input_gradient(self, op: Op, held: Buffer) -> None:
        """Compute the gradients of inputs; defer the products of weights."""
        with self._weight_gradients.deferring() as held.deferred_wgrads:
            self.backward(op, held)

    def weight_gradient(self, op: Op, held: Buffer) -> None:
        """Compute the deferred products."""
        compute(held.deferred_wgrads)

    # ------------------------------------------------------------------ other instructions

    def load(self, step: Instruction) -> None:
        """Take a micro-batch, cut it, and copy the stages' inputs to the device, so that no op waits for the host."""
        module = self._module
        if module.stage_id not in module.reading_ranks:
            return
        try:
            batch = self._data.take()
        except StopIteration:
            raise UserError(
                f"the data iterator ended at micro-batch {step.micro_batch} of a batch of "
                f"{self.batch.plan.shape.num_micro_batches}: give one that does not end, such as "
                "deepspeed.utils.RepeatingLoader"
            ) from None
        if batch is None:
            raise UserError(f"{self._reads_data()} and was given no data iterator: pass one on this rank too")
        documents = None if module.documents is None else module.documents(batch)
        self.batch.cut(step.micro_batch, documents)
        token_slices = self.batch.token_slices_of(step.micro_batch)
        if module.stage_id in module.cutting_ranks:
            parts = module.split_batch(batch, self.batch.parts_of(step.micro_batch))
            module.data_entries.check(parts[0].inputs, parts[0].labels, cutting_stages=self._cutting_stages)
            self.batch.parts[step.micro_batch] = parts_on_device(
                parts,
                self._device,
                token_slices.seq_length,
                inputs=0 in self._stages,
                labels=self.batch.plan.shape.last_stage in self._stages,
            )
        if documents is not None:
            self.batch.documents[step.micro_batch] = documents.on(self._device, token_slices)

    def reduce_gradients(self, step: Instruction) -> None:
        """Start the reductions of a stage whose gradients are complete."""
        if self._reductions is not None and self.batch.plan.updates:
            self._reductions.reduce_stage(step.stage)

    def free(self, step: Instruction) -> None:
        """Empty a buffer."""
        del self.batch.buffers[step.buffer]

    def copy_to_or_from_host(self, step: Instruction) -> None:
        """Post a copy to the host or back, or free the device copy of tensors that are on the host."""
        assert self.copies is not None, "programs have host copies where the executor was given settings for them"
        held = self.batch.buffers[step.buffer] if step.buffer >= 0 else Buffer()
        self.copies.execute(step, held, self.batch.states[step.stage, step.micro_batch])

    def post(self, step: Instruction) -> None:
        """Post the receive of the message that an op reads."""
        self._links.post(step.op)

    def send_activation(self, step: Instruction) -> None:
        """Post an activation to the rank of the next stage."""
        held = self.batch.buffers[step.buffer]
        self._links.send(self._reader(step.op), held.outputs)
        held.outputs = ()

    def pass_activation(self, step: Instruction) -> None:
        """Pass an activation to the next stage, which is on this rank too."""
        held = self.batch.buffers[step.buffer]
        passed = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in held.outputs)
        self.batch.passed[self._reader(step.op)] = passed
        held.outputs = ()

    def send_gradient(self, step: Instruction) -> None:
        """Post the gradients of a stage's inputs to the rank of the previous stage."""
        self._links.send(self._reader(step.op), self.batch.buffers[step.buffer].take_gradients())

    def pass_gradient(self, step: Instruction) -> None:
        """Pass the gradients of a stage's inputs to the previous stage, which is on this rank too."""
        self.batch.passed[self._reader(step.op)] = self.batch.buffers[step.buffer].take_gradients()

    def complete(self, step: Instruction) -> None:
        """Free a message after it has been sent."""
        reader = self._reader(step.op)
        with self._ledger.waiting_for(self._links.peer(reader)):
            self._links.complete(reader)

    # ------------------------------------------------------------------ parts of the above

    def _attach_weight_gradients(self) -> None:
        """Attach the weight gradients to the module: products may be deferred, and add to sums in place."""
        if not self._attached:
            self._weight_gradients.attach(self._module)
            self._attached = True

    def _reads_data(self) -> str:
        """Text for messages: this rank reads the data, and the layer for which it does."""
        readers = (self._module.data_entries.reader(stage) for stage in self._stages)
        layer = next((f" for {reader}" for reader in readers if reader), "")
        return f"pipeline rank {self._module.stage_id} reads the data{layer},"

    def _read(self, op: Op) -> tuple[Tensor, ...]:
        """Tensors that an op reads of another stage: passed by this rank, or received from another rank."""
        if op in self.batch.passed:
            return self.batch.passed.pop(op)
        with self._ledger.waiting_for(self._links.peer(op)):
            return self._links.wait(op)

    def _reader(self, result: Op) -> Op:
        """The op that reads a result; messages have its name."""
        return reader_of_message(result, self.batch.plan.shape)

    def _forget(self, op: Op, *, last_stage: int) -> None:
        """Free the state of a micro-batch on a stage; at this rank's last stage to need it, its data too."""
        del self.batch.states[op.stage, op.micro_batch]
        if op.stage == last_stage:
            self.batch.parts.pop(op.micro_batch, None)
            self.batch.documents.pop(op.micro_batch, None)

    # ------------------------------------------------------------------ computing a stage

    def _given(self, op: Op, held: Buffer) -> tuple[Any, Mapping[str, Any]]:
        """The input of a stage, and the entries that its layers take by name, on their device."""
        if op.stage == 0:
            inputs = self.batch.parts[op.micro_batch][op.token_slice].inputs
            return (self._entries(op), {}) if isinstance(inputs, Mapping) else (inputs, {})
        return held.inputs[0] if len(held.inputs) == 1 else held.inputs, self._entries(op)

    def _check(self, op: Op, inputs: Any, entries: Mapping[str, Any]) -> None:
        """Compare a stage in token slices with the whole, once, on a token slice with enough tokens."""
        length = self.batch.parts_of(op.micro_batch).lengths[op.token_slice]
        if isinstance(inputs, Mapping):
            entries, inputs = inputs, inputs[self._module.data_entries.first]
        layers = self._module.stage_layers(op.stage)
        cut = self.batch.token_slices_of(op.micro_batch)
        module, ranks = self._module, self._module.sequence_ranks
        if check_layers(layers, inputs, entries, modules=module, seq_length=length, token_slices=cut, ranks=ranks):
            self._unchecked.discard(op.stage)

    @property
    def _computes_again(self) -> bool:
        """Whether backwards compute stages again, without a graph of the forward."""
        return self.batch.plan.training and self._module.recomputation.stages

    def _compute(self, op: Op, held: Buffer, inputs: Any, entries: Mapping[str, Any]) -> None:
        """Compute a stage, and keep the roots of its backward, and the outputs for the next stage."""
        outputs = self._module(inputs, self._state(op), op.token_slice, op.stage, entries, self._entering(op))
        if op.stage == self.batch.plan.shape.last_stage:
            held.roots = self._loss(outputs, op)
        else:
            held.outputs = self._sent(outputs, op.stage)
            held.roots = tuple(get_gradient_edge(tensor) for tensor in held.outputs if tensor.requires_grad)

    def _pass_through(self, op: Op, held: Buffer, inputs: Any, entries: Mapping[str, Any]) -> None:
        """Compute a stage without a graph, for keys and values, and the outputs for the next stage."""
        state, keeps = self._state(op), self._module.recomputation.keeps_random_state
        held.random_state = RandomState.now(self._device) if keeps else None
        is_last = op.stage == self.batch.plan.shape.last_stage
        with torch.no_grad():
            outputs = self._module(
                *(inputs, state, op.token_slice, op.stage, entries, self._entering(op)),
                # Head and loss follow in the backward, unless the head might draw random numbers.
                up_to_past=is_last and not keeps,
            )
        state.forget_shared(op.token_slice)
        if not is_last:
            outputs = self._sent(outputs, op.stage)
            # Without a graph it is unknown which outputs depend on weights. So all floating-point outputs count, if any
            # tensor of the stage needs gradients, and the backward leaves out the other outputs.
            tensors = chain(held.inputs, self._module.parameters_of(op.stage))
            needed = any(tensor.requires_grad for tensor in tensors)
            bear = tuple(needed and (each.is_floating_point() or each.is_complex()) for each in outputs)
            held.outputs = tuple(
                output.detach().requires_grad_(bears) for output, bears in zip(outputs, bear, strict=True)
            )
            held.bear_gradients = bear

    def _sent(self, outputs: Any, stage: int) -> tuple[Tensor, ...]:
        """Return the outputs of a stage as the tensors that are sent to the next one."""
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        if not all(isinstance(each, Tensor) for each in tensors):
            raise UserError(
                f"{self._module.stage_layers(stage)[-1].name}, the last layer of stage {stage}, returns a "
                f"{type(outputs).__name__}, and stages send tensors: return one, or a tuple of tensors"
            )
        return tensors

    def _compute_again(self, op: Op, held: Buffer, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Compute a stage with a graph, and return the gradients of outputs that are part of the graph."""
        random_state, held.random_state = held.random_state, None
        trainable = any(weight.requires_grad for weight in self._module.parameters_of(op.stage))
        self._state(op).carried.bears_gradients = trainable or any(tensor.requires_grad for tensor in held.inputs)
        with nullcontext() if random_state is None else random_state.restored():
            self._compute(op, held, *self._given(op, held))
        self._state(op).forget_shared(op.token_slice)
        outputs, held.outputs = held.outputs, ()
        bearing = [output for output, bears in zip(outputs, held.bear_gradients, strict=True) if bears]
        return tuple(gradient for output, gradient in zip(bearing, gradients, strict=True) if output.requires_grad)

    def _entries(self, op: Op) -> dict[str, Any]:
        """Entries that the layers of a stage take by name, copied to the device for one token slice."""
        parts = self.batch.parts.get(op.micro_batch)
        if parts is None or not isinstance(inputs := parts[op.token_slice].inputs, Mapping):
            return {}
        return to_device(self._module.data_entries.given_to_stage(op.stage, inputs), self._device)

    def _entering(self, op: Op) -> Entering | None:
        """The function that a forward calls with each layer it enters; None if there are no listeners."""
        listeners = [self._gathers.entering] if self._gathers is not None and self._gathers.pending else []
        if self._reductions is not None and self.batch.plan.updates:
            reduced = self._reductions.entering(op, self._defer)
            listeners += [reduced] if reduced is not None else []

        def entering(layer: int, inputs: Any) -> None:
            for listener in listeners:
                listener(layer, inputs)

        return entering if listeners else None

    def _defer(self, action: Callable[[], None]) -> bool:
        """Add a function to the deferred products; False if products are not deferred."""
        if self._weight_gradients.collecting:
            self._weight_gradients.add(action)
            return True
        return False

    def _state(self, op: Op) -> SequenceState:
        """State of a micro-batch on a stage; empty at its first forward there."""
        key = op.stage, op.micro_batch
        if key not in self.batch.states:
            self.batch.states[key] = SequenceState(
                self.batch.token_slices_of(op.micro_batch),
                ranks=self._module.sequence_ranks,
                seed=self._module.base_seed,
                sequences=self.batch.plan.sequences(op.micro_batch),
                documents=self.batch.documents.get(op.micro_batch),
                forward_only=not self.batch.plan.training,
                keys_apart=self.copies is not None,
                key_value_gradients=self._key_value_gradients,
                loss_factor=self._layer_loss_factor,
            )
        return self.batch.states[key]

    def _layer_loss_factor(self) -> float:
        """Factor of a micro-batch's loss in a layer, whose gradient is averaged like the last stage's loss."""
        # DeepSpeed scales only a loss with a graph, and a backward has none.
        with torch.enable_grad():
            scaled = self._loss_scale(torch.ones((), dtype=torch.float64, requires_grad=True))
        return scaled.item() * self._module.sequence_ranks.size

    def _loss(self, outputs: Any, op: Op) -> tuple[Tensor, ...]:
        """Add a token slice's share to the loss, and return the roots of its backward."""
        if self.batch.plan.keeps_outputs:
            with torch.no_grad():
                given = outputs if self._module.output_fn is None else self._module.output_fn(outputs)
            self.batch.outputs[op.micro_batch][op.token_slice] = detached(given)
            self.batch.labels[op.micro_batch][op.token_slice] = self.batch.parts[op.micro_batch][op.token_slice].labels
        if not self.batch.plan.computes_loss:
            return ()
        part, loss_fn = self.batch.parts[op.micro_batch][op.token_slice], self._module.loss_fn
        if loss_fn is None:
            loss = outputs
        elif isinstance(part.labels, Mapping):
            labels = self._module.data_entries.given_to_loss(part.labels)
            loss = loss_fn(outputs, **to_device(labels, self._device))
        else:
            loss = loss_fn(outputs, part.labels)
        loss = self._batch_loss.weigh(loss * part.loss_weight, op.micro_batch)
        earlier = self.batch.losses.get(op.micro_batch)
        self.batch.losses[op.micro_batch] = loss.detach() if earlier is None else earlier + loss.detach()
        if self.batch.plan.training and not loss.requires_grad:
            raise UserError(
                f"the loss of token slice {op.token_slice} depends on no weight, so later token slices could not pass "
                "gradients back through it: if no token counts, return outputs.sum() * 0"
            )
        return (loss,)


METHODS: dict[InstructionKind, Callable[..., None]] = {
    InstructionKind.FORWARD: Executor.forward,
    InstructionKind.BACKWARD: Executor.backward,
    InstructionKind.INPUT_GRADIENT: Executor.input_gradient,
    InstructionKind.WEIGHT_GRADIENT: Executor.weight_gradient,
    InstructionKind.LOAD_MICRO_BATCH: Executor.load,
    InstructionKind.RECEIVE_ACTIVATION: Executor.post,
    InstructionKind.SEND_ACTIVATION: Executor.send_activation,
    InstructionKind.PASS_ACTIVATION: Executor.pass_activation,
    InstructionKind.RECEIVE_GRADIENT: Executor.post,
    InstructionKind.SEND_GRADIENT: Executor.send_gradient,
    InstructionKind.PASS_GRADIENT: Executor.pass_gradient,
    InstructionKind.COMPLETE_ACTIVATION: Executor.complete,
    InstructionKind.COMPLETE_GRADIENT: Executor.complete,
    InstructionKind.FREE: Executor.free,
    InstructionKind.REDUCE_GRADIENTS: Executor.reduce_gradients,
    **dict.fromkeys(HOST_COPIES, Executor.copy_to_or_from_host),
}
"""Method that carries out each instruction of a program: with its op and buffer for ops, else with the instruction."""
