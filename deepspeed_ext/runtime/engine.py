"""Runs a schedule of token slices on DeepSpeed's pipeline engine.

The engine is a table from instruction to method: a schedule is lowered to this rank's program, and each instruction
of the program calls the method of the executor that `METHODS` names. Optimizers, ZeRO, precision, checkpoints and
reductions over data-parallel ranks are DeepSpeed's own.

DeepSpeed regards all ranks with the same weights as readers of different data, so it counts every sequence once on
each sequence-parallel rank. A user's configuration, and all sizes that the engine reports, count it once:

    train_batch_size = micro-batch size x micro-batches x data-parallel size
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.constants import ROUTE_TRAIN
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from deepspeed.runtime.pipe.schedule import OptimizerStep, ReduceGrads, ReduceTiedGrads
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import RepeatingLoader
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.ops import Op, OpKind
from deepspeed_ext.plan.programs.device import ExpertExchange
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.program import Instruction, completing_ops
from deepspeed_ext.plan.schedules import Schedule
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.timeline import Timeline
from deepspeed_ext.runtime.channels import MessageSpec, RankLinks
from deepspeed_ext.runtime.clocks import REDUCTIONS, SUMS, UPDATE, BackwardTimer, Observer, Observers, OpClock
from deepspeed_ext.runtime.executor import METHODS, Executor
from deepspeed_ext.runtime.first_batch_checks import check_same_data
from deepspeed_ext.runtime.gradients.expert_weights import broadcast_weights, experts_apart
from deepspeed_ext.runtime.gradients.gradient_norm import (
    clip_gradients,
    count_bad_copies,
    global_grad_norm,
    join_norms,
    norm_with_experts,
    skip_bad_update,
)
from deepspeed_ext.runtime.gradients.parameter_gathers import ParameterGathers, parameter_gathers
from deepspeed_ext.runtime.gradients.reductions import (
    GradientReductions,
    gradient_reductions,
    sum_over_sharing_ranks,
    sum_over_tensor_parallel_ranks,
)
from deepspeed_ext.runtime.gradients.weight_gradients import OptimizerGradients
from deepspeed_ext.runtime.health.stall_watch import GRACE, StallWatch
from deepspeed_ext.runtime.live_batch import Batch
from deepspeed_ext.runtime.micro_batch import BatchLoss
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from deepspeed_ext.runtime.rank_programs import INSTRUCTION_CLASSES, ProgramSchedule, RankPrograms, RunLengths
from deepspeed_ext.runtime.saved_files import gathered_by_first_rank, only_safe_files
from deepspeed_ext.runtime.state.counts import StepTally, Tallies

__all__ = ["TokenSlicePipelineEngine"]

NEVER_PRINTED = 100_000
"""Interval of DeepSpeed's prints, in steps, from which the times of steps are not kept for the next one."""

SEQUENCES_PER_STEP = 1 << 32
"""Above the number of any step, so that every sequence of a run has a number of its own."""

_PHASES = {
    SUMS: "sums over the ranks of a replica",
    REDUCTIONS: "sums over replicas",
    UPDATE: "norm, clipping and update",
}
"""Names of the phases in the ledger."""


def _executed_by(method: Callable[[Executor, Instruction], None]) -> Callable[..., None]:
    def execute(engine: "TokenSlicePipelineEngine", step: Instruction) -> None:
        method(engine._executor, step)
        engine.ledger.done()

    return execute


def _phase(name: str, method: Callable[["TokenSlicePipelineEngine"], None]) -> Callable[..., None]:
    @wraps(method)
    def execute(engine: "TokenSlicePipelineEngine") -> None:
        with engine.observers.phase(name), engine.ledger.phase(_PHASES[name]):
            method(engine)

    return execute


