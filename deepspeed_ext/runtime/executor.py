"""Runs the program of one pipeline rank, instruction by instruction, on the layers of its stages.

Each method runs one instruction of `plan.programs`, for a token slice. Optimizers and replicas belong to the engine.

`RankPrograms` lowers a schedule to this rank's program when it is first needed; `ProgramSchedule` gives it to
DeepSpeed's engine, with a class for each kind of instruction; `METHODS` names the method of `Executor` for each.
"""

from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.schedule import OptimizerStep, PipeInstruction, PipeSchedule, ReduceGrads, ReduceTiedGrads
from torch import Tensor

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape, reader_of
from deepspeed_ext.plan.programs.device import Device
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.lowering import RankMessages, SimulatedSchedule, check_lowering, lower_rank, partners
from deepspeed_ext.plan.programs.program import Content, Instruction, InstructionKind, Program
from deepspeed_ext.plan.schedules import Schedule, forward_order
from deepspeed_ext.runtime.channels import RankLinks
from deepspeed_ext.runtime.cuda_environment import hardware_queues
from deepspeed_ext.runtime.gradients.reductions import GradientReductions
from deepspeed_ext.runtime.gradients.weight_gradients import compute
from deepspeed_ext.runtime.health.ledger import OpLedger
from deepspeed_ext.runtime.live_batch import Batch, Buffer
from deepspeed_ext.runtime.micro_batch import parts_on_device
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from deepspeed_ext.runtime.offload import HostCopies
from deepspeed_ext.runtime.stage_ops import StageOps


class TokenSliceInstruction(PipeInstruction):
    """A step of a program, with the instruction as its only keyword."""

    def __init__(self, *, step: Instruction) -> None:
        super().__init__(step=step)

    def __repr__(self) -> str:
        """Text of the instruction in DeepSpeed's log: `SendActivation(3F1.2 @0)`."""
        return f"{self.name}({self.kwargs['step'].place})"


def _instruction_class(kind: InstructionKind) -> type[TokenSliceInstruction]:
    # DeepSpeed looks the handler up by exact class, so every kind has its own.
    name = "".join(word.capitalize() for word in kind.name.split("_"))
    return type(name, (TokenSliceInstruction,), {"__doc__": f"The plan's `{kind.value}`.", "__module__": __name__})


INSTRUCTION_CLASSES: dict[InstructionKind, type[TokenSliceInstruction]] = {
    kind: _instruction_class(kind) for kind in InstructionKind
}


