"""An iteration: batch sizes on a ramp, fp16 scaling, gradient norms, and measurements over all ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.accelerator import get_accelerator

from megatron_terapipe.data.indexed_dataset import IndexedDatasetWriter
from megatron_terapipe.training.step import memory_line, parameter_norm, peak_memory_by_stage, peak_memory_bytes
from tests.distributed import run_distributed, run_each
from tests.end_to_end.launching import flags, read_metrics, train_on_this_rank
from tests.runtime.reference import Reference, reference_gradients, relative_error
from tests.runtime.training import ROWS, Setup, as_numpy, batches_of, build

CUT = (9, 1, 8, 6)
FP16 = (("fp16", {"enabled": True, "initial_scale_power": 8}),)
STAGES = [
    Setup(pp=2, cut=CUT),
    Setup(pp=2, cut=CUT, zero=1),
    Setup(pp=2, cut=CUT, dtype="bf16"),
    Setup(pp=2, cut=CUT, dtype="bf16", zero=1, accumulate="fp32"),
    Setup(pp=2, cut=CUT, dtype="fp16", zero=1, config=FP16),
    Setup(pp=2, cut=CUT, dtype="fp16", zero=1, accumulate="fp32", config=FP16),
]
RAMPS = [*STAGES, *(replace(mode, pp=1, dp=2) for mode in STAGES)]
SIZES = (1, 4, 2)
"""Micro-batches of consecutive steps: up as on a ramp, and down again."""
RATES = {"fp32": 2.0**20, "bf16": 2.0**20, "fp16": 64.0}
"""Learning rates that make weights small beside their change, within the range of the type."""
TOLERANCE = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 2e-3}
"""Of losses and norms: 2**-24, 2**-8 and 2**-11 of the weights and activations, with room for sums."""
OF_A_WEIGHT = TOLERANCE | {"fp16": 1e-2}
"""Of each clipped gradient, in fp16 the difference of two weights."""
CLIP = 0.25


def _steps(setup: Setup) -> list[tuple[float, float, dict[str, np.ndarray]]]:
    """Loss, norm and clipped gradient of a step of each size, every one from the same weights."""
    # DeepSpeed requires a CPU with fast fp16; the test does not.
    get_accelerator().is_fp16_supported = lambda: True
    rate = RATES[setup.dtype]
    engine = build(
        replace(setup, micro_batches=SIZES[0]),
        config={"gradient_clipping": CLIP},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
    )
    kept = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    found = []
    for count in SIZES:
        engine.set_train_batch_size(count * ROWS * setup.dp)
        assert (engine.micro_batches, engine.gradient_accumulation_steps()) == (count, count)
        batches = batches_of(replace(setup, micro_batches=count), engine.grid.get_data_parallel_rank())
        loss = engine.train_batch(iter(batches)).item()
        assert engine.was_step_applied()
        gradient = {}
        for name, parameter in engine.module.named_parameters():
            gradient[name] = (as_numpy(kept[name]).astype(np.float64) - as_numpy(parameter)) / rate
        found.append((loss, float(engine.get_global_grad_norm()), gradient))
        _put_back(engine, kept)
    return found


def _put_back(engine, kept: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            parameter.copy_(kept[name])
    # ZeRO and bf16 step on copies in fp32, which must be reset, too.
    optimizer = engine.optimizer
    for refresh in ("refresh_fp32_params", "_restore_from_bit16_weights"):
        if hasattr(optimizer, refresh):
            getattr(optimizer, refresh)()
            return


def test_every_step_has_the_norm_and_the_clipped_gradient_of_its_own_batch() -> None:
    for setup, by_rank in zip(RAMPS, run_each(_steps, 2, RAMPS), strict=True):
        tolerance = TOLERANCE[setup.dtype]
        for number, count in enumerate(SIZES):
            loss, gradients = reference_gradients(replace(setup, micro_batches=count))
            norm = float(np.sqrt(sum(np.square(each).sum() for each in gradients.values())))
            assert norm > 2 * CLIP, "clipping must have an effect"
            for rank, found in enumerate(by_rank):
                mine = found[number]
                case = f"{setup}, step {number} of {count} micro-batches, rank {rank}"
                assert mine[0] == pytest.approx(loss, rel=tolerance), case
                assert mine[1] == pytest.approx(norm, rel=tolerance), case
                for name, value in mine[2].items():
                    # The head's copy of the embedding shares only its weight, not the positions.
                    if setup.pp == 2 and rank == 1 and name.endswith("position"):
                        continue
                    assert relative_error(value, gradients[name] * CLIP / norm) < OF_A_WEIGHT[setup.dtype], (
                        f"{case}: {name}"
                    )


HUGE = "--fp16 --initial-loss-scale 4294967296 --hysteresis 1 --loss-scale-window 1000 --lr-decay-style linear"
"""With 2**32 the first gradients overflow: the largest fp16 number is below 2**16."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("fp16") / "corpus"
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, vocab_size=257) as writer:
        for _ in range(60):
            writer.add_document(random.integers(97, 105, 80).tolist())
    return prefix


def _train_in_fp16(words: list[str]) -> int:
    # DeepSpeed requires a CPU with fast fp16; the test does not.
    get_accelerator().is_fp16_supported = lambda: True
    torch.set_num_threads(1)
    return train_on_this_rank(words)


