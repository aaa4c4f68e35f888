"""Runs the instructions of one pipeline rank on the layers of its stages.

Each method is what one instruction of `plan.programs` means. Nothing here knows of optimizers or replicas: the engine
says what surrounds a batch, and this says what happens to a token slice.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from deepspeed_ext.plan.dependencies import reader_of
from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.programs.program import Instruction
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.batches.batch import detached, parts_on_device, to_device
from deepspeed_ext.runtime.batches.batch_loss import BatchLoss
from deepspeed_ext.runtime.batches.live_batch import Buffer, LiveBatch
from deepspeed_ext.runtime.gradients.gradient_reductions import Entering, GradientReductions
from deepspeed_ext.runtime.gradients.parameter_gathers import ParameterGathers
from deepspeed_ext.runtime.gradients.weight_gradients import WeightGradients, compute
from deepspeed_ext.runtime.ledger.op_ledger import OpLedger
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from deepspeed_ext.runtime.rank_links import RankLinks
from deepspeed_ext.runtime.sequence.sequence_state import SequenceState
from deepspeed_ext.runtime.sequence.slice_check import check_layers

Around = Callable[[Op], AbstractContextManager[None]]
"""Surrounds the computing of an op: measures it, and accumulates the gradients it leaves."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Facts about a batch that are known before it runs.

    Attributes:
        shape: sizes of the pipeline.
        token_slices: lengths of the token slices.
        parts: the part of each token slice that this rank has, where ranks share them.
        rows: sequences of a micro-batch.
        training: whether a backward follows.
        first_sequence: number of a micro-batch's first row among all sequences of the run, which dropout depends on.
        computes_loss: whether to call the loss function.
        keeps_outputs: whether to keep the last layer's outputs, and the labels.
        reduces: whether gradients are summed over replicas as they are completed.
    """

    shape: PipelineShape
    token_slices: TokenSlices
    parts: TokenSlices
    rows: int
    training: bool
    first_sequence: Callable[[int], int]
    computes_loss: bool = True
    keeps_outputs: bool = False
    reduces: bool = False


class Executor:
    """The stages of one pipeline rank, at work on one batch after the other.

    Args:
        module: their layers.
        links: connections to other ranks.
        device: device of the tensors.
        next_batch: gives the next micro-batch.
        loss: knows the weights of micro-batches.
        loss_scale: scales the loss of a token slice before backward.
        around: surrounds the computing of each op.
        ledger: is told of waits.
        reductions: sums of gradients over replicas, which start as ops complete them; None to leave them to the step.
        gathers: gathers of weights that replicas updated in parts; layers wait for them. None if the step does it.
        checks: whether to check, at its first token slice, that each stage computes in token slices what it does whole.
    """

    def __init__(
        self,
        module: TokenSlicePipelineModule,
        links: RankLinks,
        device: torch.device,
        *,
        next_batch: Callable[[], Any],
        loss: BatchLoss,
        loss_scale: Callable[[Tensor], Tensor],
        around: Around,
        ledger: OpLedger,
        reductions: GradientReductions | None = None,
        gathers: ParameterGathers | None = None,
        checks: bool = False,
    ) -> None:
        self._module, self._links, self._device = module, links, device
        self._next_batch, self._batch_loss, self._loss_scale, self._around = next_batch, loss, loss_scale, around
        self._ledger, self._reductions, self._gathers = ledger, reductions, gathers
        self._stages = list(module.pipeline.stages_of(module.stage_id))
        self._cutting_stages = {stage for rank in module.cutting_ranks for stage in module.pipeline.stages_of(rank)}
        self._weight_gradients, self._attached = WeightGradients(), False
        self._unchecked = set(self._stages) if checks else set()
        self.live = LiveBatch()

    def begin(self, plan: BatchPlan, *, puts_weight_gradients_off: bool) -> None:
        """Forget the previous batch, and expect another.

        Args:
            plan: facts about the batch.
            puts_weight_gradients_off: whether the schedule defers weight gradients.
        """
        self.plan, self.live = plan, LiveBatch()
        if puts_weight_gradients_off:
            self.attach_weight_gradients()

    def attach_weight_gradients(self) -> None:
        """Let products ask their weights what to do with gradients: compute them now or later, add them up where."""
        if not self._attached:
            self._weight_gradients.attach(self._module)
            self._attached = True

    def finish(self) -> LiveBatch:
        """Hand over what the batch left, and keep nothing of it."""
        finished, self.live = self.live, LiveBatch()
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
        if module.stage_id in module.cutting_ranks:
            parts = module.split_batch(batch, self.plan.parts)
            module.data_entries.check(parts[0].inputs, parts[0].labels, cutting_stages=self._cutting_stages)
            self.live.parts[step.micro_batch] = parts_on_device(
                parts,
                self._device,
                self.plan.token_slices.seq_length,
                inputs=0 in self._stages,
                labels=self.plan.shape.last_stage in self._stages,
            )
        if module.documents is not None:
            documents = module.documents(batch).on(self._device, self.plan.token_slices)
            self.live.documents[step.micro_batch] = documents

    # ------------------------------------------------------------------ ops

    def forward(self, step: Instruction) -> None:
        """Compute a token slice's way through a stage."""
        op, held = step.op, self.live.buffers[step.buffer]
        inputs = self._inputs(op, held)
        entries = self._entries(op) if op.stage else {}
        if op.stage in self._unchecked:
            self._check(op, inputs, entries)
        with self._around(op):
            outputs = self._module(inputs, self._state(op), op.token_slice, op.stage, entries, self._entering(op))
            if op.stage == self.plan.shape.last_stage:
                held.roots = self._loss(outputs, op)
            else:
                held.outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                held.roots = tuple(get_gradient_edge(tensor) for tensor in held.outputs if tensor.requires_grad)
        if not self.plan.training and op.token_slice == self.plan.shape.last_token_slice:
            self._forget(op, last_stage=self._stages[-1])

    def backward(self, step: Instruction) -> None:
        """Compute the gradients that a token slice gives a stage's inputs and weights."""
        op, held = step.op, self.live.buffers[step.buffer]
        roots = held.roots
        if op.stage == self.plan.shape.last_stage:
            # 1, or NaN where the loss is no number: then no gradient of it may pass for one.
            gradients = tuple(root.detach() * 0 + 1 for root in roots)
            roots = tuple(self._loss_scale(root) for root in roots)
        else:
            gradients = self._read(op._replace(kind=OpKind.INPUT_GRADIENT))
        with self._around(op):
            if roots:
                torch.autograd.backward(roots, gradients)
        held.roots = ()
        if op.token_slice == 0:
            self._forget(op, last_stage=self._stages[0])

    def input_gradient(self, step: Instruction) -> None:
        """Compute the gradients of inputs; defer the products of weights."""
        with self._weight_gradients.deferring() as deferred:
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

    def _inputs(self, op: Op, held: Buffer) -> Any:
        if op.stage == 0:
            inputs = self.live.parts[op.micro_batch][op.token_slice].inputs
            return self._entries(op) if isinstance(inputs, Mapping) else inputs
        held.inputs = self._read(op)
        return held.inputs[0] if len(held.inputs) == 1 else held.inputs

    def _check(self, op: Op, inputs: Any, entries: Mapping[str, Any]) -> None:
        """Hold a stage in token slices against the whole, if they are token slices and this one has tokens enough."""
        length = self.plan.parts.lengths[op.token_slice]
        if isinstance(inputs, Mapping):
            entries, inputs = inputs, inputs[self._module.data_entries.first]
        layers = self._module.stage_layers(op.stage)
        if check_layers(layers, inputs, entries, modules=self._module, seq_length=length):
            self._unchecked.discard(op.stage)

    def _entries(self, op: Op) -> dict[str, Any]:
        """Entries that the layers of a stage take by name, moved to the device for one token slice only."""
        parts = self.live.parts.get(op.micro_batch)
        if parts is None or not isinstance(inputs := parts[op.token_slice].inputs, Mapping):
            return {}
        return to_device(self._module.data_entries.given_to_stage(op.stage, inputs), self._device)

    def _entering(self, op: Op) -> Entering | None:
        """Whom a forward tells of the layers it enters; None if nobody wants to know."""
        told = [self._gathers.entering] if self._gathers is not None and self._gathers.pending else []
        if self._reductions is not None and self.plan.reduces:
            reduced = self._reductions.entering(op, self._defer)
            told += [reduced] if reduced is not None else []

        def entering(layer: int, inputs: Any) -> None:
            for tell in told:
                tell(layer, inputs)

        return entering if told else None

    def _defer(self, action: Callable[[], None]) -> bool:
        """Do something behind the products that are being deferred; False if none are."""
        if self._weight_gradients.collecting:
            self._weight_gradients.add(action)
            return True
        return False

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

    def _state(self, op: Op) -> SequenceState:
        """State of a micro-batch on a stage; empty at its first forward there."""
        key = op.stage, op.micro_batch
        if key not in self.live.states:
            first = self.plan.first_sequence(op.micro_batch)
            self.live.states[key] = SequenceState(
                self.plan.token_slices,
                ranks=self._module.sequence_ranks,
                seed=self._module.base_seed,
                sequences=range(first, first + self.plan.rows),
                documents=self.live.documents.get(op.micro_batch),
                forward_only=not self.plan.training,
            )
        return self.live.states[key]

    def _forget(self, op: Op, *, last_stage: int) -> None:
        """Let go of what a stage remembers of a micro-batch; at this rank's last stage to need it, of its data too."""
        del self.live.states[op.stage, op.micro_batch]
        if op.stage == last_stage:
            self.live.forget_batch(op.micro_batch)

    def _loss(self, outputs: Any, op: Op) -> tuple[Tensor, ...]:
        """Add a token slice's share of the loss up, and return what backward starts from."""
        if self.plan.keeps_outputs:
            with torch.no_grad():
                given = outputs if self._module.output_fn is None else self._module.output_fn(outputs)
            self.live.outputs[op.micro_batch].append(detached(given))
            self.live.labels[op.micro_batch].append(self.live.parts[op.micro_batch][op.token_slice].labels)
        if not self.plan.computes_loss:
            return ()
        part, loss_fn = self.live.parts[op.micro_batch][op.token_slice], self._module.loss_fn
        if loss_fn is None:
            loss = outputs
        elif isinstance(part.labels, Mapping):
            labels = self._module.data_entries.given_to_loss(part.labels)
            loss = loss_fn(outputs, **to_device(labels, self._device))
        else:
            loss = loss_fn(outputs, part.labels)
        loss = self._batch_loss.weigh(loss * part.loss_weight, op.micro_batch)
        self.live.add_loss(op.micro_batch, loss)
        if self.plan.training and not loss.requires_grad:
            raise UserError(
                f"the loss of token slice {op.token_slice} depends on no weight, so later token slices could not pass "
                "gradients back through it: where no token counts, return outputs.sum() * 0"
            )
        return (loss,)
