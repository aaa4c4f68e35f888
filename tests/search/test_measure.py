"""What `measure` runs: the layers of the real model, in token slices, there and back."""

from dataclasses import replace

import pytest
import torch

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.command.measure import numbers
from megatron_terapipe.search.measure.sizes import MeasuredRun, MeasuredSizes, default_numbers_of_token_slices
from megatron_terapipe.search.profile.profile import OpPoint
from megatron_terapipe.search.profile.shapes import shape_of
from megatron_terapipe.search.workload.gpt import gpt_workload
from tests.distributed import run_distributed

MODEL = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=32, vocab_size=128)


def sizes(**more: object) -> MeasuredSizes:
    values: dict[str, object] = {
        "model": MODEL,
        "precision": "fp32",
        "tensor_parallel_sizes": (1, 2),
        "micro_batch_sizes": (2, 1),
        "nums_token_slices": (1, 4),
        "num_processes": 2,
        "budget_s": 1.0,
    }
    return MeasuredSizes(**(values | more))  # type: ignore[arg-type]


def measure(tensor_parallel_size: int, recompute: str) -> list[tuple[object, list[OpPoint]]]:
    import torch.distributed as dist

    from megatron_terapipe.search.measure import layers as measuring

    # What times come to is for benchmarks; a test needs them once.
    measuring.LEAST_REPEATS, measuring.LEAST_S = 1, 0.0
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][dist.get_rank()]
    ranks = measuring.PartAlone(dist.get_rank() % tensor_parallel_size, tensor_parallel_size, alone)
    device = torch.device("cpu")
    timer = measuring.LayerTimer(MODEL, ranks, torch.float32, device)
    run = MeasuredRun(tensor_parallel_size, 2, 4, recompute)
    found = measuring.build_layers(MODEL, ranks, torch.float32, device, recompute=recompute)
    return [(layers.shape, timer.points(layers, run)) for layers in found]


@pytest.mark.parametrize(("tensor_parallel_size", "recompute"), [(1, "none"), (2, "none"), (2, "selective")])
def test_every_kind_of_layer_is_timed_at_every_token_slice(tensor_parallel_size: int, recompute: str) -> None:
    first, second = run_distributed(measure, 2, tensor_parallel_size, recompute)
    shapes = {shape_of(layer) for layer in gpt_workload(MODEL).layers}
    assert {shape for shape, _ in first} == (
        {shape for shape in shapes if shape[0] == "block"} if recompute != "none" else shapes
    )
    for shape, points in first:
        assert [point[:3] for point in points] == [(2, start, start + 8) for start in (0, 8, 16, 24)]
        assert all(point.forward_s > 0 for point in points)
        backward = [point.input_gradient_s + point.weight_gradient_s for point in points]
        assert min(backward) > 0
        if shape[0] == "block":
            assert all(point.weight_gradient_s > 0 and point.input_gradient_s > 0 for point in points)
    # Every rank knows the same: means over the ranks.
    assert first == second


def links() -> list[object]:
    from megatron_terapipe.search.measure import links as measuring

    measuring.REPEATS, measuring.MESSAGE_BYTES = 1, (1024, 4096)
    return measuring.measure_links(torch.device("cpu"))


def test_links_are_timed_by_size() -> None:
    first, second = run_distributed(links, 2)
    assert first == second
    assert [(link.what, link.num_ranks, len(link.points)) for link in first] == [
        ("all_reduce", 2, 2),
        ("transfer", 2, 2),
    ]
    assert all(seconds > 0 for link in first for _, seconds in link.points)


def engine() -> object:
    from megatron_terapipe.search.measure import engine as measuring

    measuring.STEPS = 2
    return measuring.measure_engine(MODEL, "fp32", 2)


def test_the_engine_is_timed_around_its_ops() -> None:
    (found,) = run_distributed(engine, 1)
    assert found.op_s > 0
    assert found.optimizer_s_per_parameter >= 0
    assert found.iteration_s >= 0


def test_what_tells_most_is_measured_first() -> None:
    runs = list(sizes().runs())
    assert runs[:3] == [MeasuredRun(1, 1, 1, "none"), MeasuredRun(2, 1, 1, "none"), MeasuredRun(1, 1, 4, "none")]
    assert [run.recompute for run in runs] == ["none"] * 8 + ["selective"] * 8
    assert default_numbers_of_token_slices(512) == (1, 2, 4, 8, 16)
    assert default_numbers_of_token_slices(48) == (1, 2)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"tensor_parallel_sizes": (3,)}, "--tensor-parallel-size 3 does not divide the 4 heads of the model: leave"),
        ({"nums_token_slices": (5,)}, "--num-token-slices 5 does not divide the 32 tokens of a sequence: leave it out"),
    ],
)
def test_what_the_model_does_not_allow_is_refused(change: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(sizes(), **change)  # type: ignore[arg-type]
    assert str(caught.value).startswith(line)


def test_lists_of_numbers() -> None:
    assert numbers("4,1,2,1", "--micro-batch-size") == (1, 2, 4)
    for text in ("", "0", "1,x", "-1"):
        with pytest.raises(
            ConfigError, match=r"--micro-batch-size .* is not a list of whole numbers from 1: write it as"
        ):
            numbers(text, "--micro-batch-size")
