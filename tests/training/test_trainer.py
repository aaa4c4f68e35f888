"""The training loop: notes about attention, and the conditions that end it early."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config import TrainingConfig
from megatron_terapipe.training.trainer import ExitConditions, ExitReason, any_rank, attention_notes, heard_signal
from tests.distributed import run_distributed

REQUIRED = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --vocab-size 257 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --data-path corpus "
)


def test_a_device_is_told_of_what_slows_it_down() -> None:
    slow = parse_arguments((REQUIRED + "--attention-dropout 0.1").split())
    capped = parse_arguments((REQUIRED + "--bf16 --attention-softcap 50").split())
    fast = parse_arguments((REQUIRED + "--bf16 --attention-dropout 0").split())
    cuda = torch.device("cuda")
    dtype, dropout = attention_notes(slow, cuda, flash_attention_3=False)
    assert "--bf16" in dtype
    assert "--attention-dropout 0" in dropout
    (softcap,) = attention_notes(capped, cuda, flash_attention_3=False)
    assert "--attention-softcap 50" in softcap
    assert attention_notes(fast, cuda, flash_attention_3=True) == [" attention by FlashAttention-3"]
    assert attention_notes(slow, torch.device("cpu"), flash_attention_3=False) == []


def reasons(training: TrainingConfig, *, minutes: float = 0.0, signalled: bool = False) -> list[ExitReason | None]:
    """The reasons after iterations 1 to 4, one rank alone; each iteration takes so many minutes."""
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


def test_a_signal_counts_only_where_it_is_asked_for() -> None:
    assert reasons(TrainingConfig(train_iters=9), signalled=True) == [None] * 4
    with_handler = TrainingConfig(train_iters=9, exit_signal_handler=True, exit_interval=2)
    assert reasons(with_handler, signalled=True) == [ExitReason.SIGNAL] * 4
    assert reasons(with_handler)[1] is ExitReason.INTERVAL


def test_a_signal_is_heard_inside_and_ends_the_process_outside() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with heard_signal(True) as signalled:
        assert not signalled()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signalled()
    assert signal.getsignal(signal.SIGTERM) is before
    with heard_signal(False) as signalled:
        assert signal.getsignal(signal.SIGTERM) is before
        assert not signalled()


def _end_of_a_rank(told: int | None) -> tuple[int, ExitReason]:
    """The iteration after which this rank ends, if one of them gets a signal in its second iteration."""
    with heard_signal(True) as signalled:
        exits = ExitConditions(TrainingConfig(train_iters=9, exit_signal_handler=True), signalled=signalled)
        for iteration in range(1, 10):
            if iteration == 2 and dist.get_rank() == told:
                os.kill(os.getpid(), signal.SIGTERM)
            reason = exits.reason(iteration)
            if reason is not None:
                return iteration, reason
    return 9, None


@pytest.mark.parametrize("told", [0, 1])
def test_one_rank_is_told_and_all_end_with_the_same_iteration(told: int) -> None:
    assert run_distributed(_end_of_a_rank, 2, told) == [(2, ExitReason.SIGNAL)] * 2


def _whether_any() -> list[bool]:
    return [any_rank(dist.get_rank() == 1), any_rank(False), any_rank(True)]


def test_any_rank_is_enough() -> None:
    assert run_distributed(_whether_any, 2) == [[True, False, True]] * 2