class ProgramSchedule(PipeSchedule):
    """The program of a rank, one instruction per step; reductions and optimizer step follow if it `updates`."""

    def __init__(self, program: Program, shape: PipelineShape, *, training: bool, updates: bool | None = None) -> None:
        super().__init__(micro_batches=shape.num_micro_batches, stages=shape.num_ranks, stage_id=program.rank)
        self.program, self.shape, self.training = program, shape, training
        self.updates = training if updates is None else updates
        self.defers_weight_gradients = any(
            instruction.kind is InstructionKind.WEIGHT_GRADIENT for instruction in program.instructions
        )

    def num_pipe_buffers(self) -> int:
        """Buffers that the program names."""
        return self.program.num_buffers

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The program, then the end of the batch."""
        for instruction in self.program.instructions:
            yield [INSTRUCTION_CLASSES[instruction.kind](step=instruction)]
        if self.updates:
            yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]

    def without_update(self) -> "ProgramSchedule":
        """Return the same program without reductions and optimizer step."""
        return ProgramSchedule(self.program, self.shape, training=self.training, updates=False)


class RankPrograms:
    """A rank's programs by their shape.

    Args:
        schedule: order of the ops when training. One that was simulated before is not simulated again.
        shape: shape of the pipeline, for any number of micro-batches and token slices.
        settles: whether in the first program of a shape no message travels under an op, since on an accelerator every
            rank then loads kernels, and may have to wait for its device (ADR 22). None: with an asynchronous
            accelerator.
        host_copies: settings of the copies to the host; None for no copies.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        rank: int,
        shape: PipelineShape,
        loading_ranks: Container[int],
        settles: bool | None = None,
        host_copies: HostCopySettings | None = None,
    ) -> None:
        self._settles = not get_accelerator().is_synchronized_device() if settles is None else settles
        self._hardware_queues = hardware_queues() if get_accelerator().device_name() == "cuda" else None
        self._host_copies = host_copies
        self._settled: set[tuple[bool, PipelineShape]] = set()
        self._training = SimulatedSchedule.of(schedule)
        self._evaluation = SimulatedSchedule(forward_order, complete=False)
        self._rank, self._shape = rank, shape
        self._loads = rank in loading_ranks
        self._lowered: dict[tuple[bool, PipelineShape, bool], ProgramSchedule] = {}

    def shape(self, num_micro_batches: int, num_token_slices: int | None = None) -> PipelineShape:
        """Return the shape for a number of micro-batches, and of token slices; None for those of the module."""
        num_token_slices = num_token_slices or self._shape.num_token_slices
        return replace(self._shape, num_micro_batches=num_micro_batches, num_token_slices=num_token_slices)

    def mark_completed(self, schedule: ProgramSchedule) -> None:
        """Mark a program as completed."""
        self._settled.add((schedule.training, schedule.shape))

    def program(self, shape: PipelineShape, *, training: bool) -> ProgramSchedule:
        """Return the program of a training step, or of an evaluation, which has forwards only."""
        under_ops = not self._settles or (training, shape) in self._settled
        key = training, shape, under_ops
        if key not in self._lowered:
            if training:
                # The trainer has done so before it made the process group.
                check_lowering(self._training, shape, Device(hardware_queues=self._hardware_queues), self._host_copies)
            spans = (self._training if training else self._evaluation).spans(shape)
            messages = {rank: RankMessages(rank, spans(rank), shape) for rank in partners(self._rank, shape)}
            program = lower_rank(
                self._rank,
                messages,
                shape,
                loads=self._loads,
                under_ops=under_ops,
                host_copies=self._host_copies if training else None,
            )
            self._lowered[key] = ProgramSchedule(program, shape, training=training)
        return self._lowered[key]


Around = Callable[[Op], AbstractContextManager[None]]
"""Surrounds the computing of an op: measures it, and accumulates the gradients it leaves."""


