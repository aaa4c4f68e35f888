"""The training loop: notes about attention, conditions that end it early, progress, and the device of a rank."""

import os
import signal
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as draw
from torch import Tensor

from deepspeed_ext.runtime.attention.flash_kernels import CpuFlash
from deepspeed_ext.runtime.health.ledger import OpLedger
from deepspeed_ext.runtime.topology import any_rank
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.checkpoint.agreement import work_of_any_rank
from megatron_terapipe.config import TrainingConfig
from megatron_terapipe.errors import AgreedDataError, ConfigError, DataError
from megatron_terapipe.records import Progress
from megatron_terapipe.training.build_engine import own_device
from megatron_terapipe.training.trainer import (
    ExitConditions,
    ExitReason,
    attention_notes,
    catch_sigterm,
    sample_heads,
)
from tests.distributed import run_distributed

REQUIRED = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --vocab-size 257 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --data-path corpus "
)


def test_notes_about_attention() -> None:
    slow = parse_arguments((REQUIRED + "--attention-dropout 0.1").split())
    capped = parse_arguments((REQUIRED + "--bf16 --attention-softcap 50").split())
    fast = parse_arguments((REQUIRED + "--bf16 --attention-dropout 0").split())
    cuda = torch.device("cuda")
    dtype, dropout = attention_notes(slow, cuda)
    assert "--bf16" in dtype
    assert "--attention-dropout 0" in dropout
    (softcap,) = attention_notes(capped, cuda)
    assert "--attention-softcap 50" in softcap
    # No flash kernel takes heads of this device; the choice is tested beside the kernels.
    assert attention_notes(fast, torch.device("meta")) == []
    assert attention_notes(slow, torch.device("cpu")) == []


def test_kinds_of_layers_that_flash_attention_is_tried_on() -> None:
    flags = (
        "--attention-dropout 0 --group-query-attention --num-query-groups 2 --window-size 7,0 --window-attn-skip-freq 2"
    )
    model = parse_arguments((REQUIRED + flags).split()).model
    samples = sample_heads(model, torch.device("cpu"), "bf16")
    assert {(query.shape, key.shape, window) for query, key, window in samples} == {
        ((1, 128, 4, 16), (1, 256, 2, 16), window) for window in (None, 8)
    }


def test_rounding_changes_results_for_the_samples_by_less_than_half_of_the_limit_of_wrong_kernels() -> None:
    """Regular samples have gradients that are mostly rounding: right kernels would be refused."""
    model = parse_arguments((REQUIRED + "--attention-dropout 0 --kv-channels 128").split()).model
    ((query, key, _),) = sample_heads(model, torch.device("cpu"), "bf16")
    rounded, exact = (results_both_ways(query.to(dtype), key.to(dtype)) for dtype in (torch.bfloat16, torch.float64))
    for found, right in zip(rounded, exact, strict=True):
        assert (found.double() - right).norm() < 0.01 * right.norm()


def results_both_ways(query: Tensor, key: Tensor) -> list[Tensor]:
    """Output and gradients of the kernel for CPUs."""
    kernel, scale = CpuFlash(), query.shape[-1] ** -0.5
    attended = kernel.forward(query, key, key, scale)
    gradients = kernel.backward(query, query, key, key, attended, scale)
    return [attended.output, gradients.query, *gradients.own, *gradients.prefix]


def reasons(training: TrainingConfig, *, minutes: float = 0.0, signalled: bool = False) -> list[ExitReason | None]:
    """The reasons after iterations 1 to 4 on one rank; each iteration takes so many minutes."""
    now = [0.0]
    exits = ExitConditions(training, signalled=lambda: signalled, clock=lambda: now[0], agree=bool)
    found = []
    for iteration in range(1, 5):
        now[0] += 60 * minutes
        found.append(exits.reason(iteration))
    return found


def test_each_condition() -> None:
    assert reasons(TrainingConfig(train_iters=9)) == [None] * 4
    assert reasons(TrainingConfig(train_iters=9, exit_interval=3)) == [None, None, ExitReason.INTERVAL, None]
    late = [None, None, ExitReason.DURATION, ExitReason.DURATION]
    assert reasons(TrainingConfig(train_iters=9, exit_duration_in_mins=2.5), minutes=1) == late