class TokenSlicePipelineEngine(PipelineEngine):
    """DeepSpeed's pipeline engine with token slices. Made by `deepspeed_ext.runtime.initialize`.

    Args:
        schedule: order of the ops when training.
        watch: watches this rank, and has its ledger.

    Further arguments are those of `initialize` and `PipelineEngine`.
    """

    module: TokenSlicePipelineModule

    # Class attributes, since the constructor of `PipelineEngine` reads them.
    _reductions: GradientReductions | None = None
    """Sums over replicas that start while backwards run."""
    _gathers: ParameterGathers | None = None
    """Gathers of weights that run under the next forward."""
    _curr_ckpt_path: str | None = None
    """Where DeepSpeed saves to or loads from at the moment."""

    def __init__(
        self,
        *arguments: Any,
        schedule: Schedule,
        watch: StallWatch,
        overlap_grad_reduce: bool = True,
        overlap_param_gather: bool = False,
        check_token_slices: bool = True,
        key_value_gradients: torch.dtype | None = None,
        host_copies: HostCopySettings | None = None,
        expert_exchange: ExpertExchange = ExpertExchange.NONE,
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        assert isinstance(self.module, TokenSlicePipelineModule), "made for a TokenSlicePipelineModule"
        self._count_sequences()
        self.tput_timer.batch_size = self.train_batch_size()
        self._programs = RankPrograms(
            schedule,
            rank=self.stage_id,
            shape=self.module.pipeline,
            loading_ranks=self.module.reading_ranks,
            host_copies=host_copies,
            exchange=expert_exchange,
        )
        self._lengths = RunLengths()
        self._replicas_meet = expert_exchange is not ExpertExchange.NONE
        self._links = RankLinks(
            self.module.topology(),
            self.global_rank,
            self.module.pipeline,
            self.device,
            timeout=watch.timeout + GRACE,
            activation_rule=self._activation_shape if self.module.activation_spec else None,
            dynamic_shape=self.dynamic_shape,
        )
        self.observers = Observers([BackwardTimer(self)] if self.wall_clock_breakdown() else [])
        """Surround ops and phases of the steps."""
        self.ledger = watch.ledger
        """Completed instructions and current position of this rank."""
        join_norms(self)
        self._name_groups()
        shares_experts = self.module.expert_ranks.size > 1
        self._overlaps_reductions = overlap_grad_reduce
        self._reductions = gradient_reductions(self) if overlap_grad_reduce or shares_experts else None
        self._gathers = parameter_gathers(self) if overlap_param_gather else None
        self._loss = BatchLoss(self)
        tensor_ranks, sequence_ranks = self.grid.get_slice_parallel_group(), self.module.sequence_ranks.group
        self._tallies = Tallies(
            self.module.numbered_layers(),
            self.device,
            micro_batch_groups=(sequence_ranks, tensor_ranks),
            stage_groups=(self.grid.get_data_parallel_group(), tensor_ranks),
        )
        shares_sequences = self.module.sequence_ranks.size > 1
        self._executor = Executor(
            self.module,
            self._links,
            self.device,
            loss=self._loss,
            loss_scale=self._loss_scale,
            around=self._around,
            ledger=self.ledger,
            reductions=self._reductions,
            gathers=self._gathers,
            tallies=self._tallies,
            checks=check_token_slices and (len(self.module.token_slices) > 1 or shares_sequences),
            key_value_gradients=key_value_gradients,
            host_copies=host_copies,
        )
        self.batch = self._new_batch(None, training=True)
        """The last batch of training; after it, only its cuts."""
        self._broken_by = ""
        self._unchecked_data = {True, False} if shares_sequences else set()
        """Whether data of training, and of evaluation, have yet to be compared among ranks that share sequences."""
        self._accumulated: OptimizerGradients | None = None
        if self.using_bf16_optimizer and not self._config.bfloat16_config.immediate_grad_update:
            self._accumulated = OptimizerGradients(self.optimizer)
            self._executor.attach_weight_gradients()

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
            token_slices: lengths of the token slices, of sequences of any length; None for those of the module, or
                those of its `cut_by_documents`. The same on every rank.

        Returns:
            Mean loss over micro-batches and data-parallel ranks, on every rank; or `(loss, outputs, labels)`, of all
            rows and tokens of this replica, None on ranks without the last stage.
        """
        self.batch = self._new_batch(token_slices, training=True, updates=True, keeps_outputs=return_output_label)
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        with self._running(self.batch):
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
        """Evaluate one batch, forward only, in token slices. All sizes may differ from those of training.

        Args:
            data_iter: yields micro-batches; read by the ranks that read those of `train_batch`.
            return_logits: also return the last layer's outputs by micro-batch, on the last stage.
            reduce_output: `avg` for the mean over micro-batches and replicas, None for a list by micro-batch.
            bcast_loss: send the mean to every stage; otherwise only the last one has it.
            num_micro_batches: micro-batches to evaluate; those of training if None.
            micro_batch_size: rows of a micro-batch; those of training if None.
            token_slices: lengths of the token slices, of sequences of any length; None for those of training.
            return_output_label: also return the last layer's outputs and the labels, each in one piece.

        Returns:
            The loss, or `(loss, outputs)`; outputs are a list of tensors by micro-batch, None on other stages. Or
            `(loss, outputs, labels)` as `train_batch` returns them.
        """
        if return_logits and return_output_label:
            raise UserError("return_logits and return_output_label give outputs in two forms: set one of them")
        if reduce_output not in ("avg", None):
            raise UserError(f"reduce_output={reduce_output!r}: give 'avg', or None for one loss per micro-batch")
        batch = self._new_batch(
            token_slices,
            training=False,
            num_micro_batches=num_micro_batches,
            rows=micro_batch_size,
            computes_loss=compute_loss,
            keeps_outputs=return_logits or return_output_label,
        )
        self.module.eval()
        with self._reading(data_iter), self._running(batch) as schedule, torch.no_grad():
            self._exec_schedule(schedule)
        losses = [loss for _, loss in sorted(batch.losses.items())]
        result: Any
        if compute_loss and reduce_output == "avg":
            mean = sum(losses) / batch.shape.num_micro_batches if losses else None
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
        optimizer = self.optimizer
        if not isinstance(optimizer, DeepSpeedZeroOptimizer):
            return True
        hooked = optimizer.contiguous_gradients or optimizer.overlap_comm
        return not (hooked or optimizer.cpu_offload or optimizer.partition_gradients)

    def replay(self, micro_batches: Iterable[Any], observer: Observer) -> None:
        """Compute the ops of the last batch again, given this rank's micro-batches of it. Every rank must call it.

        Weights, states and counters do not change; gradients are removed. Dropout draws the same masks, since they
        depend on the number of the step.
        """
        self.complete_weights()
        self.batch = replace(self.batch, updates=False, keeps_outputs=False)
        self.module.train()
        self.global_steps -= 1
        try:
            with (
                self._reading(iter(micro_batches)),
                self.observers.joined_by(observer),
                self._running(self.batch) as schedule,
            ):
                self._exec_schedule(schedule.without_update())
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
        with self.observers.joined_by(clock), nullcontext() if copies is None else copies.measured_by(clock):
            yield timelines
        shape = self._programs.shape(self.micro_batches, len(self.batch.token_slices))
        ranks: list[Any] = [None] * shape.num_ranks
        measured = clock.spans(), clock.host_copies()
        dist.all_gather_object(ranks, measured, group=self.grid.get_pipe_parallel_group())
        spans, copied = zip(*ranks, strict=True)
        timelines.append(Timeline(shape, tuple(map(tuple, spans)), "s", host_copies=tuple(chain.from_iterable(copied))))

    def check_schedule(self) -> None:
        """Lower the schedule of a training step, so that one that does not fit the pipeline is refused at once."""
        self._programs.program(self.batch.shape, training=True, under_ops=not self._lengths.settles)

    def reset_activation_shape(self) -> None:
        """Allow other shapes in the next batch; call it on every rank."""
        super().reset_activation_shape()
        self._links.forget_shapes()

    @property
    def num_messages(self) -> int:
        """Tensors that this rank has sent to its neighbours, headers included."""
        return self._links.num_messages

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

    def _new_batch(
        self,
        token_slices: TokenSlices | Sequence[int] | None,
        *,
        training: bool,
        num_micro_batches: int | None = None,
        rows: int | None = None,
        **settings: bool,
    ) -> Batch:
        by_documents = None
        if token_slices is None:
            token_slices, by_documents = self.module.token_slices, self.module.cut_by_documents
        elif not isinstance(token_slices, TokenSlices):
            token_slices = TokenSlices(tuple(token_slices))
        rows = rows or self.micro_batch_size
        return Batch(
            shape=self._programs.shape(num_micro_batches or self.micro_batches, len(token_slices)),
            token_slices=token_slices,
            ranks=self.module.sequence_ranks,
            by_documents=by_documents,
            rows=rows,
            sequences=partial(self._sequences, rows),
            training=training,
            **settings,
        )

    def _sequences(self, rows: int, micro_batch: int) -> range:
        before = micro_batch * self.num_replicas + self.replica
        first = self.global_steps * SEQUENCES_PER_STEP + before * rows
        return range(first, first + rows)

    def _train_schedule(self) -> ProgramSchedule:
        return self._program(self.batch)

    def _program(self, batch: Batch) -> ProgramSchedule:
        if batch.may_load is None:
            batch.may_load = self._lengths.are_new(batch)
            if self._lengths.settles and self._replicas_meet and batch.by_documents is not None:
                # Replicas have other documents, and meet in the exchanges of every op: they run one program (ADR 47).
                on_any = torch.tensor(float(batch.may_load), device=self.device)
                dist.all_reduce(on_any, dist.ReduceOp.MAX)
                batch.may_load = bool(on_any.item())
        return self._programs.program(batch.shape, training=batch.training, under_ops=not batch.may_load)

    @contextmanager
    def _running(self, batch: Batch) -> Iterator[ProgramSchedule]:
        """Around a batch. After one that was refused before its first instruction, another may follow."""
        if self._broken_by:
            raise UserError(
                f"an earlier batch ended in its middle ({self._broken_by}), and parts of it may still run: make "
                "a new engine and load a checkpoint"
            )
        self._loss.begin()
        if self._lengths.settles and batch.by_documents is not None and self.module.documents is not None:
            # All ranks read the data; lengths must be known before the first message is posted.
            for number, micro_batch in enumerate(self._loss.read_ahead(batch.shape.num_micro_batches)):
                if micro_batch is not None:
                    batch.cut(number, self.module.documents(micro_batch))
        schedule = self._program(batch)
        try:
            self._begin(batch, schedule)
            yield schedule
        except BaseException as error:
            self.timers(TRAIN_BATCH_TIMER).reset()
            self._executor.finish(batch)
            if not self.ledger.untouched:
                self._broken_by = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self.ledger.begin("no batch: the last one was refused", ())
            raise
        self._lengths.add(batch)

    def _begin(self, batch: Batch, schedule: ProgramSchedule) -> None:
        # All that determines the shapes of activations, so that those of one batch are never used for another.
        self._links.begin((batch.training, batch.rows, batch.token_slices), batch.shape, batch.parts_of)
        phase = "train" if batch.training else "eval"
        self.observers.begin()
        self.ledger.begin(f"{phase} step {self.global_steps + 1}", schedule.program.instructions)
        self._executor.begin(batch, defers_weight_gradients=schedule.defers_weight_gradients)
        if self._tallies.any and batch.training:
            whole_step = self._tallies.reads == "step" and self._programs.forwards_come_first(batch.shape)
            self._tallies.begin(whole_step=whole_step)
        if self._reductions is not None and batch.updates:
            self._reductions.begin(completing_ops(schedule.program.ops()) if self._overlaps_reductions else {})

    def _exec_schedule(self, pipe_schedule: ProgramSchedule) -> None:
        batch = self._executor.batch
        self._loss.weigh_ahead(batch.shape.num_micro_batches, self.module.loss_tokens if batch.computes_loss else None)
        if self.reads_data and batch.training in self._unchecked_data:
            check_same_data(self.module.sequence_ranks, self._loss.first())
            self._unchecked_data.remove(batch.training)
        super()._exec_schedule(pipe_schedule)

    @contextmanager
    def _around(self, op: Op) -> Iterator[None]:
        """Surround the computation of an op: measure it, and accumulate its gradients."""
        with self.observers.op(op):
            yield
            # Deferred products accumulate by themselves.
            if self._accumulated is not None and op.kind in (OpKind.BACKWARD, OpKind.INPUT_GRADIENT):
                self._accumulated.collect()

    def _activation_shape(self, length: int) -> MessageSpec:
        batch, dtype = self._executor.batch, next(self.module.parameters()).dtype
        spec = self.module.activation_spec(batch.rows, length, dtype)
        return tuple(entry._replace(requires_grad=entry.requires_grad and batch.training) for entry in spec)

    def _loss_scale(self, loss: Tensor) -> Tensor:
        """Mean over micro-batches of the weighed loss of a token slice; scaled only in fp16."""
        loss = loss / self.micro_batches
        return self.optimizer.scale_if_loss(loss) if self.fp16_enabled() else loss

    def _aggregate_total_loss(self) -> Tensor:
        losses = self.batch.losses.values()
        return self._loss.mean(sum(losses) / self.micro_batches if losses else None)

    # ------------------------------------------------------------------ batch sizes and data

    @property
    def num_replicas(self) -> int:
        """Data-parallel size: groups of ranks that read different data."""
        return self.module.topology().layout.data_parallel_size

    @property
    def replica(self) -> int:
        """Number of this rank's replica: the same on all ranks that read the same data."""
        return self.module.topology().layout.coordinate(self.global_rank).data

    @property
    def computes_loss(self) -> bool:
        """Whether this rank has the last stage."""
        return self.module.pipeline.rank_of(self.module.pipeline.last_stage) == self.stage_id

    @property
    def reads_data(self) -> bool:
        """Whether this rank reads the data iterator."""
        return self.stage_id in self.module.reading_ranks

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch size, by another number of micro-batches."""
        super().set_train_batch_size(train_batch_size * self.module.sequence_ranks.size)
        self._count_sequences()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch size, and with it the global batch size."""
        super().set_train_micro_batch_size(micro_batch_size)
        self._count_sequences()

    def _count_sequences(self) -> None:
        self._config.train_batch_size //= self.module.sequence_ranks.size

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Read from another iterator, on ranks that read data."""
        self.data_iterator = iterator if self.reads_data else None

    @contextmanager
    def _reading(self, iterator: Iterator[Any]) -> Iterator[None]:
        """Read from another iterator inside."""
        before = self.data_iterator
        self.set_dataiterator(iterator)
        try:
            yield
        finally:
            self.set_dataiterator(before)

    def deepspeed_io(
        self, dataset: Dataset, batch_size: int | None = None, route: str = ROUTE_TRAIN, **keywords: Any
    ) -> Any:
        """Return a loader of a dataset, by which all ranks of a replica read the same samples."""
        shared = self.module.sequence_ranks.size > 1 and not isinstance(dataset, IterableDataset)
        if shared and keywords.get("data_sampler") is None:
            keywords["data_sampler"] = self._sampler(dataset, shuffle=route == ROUTE_TRAIN)
        return super().deepspeed_io(dataset, batch_size, route, **keywords)

    def _build_data_iter(self, dataset: Dataset) -> None:
        loader = self.deepspeed_io(dataset, data_sampler=self._sampler(dataset, shuffle=False))
        self.set_dataloader(RepeatingLoader(loader))

    def _sampler(self, dataset: Dataset, *, shuffle: bool) -> DistributedSampler:
        return DistributedSampler(dataset, self.num_replicas, self.replica, shuffle=shuffle)

    # ------------------------------------------------------------------ the optimizer step

    def _broadcast_model(self) -> None:
        if self.module.expert_ranks.size > 1:
            broadcast_weights(self)
        else:
            super()._broadcast_model()

    def _configure_bf16_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        with experts_apart(self, optimizer):
            return super()._configure_bf16_optimizer(optimizer)

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        with experts_apart(self, optimizer):
            return super()._configure_zero_optimizer(optimizer)

    def complete_weights(self) -> None:
        """Wait for pending gathers of weights; call it before weights are read outside a batch or state dict."""
        if self._gathers is not None:
            self._gathers.finish()

    def _exec_reduce_tied_grads(self) -> None:
        """Sum the gradients of which several ranks of one replica have a part."""
        sum_over_tensor_parallel_ranks(self.module, self.grid)
        sum_over_sharing_ranks(self.module.get_tied_weights_and_groups())

    def _exec_reduce_grads(self) -> None:
        if self._reductions is not None:
            self._reductions.finish(self.module.parameters())
        # DeepSpeed would copy every gradient even where there is no other replica to reduce with.
        elif self.is_data_parallel or self.zero_optimization():
            super()._exec_reduce_grads()

    def _exec_optimizer_step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        count_bad_copies(self)
        if not (self.fp16_enabled() or self.bfloat16_enabled() or self.zero_optimization()):
            # Other optimizers of DeepSpeed compute the norm themselves.
            if self.module.expert_ranks.size > 1:
                self._global_grad_norm = norm_with_experts(self)
            else:
                self._global_grad_norm = global_grad_norm(
                    self.module.parameters(),
                    self.grid.get_model_parallel_group(),
                    tensor_parallel_rank=self.grid.get_slice_parallel_rank(),
                )
            skip_bad_update(self.optimizer, self._global_grad_norm)
        with nullcontext() if self._gathers is None else self._gathers.deferred():
            super()._exec_optimizer_step(lr_kwargs)
        if self._tallies.any:
            norm = self._global_grad_norm
            updated = super().was_step_applied()
            updated = updated & norm.isfinite() if torch.is_tensor(norm) else updated
            self._tallies.finish_step(updated, self.micro_batches * self.num_replicas)

    def get_global_grad_norm(self) -> float | None:
        """Norm of the gradients of the last step; the host waits for it only here."""
        norm = super().get_global_grad_norm()
        return norm.item() if torch.is_tensor(norm) else norm

    def was_step_applied(self) -> bool:
        """Whether the last step changed the weights: not if its gradient had a NaN or an infinity."""
        norm = self._global_grad_norm
        return super().was_step_applied() and not (torch.is_tensor(norm) and not norm.isfinite().item())

    def clip_fp32_gradients(self) -> None:
        """Scale the gradients so that the norm of the whole model's is at most the configured one."""
        clip_gradients(self.module.parameters(), self._global_grad_norm, self.gradient_clipping())

    # ------------------------------------------------------------------ checkpoints

    def load_checkpoint(self, load_dir: str, tag: str | None = None, *arguments: Any, **keywords: Any) -> Any:
        """Load a checkpoint, the latest if `tag` is None, as DeepSpeed's engines do.

        Returns:
            `(path, client_state)`, both None if there is no latest one.
        """
        directory = Path(load_dir)
        if tag is not None and not (directory / tag).is_dir():
            names = sorted(path.name for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []
            raise UserError(
                f"{directory} has no checkpoint {tag!r}, but {', '.join(names) or 'none at all'}: give one of its tags"
            )
        try:
            with only_safe_files(directory if tag is None else directory / tag):
                return super().load_checkpoint(load_dir, tag, *arguments, **keywords)
        finally:
            self._curr_ckpt_path = None

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Weights and buffers of this rank's layers, by name.

        None while a checkpoint is saved, which has a file for each layer instead.
        """
        if self._curr_ckpt_path is not None:
            return super().module_state_dict(exclude_frozen_parameters)
        self.complete_weights()
        frozen = {name for name, weight in self.module.named_parameters() if not weight.requires_grad}
        left_out = frozen if exclude_frozen_parameters else set()
        return {name: value for name, value in self.module.state_dict().items() if name not in left_out}

    def _copy_recovery_script(self, save_path: str) -> None:
        """Copy no script: DeepSpeed's scripts cannot join the stages of a pipeline."""

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Save the weights of all pipeline ranks in one file, in their own types. Every rank must call it."""
        if self.grid.get_slice_parallel_world_size() > 1:
            raise UserError(
                "save_16bit_model writes whole weights, and tensor-parallel ranks have parts of them: save_checkpoint"
            )
        whole = gathered_by_first_rank(self, self.module_state_dict(exclude_frozen_parameters))
        if whole is not None:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save(whole, Path(save_dir) / save_filename)
        dist.barrier()
        return True

    # ------------------------------------------------------------------ the table

    # DeepSpeed calls the functions in this table, not methods by name: an override must be listed.
    _INSTRUCTION_MAP = {  # noqa: RUF012
        **PipelineEngine._INSTRUCTION_MAP,
        ReduceTiedGrads: _phase(SUMS, _exec_reduce_tied_grads),
        ReduceGrads: _phase(REDUCTIONS, _exec_reduce_grads),
        OptimizerStep: _phase(UPDATE, _exec_optimizer_step),
        **{INSTRUCTION_CLASSES[kind]: _executed_by(method) for kind, method in METHODS.items()},
    }