class Executor:
    """Runs the stages of one pipeline rank, one batch after the other.

    Args:
        around: surrounds the computing of each op.
        reductions: sums of gradients over replicas, which start as ops complete them; None to leave them to the step.
        host_copies: settings of the copies to the host; None for no copies.
    """

    def __init__(
        self,
        module: TokenSlicePipelineModule,
        ops: StageOps,
        links: RankLinks,
        device: torch.device,
        *,
        next_batch: Callable[[], Any],
        around: Around,
        ledger: OpLedger,
        reductions: GradientReductions | None = None,
        host_copies: HostCopySettings | None = None,
    ) -> None:
        self._module, self._ops, self._links, self._device = module, ops, links, device
        self._next_batch, self._around = next_batch, around
        self._ledger, self._reductions, self._attached = ledger, reductions, False
        self._host_copies = host_copies
        self.copies = None if host_copies is None else HostCopies(device, host_copies)
        """Copies in the memory of the host."""
        self._stages = list(module.pipeline.stages_of(module.stage_id))
        self._cutting_stages = {stage for rank in module.cutting_ranks for stage in module.pipeline.stages_of(rank)}

    def begin(self, batch: Batch, *, defers_weight_gradients: bool) -> None:
        """Start a batch."""
        self.batch = batch
        self._ops.begin(batch)
        if self._host_copies is not None and self.copies is not None:
            self.copies.begin(self._host_copies.fitting(batch.shape))
        if defers_weight_gradients:
            self.attach_weight_gradients()

    def attach_weight_gradients(self) -> None:
        """Attach the weight gradients to the module: products may be deferred, and add to sums in place."""
        if not self._attached:
            self._ops.weight_gradients.attach(self._module)
            self._attached = True

    def finish(self, batch: Batch) -> None:
        """Free all tensors of a batch, which may have ended early."""
        batch.clear()
        if self.copies is not None:
            self.copies.finish()

    # ------------------------------------------------------------------ data

    def load(self, step: Instruction) -> None:
        """Take a micro-batch, cut it, and copy the stages' inputs to the device, so that no op waits for the host."""
        try:
            batch = self._next_batch()
        except StopIteration:
            raise UserError(
                f"the data iterator ended at micro-batch {step.micro_batch} of a batch of "
                f"{self.batch.shape.num_micro_batches}: give one that does not end, such as "
                "deepspeed.utils.RepeatingLoader"
            ) from None
        module = self._module
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
                labels=self.batch.shape.last_stage in self._stages,
            )
        if documents is not None:
            self.batch.documents[step.micro_batch] = documents.on(self._device, token_slices)

    # ------------------------------------------------------------------ ops

    def forward(self, step: Instruction) -> None:
        """Compute a stage on a token slice."""
        op, held = step.op, self.batch.buffers[step.buffer]
        if op.stage:
            held.inputs = self._read(op)
        inputs, entries = self._ops.given(op, held)
        self._ops.check(op, inputs, entries)
        with self._around(op):
            self._ops.forward(op, held, inputs, entries)
        if not self.batch.training and op.token_slice == self.batch.shape.last_token_slice:
            self._forget(op, last_stage=self._stages[-1])

    def backward(self, step: Instruction) -> None:
        """Compute the gradients of a stage's inputs and weights for a token slice."""
        op, held = step.op, self.batch.buffers[step.buffer]
        is_last = op.stage == self.batch.shape.last_stage
        gradients = () if is_last else self._read(op._replace(kind=OpKind.INPUT_GRADIENT))
        self._take_fetched(op, held)
        with self._around(op):
            self._ops.backward(op, held, gradients)
        if op.token_slice == 0:
            self._forget(op, last_stage=self._stages[0])

    def input_gradient(self, step: Instruction) -> None:
        """Compute the gradients of inputs; defer the products of weights."""
        with self._ops.weight_gradients.deferring() as deferred:
            self.backward(step)
        self.batch.buffers[step.buffer].deferred_wgrads = deferred

    def weight_gradient(self, step: Instruction) -> None:
        """Compute the deferred products."""
        held = self.batch.buffers[step.buffer]
        with self._around(step.op):
            compute(held.deferred_wgrads)

    def reduce_gradients(self, step: Instruction) -> None:
        """Start the reductions of a stage whose gradients are complete."""
        if self._reductions is not None and self.batch.updates:
            self._reductions.reduce_stage(step.stage)

    def free(self, step: Instruction) -> None:
        """Empty a buffer."""
        del self.batch.buffers[step.buffer]

    # ------------------------------------------------------------------ host copies

    def offload_input(self, step: Instruction) -> None:
        """Post a copy of a stage's input to the host."""
        self._copies.offload((Content.INPUT, *step.op[1:]), self.batch.buffers[step.buffer].inputs)

    def drop_input(self, step: Instruction) -> None:
        """Free the device copy of an offloaded input."""
        self.batch.buffers[step.buffer].inputs = ()
        self._copies.drop((Content.INPUT, *step.op[1:]))

    def fetch_input(self, step: Instruction) -> None:
        """Post the copy of a stage's input back."""
        self._copies.fetch((Content.INPUT, *step.op[1:]))

    def offload_keys_and_values(self, step: Instruction) -> None:
        """Post a copy of the keys and values of a token slice to the host."""
        state = self.batch.states[step.stage, step.micro_batch]
        self._copies.offload((Content.KEYS_AND_VALUES, *step.op[1:]), state.keys_of(step.token_slice))

    def drop_keys_and_values(self, step: Instruction) -> None:
        """Free the device copy of offloaded keys and values."""
        self.batch.states[step.stage, step.micro_batch].drop_keys_of(step.token_slice)
        self._copies.drop((Content.KEYS_AND_VALUES, *step.op[1:]))

    def fetch_keys_and_values(self, step: Instruction) -> None:
        """Post the copy of keys and values back."""
        self._copies.fetch((Content.KEYS_AND_VALUES, *step.op[1:]))

    # ------------------------------------------------------------------ transfers

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
        with self._ledger.waiting_for(self._links.peer(reader), self._links.over(reader)):
            self._links.complete(reader)

    # ------------------------------------------------------------------ parts of the above

    @property
    def _copies(self) -> HostCopies:
        assert self.copies is not None, "programs have host copies where the executor was given settings for them"
        return self.copies

    def _take_fetched(self, op: Op, held: Buffer) -> None:
        """Put on the device the tensors that were fetched for a backward."""
        if self.copies is None:
            return
        for content, token_slice, tensors in self.copies.arrivals(op):
            if content is Content.INPUT:
                held.inputs = tensors
            else:
                self.batch.states[op.stage, op.micro_batch].put_back_keys_of(token_slice, tensors)

    def _reads_data(self) -> str:
        """Text for messages: this rank reads the data, and the layer for which it does."""
        readers = (self._module.data_entries.reader(stage) for stage in self._stages)
        layer = next((f" for {reader}" for reader in readers if reader), "")
        return f"pipeline rank {self._module.stage_id} reads the data{layer},"

    def _read(self, op: Op) -> tuple[Tensor, ...]:
        """Tensors that an op reads of another stage: passed by this rank, or received from another rank."""
        if op in self.batch.passed:
            return self.batch.passed.pop(op)
        with self._ledger.waiting_for(self._links.peer(op), self._links.over(op)):
            return self._links.wait(op)

    def _reader(self, result: Op) -> Op:
        """The op that reads a result; messages have its name."""
        reader = reader_of(result, self.batch.shape)
        assert reader is not None, "the output of a stage is read by another one"
        return reader

    def _forget(self, op: Op, *, last_stage: int) -> None:
        """Free the state of a micro-batch on a stage; at this rank's last stage to need it, its data too."""
        del self.batch.states[op.stage, op.micro_batch]
        if op.stage == last_stage:
            self.batch.forget_data(op.micro_batch)