def trained(data: Path, folder: Path, *words: str, metrics: str = "metrics.jsonl") -> list[dict[str, Any]]:
    path = folder / metrics
    given = flags(data, *HUGE.split(), "--metrics-file", path, *words)
    if "--train-samples" in words:
        position = given.index("--train-iters")
        del given[position : position + 2]
    assert run_distributed(_train_in_fp16, 2, given) == [0, 0]
    return read_metrics(path)[0]


def test_overflows_skip_updates_until_the_scale_fits(data: Path, tmp_path: Path) -> None:
    rising = "--start-weight-decay 0 --end-weight-decay 0.3 --weight-decay-incr-style linear".split()
    found = trained(data, tmp_path, "--train-iters", "30", "--eval-iters", "0", *rising)
    skipped = [each["grad_norm"] is None for each in found]
    count = sum(skipped)
    assert 4 < count < 30
    assert skipped == [True] * count + [False] * (30 - count), "the scale only falls, so updates do not stop again"
    assert [each["loss_scale"] for each in found] == [2.0 ** (32 - min(done, count)) for done in range(1, 31)]
    assert [each["skipped_iterations"] for each in found] == [min(done, count) for done in range(1, 31)]
    # A skipped iteration counts, and its samples are read; only the schedules count updates.
    assert [each["iteration"] for each in found] == list(range(1, 31))
    assert [each["consumed_samples"] for each in found] == [8 * done for done in range(1, 31)]
    updates = [max(0, done - count) for done in range(30)]
    assert [each["learning_rate"] for each in found] == pytest.approx([1e-2 * (30 - done) / 30 for done in updates])
    assert [each["weight_decay"] for each in found] == pytest.approx([0.3 * done / 30 for done in updates])
    losses = [each["lm_loss"] for each in found]
    assert losses[-1] < losses[count] - 0.5, "it learns after the last skipped update"


def test_a_resumed_run_counts_skipped_iterations(data: Path, tmp_path: Path) -> None:
    """In samples, on a ramp: the schedule continues after the applied updates, with the saved loss scale."""
    length = "--train-samples 160 --rampup-batch-size 4 4 16 --eval-iters 0 --save-interval 8".split()
    checkpoints = str(tmp_path / "checkpoints")
    whole = trained(data, tmp_path, *length, "--save", checkpoints, metrics="whole.jsonl")
    (tmp_path / "checkpoints" / "latest").write_text("global_step8")
    rest = trained(data, tmp_path, *length, "--save", checkpoints, "--load", checkpoints, metrics="rest.jsonl")
    assert whole[7]["skipped_iterations"] > 2
    assert [each["iteration"] for each in rest] == [each["iteration"] for each in whole[8:]]
    for name in ("consumed_samples", "skipped_iterations", "loss_scale", "learning_rate", "global_batch_size"):
        assert [each[name] for each in rest] == [each[name] for each in whole[8:]], name
    assert [each["lm_loss"] for each in rest] == [each["lm_loss"] for each in whole[8:]]


def test_weight_gradients_apart_overflow_and_learn_as_whole_backwards_do(data: Path, tmp_path: Path) -> None:
    words = "--initial-loss-scale 1048576 --train-iters 10 --eval-iters 0".split()
    whole = trained(data, tmp_path, *words)
    apart = trained(data, tmp_path, *words, "--pipeline-schedule", "zero-bubble", metrics="apart.jsonl")
    assert 0 < sum(each["grad_norm"] is None for each in whole) < 10
    for name in ("lm_loss", "grad_norm", "loss_scale", "skipped_iterations"):
        assert [each[name] for each in apart] == [each[name] for each in whole], name


SETUPS = [
    Setup(pp=2, dp=1, cut=CUT),
    Setup(pp=1, dp=2, cut=CUT, zero=1),
    Setup(pp=2, dp=1, cut=CUT, tied=False),
    Setup(pp=2, dp=1, cut=CUT, dtype="bf16"),
]


def _numbers(setups: list[Setup]) -> list[tuple[float, tuple[int, ...], int]]:
    found = []
    for setup in setups:
        engine = build(setup)
        found.append((parameter_norm(engine), peak_memory_by_stage(engine), peak_memory_bytes()))
    return found


def test_norm_and_memory_of_all_ranks() -> None:
    by_rank = run_distributed(_numbers, 2, SETUPS)
    for index, setup in enumerate(SETUPS):
        model = Reference(setup.num_blocks, tied=setup.tied)
        expected = np.sqrt(sum(parameter.double().pow(2).sum().item() for parameter in model.parameters()))
        (norm, memory, own), (other_norm, other_memory, other_own) = (found[index] for found in by_rank)
        # Rounded to bf16, weights err by up to 2**-9 each, their norm by much less.
        assert norm == pytest.approx(expected, rel=1e-3 if setup.dtype == "bf16" else 1e-6), str(setup)
        assert (other_norm, other_memory) == (norm, memory)
        assert len(memory) == setup.pp
        # A peak can only have risen between the two looks.
        if setup.pp == 2:
            assert 2**20 < memory[0] <= own and 2**20 < memory[1] <= other_own
        else:
            assert memory[0] <= max(own, other_own)


def test_the_line_of_the_log() -> None:
    line = memory_line(2, (3 * 2**20, 2**19))
    assert line == " peak memory after 2 iterations (MiB) | stage 0: 3.0 | stage 1: 0.5 |"
