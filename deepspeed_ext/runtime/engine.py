"""Runs a schedule of token slices on DeepSpeed's pipeline engine.

The engine is a table from instruction to method: a schedule is lowered to this rank's program, and each instruction
of the program calls the method of the executor that it names below. Everything else - optimizers, ZeRO, precision,
checkpoints, reductions over data-parallel ranks - is DeepSpeed's own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER
from torch import Tensor

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.ops import Op, OpKind
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.program import Instruction, completing_ops
from deepspeed_ext.plan.schedules import Schedule
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.timeline import Timeline
from deepspeed_ext.runtime.channels import MessageSpec, RankLinks
from deepspeed_ext.runtime.clocks import BackwardTimer, Observers, OpClock
from deepspeed_ext.runtime.engine_base import SteppingEngine
from deepspeed_ext.runtime.executor import INSTRUCTION_CLASSES, METHODS, Executor, ProgramSchedule, RankPrograms
from deepspeed_ext.runtime.first_batch_checks import SameData
from deepspeed_ext.runtime.gradients.parameter_gathers import parameter_gathers
from deepspeed_ext.runtime.gradients.reductions import gradient_reductions
from deepspeed_ext.runtime.gradients.weight_gradients import OptimizerGradients
from deepspeed_ext.runtime.health.stall_watch import GRACE, StallWatch
from deepspeed_ext.runtime.live_batch import BatchPlan, Cuts
from deepspeed_ext.runtime.micro_batch import batch_loss
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from deepspeed_ext.runtime.replay import ReplayingEngine
from deepspeed_ext.runtime.stage_ops import StageOps

__all__ = ["TokenSlicePipelineEngine"]

SEQUENCES_PER_STEP = 1 << 32
"""More than any step has, so that every sequence of a run has a number of its own."""


def _executed_by(method: Callable[[Executor, Instruction], None]) -> Callable[..., None]:
    def execute(engine: "TokenSlicePipelineEngine", step: Instruction) -> None:
        method(engine._executor, step)
        engine.ledger.done()

    return execute


class TokenSlicePipelineEngine(ReplayingEngine):
    """DeepSpeed's pipeline engine with token slices. Made by `deepspeed_ext.runtime.initialize`.

    Args:
        schedule: order of the ops when training.
        watch: looks after this rank, and has its ledger.
        overlap_grad_reduce: sum gradients over replicas layer by layer, while the last backwards run.
        overlap_param_gather: gather weights that replicas stepped in parts while the next forward runs.
        check_token_slices: check in the first batch that each layer computes in token slices what it does whole.
        key_value_gradients: type in which gradients of keys and values are kept; None for fp32 or wider.
        host_copies: what waits on the host while nothing reads it, and how fast it is copied; None for nothing.

    Other arguments are those of `PipelineEngine`.
    """

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
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        assert isinstance(self.module, TokenSlicePipelineModule), "made for a TokenSlicePipelineModule"
        self._programs = RankPrograms(
            schedule,
            rank=self.stage_id,
            shape=self.module.pipeline,
            loading_ranks=self.module.reading_ranks,
            host_copies=host_copies,
        )
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
        """Surround ops and phases of the steps, wherever they are called for."""
        self.ledger = watch.ledger
        self._name_groups()
        self._reductions = gradient_reductions(self) if overlap_grad_reduce else None
        self._gathers = parameter_gathers(self) if overlap_param_gather else None
        self._loss, self._same_data = batch_loss(self), SameData(self.module.sequence_ranks)
        ops = StageOps(
            self.module,
            self.device,
            loss=self._loss,
            loss_scale=self._loss_scale,
            reductions=self._reductions,
            gathers=self._gathers,
            checks=check_token_slices and (len(self.module.token_slices) > 1 or self.module.sequence_ranks.size > 1),
            key_value_gradients=key_value_gradients,
            keys_apart=host_copies is not None,
        )
        self._executor = Executor(
            self.module,
            ops,
            self._links,
            self.device,
            next_batch=lambda: self._loss.take(self._next_batch),
            around=self._around,
            ledger=self.ledger,
            reductions=self._reductions,
            host_copies=host_copies,
        )
        self._cuts, self._broken_by = self._cut(None), ""
        self._accumulated: OptimizerGradients | None = None
        if self.using_bf16_optimizer and not self._config.bfloat16_config.immediate_grad_update:
            self._accumulated = OptimizerGradients(self.optimizer)
            self._executor.attach_weight_gradients()

    def _name_groups(self) -> None:
        """Tell the ledger what the groups of this rank are for, and count their collectives alike on all ranks."""
        collectives = self.ledger.collectives
        collectives.leave_out(self._links.groups)
        collectives.name(self.grid.get_data_parallel_group(), "replicas")
        collectives.name(self.module.sequence_ranks.group, "sequence-parallel ranks")
        collectives.name(self.grid.get_slice_parallel_group(), "tensor-parallel ranks")
        collectives.name(self.grid.get_pipe_parallel_group(), "pipeline ranks")
        collectives.name(self.grid.get_model_parallel_group(), "ranks of a replica")
        collectives.name(dist.group.WORLD, "all ranks")
        collectives.start_anew()

    # ------------------------------------------------------------------ what a user calls

    @property
    def num_messages(self) -> int:
        """Tensors this rank has sent to its neighbours so far, headers included."""
        return self._links.num_messages

    def check_schedule(self) -> None:
        """Find the program of a training step, so that a schedule that does not fit the pipeline shows at once.

        Raises:
            PlanError: if there is none.
        """
        self._train_schedule()

    def train_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_output_label: bool = False,
        token_slices: TokenSlices | Sequence[int] | None = None,
    ) -> Any:
        """Train on one batch.

        Args:
            data_iter: yields micro-batches; read where the first and the last stage are, and where layers take entries
                of the data by name.
            return_output_label: also return what the last layer gave, and the labels. Nothing of them is kept if not.
            token_slices: lengths of the token slices, of sequences of any length; None for those of the module, or
                those that its `cut_by_documents` gives. Every rank must give the same.

        Returns:
            Mean loss over micro-batches and data-parallel ranks, on every rank; or `(loss, outputs, labels)`, of all
            rows and tokens of this replica, None where the last stage is not.

        Raises:
            UserError: if the batch cannot be trained on, or one before it ended in its middle.
        """
        self._cuts = cuts = self._cut(token_slices)
        schedule = self._train_schedule()
        with self._batch():
            self._begin(schedule, cuts, self.micro_batch_size, keeps_outputs=return_output_label)
            loss = super().train_batch(data_iter)
        self._programs.ran(schedule)
        live = self._executor.finish()
        if not return_output_label:
            return loss
        return loss, *live.outputs_and_labels(cuts)

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
        """Evaluate one batch, forward only, in token slices. Nothing of it need be as when training.

        Args:
            data_iter: yields micro-batches; read where `train_batch` reads them.
            return_logits: also return the last layer's outputs by micro-batch, where the last stage is.
            reduce_output: `avg` for the mean over micro-batches and replicas, None for a list by micro-batch.
            bcast_loss: give the mean to every stage; otherwise only the last one has it.
            num_micro_batches: micro-batches to evaluate; those of training if None.
            micro_batch_size: rows of a micro-batch; those of training if None.
            token_slices: lengths of the token slices, of sequences of any length; None for those of training.
            return_output_label: also return the last layer's outputs and the labels, each in one piece.

        Returns:
            The loss, or `(loss, outputs)`; outputs are a list of tensors by micro-batch, None on other stages. Or
            `(loss, outputs, labels)` as `train_batch` returns them.

        Raises:
            UserError: if `reduce_output` is something else, or outputs are asked for in both forms.
        """
        if return_logits and return_output_label:
            raise UserError("return_logits and return_output_label give outputs in two forms: ask for one of them")
        if reduce_output not in ("avg", None):
            raise UserError(f"reduce_output={reduce_output!r}: give 'avg', or None for one loss per micro-batch")
        num_micro_batches = num_micro_batches or self.micro_batches
        cuts = self._cut(token_slices)
        schedule = self._programs.evaluation(num_micro_batches, len(cuts.token_slices))
        rows, keeps = micro_batch_size or self.micro_batch_size, return_logits or return_output_label
        self.module.eval()
        train_iterator = self.data_iterator
        self.set_dataiterator(data_iter)
        try:
            with self._batch(), torch.no_grad():
                self._begin(schedule, cuts, rows, computes_loss=compute_loss, keeps_outputs=keeps)
                self._exec_schedule(schedule)
        finally:
            self.set_dataiterator(train_iterator)

        self._programs.ran(schedule)
        live = self._executor.finish()
        losses = [loss for _, loss in sorted(live.losses.items())]
        if compute_loss and reduce_output == "avg":
            result = self._loss.mean(sum(losses) / num_micro_batches if losses else None, broadcast=bcast_loss)
        else:
            result = [self._loss.of_micro_batch(loss) for loss in losses] or None
        if return_output_label:
            return (result, *live.outputs_and_labels(cuts))
        return (result, live.outputs_by_micro_batch(cuts) or None) if return_logits else result

    @property
    def computes_loss(self) -> bool:
        """Whether this rank has the last stage."""
        return self.module.pipeline.rank_of(self.module.pipeline.last_stage) == self.stage_id

    @property
    def reads_data(self) -> bool:
        """Whether this rank reads what the data iterator yields."""
        return self.stage_id in self.module.reading_ranks

    def num_loss_tokens(self) -> float:
        """Tokens that bore loss in the last batch, where the module counts them; every rank must ask."""
        return self._loss.num_tokens()

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Read from another iterator, on the ranks that read any."""
        self.data_iterator = iterator if self.reads_data else None

    def reset_activation_shape(self) -> None:
        """Let the next batch have other shapes; call it on every rank."""
        super().reset_activation_shape()
        self._links.forget_shapes()

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
        shape = self._programs.shape(self.micro_batches, len(self._cuts.token_slices))
        ranks: list[Any] = [None] * shape.num_ranks
        measured = clock.spans(), clock.host_copies()
        dist.all_gather_object(ranks, measured, group=self.grid.get_pipe_parallel_group())
        spans, copied = zip(*ranks, strict=True)
        timelines.append(Timeline(shape, tuple(map(tuple, spans)), "s", host_copies=tuple(chain.from_iterable(copied))))

    # ------------------------------------------------------------------ schedules

    def _train_schedule(self) -> ProgramSchedule:
        return self._programs.training(self.micro_batches, len(self._cuts.token_slices))

    def _inference_schedule(self, micro_batches: int) -> ProgramSchedule:
        return self._programs.evaluation(micro_batches)

    def _exec_schedule(self, pipe_schedule: ProgramSchedule) -> None:
        count = self.module.loss_tokens if self._executor.plan.computes_loss else None
        self._loss.read_ahead(pipe_schedule.shape.num_micro_batches, self._next_batch, count)
        if self.reads_data:
            self._same_data.check(lambda: self._loss.first(self._next_batch), training=pipe_schedule.training)
        super()._exec_schedule(pipe_schedule)

    def _cut(self, token_slices: TokenSlices | Sequence[int] | None) -> Cuts:
        if token_slices is None:
            return Cuts(self.module.token_slices, self.module.sequence_ranks, self.module.cut_by_documents)
        given = token_slices if isinstance(token_slices, TokenSlices) else TokenSlices(tuple(token_slices))
        return Cuts(given, self.module.sequence_ranks)

    @contextmanager
    def _batch(self) -> Iterator[None]:
        """Around a batch. One that is refused before anything of it ran leaves no trace, and another may follow."""
        if self._broken_by:
            raise UserError(
                f"a batch before ended in its middle ({self._broken_by}), and parts of it may still be under way: make "
                "a new engine and load a checkpoint"
            )
        try:
            yield
        except BaseException as error:
            self.timers(TRAIN_BATCH_TIMER).reset()
            self._executor.finish()
            if not self.ledger.untouched:
                self._broken_by = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self.ledger.begin("no batch: the last one was refused", ())
            raise

    def _begin(self, schedule: ProgramSchedule, cuts: Cuts, rows: int, **settings: bool) -> None:
        plan = BatchPlan(
            shape=schedule.shape,
            cuts=cuts,
            rows=rows,
            training=schedule.training,
            reduces=schedule.updates,
            first_sequence=self._first_sequence,
            **settings,
        )
        # All that shapes of activations depend on, so that those of one batch are never taken for those of another.
        self._links.begin((schedule.training, rows, cuts.token_slices), schedule.shape, cuts.parts_of)
        phase = "train" if schedule.training else "eval"
        self.observers.begin()
        self.ledger.begin(f"{phase} step {self.global_steps + 1}", schedule.program.instructions)
        self._executor.begin(plan, puts_weight_gradients_off=schedule.puts_weight_gradients_off)
        if self._reductions is not None and schedule.updates:
            self._reductions.begin(completing_ops(schedule.program.ops()))

    def _first_sequence(self, micro_batch: int) -> int:
        before = micro_batch * self.num_replicas + self.replica
        return self.global_steps * SEQUENCES_PER_STEP + before * self._executor.plan.rows

    def _activation_shape(self, length: int) -> MessageSpec:
        plan, dtype = self._executor.plan, next(self.module.parameters()).dtype
        spec = self.module.activation_spec(plan.rows, length, dtype)
        return tuple(entry._replace(requires_grad=entry.requires_grad and plan.training) for entry in spec)

    def _loss_scale(self, loss: Tensor) -> Tensor:
        """Mean over micro-batches; token slices already weigh what they should. Only fp16 scales on top."""
        loss = loss / self.micro_batches
        return self.optimizer.scale_if_loss(loss) if self.fp16_enabled() else loss

    def _aggregate_total_loss(self) -> Tensor:
        losses = self._executor.live.losses.values()
        return self._loss.mean(sum(losses) / self.micro_batches if losses else None)

    @contextmanager
    def _around(self, op: Op) -> Iterator[None]:
        """Surround the computing of an op: measure it, and add up the gradients it leaves."""
        with self.observers.op(op):
            yield
            # What is deferred adds up by itself.
            if self._accumulated is not None and op.kind in (OpKind.BACKWARD, OpKind.INPUT_GRADIENT):
                self._accumulated.collect()

    # DeepSpeed calls the functions in this table, not the methods of their names: an override must be listed.
    _INSTRUCTION_MAP = {  # noqa: RUF012
        **SteppingEngine._INSTRUCTION_MAP,
        **{INSTRUCTION_CLASSES[kind]: _executed_by(method) for kind, method in METHODS.items()},
    }
