"""Runs the instructions of one pipeline rank on the layers of its stages.

Each method is what one instruction of `plan.programs` means. Nothing here knows of optimizers or replicas: the engine
says what surrounds a batch, and this says what happens to a token slice.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.plan.dependencies import reader_of
from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.ops import Op, OpKind
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.program import Content, Instruction, InstructionKind
from deepspeed_ext.runtime.batches.batch import parts_on_device
from deepspeed_ext.runtime.batches.batch_plan import BatchPlan
from deepspeed_ext.runtime.batches.live_batch import Buffer, LiveBatch
from deepspeed_ext.runtime.execution.rank_links import RankLinks
from deepspeed_ext.runtime.execution.stage_ops import StageOps
from deepspeed_ext.runtime.gradients.gradient_reductions import GradientReductions
from deepspeed_ext.runtime.gradients.weight_gradients import compute
from deepspeed_ext.runtime.ledger.op_ledger import OpLedger
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from deepspeed_ext.runtime.offload.token_slice_copies import TokenSliceCopies

Around = Callable[[Op], AbstractContextManager[None]]
"""Surrounds the computing of an op: measures it, and accumulates the gradients it leaves."""


class Executor:
    """The stages of one pipeline rank, at work on one batch after the other.

    Args:
        around: surrounds the computing of each op.
        reductions: sums of gradients over replicas, which start as ops complete them; None to leave them to the step.
        host_copies: how what waits on the host is copied; None where nothing does.
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
        self.copies = None if host_copies is None else TokenSliceCopies(host_copies, device)
        """Copies in the memory of the host."""
        self._stages = list(module.pipeline.stages_of(module.stage_id))
        self._cutting_stages = {stage for rank in module.cutting_ranks for stage in module.pipeline.stages_of(rank)}
        self.live = LiveBatch()

    def begin(self, plan: BatchPlan, *, puts_weight_gradients_off: bool) -> None:
        """Forget the previous batch, and expect another.

        Args:
            puts_weight_gradients_off: whether the schedule defers weight gradients.
        """
        self.plan, self.live = plan, LiveBatch()
        self._ops.begin(plan, self.live)
        if self._host_copies is not None and self.copies is not None:
            self.copies.begin(self._host_copies.fitting(plan.shape))
        if puts_weight_gradients_off:
            self.attach_weight_gradients()

    def attach_weight_gradients(self) -> None:
        """Let products ask their weights what to do with gradients: compute them now or later, add them up where."""
        if not self._attached:
            self._ops.weight_gradients.attach(self._module)
            self._attached = True

    def finish(self) -> LiveBatch:
        """Hand over what the batch left, and keep nothing of it."""
        finished, self.live = self.live, LiveBatch()
        self._ops.finish()
        if self.copies is not None:
            self.copies.finish()
        return finished

    # ------------------------------------------------------------------ data

    def load(self, step: Instruction) -> None:
        """Take a micro-batch, cut it, and move what the stages read to their device: no op waits for the host then."""
        try:
            batch = self._next_batch()
        except StopIteration:
            raise UserError(
                f"the data iterator ended at micro-batch {step.micro_batch} of a batch of "
                f"{self.plan.shape.num_micro_batches}: give one that does not end, such as "
                "deepspeed.utils.RepeatingLoader"
            ) from None
        module = self._module
        if batch is None:
            raise UserError(f"{self._reads_data()} and was given no data iterator: pass one on this rank too")
        documents = None if module.documents is None else module.documents(batch)
        self.plan.cuts.cut(step.micro_batch, documents)
        token_slices = self.plan.cuts.of(step.micro_batch)
        if module.stage_id in module.cutting_ranks:
            parts = module.split_batch(batch, self.plan.cuts.parts_of(step.micro_batch))
            module.data_entries.check(parts[0].inputs, parts[0].labels, cutting_stages=self._cutting_stages)
            self.live.parts[step.micro_batch] = parts_on_device(
                parts,
                self._device,
                token_slices.seq_length,
                inputs=0 in self._stages,
                labels=self.plan.shape.last_stage in self._stages,
            )
        if documents is not None:
            self.live.documents[step.micro_batch] = documents.on(self._device, token_slices)

    # ------------------------------------------------------------------ ops

    def forward(self, step: Instruction) -> None:
        """Compute a token slice's way through a stage."""
        op, held = step.op, self.live.buffers[step.buffer]
        if op.stage:
            held.inputs = self._read(op)
        inputs, entries = self._ops.given(op, held)
        self._ops.check(op, inputs, entries)
        with self._around(op):
            self._ops.forward(op, held, inputs, entries)
        if not self.plan.training and op.token_slice == self.plan.shape.last_token_slice:
            self._forget(op, last_stage=self._stages[-1])

    def backward(self, step: Instruction) -> None:
        """Compute the gradients that a token slice gives a stage's inputs and weights."""
        op, held = step.op, self.live.buffers[step.buffer]
        is_last = op.stage == self.plan.shape.last_stage
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
        self.live.buffers[step.buffer].deferred_wgrads = deferred

    def weight_gradient(self, step: Instruction) -> None:
        """Compute the products that were deferred."""
        held = self.live.buffers[step.buffer]
        with self._around(step.op):
            compute(held.deferred_wgrads)

    def reduce_gradients(self, step: Instruction) -> None:
        """Start the reductions of a stage whose gradients are complete."""
        if self._reductions is not None and self.plan.reduces:
            self._reductions.reduce_stage(step.stage)

    def free(self, step: Instruction) -> None:
        """Empty a buffer."""
        del self.live.buffers[step.buffer]

    # ------------------------------------------------------------------ host copies

    def offload_input(self, step: Instruction) -> None:
        """Post a copy of a stage's input to the host."""
        self._copies.offload(Content.INPUT, step.op, self.live.buffers[step.buffer].inputs)

    def drop_input(self, step: Instruction) -> None:
        """Let go of a stage's input that is on the host."""
        self.live.buffers[step.buffer].inputs = ()
        self._copies.drop(Content.INPUT, step.op)

    def fetch_input(self, step: Instruction) -> None:
        """Post the copy of a stage's input back."""
        self._copies.fetch(Content.INPUT, step.op)

    def offload_keys_and_values(self, step: Instruction) -> None:
        """Post a copy of the keys and values of a token slice to the host."""
        state = self.live.states[step.stage, step.micro_batch]
        self._copies.offload(Content.KEYS_AND_VALUES, step.op, state.keys_of(step.token_slice))

    def drop_keys_and_values(self, step: Instruction) -> None:
        """Let go of keys and values that are on the host."""
        self.live.states[step.stage, step.micro_batch].drop_keys_of(step.token_slice)
        self._copies.drop(Content.KEYS_AND_VALUES, step.op)

    def fetch_keys_and_values(self, step: Instruction) -> None:
        """Post the copy of keys and values back."""
        self._copies.fetch(Content.KEYS_AND_VALUES, step.op)

    # ------------------------------------------------------------------ transfers

    def post(self, step: Instruction) -> None:
        """Expect what an op reads of another rank."""
        self._links.post(step.op)

    def send_activation(self, step: Instruction) -> None:
        """Post an activation to the rank of the stage after."""
        held = self.live.buffers[step.buffer]
        self._links.send(self._reader(step.op), held.outputs)
        held.outputs = ()

    def pass_activation(self, step: Instruction) -> None:
        """Give an activation to the stage after, which is this rank's too."""
        held = self.live.buffers[step.buffer]
        passed = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in held.outputs)
        self.live.passed[self._reader(step.op)] = passed
        held.outputs = ()

    def send_gradient(self, step: Instruction) -> None:
        """Post the gradients of a stage's inputs to the rank of the stage before."""
        self._links.send(self._reader(step.op), self.live.buffers[step.buffer].take_gradients())

    def pass_gradient(self, step: Instruction) -> None:
        """Give the gradients of a stage's inputs to the stage before, which is this rank's too."""
        self.live.passed[self._reader(step.op)] = self.live.buffers[step.buffer].take_gradients()

    def complete(self, step: Instruction) -> None:
        """Let go of a message once it has left."""
        reader = self._reader(step.op)
        with self._ledger.waiting_for(self._links.peer(reader), self._links.over(reader)):
            self._links.complete(reader)

    # ------------------------------------------------------------------ parts of the above

    @property
    def _copies(self) -> TokenSliceCopies:
        assert self.copies is not None, "programs have host copies where the executor was given settings for them"
        return self.copies

    def _take_fetched(self, op: Op, held: Buffer) -> None:
        """Have on the device what was fetched for a backward."""
        if self.copies is None:
            return
        for content, token_slice, tensors in self.copies.arrivals(op):
            if content is Content.INPUT:
                held.inputs = tensors
            else:
                self.live.states[op.stage, op.micro_batch].put_back_keys_of(token_slice, tensors)

    def _reads_data(self) -> str:
        """Reason for which this rank reads the data, in words."""
        readers = (self._module.data_entries.reader(stage) for stage in self._stages)
        for_whom = next((f" for {reader}" for reader in readers if reader), "")
        return f"pipeline rank {self._module.stage_id} reads the data{for_whom},"

    def _read(self, op: Op) -> tuple[Tensor, ...]:
        """Tensors that an op reads of another stage: passed on by this rank, or received from another rank."""
        if op in self.live.passed:
            return self.live.passed.pop(op)
        with self._ledger.waiting_for(self._links.peer(op), self._links.over(op)):
            return self._links.wait(op)

    def _reader(self, result: Op) -> Op:
        """The op that reads a result, by which messages are named."""
        reader = reader_of(result, self.plan.shape)
        assert reader is not None, "what leaves a stage is read by another"
        return reader

    def _forget(self, op: Op, *, last_stage: int) -> None:
        """Let go of what a stage remembers of a micro-batch; at this rank's last stage to need it, of its data too."""
        del self.live.states[op.stage, op.micro_batch]
        if op.stage == last_stage:
            self.live.forget_batch(op.micro_batch)


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
