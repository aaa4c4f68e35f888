"""Measured profiles as op times: through the points, monotonic between them, by the fit beyond; and their files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as draw

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.library import device
from megatron_terapipe.search.price.layer_times import LayerQuery, LayerTimes
from megatron_terapipe.search.price.profile import profile_to_json, read_profile, write_profile
from megatron_terapipe.search.price.profile_times import MeasuredProfile, Point, Surface
from megatron_terapipe.search.price.workload import Layer, gpt_workload
from tests.search.price.machines import gpt
from tests.search.price.profiles import LENGTHS, MODEL, SIZES, profile, seconds, workload

CPU = device("cpu-core")
BLOCK = workload().layers[1]


@pytest.fixture(scope="module")
def measured() -> MeasuredProfile:
    return MeasuredProfile(profile())


def times(measured: MeasuredProfile, layer: Layer = BLOCK, **more: object) -> LayerTimes:
    arguments: dict[str, object] = {"tensor_parallel_size": 1, "micro_batch_size": 1, "start": 0, "end": 64}
    return measured(LayerQuery(layer, CPU, **(arguments | more)))  # type: ignore[arg-type]


def test_points_come_back(measured: MeasuredProfile) -> None:
    for size in SIZES:
        for length in LENGTHS:
            starts = np.arange(0, 64, length)
            found = times(measured, micro_batch_size=size, start=starts, end=starts + length)
            expected = [seconds(size, start, start + length) for start in starts.tolist()]
            assert found.forward == pytest.approx(expected, rel=1e-9)
            assert found.weight_gradient == pytest.approx([0.8 * each for each in expected], rel=1e-9)


def test_sums_of_the_terms_are_exact_between_and_beyond_the_points(measured: MeasuredProfile) -> None:
    for size, start, end in ((1, 0, 24), (3, 5, 30), (8, 10, 60), (1, 0, 128)):
        assert times(measured, micro_batch_size=size, start=start, end=end).forward == pytest.approx(
            seconds(size, start, end), rel=1e-6
        )


def test_one_point_gives_times_proportional_to_rows() -> None:
    surface = Surface.through([Point(1, 0, 64, 0.2)])
    assert surface(2, 0, 64) == pytest.approx(0.4, rel=1e-12)
    assert surface(1, np.arange(0, 64, 16), np.arange(16, 80, 16)) == pytest.approx([0.05] * 4, rel=1e-12)
    assert surface(1, 0, 64, parts=2) == pytest.approx(0.1, rel=1e-12)


@pytest.mark.parametrize(
    ("points", "others"),
    [
        # fixed 0.1 + 0.01 for each of 10 rows: neither micro-batches nor lengths determine attention.
        ([Point(1, 0, 10, 0.2), Point(2, 0, 10, 0.3)], [Point(4, 0, 10, 0.5), Point(1, 0, 20, 0.3)]),
        ([Point(1, 0, 10, 0.2), Point(1, 0, 40, 0.5)], [Point(1, 0, 80, 0.9), Point(2, 0, 20, 0.5)]),
    ],
)
def test_two_points_separate_fixed_time_and_rows(points: list[Point], others: list[Point]) -> None:
    surface = Surface.through(points)
    for size, start, end, expected in (*points, *others):
        assert surface(size, start, end) == pytest.approx(expected, rel=1e-9)


def test_a_point_off_the_terms_is_still_met_and_its_neighbours_lean_to_it() -> None:
    points = [Point(1, 0, length, seconds(1, 0, length)) for length in (8, 16, 32, 64)]
    odd = [*points[:2], points[2]._replace(seconds=1.3 * points[2].seconds), *points[3:]]
    surface, smooth = Surface.through(odd), Surface.through(points)
    assert surface(1, 0, 32) == pytest.approx(1.3 * points[2].seconds, rel=1e-9)
    assert 1.05 < surface(1, 0, 30) / smooth(1, 0, 30) < 1.3


def test_noise_that_would_make_a_larger_op_faster_is_smoothed() -> None:
    points = [Point(1, start, start + 8, 1e-3 * (0.9 if start == 16 else 1.0)) for start in range(0, 64, 8)]
    surface = Surface.through(points)
    found = surface(1, np.arange(0, 56.0), np.arange(8, 64.0))
    assert (np.diff(found) >= -1e-15).all()
    assert found == pytest.approx(1e-3, rel=0.11)


@settings(max_examples=40)
@given(
    noise=draw.lists(draw.floats(0.7, 1.4), min_size=45, max_size=45),
    size=draw.floats(1, 6),
    start=draw.floats(0, 50),
    length=draw.floats(4, 60),
    more=draw.sampled_from(((1.3, 1.0, 0.0), (1.0, 1.3, 0.0), (1.0, 1.0, 6.0))),
)
def test_never_faster_where_there_is_more_to_do(
    noise: list[float], size: float, start: float, length: float, more: tuple[float, float, float]
) -> None:
    places = [(b, s, s + n) for b in SIZES for n in LENGTHS for s in range(0, 64, n)]
    points = [Point(*place, seconds(*place) * factor) for place, factor in zip(places, noise, strict=True)]
    surface = Surface.through(points)
    first = surface(size, start, start + length)
    begin = start + more[2]
    second = surface(size * more[0], begin, begin + length * more[1])
    # Factors of neighbouring micro-batches and lengths may bend the surface by the remaining noise.
    assert second >= first * (1 - 0.02)


def test_tensor_parallel_sizes_between_and_beyond(measured: MeasuredProfile) -> None:
    one, two, four = (float(times(measured, tensor_parallel_size=size).forward) for size in (1, 2, 4))
    assert two == pytest.approx(seconds(1, 0, 64, 2))
    assert four == pytest.approx(seconds(1, 0, 64, 4), rel=1e-6)
    wide = MeasuredProfile(profile((1, 4)))
    between = float(times(wide, tensor_parallel_size=2).forward)
    assert between == pytest.approx((one * seconds(1, 0, 64, 4)) ** 0.5)


def test_arrays_broadcast(measured: MeasuredProfile) -> None:
    tensor, size = np.array([[1], [2], [4]]), np.array([1, 2])
    found = times(measured, tensor_parallel_size=tensor, micro_batch_size=size)
    assert np.shape(found.forward) == (3, 2)
    assert found.forward[1, 1] == times(measured, tensor_parallel_size=2, micro_batch_size=2).forward


def test_recomputation(measured: MeasuredProfile) -> None:
    plain, full, selective = (times(measured, recompute=each) for each in ("none", "full", "selective"))
    assert full.input_gradient - plain.input_gradient == pytest.approx(plain.forward)
    assert selective.input_gradient - plain.input_gradient == pytest.approx(5e-7 * 64, rel=1e-6)
    assert selective.forward == plain.forward
    unmeasured = MeasuredProfile(profile(selective=False))
    assert times(unmeasured, recompute="selective").input_gradient == pytest.approx(
        plain.input_gradient + plain.forward / 3
    )
    head = workload().layers[-1]
    assert times(measured, head, recompute="full").input_gradient == times(measured, head).input_gradient


def test_a_layer_that_does_not_attend_does_not_mind_where_a_token_slice_begins(measured: MeasuredProfile) -> None:
    head = workload().layers[-1]
    assert times(measured, head, start=48, end=64).forward == times(measured, head, start=0, end=16).forward


def test_other_sizes_are_refused() -> None:
    other = gpt_workload(gpt(4, 128, 4, 64, 256))
    measured = MeasuredProfile(profile())
    with pytest.raises(ConfigError) as caught:
        times(measured, other.layers[1])
    assert str(caught.value) == (
        "the profile just measured has no block of hidden size 128, 4 heads, MLP of 512; it has a block of hidden "
        "size 64, 4 heads, MLP of 256: measure this model, or give no profile"
    )
    longer = gpt_workload(replace(MODEL, seq_length=128, max_position_embeddings=128))
    assert times(measured, longer.layers[1], end=128).forward > times(measured).forward


def test_layers_with_and_without_a_window_are_measured_apart() -> None:
    """Each has a surface of its own, over the positions that its tokens attend to."""
    model = replace(MODEL, sliding_window=10, window_attn_skip_freq="2")
    measured = MeasuredProfile(profile(model=model))
    windowed, whole = gpt_workload(model).layers[1:3]
    for layer, window in ((windowed, 10), (whole, None)):
        for start, end in ((0, 24), (5, 30), (40, 61)):
            assert times(measured, layer, start=start, end=end).forward == pytest.approx(
                seconds(1, start, end, window=window), rel=1e-6
            )
    assert times(measured, windowed, start=48, end=64).forward < times(measured, whole, start=48, end=64).forward
    other = gpt_workload(replace(MODEL, sliding_window=20)).layers[1]
    with pytest.raises(ConfigError, match=r"4 heads in a window of 20, MLP of 256; it has .* in a window of 10"):
        times(measured, other)


def test_write_and_read(tmp_path: Path) -> None:
    path = tmp_path / "P.json"
    write_profile(profile(), str(path))
    read = read_profile(str(path))
    assert profile_to_json(read) == profile_to_json(profile())
    assert read.source == str(path)
    # A point a line, so that people can look at it.
    assert "\n    [1, 0, 8, " in path.read_text()


def faulty(change: str, value: Any) -> dict[str, Any]:
    document = json.loads(json.dumps(profile_to_json(profile())))
    *way, last = change.split(".")
    place: Any = document
    for step in way:
        place = place[int(step)] if step.isdigit() else place[step]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return document


@pytest.mark.parametrize(
    ("change", "value", "line"),
    [
        (
            "format",
            "other",
            'format "other" is not terapipe-profile-1: give a file that `terapipe search measure` wrote',
        ),
        ("colour", "red", 'colour "red" is not a known field: '),
        ("layers.0.points", [[1, 0, 8, 1e-3]], "layers[0].points[0] [1, 0, 8, 0.001] is not [micro"),
        ("layers.0.points", [[1, 8, 8, 1, 1, 1]], "layers[0].points[0] [1, 8, 8, 1, 1, 1] has an empty token slice"),
        ("links.0.points", [[8, -1.0]], "links[0].points[0] [8, -1.0] is not [bytes, seconds], none"),
        ("engine.op_s", -1, "engine.op_s -1 is not a number from 0: give one"),
    ],
)
def test_refused_profiles(change: str, value: Any, line: str, tmp_path: Path) -> None:
    path = tmp_path / "P.json"
    path.write_text(json.dumps(faulty(change, value)))
    with pytest.raises(ConfigError) as caught:
        read_profile(str(path))
    assert str(caught.value).startswith(f"{path}: {line}")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--json \S+/file/P.json cannot be written \(.+\): name"):
        write_profile(profile(), str(tmp_path / "file/P.json"))
