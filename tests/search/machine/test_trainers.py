"""Descriptions of trainers, and files that change one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import published
from megatron_terapipe.dimensions import Dimension
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.answer.flags import TRAINERS
from megatron_terapipe.search.machine.library import device
from megatron_terapipe.search.machine.software import Software
from megatron_terapipe.search.machine.trainer_files import find_software, read_trainers
from megatron_terapipe.search.machine.trainers import DGXC, SOFTWARE, TERAPIPE
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, reachable_bandwidth
from megatron_terapipe.search.price.layer_times import LayerQuery
from megatron_terapipe.search.price.roofline import Roofline
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.strategy import DIMENSIONS, Strategy
from tests.search.price.machines import gpt
from tests.search.problems import small_problem

PUBLISHED = read_trainers(str(published.TRAINERS)).software
"""Trainers of the package, and of published runs."""


def written(tmp_path: Path, document: object) -> str:
    path = tmp_path / "ours.json"
    path.write_text(json.dumps(document))
    return str(path)


def test_the_flag_names_all_of_them() -> None:
    assert TRAINERS == tuple(SOFTWARE)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_description_is_complete(name: str) -> None:
    software = PUBLISHED[name]
    known: dict[str, Dimension] = {each.name: each for each in DIMENSIONS}
    assert {dimension for dimension, _ in software.runs} <= set(known)
    for precision in ("fp32", "fp16", "bf16"):
        for zero_stage in (0, 1, 3):
            if software.can_run("zero_stage", zero_stage):
                state = software.state(precision, zero_stage)
                # A weight, a gradient and Adam's two moments at least.
                assert state.weights + state.gradients + state.optimizer >= (16 if precision != "bf16" else 14)
    assert 0 <= software.communication.tensor_parallel_overlap < 1


def test_a_file_changes_its_fields_only(tmp_path: Path) -> None:
    document = {"like": "megatron-core", "communication": {"tensor_parallel_overlap": 0.8}, "launch_factor": 0.5}
    ours, like = find_software(written(tmp_path, document)), SOFTWARE["megatron-core"]
    assert (ours.name, ours.launch_factor, ours.communication.tensor_parallel_overlap) == ("ours", 0.5, 0.8)
    assert (ours.operators, ours.states, ours.runs) == (like.operators, like.states, like.runs)
    assert hash(ours) != hash(like) and like.measured and not ours.measured


@pytest.mark.parametrize(
    ("software", "device_name", "num_devices", "kind", "parameters", "run"),
    [
        ("fsdp", "H100-SXM5-80GB", 512, "dense", 70e9, "Llama 3.1 70B on 256 H100 (torchtitan)"),
        ("fsdp", "H100-SXM5-80GB", 512, "dense", 406e9, None),
        ("fsdp", "H100-SXM5-80GB", 4096, "dense", 70e9, None),
        ("fsdp", "H100-SXM5-80GB", 64, "experts", 30e9, None),
        ("fsdp", "B200-SXM-180GB", 256, "dense", 70e9, None),
        ("megatron-core", "H100-SXM5-80GB", 512, "dense", 406e9, f"Llama 3.1 405B on 512 to 2,304 H100 ({DGXC})"),
        # Of two models within the factor the nearer one.
        ("megatron-core", "H100-SXM5-80GB", 64, "dense", 20e9, f"Nemotron-4 15B on 16 to 2,048 H100 ({DGXC})"),
        ("terapipe", "H100-SXM5-80GB", 64, "dense", 20e9, None),
    ],
)
def test_a_measured_run_is_like_the_question(
    software: str, device_name: str, num_devices: int, kind: str, parameters: float, run: str | None
) -> None:
    assert SOFTWARE[software].measured_on([device(device_name)], num_devices, kind, parameters) == run


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "like null is not a known trainer: choose among terapipe, megatron-lm"),
        ({"like": "megatron"}, "did you mean megatron-lm?"),
        ([], "is not an object"),
        ({"like": "fsdp", "launches": 1}, "launches is not known: choose among name"),
        ({"like": "fsdp", "operators": {"rmsnrom": {}}}, "operators.rmsnrom is not known: did you mean rmsnorm?"),
        ({"like": "fsdp", "operators": 3}, "operators 3 is not an object: give fields of it: layernorm"),
        ({"like": "fsdp", "launch_factor": -1}, "launch_factor -1 is not a number from 0"),
        (
            {"like": "fsdp", "communication": {"tensor_parallel_overlap": 1.8}},
            "communication.tensor_parallel_overlap 1.8 is not a share up to 1: give one",
        ),
        ({"like": "fsdp", "launch_factor": "fast"}, 'launch_factor "fast" is wrong'),
        ({"like": "fsdp", "attention": {"kernel": "flash-9"}}, 'attention.kernel "flash-9" is wrong'),
    ],
)
def test_errors_name_the_field(tmp_path: Path, document: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_software(written(tmp_path, document))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_neither_a_file_nor_a_name() -> None:
    with pytest.raises(ConfigError, match="--software megatron is neither a file nor a known trainer: did you mean"):
        find_software("megatron")


GPT_NEO = gpt_workload(gpt(32, 2560, 32, 2048, 128256))
BLOCK, GH200 = GPT_NEO.layers[1], device("GH200-96GB")
EFFICIENCY = HardwareEfficiency()
DEEPSPEED_EAGER = PUBLISHED["deepspeed-eager"]


@pytest.mark.parametrize(
    ("sequences", "forward_s", "backward_s", "within"), [(16, 36.5e-3, 97.8e-3, 0.02), (1, 2.13e-3, 5.83e-3, 0.1)]
)
def test_a_layer_takes_its_published_time(sequences: int, forward_s: float, backward_s: float, within: float) -> None:
    query = LayerQuery(BLOCK, GH200, tensor_parallel_size=1.0, micro_batch_size=float(sequences), start=0.0, end=2048.0)
    times = Roofline(EFFICIENCY, DEEPSPEED_EAGER, "fp16")(query)
    assert times.forward == pytest.approx(forward_s, rel=within)
    assert times.input_gradient + times.weight_gradient == pytest.approx(backward_s, rel=within)


def test_a_step_takes_its_published_time() -> None:
    moved = EFFICIENCY.optimizer_passes * DEEPSPEED_EAGER.step_bytes * BLOCK.parameters
    seconds = moved / (reachable_bandwidth(GH200) * EFFICIENCY.memory_efficiency)
    assert seconds == pytest.approx(2.86e-3, rel=0.02)


LAYOUT = Strategy(
    data_parallel_size=2,
    pipeline_parallel_size=2,
    tensor_parallel_size=1,
    zero_stage=1,
    recompute="selective",
    global_batch_size=8,
)
ON_TWO = replace(LAYOUT, data_parallel_size=1, tensor_parallel_size=2)


def priced(software: Software, strategy: Strategy) -> tuple[float, float]:
    problem = small_problem()
    prediction = Pricing(problem.workload, problem.cluster, software=software).predict(strategy)
    return prediction.iteration_time_s, prediction.peak_memory_bytes


def changed(field: str, **changes: object) -> Software:
    """This trainer with other values in one of its parts."""
    part = replace(getattr(TERAPIPE, field), **changes)
    return replace(TERAPIPE, **{field: part})  # type: ignore[arg-type]


BLOCKING = changed("communication", overlaps_transfers=False)
FACTS: list[tuple[Software, Software, Strategy]] = [
    *(
        (replace(TERAPIPE, **fact), TERAPIPE, LAYOUT)  # type: ignore[arg-type]
        for fact in (
            {"launch_factor": 50.0},
            {"allocator_factor": 2.0},
            {"step_bytes": 180.0},
            {"bucket_elements": 1000},
            {"selective_recomputes": "attention"},
            {"selective_recomputes": "operators"},
            {"residual_dropout": True},
            {"logits_at_once": 100},
        )
    ),
    (BLOCKING, TERAPIPE, LAYOUT),
    (changed("communication", overlaps_transfers=False, shares_transfers=True), BLOCKING, ON_TWO),
    (changed("communication", overlaps_gradient_reduction=False), TERAPIPE, LAYOUT),
    (changed("communication", overlaps_weight_gather=True), TERAPIPE, LAYOUT),
    (changed("communication", broadcasts_parts=True), TERAPIPE, LAYOUT),
    (changed("communication", reduction_bytes=8), TERAPIPE, LAYOUT),
    *(
        (changed("communication", **fact), TERAPIPE, replace(ON_TWO, sequence_parallel=True))
        for fact in ({"tensor_parallel_overlap": 0.5}, {"copies_parts": True})
    ),
    *(
        (changed("operators", **{name: replace(getattr(TERAPIPE.operators, name), forward=1e3)}), TERAPIPE, LAYOUT)
        for name in ("layernorm", "residual", "activation", "heads", "loss", "embedding")
    ),
]


@pytest.mark.parametrize(("software", "other", "strategy"), FACTS, ids=range(len(FACTS)))
def test_every_fact_changes_a_price(software: Software, other: Software, strategy: Strategy) -> None:
    assert priced(software, strategy) != priced(other, strategy)


def test_trainers_differ() -> None:
    def unsliced(software: Software) -> Strategy:
        return replace(LAYOUT, recompute="none", zero_stage=dict(software.runs)["zero_stage"][-1])

    norms = {software: (software.operators.rmsnorm, software.attention.on) for software in PUBLISHED.values()}
    assert len({(*priced(software, unsliced(software)), norm) for software, norm in norms.items()}) == len(PUBLISHED)
