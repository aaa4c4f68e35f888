"""Factors on a measured profile, from runs of which the truth is known."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.__main__ import main
from megatron_terapipe.search.answer.trial_command import Journal, Outcome
from megatron_terapipe.search.learn.calibration import FACTORS, calibrate, no_calibration
from megatron_terapipe.search.learn.cluster_calibrations import Calibrations
from megatron_terapipe.search.learn.costs import Costs
from megatron_terapipe.search.learn.trials import Trial
from megatron_terapipe.search.learn.validation import deal_groups, predict_in_folds, predict_trials
from megatron_terapipe.search.machine.cluster import cluster_document, model_document
from megatron_terapipe.search.machine.cluster_files import parse_cluster, read_cluster
from megatron_terapipe.search.machine.trainers import TERAPIPE
from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.price.efficiency import ProfileFactors
from megatron_terapipe.search.price.profile import Profile, ProfiledLink, write_profile
from megatron_terapipe.search.price.profile_times import MeasuredProfile, measured_efficiency
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.search.price.workload_files import read_workload
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import Strategy
from tests.search.answer.answers import checked
from tests.search.learn import synthetic
from tests.search.price.profiles import MODEL, profile

CLUSTER = parse_cluster({"nodes": [{"device": "cpu-core", "devices": 2}]}, "test")[0]
WORKLOAD = gpt_workload(MODEL)
PROFILE = profile()
STRATEGIES = [
    Strategy(global_batch_size=8, **sizes)  # type: ignore[arg-type]
    for sizes in (
        {"pipeline_parallel_size": 2, "micro_batch_size": 2},
        {"data_parallel_size": 2, "micro_batch_size": 1},
        {"tensor_parallel_size": 2, "micro_batch_size": 2},
        {"data_parallel_size": 2, "micro_batch_size": 4},
        {"pipeline_parallel_size": 2, "num_token_slices": 4},
        {"tensor_parallel_size": 2, "micro_batch_size": 4},
    )
]


def slower(factor: float) -> Profile:
    """The profile of a machine with slower ops."""
    layers = [
        layer.model_copy(
            update={
                "points": tuple(
                    point._replace(**{op: factor * getattr(point, op) for op in OPS}) for point in layer.points
                )
            }
        )
        for layer in PROFILE.layers
    ]
    return PROFILE.model_copy(update={"layers": tuple(layers)})


OPS = ("forward_s", "input_gradient_s", "weight_gradient_s")


def model(measured: Profile, factors: ProfileFactors | None = None) -> CostModel:
    found = CostModel(
        WORKLOAD,
        CLUSTER,
        efficiency=measured_efficiency(measured, CLUSTER),
        op_times=MeasuredProfile(measured),
        precision="fp32",
    )
    return found if factors is None else found.with_constants(factors)


TRUTH = model(slower(1.3))


def truth_s(strategy: Strategy) -> float:
    return TRUTH.predict_time(strategy).iteration_time_s


def trial(strategy: Strategy, seconds: float | None, **more: object) -> Trial:
    same = {"workload": WORKLOAD, "cluster": CLUSTER, "software": TERAPIPE, "precision": "fp32"}
    return synthetic.trial(strategy, seconds, **{"group": str(strategy), **same, **more})


def trials(noise: float = 0.0, count: int = 6) -> list[Trial]:
    draw = np.random.default_rng(1)
    return [trial(one, truth_s(one) * float(np.exp(noise * draw.normal()))) for one in STRATEGIES[:count]]


def errors(factors: ProfileFactors | None) -> np.ndarray:
    found = model(PROFILE, factors)
    return np.array([abs(found.predict_time(one).iteration_time_s / truth_s(one) - 1) for one in STRATEGIES])


def test_ops_that_take_longer_in_training_are_recognised() -> None:
    """They are, though messages, gaps and the step could have been blamed."""
    assert errors(None).mean() > 0.05
    found = calibrate(trials(), PROFILE)
    assert found.factors is not None and found.efficiency is None and (found.num_trials, found.notes) == (6, ())
    assert found.factors.ops == pytest.approx(1.3, rel=0.03)
    assert (found.factors.messages, found.factors.gaps, found.factors.step) == pytest.approx((1, 1, 1), rel=0.05)
    assert errors(found.factors).max() < 0.01


def test_intervals_contain_the_measurements_and_widen_with_scatter() -> None:
    calm, wild = (calibrate(trials(noise), PROFILE) for noise in (0.01, 0.2))
    slopes = calm.slopes(model(PROFILE, calm.factors), STRATEGIES)
    assert slopes.shape == (len(STRATEGIES), len(FACTORS.names)) and calm.intervals.parameter_names == FACTORS.names
    # Everything that takes time belongs to a factor, but for the latency of links.
    assert slopes.sum(axis=1) == pytest.approx(1, abs=0.06)
    assert (calm.intervals.half_width(slopes) > errors(calm.factors)).all()
    assert (wild.intervals.half_width(slopes) > 2 * calm.intervals.half_width(slopes)).all()


def test_models_that_the_profile_does_not_cover_are_left_out() -> None:
    wider = gpt_workload(replace(MODEL, hidden_size=128, ffn_hidden_size=None, kv_channels=None))
    other = trial(STRATEGIES[0], 100.0, workload=wider, path="t.jsonl")
    found = calibrate([*trials(), other], PROFILE)
    assert found.num_trials == 6 and found.notes[0].startswith("1 trials are of models that the profile does not cover")
    assert found.factors is not None and found.factors.ops == pytest.approx(1.3, rel=0.03)
    with pytest.raises(ConfigError, match=r"covers no trial of t.jsonl.*measure one of these models"):
        calibrate([other], PROFILE)


def test_trials_are_cross_validated_on_the_profile() -> None:
    predicted = predict_in_folds(trials(), deal_groups(trials(), 3), profile=PROFILE)
    assert [one.calibration.num_trials for one in predicted] == [4] * 6
    for one in predicted:
        assert one.iteration_time_s == pytest.approx(one.trial.iteration_time_s, rel=0.03)
        assert one.interval_s[0] < (one.trial.iteration_time_s or 0.0) < one.interval_s[1]


def test_validation_prices_messages_on_the_measured_links() -> None:
    nodes = parse_cluster({"nodes": [{"device": "cpu-core", "devices": 1, "count": 2}]}, "test")[0]
    slow = tuple((size, 0.05 + size / 1e9) for size in (2**10, 2**14))
    network = ProfiledLink(where="network", what="transfer", num_ranks=2, points=slow)
    measured = PROFILE.model_copy(update={"links": (*PROFILE.links, network)})
    (found,) = predict_trials([trial(STRATEGIES[0], 1.0, cluster=nodes)], Calibrations(), profile=measured)
    costs = Costs(
        workload=WORKLOAD, precision="fp32", software=TERAPIPE, calibration=no_calibration(), profile=measured, notes=()
    )
    assert found.iteration_time_s == costs.pricing_on(nodes).predict(STRATEGIES[0]).iteration_time_s > 0.1


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A model, a cluster, a profile, trials and strategies, as commands read them."""
    texts = {
        "model.json": json.dumps(model_document(MODEL)),
        "cluster.json": json.dumps(cluster_document(CLUSTER.nodes)),
        "strategies.jsonl": "\n".join(json.dumps(one.to_json()) for one in STRATEGIES),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    workload, cluster = read_workload(str(tmp_path / "model.json")), read_cluster(str(tmp_path / "cluster.json"))
    problem = SearchProblem(workload=workload, cluster=cluster, precision="fp32", global_batch_size=8)
    journal = Journal(path=tmp_path / "trials.jsonl", problem=problem)
    for one in trials():
        journal.write(one.strategy, [Outcome(iteration_time_s=one.iteration_time_s)], trial_id=str(one.strategy))
    write_profile(PROFILE, str(tmp_path / "profile.json"))
    return {name: str(tmp_path / name) for name in (*texts, "trials.jsonl", "profile.json")}


def test_the_flags_together(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", files["model.json"], files["cluster.json"], "--strategies", files["strategies.jsonl"]]
    words += ["--profile", files["profile.json"]]
    widths = []
    for more, least, most in (([], 0.05, 1.0), (["--calibrate", files["trials.jsonl"]], 0.0, 0.01)):
        assert main([*words, *more, "--json", "-"]) == 0
        predicted = [entry["predicted"] for entry in json.loads(capsys.readouterr().out)["entries"]]
        off = [
            abs(one["iteration_time_s"] / truth_s(each) - 1) for one, each in zip(predicted, STRATEGIES, strict=True)
        ]
        assert least <= np.mean(off) <= most
        widths.append(np.mean([np.log(one["interval_s"][1] / one["interval_s"][0]) for one in predicted]))
    assert widths[1] < 0.7 * widths[0]
    found = calibrate(trials(), PROFILE)
    expected = found.intervals.half_width(found.slopes(model(PROFILE, found.factors), STRATEGIES))
    assert widths[1] == pytest.approx(2 * expected.mean(), rel=0.01)
    assert main([*words, "--calibrate", files["trials.jsonl"]]) == 0
    assert "ops take 1.3" in " ".join(capsys.readouterr().out.split())


def test_trial_shows_errors_before_and_after_calibration(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["trial", files["model.json"], files["cluster.json"], "--global-batch-size", "8"]
    words += ["--strategies", files["strategies.jsonl"], "--trials", files["trials.jsonl"]]
    assert main([*words, "--profile", files["profile.json"]]) == 0
    shown = capsys.readouterr().out
    assert "6 of 6 are in" in shown
    before, after = (
        float(line.split("mean error ")[1].split("%")[0]) for line in shown.splitlines() if "mean error" in line
    )
    assert before > 5 and after < 1
    # The same as a document, alone on standard output.
    assert main([*words, "--profile", files["profile.json"], "--json", "-"]) == 0
    document = checked(capsys.readouterr().out)
    assert len(document["entries"]) == 6
    assert document["errors"]["mean_error"] == pytest.approx(before / 100, abs=6e-4)
    assert document["errors_calibrated"]["mean_error"] == pytest.approx(after / 100, abs=6e-4)
    assert document["entries"][0]["calibrated"]["tokens_per_s"] > 0
