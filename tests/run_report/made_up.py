"""Made-up metrics files, timelines and answers of the search."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.measured import StepRecord
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import SCHEDULES, rank_orders
from deepspeed_ext.plan.simulate import simulate
from megatron_terapipe.records import (
    EvaluationMetrics,
    ExpertLoads,
    IterationMetrics,
    Machine,
    RunEnd,
    RunStart,
    Saved,
)
from megatron_terapipe.search.price.cost_model import Prediction, TimeBreakdown
from megatron_terapipe.search.price.memory import RankMemory
from megatron_terapipe.strategy import Strategy

STRATEGY = Strategy(pipeline_parallel_size=2, num_token_slices=2, token_slices=(16, 16), micro_batch_size=2)
START = RunStart(
    iteration=0,
    train_iters=40,
    command="pretrain_gpt.py --lr 1e-4",
    directory=".",
    versions={"python": "3.12.0", "torch": "2.13.0"},
    machine=Machine(host="node-1", num_hosts=1, num_devices=2, device="NVIDIA A100-SXM4-80GB"),
    model_name="2x32",
    parameters=1000,
    model={"seq_length": 32},
    precision="bf16",
    strategy=STRATEGY.to_json(),
    time=1e9,
)
GIB = 2**30


def iteration(number: int, **more: Any) -> IterationMetrics:
    """An iteration of a run whose loss is 10 / its number; every tenth measures memory."""
    seconds = more.pop("iteration_time_s", 0.5 if number > 1 else 3.0)
    values: dict[str, Any] = {
        "consumed_samples": 2 * number,
        "lm_loss": 10.0 / number,
        "grad_norm": 1.0,
        "learning_rate": 1e-4,
        "tokens_per_second": 64 / seconds,
        "global_batch_size": 2,
        "tflops_per_device": 100.0,
        "mfu": 0.4,
        "tflops_per_device_causal": 75.0,
        "mfu_causal": 0.3,
        "loss_scale": None,
        "skipped_iterations": 0,
        "peak_memory_bytes": (3 * GIB, 2 * GIB) if number % 10 == 0 else None,
    }
    return IterationMetrics(iteration=number, iteration_time_s=seconds, **{**values, **more})


def lines_of(numbers: Iterable[int], changes: Mapping[int, Mapping[str, Any]] | None = None) -> list[Any]:
    """Iterations, some of them changed, with an evaluation after every tenth."""
    lines: list[Any] = []
    for number in numbers:
        lines.append(iteration(number, **(changes or {}).get(number, {})))
        if number % 10 == 0:
            lines.append(
                EvaluationMetrics(iteration=number, consumed_samples=2 * number, part="validation", lm_loss=11 / number)
            )
    return lines


def whole_run(changes: Mapping[int, Mapping[str, Any]] | None = None) -> list[Any]:
    """A run that was stopped after iteration 25, and resumed from iteration 20."""
    return [
        START,
        *lines_of(range(1, 26), changes),
        Saved(iteration=20, seconds=0.25, time=1e9 + 15),
        ExpertLoads(
            iteration=20, iterations=20, layers=(1, 3), loads=((1.5, 0.5), (0.0, 2.0)), losses={"z_loss": 0.01}
        ),
        RunEnd(iteration=25, reason="a SIGTERM came", failed=False, time=1e9 + 20),
        replace(START, iteration=20, time=1e9 + 80),
        *lines_of(range(21, 41), changes),
        RunEnd(iteration=40, reason="", failed=False, time=1e9 + 100),
    ]


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    """Write lines as the trainer does, after a start, and return the file."""
    lines = list(lines)
    lines = lines if isinstance(lines[0], RunStart) else [START, *lines]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line.as_json()) + "\n" for line in lines))
    return path


def write_timeline(directory: Path) -> Path:
    """Write a measured step of two stages, and return its directory."""
    shape = PipelineShape(2, 1, 2)
    costs = OpCosts(((0.05, 0.06),) * 2, ((0.10, 0.12),) * 2)
    timeline = replace(simulate(rank_orders(SCHEDULES["1f1b"], shape), shape, costs), unit="s")
    directory.mkdir(parents=True)
    (directory / "iteration_000003.json").write_text(StepRecord(timeline, "1f1b", 3, (16.0, 16.0)).to_json())
    return directory


def write_answer(path: Path, strategy: Strategy = STRATEGY) -> Path:
    """Write an answer of the search that predicts 0.4 s, and return its file."""
    nothing = [dict.fromkeys((each.name for each in fields(kind)), 0.0) for kind in (RankMemory, TimeBreakdown)]
    memory = RankMemory(**nothing[0] | {"weights": 1e9, "gradients": 1e9, "activations": 1e9})
    breakdown = TimeBreakdown(
        **nothing[1] | {"compute_s": 0.3, "bubble_s": 0.08, "transfer_s": 0.01, "optimizer_s": 0.01}
    )
    prediction = Prediction(
        iteration_time_s=0.4, bubble_ratio=0.2, breakdown=breakdown, memory=(memory, memory), interval_s=(0.35, 0.6)
    )
    speed = {
        **{"tokens_per_s": 160.0, "tokens_per_s_per_device": 80.0, "tflops_per_device": 125.0},
        **{"mfu": 0.5, "mfu_causal": 0.45, "tflops_per_device_causal": 112.5},
    }
    document = {
        "schema_version": 2,
        "command": "predict",
        "model": {"name": "2x32", "parameters": 1000, "num_layers": 2, "seq_length": 32, "settings": None},
        "cluster": {"name": "two", "num_nodes": 1, "num_devices": 2, "devices": {"A100": 2}, "nodes": []},
        "software": "terapipe",
        "precision": "bf16",
        "global_batch_size": 2,
        "constraints": {},
        "notes": [],
        "entries": [
            {
                "rank": 1,
                "index": 0,
                "strategy": strategy.to_json(),
                "predicted": prediction.to_json() | speed,
                "feasible": True,
                "reason": None,
            }
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path
