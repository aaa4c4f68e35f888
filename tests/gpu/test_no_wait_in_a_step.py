"""A training step on CUDA in which torch refuses whatever makes the host wait for the device."""

from unittest.mock import patch

import pytest
import torch

import tests.distributed  # noqa: F401  # names what the server of forked ranks has imported already
from benchmarks.measuring.worlds import World
from megatron_terapipe.data.loader import MicroBatch
from megatron_terapipe.training.build_engine import build_engine, process_group
from megatron_terapipe.training.end_of_run import EndOfRun
from tests.training.gpt_runs import Setup, batches, run_of

CUT = "--num-token-slices 3 --token-slices 9,15,8"
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
    " --untie-embeddings-and-output-weights --num-key-value-heads 2"
)
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
PACKED = "--reset-position-ids --reset-attention-mask"
WINDOWS = "--sliding-window 9 --window-attn-skip-freq 2"


MODES = (
    f"{CUT} --bf16",
    f"{CUT} --bf16 {LLAMA}",
    f"{CUT} --bf16 {LLAMA} {PACKED} --recompute-activations",
    f"{CUT} --bf16 {LLAMA} {WINDOWS} {PACKED}",
    f"{CUT} --bf16 {LLAMA} {WINDOWS} --attention-softcap 30",
    f"{CUT} --bf16 {LLAMA} --num-experts 8 --moe-shared-expert-intermediate-size 16 --moe-aux-loss-coeff 0.01",
    f"{CUT} --bf16 {DROPOUT}",
    f"{CUT} --bf16 {LLAMA} {DROPOUT} --recompute-granularity full",
    f"{CUT} {LLAMA} --pipeline-schedule zero-bubble",
    f"{CUT} --bf16 {LLAMA} {PACKED} --recompute-granularity stage --key-value-gradients bf16",
    f"{CUT} --bf16 {LLAMA} --recompute-granularity stage --offload-token-slices --num-model-chunks 2"
    " --pipeline-schedule breadth-first",
)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("flags", MODES)
def test_every_op_of_a_step_goes_without_waiting(flags: str) -> None:
    assert all(loss.is_cuda for loss in losses_of_a_step(flags))


def test_the_step_is_a_whole_one_without_a_device() -> None:
    with World(1, int, start_method="forkserver") as world:
        for flags in (MODES[2], MODES[-1]):
            assert world.run(number_of_losses, flags) == [Setup().micro_batches]


def number_of_losses(_: int, flags: str) -> int:
    with patch.object(torch.cuda, "set_sync_debug_mode"), patch.object(MicroBatch, "pin_memory", lambda batch: batch):
        return len(losses_of_a_step(flags))


def losses_of_a_step(flags: str) -> list[torch.Tensor]:
    """Losses of the second of two steps, whose ops must not wait for the device."""
    setup = Setup(flags=flags)
    run = run_of(setup)
    with EndOfRun() as end, process_group(run, end.watch(run.launch, run.config)):
        engine = build_engine(run)
        micro_batches = [batch.pin_memory() for batch in batches(setup, 0)]
        # The first step compiles kernels, and allocates what the second finds.
        engine.train_batch(iter(micro_batches))
        engine.set_dataiterator(iter(micro_batches))
        with engine._running(engine._plan(None, training=True, updates=True)):
            torch.cuda.set_sync_debug_mode("error")
            try:
                engine._executor.run(engine._program)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        losses = list(engine.batch.losses.values())
        assert all(loss.isfinite() for loss in losses)
        engine._executor.finish(engine.batch)
    return losses
