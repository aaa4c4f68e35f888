"""TeraPipe's settings as the product prices them, beside what its authors measured."""

import json
from dataclasses import replace

import numpy as np
import pytest

from examples.terapipe.hardware import PHYSICS, V100, cost_model_of, strategy_of
from examples.terapipe.published import EQUAL_TOKEN_SLICES, SETTINGS, SWEEP
from examples.terapipe.settings import main, predicted
from megatron_terapipe.search.price.roofline import Roofline

BY_NAME = {one.name: one for one in (*SETTINGS, *SWEEP)}


@pytest.mark.parametrize("name", [1, 5, 8, 9])
def test_token_slices_gain_what_was_measured(name):
    entry = predicted(BY_NAME[name])
    known = entry["published"]
    assert entry["speedup"] == pytest.approx(known["speedup"], rel=0.15)
    for time in ("without_s", "with_s"):
        assert entry[time] == pytest.approx(known[time], rel=0.2)
    cut = entry["token_slices"]
    if known["token_slices"] is not None:
        assert len(cut) == pytest.approx(len(known["token_slices"]), rel=0.4)
    # Later token slices attend to more, so that none is longer than the one before.
    assert cut == sorted(cut, reverse=True)
    assert not any(length % 8 for length in cut)


@pytest.mark.parametrize(("name", "counts"), [(8, (1, 4, 8, 16)), (9, (1, 4, 8, 16, 32))])
def test_the_curve_over_equal_token_slices_is_that_which_was_measured(name, counts):
    setting = BY_NAME[name]
    cost_model, strategy = cost_model_of(setting), strategy_of(setting)
    times = [cost_model.predict_time(replace(strategy, num_token_slices=count)).iteration_time_s for count in counts]
    assert times == pytest.approx([EQUAL_TOKEN_SLICES[name][count] for count in counts], rel=0.2)


def test_where_the_pipeline_is_full_token_slices_gain_nothing():
    assert predicted(BY_NAME[2])["token_slices"] == [2048]


def test_longer_sequences_gain_more():
    gains = [predicted(BY_NAME[f"gpt3-13b-{length}"])["speedup"] for length in (2048, 8192)]
    assert gains == sorted(gains)
    assert gains[-1] > 5


def test_matrix_products_are_as_fast_as_they_were_measured():
    sizes = np.array([1024.0, 2048.0, 4096.0, 8192.0])
    roofline = Roofline(PHYSICS, cost_model_of(BY_NAME[5]).software, "fp16")
    times = roofline.product_s(V100, sizes, sizes, sizes)
    assert 2 * sizes**3 / times == pytest.approx([57.3e12, 78.2e12, 95.7e12, 97.4e12], rel=0.08)


def test_a_pipeline_is_on_as_few_nodes_as_can_be():
    groups = cost_model_of(BY_NAME[1]).groups(strategy_of(BY_NAME[1]))
    assert groups.pipe.crosses_nodes[:-1].tolist() == [boundary % 8 == 7 for boundary in range(23)]


def test_the_command(capsys):
    assert main(["--setting", "5", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert {"setting", "without_s", "with_s", "speedup", "token_slices"} <= entry.keys()
    assert entry["setting"] == 5
    assert main(["--setting", "8", "--curves", "--joint"]) == 0
    shown = capsys.readouterr().out
    assert "16 equal token slices" in shown
    assert "joint program: 1 x" in shown
    assert main(["--setting", "11"]) == 2
    assert "--setting 11 is none of 1, 2," in capsys.readouterr().err