METHODS = {
    InstructionKind.LOAD_MICRO_BATCH: Executor.load,
    InstructionKind.RECEIVE_ACTIVATION: Executor.post,
    InstructionKind.FORWARD: Executor.forward,
    InstructionKind.SEND_ACTIVATION: Executor.send_activation,
    InstructionKind.PASS_ACTIVATION: Executor.pass_activation,
    InstructionKind.RECEIVE_GRADIENT: Executor.post,
    InstructionKind.BACKWARD: Executor.backward,
    InstructionKind.INPUT_GRADIENT: Executor.input_gradient,
    InstructionKind.WEIGHT_GRADIENT: Executor.weight_gradient,
    InstructionKind.SEND_GRADIENT: Executor.send_gradient,
    InstructionKind.PASS_GRADIENT: Executor.pass_gradient,
    InstructionKind.COMPLETE_ACTIVATION: Executor.complete,
    InstructionKind.COMPLETE_GRADIENT: Executor.complete,
    InstructionKind.FREE: Executor.free,
    InstructionKind.REDUCE_GRADIENTS: Executor.reduce_gradients,
    InstructionKind.OFFLOAD_INPUT: Executor.offload_input,
    InstructionKind.OFFLOAD_KEYS_AND_VALUES: Executor.offload_keys_and_values,
    InstructionKind.DROP_INPUT: Executor.drop_input,
    InstructionKind.DROP_KEYS_AND_VALUES: Executor.drop_keys_and_values,
    InstructionKind.FETCH_INPUT: Executor.fetch_input,
    InstructionKind.FETCH_KEYS_AND_VALUES: Executor.fetch_keys_and_values,
}
"""Method that carries out each instruction of a program."""
