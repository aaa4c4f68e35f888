"""Instruments of an iteration: timers, profiler, zeros of gradients; throughput; loads of experts."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map_only

from deepspeed_ext.plan.ops import Op, OpKind
from deepspeed_ext.runtime.clocks import BACKWARD, FORWARD, OPS, PHASES, ProfilerRanges
from deepspeed_ext.runtime.state.counts import StepTally
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.flops import iteration_flops
from megatron_terapipe.devices import DEVICES
from megatron_terapipe.records import ExpertLoads
from megatron_terapipe.training import run as prepared_run
from megatron_terapipe.training.build_engine import build_engine
from megatron_terapipe.training.run import peak_tflops_here
from megatron_terapipe.training.step import ExpertWatch, Instruments
from tests.distributed import run_distributed, run_each
from tests.training.equivalence.test_gpt_equivalence import expected_gradients
from tests.training.gpt_runs import Setup, batches, run_of

# Gradients of the biases of keys are zero but for rounding.
UNTIED = "--num-token-slices 4 --untie-embeddings-and-output-weights --disable-bias-linear --log-num-zeros-in-grad"
ZEROS = [
    Setup(1, UNTIED),
    Setup(2, f"{UNTIED} --zero-stage 1"),
    Setup(2, f"{UNTIED} --zero-stage 1 --no-overlap-grad-reduce"),
    Setup(2, f"{UNTIED} --zero-stage 1 --bf16"),
    Setup(4, f"{UNTIED} --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"),
    Setup(4, f"{UNTIED} --pipeline-model-parallel-size 2 --zero-stage 1"),
]


def observed(setup: Setup, iterations: int = 1) -> tuple[list[int | None], list[Any], list[str]]:
    """Zeros and timers of a few iterations, and the lines of the log."""
    run, notes = run_of(setup), []
    engine = build_engine(run)
    instruments = Instruments(run.config.logging, engine, notes.append)
    zeros, timers = [], []
    for iteration in range(1, iterations + 1):
        with instruments.around(iteration):
            engine.train_batch(iter(batches(setup, run.layout.coordinate(run.launch.rank).data)))
        zeros.append(instruments.num_zero_gradients())
        timers.append(instruments.timers())
    instruments.close()
    return zeros, timers, notes


def zeros_of(setup: Setup) -> int | None:
    return observed(setup)[0][0]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_zeros_of_the_gradient_are_those_of_plain_autograd(world_size: int) -> None:
    """Tokens of no sample have a gradient of zeros."""
    setups = [setup for setup in ZEROS if setup.world_size == world_size]
    for setup, found in zip(setups, run_each(zeros_of, world_size, setups), strict=True):
        gradients = expected_gradients(setup)[1]
        expected = sum(int(np.count_nonzero(gradient == 0)) for gradient in gradients.values())
        assert expected > 32
        # In bf16 two numbers of a sum may cancel to the last bit; a word that is not counted would be 32.
        by_chance = 31 if setup.dtype == "bf16" else 0
        assert len(set(found)) == 1, "all ranks have the same number"
        assert expected <= found[0] <= expected + by_chance, str(setup)


OPTIONS = {"max": 1, "minmax": 2, "all": 2}
"""Options of the timers, and the numbers for each phase on two ranks."""


def timers_of_options() -> list[list[Any]]:
    flags = "--num-token-slices 4 --pipeline-model-parallel-size 2 --timing-log-level 2 --timing-log-option"
    return [observed(Setup(2, f"{flags} {option}"), 2)[1] for option in OPTIONS]


def test_timers_of_the_phases() -> None:
    first_rank, second_rank = run_distributed(timers_of_options, 2)
    assert first_rank == second_rank
    for iterations, num_figures in zip(first_rank, OPTIONS.values(), strict=True):
        for timers in iterations:
            assert list(timers) == [*PHASES, FORWARD, BACKWARD]
            assert all(len(seconds) == num_figures for seconds in timers.values())
            assert min(map(min, timers.values())) >= 0
            slowest = {name: max(seconds) for name, seconds in timers.items()}
            assert 0 < slowest[FORWARD] <= slowest[OPS]
            assert 0 < slowest[BACKWARD] <= slowest[OPS]


def test_torchs_profiler_writes_the_ops_of_its_iterations_and_ranks(tmp_path: Path) -> None:
    flags = f"--num-token-slices 4 --pipeline-model-parallel-size 2 --tensorboard-dir {tmp_path} --use-pytorch-profiler"
    chosen = " --profile --profile-step-start 1 --profile-step-end 2 --profile-ranks 1"
    (_, _, quiet), (_, _, notes) = run_distributed(observed, 2, Setup(2, flags + chosen), 3)
    assert (quiet, notes) == ([], [" profiled iterations 2 to 2"])
    (trace,) = tmp_path.iterdir()
    assert trace.name.startswith("rank1.")
    names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("1F0.0") == names.count("1B1.3") == 1
    assert "optimizer" in names
    assert not any(str(name).startswith("0F") for name in names), "ops of the other stage"


def test_instruments_of_one_rank() -> None:
    plain, ranges, threads = run_distributed(one_rank, 1)[0]
    assert plain == ([None], [None], []), "without flags nothing is measured"
    assert ranges == ["start", "push 0F0.0", "pop", "push 0F1.0", "pop", "stop"]
    pushed, *computed, popped = threads
    assert [name for name, _ in threads] == ["push 0B0.0", "backward", "backward", "pop"]
    assert {thread for _, thread in (*computed, popped)} == {pushed[1]}, "a range is one of its thread's kernels"


def one_rank() -> tuple[Any, list[str], list[tuple[str, int]]]:
    return observed(Setup(1)), nsight(), threads_of_a_backward()


def threads_of_a_backward() -> list[tuple[str, int]]:
    """Calls of the ranges of the accelerator, and of a backward inside, with their threads.

    The tensors pretend to be on an accelerator, of which autograd has a thread of its own.
    """
    from deepspeed.accelerator import get_accelerator
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("pretended")
    calls: list[tuple[str, int]] = []
    accelerator = get_accelerator()
    accelerator.range_push = lambda name: calls.append((f"push {name}", threading.get_ident()))
    accelerator.range_pop = lambda: calls.append(("pop", threading.get_ident()))
    weight = OnPretendedDevice(torch.ones(3)).requires_grad_()
    product = weight * 2 * 3
    products: list[Any] = [product.grad_fn, product.grad_fn.next_functions[0][0]]
    for each in products:
        each.register_hook(lambda *_: calls.append(("backward", threading.get_ident())))
    with ProfilerRanges().op(Op(OpKind.BACKWARD, 0, 0, 0)):
        product.backward(OnPretendedDevice(torch.ones(3)))
    return calls


class OnPretendedDevice(torch.Tensor):
    """A tensor in host memory whose device is another."""

    values: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "OnPretendedDevice":
        device = torch.device("pretended", 0)
        tensor = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=device)
        tensor.values = values
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        found = function(*tree_map_only(cls, lambda each: each.values, arguments), **(keywords or {}))
        return tree_map_only(torch.Tensor, cls, found)


def nsight() -> list[str]:
    """Calls of CUDA's profiler and of the ranges of the accelerator, in two forwards."""
    from deepspeed.accelerator import get_accelerator

    calls: list[str] = []
    accelerator = get_accelerator()
    accelerator.range_push = lambda name: calls.append(f"push {name}")
    accelerator.range_pop = lambda: calls.append("pop")
    torch.cuda.profiler.start = lambda: calls.append("start")
    torch.cuda.profiler.stop = lambda: calls.append("stop")
    setup = Setup(1, "--profile --profile-step-start 0 --profile-step-end 1")
    run = run_of(setup)
    engine = build_engine(run)
    instruments = Instruments(run.config.logging, engine, lambda line: None)
    with instruments.around(1):
        engine.eval_batch(iter(batches(setup, 0)))
    return calls