def test_a_signal_needs_its_flag() -> None:
    assert reasons(TrainingConfig(train_iters=9), signalled=True) == [None] * 4
    with_handler = TrainingConfig(train_iters=9, exit_signal_handler=True, exit_interval=2)
    assert reasons(with_handler, signalled=True) == [ExitReason.SIGNAL] * 4
    assert reasons(with_handler)[1] is ExitReason.INTERVAL


def test_sigterm_is_caught_in_the_context_only() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with catch_sigterm(True) as signalled:
        assert not signalled()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signalled()
    assert signal.getsignal(signal.SIGTERM) is before
    with catch_sigterm(False) as signalled:
        assert signal.getsignal(signal.SIGTERM) is before
        assert not signalled()


def _end_of_a_rank(signalled_rank: int) -> tuple[int, ExitReason | None]:
    """The iteration after which this rank ends, if one of them gets a signal in its second iteration."""
    with catch_sigterm(True) as signalled:
        exits = ExitConditions(TrainingConfig(train_iters=9, exit_signal_handler=True), signalled=signalled)
        for iteration in range(1, 10):
            if iteration == 2 and dist.get_rank() == signalled_rank:
                os.kill(os.getpid(), signal.SIGTERM)
            reason = exits.reason(iteration)
            if reason is not None:
                return iteration, reason
    return 9, None


def _agreements() -> list[Any]:
    any_of_ranks = [any_rank(dist.get_rank() == 1), any_rank(False), any_rank(True)]
    return [any_of_ranks, _end_of_a_rank(0), _end_of_a_rank(1), _work_of_a_rank(), _error_of_a_rank()]


def _work_of_a_rank() -> bool:
    """Whether this rank has waited for the work of the other, and has said meanwhile that it is alive."""
    ledger, began = OpLedger(dist.get_rank()), time.monotonic()
    work_of_any_rank("working", partial(time.sleep, 0.4 * dist.get_rank()), ledger)
    return time.monotonic() - began > 0.3 and ledger._on_host.number > 4


def _error_of_a_rank() -> str:
    def fails() -> None:
        if dist.get_rank() == 1:
            raise DataError("it is damaged")

    with pytest.raises(AgreedDataError) as raised:
        work_of_any_rank("working", fails, OpLedger(dist.get_rank()))
    return str(raised.value)


def test_a_signal_the_work_and_the_error_of_one_rank_are_those_of_all() -> None:
    wanted = [[True, False, True], *[(2, ExitReason.SIGNAL)] * 2, True, "it is damaged"]
    assert run_distributed(_agreements, 2) == [wanted] * 2


@given(draw.lists(draw.tuples(draw.integers(1, 64), draw.booleans())))
def test_skipped_iterations_count_as_done_but_do_not_move_the_schedule(steps: list[tuple[int, bool]]) -> None:
    """Megatron counts their iteration and samples, and steps its scheduler only after an update."""
    progress = Progress()
    for batch_size, skipped in steps:
        progress = progress.after(batch_size, skipped=skipped)
    assert progress.iteration == len(steps)
    assert progress.consumed_samples == sum(size for size, _ in steps)
    assert progress.skipped_iterations == sum(skipped for _, skipped in steps)
    assert progress.schedule_step("iters") == sum(not skipped for _, skipped in steps)
    assert progress.schedule_step("samples") == sum(size for size, skipped in steps if not skipped)


def test_each_rank_has_its_own_device() -> None:
    assert [own_device(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    # As with one GPU for a task of srun: the other devices are not visible.
    assert [own_device(rank, 1) for rank in range(4)] == [0, 0, 0, 0]
    assert [own_device(0, 1, ["0", "9"]), own_device(1, 1, ["GPU-8932f937"])] == [0, 0]
    with pytest.raises(ConfigError, match=r"^CUDA_VISIBLE_DEVICES=0,9 lists 2 devices, of which CUDA shows 1 to local"):
        own_device(1, 1, ["0", "9"])
    with pytest.raises(ConfigError, match=r"^local rank 4 of host \S+ has no device, because 4 are visible: "):
        own_device(4, 4)
