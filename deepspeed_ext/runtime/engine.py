"""Runs a schedule of token slices on DeepSpeed's pipeline engine.

A batch, from here down:

    train_batch     plan of the batch -> `_running` -> `_exec_schedule`, which DeepSpeed calls -> loss
    _running        chooses the program, starts all parts, and keeps the engine usable if a batch is refused
    _exec_schedule  the loop over the program's instructions (`Executor.run`), then the end of a training step

Optimizers, ZeRO, precision, checkpoints and reductions over data-parallel ranks are DeepSpeed's own, adapted to our
layouts by `AdaptedPipelineEngine`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER
from torch import Tensor

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.programs.device import ExpertExchange
from deepspeed_ext.plan.programs.lowering import ProvenSchedule
from deepspeed_ext.plan.programs.program import Program, completing_ops
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.timeline import Timeline
from deepspeed_ext.runtime.adapted_engine import AdaptedPipelineEngine
from deepspeed_ext.runtime.channels import MessageSpec, RankLinks
from deepspeed_ext.runtime.clocks import REDUCTIONS, SUMS, UPDATE, BackwardTimer, Observer, Observers, OpClock
from deepspeed_ext.runtime.executor import Executor
from deepspeed_ext.runtime.first_batch_checks import check_same_data
from deepspeed_ext.runtime.gradients.reductions import reduced_by_hooks
from deepspeed_ext.runtime.gradients.weight_gradients import OptimizerGradients
from deepspeed_ext.runtime.health.stall_watch import GRACE, StallWatch
from deepspeed_ext.runtime.live_batch import BatchLoss, BatchPlan, LiveBatch, RunLengths
from deepspeed_ext.runtime.micro_batch import MicroBatchReader
from deepspeed_ext.runtime.state.counts import StepTally, Tallies
from deepspeed_ext.runtime.topology import any_rank

__all__ = ["TokenSlicePipelineEngine"]

NEVER_PRINTED = 100_000
"""Interval of DeepSpeed's prints, in steps, from which the times of steps are not kept for the next one."""