GPT3_175B = ModelConfig(
    num_layers=96,
    hidden_size=12288,
    num_attention_heads=96,
    seq_length=2048,
    vocab_size=51200,
    max_position_embeddings=2048,
)


def test_a_published_utilization() -> None:
    """Narayanan et al. 2021, table 1 and section 5.1: 175B on 1024 A100s with batch 1536 at 140 TFLOP/s and 0.45.

    Their FLOPs are those of the hardware, whose backward recomputes the blocks: 4 passes where the model needs 3.
    """
    seconds = 32.0
    found = iteration_flops(GPT3_175B, 1536) / seconds / 1024 / 1e12
    hardware_tflops = 96 * 1536 * 2048 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288))
    assert found == pytest.approx(hardware_tflops * 3 / 4 / seconds / 1024 / 1e12, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        *((f"NVIDIA {name}", each.device.half_flops / 1e12) for name, each in DEVICES.items() if each.device.is_gpu),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 NVL", 835.5),
        ("Tesla V100-PCIE-32GB", 112),
        ("AMD Instinct MI250X", 191.5),  # one of its two dies, which torch sees as a device
        ("NVIDIA RTX A4000", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("GeForce GTX 970", None),
    ],
)
def test_peaks_of_data_sheets(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_tflops_here("bf16") is None, "on a CPU"
    monkeypatch.setattr(prepared_run, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert (peak_tflops_here("bf16"), peak_tflops_here("fp32")) == (peak, None)


WITH_EXPERTS = ModelConfig(
    num_layers=3, hidden_size=8, num_attention_heads=2, seq_length=8, num_experts=4, moe_layer_freq="2",
    moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.1,
)  # fmt: skip


class Reported(list[Any]):
    """Lines, and notes as texts."""

    __call__ = note = list.append


def test_loads_are_shares_by_transformer_layer_and_an_expert_that_starts_to_starve_is_reported_once() -> None:
    # The engine has two layers before the transformer layers, and two after them.
    def tally(first: tuple[int, ...]) -> StepTally:
        counts, values = torch.zeros(7, 4, dtype=torch.int64), torch.zeros(7, 2, dtype=torch.float64)
        counts[2], counts[4] = torch.tensor(first), torch.tensor((5, 5, 5, 5))
        values[2], values[4] = torch.tensor((1.5, 2.0)), torch.tensor((1.0, 4.0))
        return StepTally(50, counts, values)

    even, uneven = (10, 10, 10, 10), (1, 20, 12, 7)
    tallies = iter([tally(even), *[tally(uneven)] * 3, tally(even), *[tally((1, 1, 0, 0))] * 2])
    engine, reported = SimpleNamespace(take_tally=lambda: next(tallies)), Reported()
    watch = ExpertWatch(WITH_EXPERTS, engine, reported)  # type: ignore[arg-type]
    for iteration in range(80, 381, 50):
        watch.read(iteration)
    first, second = reported[:2]
    assert isinstance(first, ExpertLoads) and (first.iteration, first.iterations, first.layers) == (80, 50, (0, 2))
    assert first.loads == ((1.0,) * 4, (1.0,) * 4) and first.losses == {"load_balancing_loss": 1.25, "z_loss": 3.0}
    assert second.loads == ((0.1, 2.0, 1.2, 0.7), (1.0,) * 4)
    notes = {index: each for index, each in enumerate(reported) if isinstance(each, str)}
    assert notes == {
        7: " warning: expert 2 of layer 0 received 0.0% of an even share of tokens over the last 100 iterations, and 1 "
        "more below 10%: raise --moe-aux-loss-coeff, or add --moe-router-enable-expert-bias"
    }
