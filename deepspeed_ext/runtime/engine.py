"""Runs a schedule of token slices on DeepSpeed's pipeline engine.

The engine is a table from instruction to method: a schedule is lowered to this stage's program, and each instruction
of the program calls the method of its name below. Everything else - optimizers, ZeRO, precision, checkpoints,
reductions over data-parallel ranks - is DeepSpeed's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule as deepspeed_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils.timer import BACKWARD_MICRO_TIMER
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.lowering import InstructionKind
from deepspeed_ext.plan.ops import Op, OpKind
from deepspeed_ext.plan.schedules import Schedule
from deepspeed_ext.plan.timeline import Timeline
from deepspeed_ext.runtime.batch import to_device
from deepspeed_ext.runtime.channels import MessageSpec
from deepspeed_ext.runtime.grad_norm import clip_gradients, global_grad_norm
from deepspeed_ext.runtime.gradient_sums import sum_over_tensor_parallel_ranks, sum_over_tied_stages
from deepspeed_ext.runtime.instructions import INSTRUCTION_CLASSES, ProgramSchedule
from deepspeed_ext.runtime.live_batch import LiveBatch
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from deepspeed_ext.runtime.op_clock import OpClock
from deepspeed_ext.runtime.sequence_state import SequenceState
from deepspeed_ext.runtime.stage_links import StageLinks
from deepspeed_ext.runtime.stage_programs import StagePrograms

SEQUENCES_PER_STEP = 1 << 32
"""More than any step has, so that every sequence of a run has a number of its own."""


class TokenSlicePipelineEngine(PipelineEngine):
    """DeepSpeed's pipeline engine with token slices. Made by `deepspeed_ext.runtime.initialize`.

    Args:
        schedule: order of the ops when training.
        timeout: how long a transfer between stages may take.

    Other arguments are those of `PipelineEngine`.
    """

    def __init__(self, *arguments: Any, schedule: Schedule, timeout: timedelta, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        assert isinstance(self.module, TokenSlicePipelineModule), "made for a TokenSlicePipelineModule"
        self._programs = StagePrograms(
            schedule,
            stage=self.stage_id,
            num_stages=self.num_stages,
            num_token_slices=len(self.module.token_slices),
            every_stage_loads=self.module.documents is not None,
        )
        self._rows = {"train": self.micro_batch_size, "eval": self.micro_batch_size}
        self._phase = "train"
        self._links = StageLinks(
            self.module.topology(),
            self.global_rank,
            self.device,
            timeout=timeout,
            activation_rule=self._activation_shape if self.module.activation_spec else None,
            dynamic_shape=self.dynamic_shape,
        )
        self._clock: OpClock | None = None
        self._live = LiveBatch()

    # ------------------------------------------------------------------ what a user calls

    @property
    def num_messages(self) -> int:
        """Tensors this rank has sent to its neighbours so far, headers included."""
        return self._links.num_messages

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on one batch.

        Args:
            data_iter: yields micro-batches; read on the first and the last stage.

        Returns:
            Mean loss over micro-batches and data-parallel ranks, on every rank.
        """
        self._begin("train")
        return super().train_batch(data_iter)

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
        micro_batch_size: int | None = None,
    ) -> Any:
        """Evaluate one batch, forward only, with the same token slices.

        Args:
            data_iter: yields micro-batches; read on the first and the last stage.
            return_logits: also return the last layer's outputs, of all micro-batches, on the last stage.
            compute_loss: compute the loss.
            reduce_output: `avg` for the mean over micro-batches and replicas, None for a list by micro-batch.
            bcast_loss: give the mean to every stage; otherwise only the last one has it.
            num_micro_batches: micro-batches to evaluate; those of training if None.
            micro_batch_size: rows of a micro-batch; those of training if None.

        Returns:
            The loss, or `(loss, outputs)`; outputs are a list of tensors by micro-batch, None on other stages.

        Raises:
            UserError: if `reduce_output` is something else.
        """
        if reduce_output not in ("avg", None):
            raise UserError(f"reduce_output={reduce_output!r}: give 'avg', or None for one loss per micro-batch")
        num_micro_batches = num_micro_batches or self.micro_batches
        self._begin("eval", micro_batch_size or self.micro_batch_size)
        self.eval_return_logits, self._compute_loss = return_logits, compute_loss
        self.module.eval()
        train_iterator = self.data_iterator
        self.set_dataiterator(data_iter)
        with torch.no_grad():
            self._exec_schedule(self._inference_schedule(num_micro_batches))
        self.set_dataiterator(train_iterator)

        losses = [loss for _, loss in sorted(self._live.losses.items())]
        outputs = None
        if return_logits and self.is_last_stage():
            outputs = [torch.cat(parts, dim=1) for _, parts in sorted(self._live.outputs.items())]
        self._live = LiveBatch()
        result: Any = losses or None
        if compute_loss and reduce_output == "avg":
            result = self._mean_over_replicas(sum(losses) / num_micro_batches if losses else None, bcast_loss)
        return (result, outputs) if return_logits else result

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Read from another iterator, on the stages that read any."""
        super().set_dataiterator(iterator)
        if self.module.documents is not None:
            self.data_iterator = iterator

    def reset_activation_shape(self) -> None:
        """Let the next batch have other shapes; call it on every rank."""
        super().reset_activation_shape()
        self._links.forget_shapes()

    @contextmanager
    def timeline(self) -> Iterator[list[Timeline]]:
        """Measure the ops of the batches run inside; on leaving, the list yielded holds their timeline.

        All ranks must enter and leave together. Stages start their clocks at a barrier.
        """
        timelines: list[Timeline] = []
        dist.barrier()
        self._clock = OpClock()
        shape = self._programs.shape(self.micro_batches)
        yield timelines
        spans, self._clock = self._clock.spans(), None
        stages: list[Any] = [None] * self.num_stages
        dist.all_gather_object(stages, spans, group=self.grid.get_pipe_parallel_group())
        timelines.append(Timeline(shape, tuple(tuple(stage) for stage in stages), unit="s"))

    # ------------------------------------------------------------------ schedules

    def _train_schedule(self) -> ProgramSchedule:
        return self._programs.training(self.micro_batches)

    def _inference_schedule(self, micro_batches: int) -> ProgramSchedule:
        return self._programs.evaluation(micro_batches)

    def _begin(self, phase: str, micro_batch_size: int | None = None) -> None:
        self._phase = phase
        if micro_batch_size not in (None, self._rows[phase]):
            self._rows[phase] = micro_batch_size
            self._links.forget_shapes()
        self._links.begin(phase)
        self._live = LiveBatch()

    def _activation_shape(self, token_slice: int) -> MessageSpec:
        dtype = next(self.module.parameters()).dtype
        length = self.module.token_slices.lengths[token_slice]
        spec = self.module.activation_spec(self._rows[self._phase], length, dtype)
        training = self._phase == "train"
        return tuple(entry._replace(requires_grad=entry.requires_grad and training) for entry in spec)

    # ------------------------------------------------------------------ instructions

    def _exec_load(self, micro_batch: int, **_: int) -> None:
        try:
            batch = self._next_batch()
        except StopIteration:
            raise UserError(
                f"the data iterator ended at micro-batch {micro_batch} of a batch of {self.micro_batches}: "
                "give one that does not end, such as deepspeed.utils.RepeatingLoader"
            ) from None
        if self.is_first_stage() or self.is_last_stage():
            self._live.parts[micro_batch] = self.module.split_batch(batch, self.module.token_slices)
        if self.module.documents is not None:
            self._live.documents[micro_batch] = self.module.documents(batch)

    def _exec_forward(self, micro_batch: int, token_slice: int, buffer: int) -> None:
        held = self._live.buffers[buffer]
        if self.is_first_stage():
            inputs = to_device(self._live.parts[micro_batch][token_slice].inputs, self.device)
        else:
            held.inputs = self._links.activation((micro_batch, token_slice))
            inputs = held.inputs[0] if len(held.inputs) == 1 else held.inputs
        with self._measured(OpKind.FORWARD, micro_batch, token_slice):
            outputs = self.module(inputs, self._state(micro_batch), token_slice)
            if self.is_last_stage():
                held.roots = self._exec_loss(outputs, micro_batch, token_slice)
            else:
                held.outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                held.roots = tuple(get_gradient_edge(tensor) for tensor in held.outputs if tensor.requires_grad)
        if not torch.is_grad_enabled() and token_slice == len(self.module.token_slices) - 1:
            self._live.forget(micro_batch)

    def _state(self, micro_batch: int) -> SequenceState:
        """What a micro-batch remembers; at its first forward, nothing yet."""
        if micro_batch not in self._live.states:
            rows = self._rows[self._phase]
            first = (micro_batch * self.dp_world_size + self.grid.get_data_parallel_rank()) * rows
            self._live.states[micro_batch] = SequenceState(
                self.module.token_slices,
                seed=self.module.base_seed,
                sequences=[self.global_steps * SEQUENCES_PER_STEP + first + row for row in range(rows)],
                documents=self._live.documents.get(micro_batch),
            )
        return self._live.states[micro_batch]

    def _exec_loss(self, outputs: Any, micro_batch: int, token_slice: int) -> tuple[Tensor, ...]:
        """Add a token slice's share of the loss up, and return what backward starts from."""
        if not torch.is_grad_enabled() and self.eval_return_logits:
            self._live.outputs[micro_batch].append(outputs)
        if not self._compute_loss:
            return ()
        part = self._live.parts[micro_batch][token_slice]
        loss = (
            outputs
            if self.module.loss_fn is None
            else self.module.loss_fn(outputs, to_device(part.labels, self.device))
        )
        weight = part.loss_weight
        loss = loss * (weight.to(loss.device) if torch.is_tensor(weight) else weight)
        self._live.add_loss(micro_batch, loss)
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise UserError(
                f"the loss of token slice {token_slice} depends on no weight, so later token slices could not pass "
                "gradients back through it: where no token counts, return outputs.sum() * 0"
            )
        return (loss,)

    def _exec_send_activation(self, micro_batch: int, token_slice: int, buffer: int) -> None:
        self._links.send_activation((micro_batch, token_slice), self._live.buffers[buffer].outputs)
        self._live.buffers[buffer].outputs = ()

    def _exec_backward(self, micro_batch: int, token_slice: int, buffer: int) -> None:
        roots = self._live.buffers[buffer].roots
        if self.is_last_stage():
            # Mean over micro-batches; token slices already weigh what they should. Only fp16 scales on top.
            roots = tuple(root / self.micro_batches for root in roots)
            roots = tuple(self.optimizer.scale_if_loss(root) for root in roots) if self.fp16_enabled() else roots
            gradients = tuple(torch.ones_like(root) for root in roots)
        else:
            gradients = self._links.gradient((micro_batch, token_slice))
        with self._measured(OpKind.BACKWARD, micro_batch, token_slice), self._accumulation():
            if roots:
                torch.autograd.backward(roots, gradients)
        self._live.buffers[buffer].roots = ()
        if token_slice == 0:
            self._live.forget(micro_batch)

    def _exec_send_gradient(self, micro_batch: int, token_slice: int, buffer: int) -> None:
        gradients = tuple(
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in self._live.buffers[buffer].inputs
            if tensor.requires_grad
        )
        self._links.send_gradient((micro_batch, token_slice), gradients)

    def _exec_post_activation(self, micro_batch: int, token_slice: int, buffer: int) -> None:
        self._links.post_activation((micro_batch, token_slice))

    def _exec_post_gradient(self, micro_batch: int, token_slice: int, buffer: int) -> None:
        self._links.post_gradient((micro_batch, token_slice))

    def _exec_complete_activation(self, micro_batch: int, token_slice: int, buffer: int) -> None:
        self._links.complete_activation((micro_batch, token_slice))

    def _exec_complete_gradient(self, micro_batch: int, token_slice: int, buffer: int) -> None:
        self._links.complete_gradient((micro_batch, token_slice))

    def _exec_free(self, micro_batch: int, token_slice: int, buffer: int) -> None:
        del self._live.buffers[buffer]

    # ------------------------------------------------------------------ end of the batch

    def _exec_reduce_tied_grads(self) -> None:
        """Complete the gradients of which several ranks of one replica hold a part."""
        sum_over_tensor_parallel_ranks(self.module, self.grid)
        sum_over_tied_stages(self.module)

    def _exec_reduce_grads(self) -> None:
        # DeepSpeed would copy every gradient even where there is no other replica to reduce with.
        if self.is_data_parallel or self.zero_optimization():
            super()._exec_reduce_grads()

    def _exec_optimizer_step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        if not (self.fp16_enabled() or self.bfloat16_enabled() or self.zero_optimization()):
            # The other optimizers of DeepSpeed compute the norm themselves.
            norm = global_grad_norm(
                self.module.parameters(),
                self.grid.get_model_parallel_group(),
                tensor_parallel_rank=self.grid.get_slice_parallel_rank(),
            )
            self._global_grad_norm = norm.item()
        super()._exec_optimizer_step(lr_kwargs)

    def clip_fp32_gradients(self) -> None:
        """Scale the gradients so that the norm of the whole model's is at most the configured one."""
        clip_gradients(self.module.parameters(), self._global_grad_norm, self.gradient_clipping())

    def _aggregate_total_loss(self) -> Tensor:
        losses = self._live.losses.values()
        loss = self._mean_over_replicas(sum(losses) / self.micro_batches if losses else None)
        self._live = LiveBatch()
        return loss

    # ------------------------------------------------------------------ parts of the above

    def _mean_over_replicas(self, loss: Tensor | None, broadcast: bool = True) -> Tensor | None:
        """Mean over data-parallel ranks of a scalar of the last stage, given to every stage in its own precision."""
        if loss is None:
            dtype = torch.promote_types(next(self.module.parameters()).dtype, torch.float32)
            loss = torch.zeros((), dtype=dtype, device=self.device)
        loss = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
        if self.is_last_stage():
            dist.all_reduce(loss, group=self.grid.get_data_parallel_group())
            loss /= self.dp_world_size
        if not broadcast:
            return loss if self.is_last_stage() else None
        if self.is_pipe_parallel:
            dist.broadcast(loss, src=self._loss_stage_global_rank(), group=self.grid.get_pipe_parallel_group())
        return loss

    @contextmanager
    def _accumulation(self) -> Iterator[None]:
        """Around one backward: add the token slice's bf16 gradients to the fp32 ones that `BF16_Optimizer` keeps."""
        separate = self.using_bf16_optimizer and not self._config.bfloat16_config.immediate_grad_update
        if separate:
            self.optimizer.clear_lp_grads()
        yield
        if separate:
            self.optimizer.update_hp_grads(clear_lp_grads=False)

    @contextmanager
    def _measured(self, kind: OpKind, micro_batch: int, token_slice: int) -> Iterator[None]:
        # Forwards are timed by the hooks that DeepSpeed puts on the module.
        timed = self.wall_clock_breakdown() and kind is OpKind.BACKWARD
        if timed:
            self.timers(BACKWARD_MICRO_TIMER).start()
        if self._clock is None:
            yield
        else:
            with self._clock.measure(Op(kind, self.stage_id, micro_batch, token_slice)):
                yield
        if timed:
            self.timers(BACKWARD_MICRO_TIMER).stop()

    # DeepSpeed calls the functions in this table, not the methods of their names: an override must be listed.
    _INSTRUCTION_MAP = {  # noqa: RUF012
        **PipelineEngine._INSTRUCTION_MAP,
        deepspeed_schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
        deepspeed_schedule.ReduceGrads: _exec_reduce_grads,
        deepspeed_schedule.OptimizerStep: _exec_optimizer_step,
        INSTRUCTION_CLASSES[InstructionKind.LOAD_MICRO_BATCH]: _exec_load,
        INSTRUCTION_CLASSES[InstructionKind.RECEIVE_ACTIVATION]: _exec_post_activation,
        INSTRUCTION_CLASSES[InstructionKind.FORWARD]: _exec_forward,
        INSTRUCTION_CLASSES[InstructionKind.SEND_ACTIVATION]: _exec_send_activation,
        INSTRUCTION_CLASSES[InstructionKind.RECEIVE_GRADIENT]: _exec_post_gradient,
        INSTRUCTION_CLASSES[InstructionKind.BACKWARD]: _exec_backward,
        INSTRUCTION_CLASSES[InstructionKind.SEND_GRADIENT]: _exec_send_gradient,
        INSTRUCTION_CLASSES[InstructionKind.COMPLETE_ACTIVATION]: _exec_complete_activation,
        INSTRUCTION_CLASSES[InstructionKind.COMPLETE_GRADIENT]: _exec_complete_gradient,
        INSTRUCTION_CLASSES[InstructionKind.FREE]: _exec_free,
    }