class TokenSlicePipelineEngine(AdaptedPipelineEngine):
    """DeepSpeed's pipeline engine with token slices. Made by `deepspeed_ext.runtime.initialize`.

    Args:
        schedule: programs of the ranks.
        watch: watches this rank, and has its ledger.

    For further arguments see `initialize` and `PipelineEngine`.
    """

    def __init__(
        self,
        *arguments: Any,
        schedule: ProvenSchedule,
        watch: StallWatch,
        check_token_slices: bool = True,
        key_value_gradients: torch.dtype | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        module, grid = self.module, self.grid
        self._schedule, self._lengths = schedule, RunLengths()
        self._links = RankLinks(
            module.topology(),
            self.global_rank,
            module.pipeline,
            self.device,
            timeout=watch.timeout + GRACE,
            activation_rule=self._activation_shape if module.activation_spec else None,
            dynamic_shape=self.dynamic_shape,
        )
        self.observers = Observers([BackwardTimer(self)] if self.wall_clock_breakdown() else [])
        """Surround ops and phases of the steps."""
        self.ledger = watch.ledger
        """Completed instructions and current position of this rank."""
        self._name_groups()
        replicas, tensor_ranks = grid.get_data_parallel_group(), grid.get_slice_parallel_group()
        self._data = MicroBatchReader(self._next_batch)
        last_rank = module.pipeline.rank_of(module.pipeline.last_stage)
        self._loss = BatchLoss(next(module.parameters()), module.loss_shape, grid, last_rank, module.sequence_ranks)
        self._tallies = Tallies(
            module.numbered_layers(),
            self.device,
            micro_batch_groups=(module.sequence_ranks.group, tensor_ranks),
            stage_groups=(replicas, tensor_ranks),
        )
        shares_sequences = module.sequence_ranks.size > 1
        sums = self.using_bf16_optimizer and not self._config.bfloat16_config.immediate_grad_update
        self._executor = Executor(
            module,
            self._links,
            self.device,
            data=self._data,
            loss=self._loss,
            loss_scale=self._loss_scale,
            observers=self.observers,
            ledger=self.ledger,
            accumulated=OptimizerGradients(self.optimizer) if sums else None,
            reductions=self._reductions,
            gathers=self._gathers,
            tallies=self._tallies,
            checks=check_token_slices and (len(module.token_slices) > 1 or shares_sequences),
            key_value_gradients=key_value_gradients,
            host_copies=schedule.host_copies,
        )
        self._end_of_step: tuple[tuple[str, str, Callable[[], None]], ...] = (
            (SUMS, "sums over the ranks of a replica", self._exec_reduce_tied_grads),
            (REDUCTIONS, "sums over replicas", self._exec_reduce_grads),
            (UPDATE, "norm, clipping and update", self._exec_optimizer_step),
        )
        """Phases after the ops: name for observers, name in the ledger, and function."""
        self.batch = LiveBatch(self._plan(None, training=True))
        """The last batch of training; after it, only its cuts."""
        self._broken_by = ""
        self._unchecked_data = {True, False} if shares_sequences else set()
        """Whether data of training, and of evaluation, have yet to be compared among ranks that share sequences."""

    def _name_groups(self) -> None:
        """Name the groups of this rank in the ledger, and reset their counts of collectives on all ranks."""
        collectives = self.ledger.collectives
        collectives.leave_out(self._links.groups)
        collectives.name(self.grid.get_data_parallel_group(), "replicas")
        collectives.name(self.module.sequence_ranks.group, "sequence-parallel ranks")
        collectives.name(self.grid.get_slice_parallel_group(), "tensor-parallel ranks")
        collectives.name(self.module.expert_ranks.group, "expert-parallel ranks")
        collectives.name(self.module.expert_ranks.copies, "ranks with the same experts")
        collectives.name(self.grid.get_pipe_parallel_group(), "pipeline ranks")
        collectives.name(self.grid.get_model_parallel_group(), "ranks of a replica")
        collectives.name(dist.group.WORLD, "all ranks")
        collectives.reset()

    # ------------------------------------------------------------------ batches

    def train_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_output_label: bool = False,
        token_slices: TokenSlices | Sequence[int] | None = None,
    ) -> Any:
        """Train on one batch.

        Args:
            data_iter: yields micro-batches; read by the ranks of the first and the last stage, and of layers that take
                entries of the data by name.
            return_output_label: also return the output of the last layer, and the labels.
            token_slices: lengths of the token slices, of sequences of any length; None for the module's own, or for its
                `cut_by_documents`. The same on every rank.

        Returns:
            Mean loss over micro-batches and data-parallel ranks, on every rank, of the module's `loss_shape`; or
            `(loss, outputs, labels)`, of all rows and tokens of this replica, None on ranks without the last stage.
        """
        plan = self._plan(token_slices, training=True, updates=True, keeps_outputs=return_output_label)
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        with self._running(plan):
            loss = super().train_batch(data_iter)
        if (self.steps_per_print() or NEVER_PRINTED) >= NEVER_PRINTED:
            # DeepSpeed's timer keeps two events of the device for each step until the next print.
            self.timers(TRAIN_BATCH_TIMER).reset()
        result = (loss, *self.batch.outputs_and_labels()) if return_output_label else loss
        self._executor.finish(self.batch)
        return result

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
        micro_batch_size: int | None = None,
        token_slices: TokenSlices | Sequence[int] | None = None,
        return_output_label: bool = False,
    ) -> Any:
        """Evaluate one batch, forward only, in token slices. All sizes may differ from training.

        Args:
            data_iter: yields micro-batches; read by the same ranks as in `train_batch`.
            return_logits: also return the last layer's outputs by micro-batch, on the last stage.
            reduce_output: `avg` for the mean over micro-batches and replicas, None for a list by micro-batch.
            bcast_loss: send the mean to every stage; otherwise only the last one has it.
            num_micro_batches: micro-batches to evaluate; None = as many as in training.
            micro_batch_size: rows of a micro-batch; None = as many as in training.
            token_slices: lengths of the token slices, of sequences of any length; None = as in training.
            return_output_label: also return the last layer's outputs and the labels, each in one piece.

        Returns:
            The loss, or `(loss, outputs)`; outputs are a list of tensors by micro-batch, None on other stages. Or
            `(loss, outputs, labels)` as `train_batch` returns them.
        """
        if return_logits and return_output_label:
            raise UserError("return_logits and return_output_label give outputs in two forms: set one of them")
        if reduce_output not in ("avg", None):
            raise UserError(f"reduce_output={reduce_output!r}: give 'avg', or None for one loss per micro-batch")
        plan = self._plan(
            token_slices,
            training=False,
            num_micro_batches=num_micro_batches,
            rows=micro_batch_size,
            computes_loss=compute_loss,
            keeps_outputs=return_logits or return_output_label,
        )
        self.module.eval()
        with self._reading(data_iter), self._running(plan) as batch, torch.no_grad():
            self._exec_schedule(self._program)
        losses = [loss for _, loss in sorted(batch.losses.items())]
        result: Any
        if compute_loss and reduce_output == "avg":
            mean = sum(losses) / plan.shape.num_micro_batches if losses else None
            result = self._loss.mean(mean, broadcast=bcast_loss)
        else:
            result = [self._loss.of_micro_batch(loss) for loss in losses] or None
        if return_output_label:
            result = (result, *batch.outputs_and_labels())
        elif return_logits:
            result = result, batch.outputs_by_micro_batch() or None
        self._executor.finish(batch)
        return result

    @property
    def can_replay(self) -> bool:
        """Whether backwards only compute gradients: not if hooks of DeepSpeed reduce them in the backward."""
        return not reduced_by_hooks(self.optimizer)

    def replay(self, micro_batches: Iterable[Any], observer: Observer) -> None:
        """Compute the ops of the last batch again, given this rank's micro-batches of it. Every rank must call it.

        Weights, states and counters do not change; gradients are removed. Dropout draws the same masks, since they
        depend on the number of the step.
        """
        self.complete_weights()
        plan = replace(self.batch.plan, updates=False, keeps_outputs=False)
        self.module.train()
        self.global_steps -= 1
        try:
            with self._reading(iter(micro_batches)), self.observers.joined_by(observer), self._running(plan):
                self._exec_schedule(self._program)
        finally:
            self.global_steps += 1
            self._executor.finish(self.batch)
            self.optimizer.zero_grad()

    def uncount_step(self) -> None:
        """Undo the count of the last step, which changed no weight: the next one gets its number."""
        self.global_steps -= 1
        self.global_samples -= self.train_batch_size()
        self.skipped_steps -= bool(getattr(self.optimizer, "overflow", False))

    @contextmanager
    def timeline(self) -> Iterator[list[Timeline]]:
        """Measure the ops of the batches run inside; on leaving, the list yielded holds their timeline.

        All ranks must enter and leave together. They start their clocks at a barrier.
        """
        timelines: list[Timeline] = []
        dist.barrier()
        clock, copies = OpClock(), self._executor.copies
        with self.observers.joined_by(clock), nullcontext([]) if copies is None else copies.measured_by(clock) as timed:
            yield timelines
        shape = self.batch.plan.shape
        ranks: list[Any] = [None] * shape.num_ranks
        dist.all_gather_object(ranks, (clock.spans(), timed), group=self.grid.get_pipe_parallel_group())
        spans, copied = zip(*ranks, strict=True)
        timelines.append(Timeline(shape, tuple(map(tuple, spans)), "s", host_copies=tuple(chain.from_iterable(copied))))

    def check_schedule(self) -> None:
        """Lower the schedule of a training step, so that one that does not fit the pipeline is refused at once."""
        self._program_of(self.batch.plan, under_ops=not self._lengths.settles)

    def reset_activation_shape(self) -> None:
        """Allow other shapes in the next batch; call it on every rank."""
        super().reset_activation_shape()
        self._links.forget_shapes()

    def num_loss_tokens(self) -> float:
        """Tokens with loss in the last batch, if the module counts them; every rank must call this."""
        return self._loss.num_tokens()

    def take_tally(self) -> StepTally:
        """Numbers that layers counted in training since the last call, by layer; every rank must call this.

        The host waits for them only here.
        """
        pipeline = self.grid.get_pipe_parallel_group() if self.is_pipe_parallel else None
        return self._tallies.take(self.module.num_layers, pipeline)

    # ------------------------------------------------------------------ the run of a batch

    def _plan(
        self,
        token_slices: TokenSlices | Sequence[int] | None,
        *,
        training: bool,
        num_micro_batches: int | None = None,
        rows: int | None = None,
        **settings: bool,
    ) -> BatchPlan:
        """The plan of the next batch; None for a value that the module or the configuration sets."""
        by_documents = None
        if token_slices is None:
            token_slices, by_documents = self.module.token_slices, self.module.cut_by_documents
        elif not isinstance(token_slices, TokenSlices):
            token_slices = TokenSlices(tuple(token_slices))
        return BatchPlan(
            shape=replace(
                self.module.pipeline,
                num_micro_batches=num_micro_batches or self.micro_batches,
                num_token_slices=len(token_slices),
            ),
            token_slices=token_slices,
            ranks=self.module.sequence_ranks,
            by_documents=by_documents,
            rows=rows or self.micro_batch_size,
            step=self.global_steps,
            replica=self.replica,
            num_replicas=self.num_replicas,
            training=training,
            **settings,
        )

    @contextmanager
    def _running(self, plan: BatchPlan) -> Iterator[LiveBatch]:
        """Around a batch. After one that was refused before its first instruction, another may follow."""
        if self._broken_by:
            raise UserError(
                f"an earlier batch ended in its middle ({self._broken_by}), and parts of it may still run: make "
                "a new engine and load a checkpoint"
            )
        batch = LiveBatch(plan)
        if plan.training:
            self.batch = batch
        self._data.begin()
        self._loss.begin()
        if self._lengths.settles and plan.by_documents is not None and self.module.documents is not None:
            # All ranks read the data; lengths must be known before the first message is posted.
            for number, micro_batch in enumerate(self._data.read_ahead(plan.shape.num_micro_batches)):
                if micro_batch is not None:
                    batch.cut(number, self.module.documents(micro_batch))
        batch.may_load = self._may_load(batch)
        self._program = self._program_of(plan, under_ops=not batch.may_load)
        try:
            self._begin(batch, self._program)
            yield batch
        except BaseException as error:
            self.timers(TRAIN_BATCH_TIMER).reset()
            self._executor.finish(batch)
            if not self.ledger.untouched:
                self._broken_by = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self.ledger.begin("no batch: the last one was refused", ())
            raise
        self._lengths.add(batch)

    def _may_load(self, batch: LiveBatch) -> bool:
        """Whether a rank may load kernels in a batch, the same on all ranks that run one program."""
        may_load = self._lengths.are_new(batch)
        exchanges = self._schedule.device.exchange is not ExpertExchange.NONE
        if self._lengths.settles and exchanges and batch.plan.by_documents is not None:
            # Replicas have other documents, and meet in the exchanges of every op: they run one program (ADR 47).
            may_load = any_rank(may_load)
        return may_load

    def _program_of(self, plan: BatchPlan, *, under_ops: bool) -> Program:
        schedule = self._schedule if plan.training else self._schedule.evaluation
        return schedule.program(self.stage_id, plan.shape, under_ops=under_ops)

    def _begin(self, batch: LiveBatch, program: Program) -> None:
        plan = batch.plan
        self._links.begin(batch)
        self.observers.begin()
        self.ledger.begin(f"{'train' if plan.training else 'eval'} step {plan.step + 1}", program.instructions)
        self._executor.begin(batch, program)
        if self._tallies.any and plan.training:
            whole_step = self._tallies.reads == "step" and self._schedule.forwards_come_first(plan.shape)
            self._tallies.begin(whole_step=whole_step)
        if self._reductions is not None and plan.updates:
            self._reductions.begin(completing_ops(program.ops()) if self._overlaps_reductions else {})

    def _train_schedule(self) -> Program:
        return self._program

    def _exec_schedule(self, program: Program) -> None:
        """Run a batch that has begun: weights by its data, the instructions, and the end of a training step."""
        plan, count = self._executor.batch.plan, self.module.loss_tokens
        if plan.computes_loss and self.computes_loss and count is not None:
            micro_batches = self._data.read_ahead(plan.shape.num_micro_batches)
            self._loss.weigh_by_tokens([0.0 if each is None else count(each) for each in micro_batches])
        if self.reads_data and plan.training in self._unchecked_data:
            check_same_data(self.module.sequence_ranks, next(iter(self._data.read_ahead(1)), None))
            self._unchecked_data.remove(plan.training)
        self._executor.run(program)
        for phase, words, act in self._end_of_step if plan.updates else ():
            with self.observers.phase(phase), self.ledger.phase(words):
                act()

    def _exec_optimizer_step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        super()._exec_optimizer_step(lr_kwargs)
        if self._tallies.any:
            norm, updated = self._global_grad_norm, self._step_applied
            updated = updated & norm.isfinite() if torch.is_tensor(norm) else updated
            self._tallies.finish_step(updated, self.micro_batches * self.num_replicas)

    def _activation_shape(self, length: int) -> MessageSpec:
        plan, dtype = self._executor.batch.plan, next(self.module.parameters()).dtype
        spec = self.module.activation_spec(plan.rows, length, dtype)
        return tuple(entry._replace(requires_grad=entry.requires_grad and plan.training) for entry in spec)

    def _loss_scale(self, loss: Tensor) -> Tensor:
        """Mean over micro-batches of the weighed loss of a token slice; scaled only in fp16."""
        loss = loss / self.micro_batches
        return self.optimizer.scale_if_loss(loss) if self.fp16_enabled() else loss

    def _aggregate_total_loss(self) -> Tensor:
        losses = self.batch.losses.values()
        return self._loss.mean(sum(losses) / self.micro_batches if losses else None)
