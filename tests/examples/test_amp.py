"""AMP's experiments against its published trials; figures that need them are skipped where they are not at hand."""

import csv
import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from examples.amp import models
from examples.amp.deepspeed_costs import FOLDER, TENSOR_PARALLEL_SIZES, read_profile, unthrottled
from examples.amp.experiments import EXPERIMENTS
from examples.amp.run import main
from examples.amp.search import price, search, with_partition_of_amp
from examples.amp.speed import AMP_ACCURACY, accuracy, partition_gains
from examples.amp.strategies import read_strategies
from megatron_terapipe.errors import ConfigError, DataError
from megatron_terapipe.strategy import Strategy

ROOT = Path(__file__).resolve().parents[2]
AMP = ROOT.parent / "shared" / "reference" / "amp"
needs_amp = pytest.mark.skipif(not AMP.is_dir(), reason="AMP's profiles and trials are not at hand")


def amp(**changes):
    """A strategy of AMP's trials: 32 sequences, without ZeRO."""
    return Strategy(**({"global_batch_size": 32, "zero_stage": 0} | changes))


@pytest.fixture(scope="module")
def trials():
    """Rows of AMP's table."""
    with (AMP / "trials_homogeneous.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def predicted(tmp_path_factory, trials):
    """Predictions of the command for them, in their order."""
    folder = tmp_path_factory.mktemp("amp")
    lines, out = folder / "strategies.jsonl", folder / "predictions.json"
    names = "mbs", "tp", "dp", "pp", "gbs"
    rows = ({**{name: int(row[name]) for name in names}, "layer_partition": row["layer_partition"]} for row in trials)
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--strategies", str(lines), "--json", str(out), "--top", "0"]
    assert main(["homogeneous", "--amp-repo", str(AMP), *options]) == 0
    return json.loads(out.read_text())


@needs_amp
def test_trials_of_the_homogeneous_cluster(trials):
    # Without a fit to them; the figures are those of examples/README.md, and better than AMP's.
    found = accuracy(AMP, trials)
    assert found == pytest.approx(
        {"spearman": 0.976, "pairs": 0.944, "mape": 0.058, "raw": 0.071, "regret": 1.025}, abs=6e-4
    )
    assert found["spearman"] > AMP_ACCURACY["spearman"] and found["mape"] < AMP_ACCURACY["mape"]


@needs_amp
def test_trials_that_ran_out_of_memory_are_infeasible(trials, predicted):
    assert [each["index"] for each in predicted] == list(range(len(trials)))
    assert sorted(each["rank"] for each in predicted) == list(range(1, len(trials) + 1))
    # One trial died at once, and the same with half the micro-batch ran.
    failed = [row for row, each in zip(trials, predicted, strict=True) if row["outcome"].startswith("fast_fail")]
    assert len(failed) == 1
    for row, each in zip(trials, predicted, strict=True):
        if row["outcome"].startswith("fast_fail"):
            assert not each["feasible"] and "memory" in each["reason"]
    ran = [each["feasible"] for row, each in zip(trials, predicted, strict=True) if row["outcome"] == "ran"]
    assert np.mean(ran) > 0.9


@needs_amp
def test_ours_is_never_worse_than_amps_partition_by_amps_own_objective(trials):
    gains = partition_gains(AMP, trials)
    assert len(gains) > 30 and min(gains) >= -1e-9
    assert sum(gain > 1e-6 for gain in gains) == 4


@needs_amp
def test_search_on_a_mixed_cluster_spares_the_slow_node():
    experiment = EXPERIMENTS["het_cluster"]
    pricing = experiment.pricing(AMP)
    found = search(experiment, pricing)
    assert len(found) == 53
    best = found[0].strategy
    assert best.pipeline_parallel_size > 1
    bounds = best.stage_partition
    layers = [end - first for first, end in pairwise(bounds)]
    # Transformer layers are 2 to 25; the T4 have the last stages.
    blocks = [len(set(range(first, end)) & set(range(2, 26))) for first, end in pairwise(bounds)]
    on_t4 = best.pipeline_parallel_size // 4
    assert sum(layers) == 30
    assert sum(blocks[-on_t4:]) < 24 / 4
    uneven = found[0].prediction.iteration_time_s
    even = price(
        pricing, Strategy.from_json({**best.to_json(), "stage_partition": "uniform"})
    ).prediction.iteration_time_s
    assert uneven < even


@needs_amp
def test_scores_of_windows_are_divided_by_no_tensor_parallelism():
    pricing = EXPERIMENTS["het_model"].pricing(AMP)
    times = [
        price(
            pricing, amp(data_parallel_size=16 // tensor, tensor_parallel_size=tensor, global_batch_size=64)
        ).prediction.breakdown.compute_s
        for tensor in (1, 2)
    ]
    # Half the replicas, and as long for each sequence.
    assert times[1] > 1.8 * times[0]


def test_parameters_are_those_of_the_models():
    # 12 h^2 + 13 h a layer, the padded vocabulary once, positions, and a norm.
    assert models.gpt2().parameters == 24 * (12 * 1024**2 + 13 * 1024) + (50304 + 1024) * 1024 + 2048
    transgan = models.transgan()
    assert len(transgan.layers) == 56
    assert transgan.layers[0].parameters == 42_550_272
    outputs = [layer.output_elements for layer in transgan.layers]
    assert outputs[14:55] == [82944] * 2 + [331776] * 3 + [1327104] * 36


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not JSON"),
        ('{"mbs": 1}\n{"mbs": 0}', "line 2: strategy: micro_batch_size 0"),
        ('{"speed": 1}', "line 1: strategy: field 'speed' is not known"),
        ("", "holds no strategy"),
    ],
)
def test_refused_lines_of_strategies(tmp_path, text, message):
    path = tmp_path / "s.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_strategies(path, 32)


def test_lines_may_have_our_names_or_amps(tmp_path):
    path = tmp_path / "s.jsonl"
    ours = {"strategy": {"data_parallel_size": 8, "pipeline_parallel_size": 2, "stage_partition": [0, 15, 30]}}
    amps = {"mbs": 1, "tp": 1, "dp": 8, "pp": 2, "layer_partition": "[0, 15, 30]", "placement": "default"}
    path.write_text(f"{json.dumps(ours)}\n\n{json.dumps(amps)}\n" + '{"dp": 16}\n')
    first, second, third = read_strategies(path, 32)
    assert first == second
    assert first[1] and not third[1]
    assert first[0].global_batch_size == 32


def test_a_repository_without_profiles_is_an_error(tmp_path, capsys):
    assert main(["homogeneous", "--amp-repo", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "gpt2_G4_1.npy" in error and len(error.splitlines()) == 1


@needs_amp
def test_a_strategy_that_does_not_fit_is_infeasible_with_its_reason(tmp_path):
    path, out = tmp_path / "s.jsonl", tmp_path / "out.json"
    path.write_text(
        '{"dp": 16, "pp": 2}\n{"dp": 4, "pp": 4, "layer_partition": [0, 1, 2, 3]}\n{"dp": 16}\n'
        '{"dp": 16, "recompute": "full"}'
    )
    assert main(["homogeneous", "--amp-repo", str(AMP), "--strategies", str(path), "--json", str(out)]) == 0
    wide, short, good, saving = json.loads(out.read_text())
    assert not saving["feasible"] and "recompute 'full'" in saving["reason"]
    assert not wide["feasible"] and "16 devices" in wide["reason"] and wide["predicted"] is None
    assert not short["feasible"] and "stage_partition" in short["reason"]
    assert good["feasible"] and good["rank"] == 1
    assert {"iteration_time_s", "bubble_ratio", "peak_memory_bytes"} <= set(good["predicted"])


@needs_amp
def test_a_message_keeps_its_sender_when_it_is_larger_than_the_buffers():
    costs = EXPERIMENTS["homogeneous"].pricing(AMP).cost_model
    mebibyte, num_pairs = 2**20, 4
    bandwidth = 0.75 * 50e9 / 8 / num_pairs

    layout = {"data_parallel_size": 4, "pipeline_parallel_size": 4, "stage_partition": (0, 8, 14, 20, 30)}
    small, large = (amp(**layout, micro_batch_size=size) for size in (1, 8))
    assert np.all(costs.messages_s(small).holding_there[:, :26] == 0)
    # 16 MiB of activations; the mask of 2 MiB is only sent forward; 8 MiB are in buffers.
    messages = costs.messages_s(large)
    assert messages.holding_there[0, 7] == pytest.approx((16 + 2 - 8) * mebibyte / bandwidth)
    assert messages.holding_back[0, 7] == pytest.approx((16 - 8) * mebibyte / bandwidth)
    assert messages.there[0, 7] == pytest.approx((16 + 2) * mebibyte / bandwidth, rel=0.01)
    forward, backward = costs.layer_times_s(large)
    ops = costs.pipeline_costs(large)
    assert ops.forward[0][0] == pytest.approx(forward[0, :8].sum() + messages.holding_there[0, 7])
    assert ops.backward[0][0] == pytest.approx(backward[0, :8].sum())
    assert ops.backward[3][0] == pytest.approx(backward[3, 20:].sum() + messages.holding_back[2, 19])


@needs_amp
def test_tensor_parallel_ranks_send_parts_of_activations_and_whole_gradients():
    # 10 Gbit/s, which four ranks share; stages 1 to 3 are on V100, the last one on T4.
    costs = EXPERIMENTS["het_cluster"].pricing(AMP).cost_model
    stages = {"pipeline_parallel_size": 4, "stage_partition": (0, 8, 14, 20, 30)}
    strategy = amp(tensor_parallel_size=4, micro_batch_size=4, **stages)
    activation, mask = 8 * 2**20, 2 * 2**20
    one_s = 4 / (0.92 * 10e9 / 8)
    nvlink, pcie = (0.65 * node.inside.bandwidth for node in costs.cluster.nodes[2:])
    messages = costs.messages_s(strategy)
    there, back = messages.there[2, 19], messages.back[2, 19]
    assert there == pytest.approx((activation / 4 + mask) * one_s + activation * 3 / 4 / pcie, rel=0.05)
    assert back == pytest.approx(activation * one_s + activation * 3 / 4 / nvlink, rel=0.05)
    assert messages.there[0, 7] < there


@needs_amp
def test_a_tied_embedding_is_reduced_once_or_between_the_ends():
    costs = EXPERIMENTS["homogeneous"].pricing(AMP).cost_model
    whole = costs.predict_time(amp(data_parallel_size=16)).breakdown
    # The ring is as fast as PCIe lets it: 2 (n - 1)/n of 4 bytes of each parameter.
    seconds = 2 * 15 / 16 * 4 * models.gpt2().parameters / (0.65 * 50e9 / 8)
    assert whole.gradient_reduction_s == pytest.approx(seconds, rel=0.01)
    assert whole.shared_weight_s == 0
    ends = amp(data_parallel_size=4, pipeline_parallel_size=4)
    # Half precision, four pairs that share a card.
    seconds = 2 * 50304 * 1024 / (0.75 * 50e9 / 8 / 4)
    assert costs.predict_time(ends).breakdown.shared_weight_s == pytest.approx(seconds, rel=0.01)


@needs_amp
def test_a_line_without_a_partition_gets_amps(trials):
    # AMP's solver misses the best in some; those with one micro-batch it deals evenly.
    pricing = EXPERIMENTS["homogeneous"].pricing(AMP)
    same = []
    for row in trials:
        sizes = {"dp": "data", "tp": "tensor", "pp": "pipeline"}
        layout = {f"{name}_parallel_size": int(row[short]) for short, name in sizes.items()}
        strategy = with_partition_of_amp(pricing, amp(**layout, micro_batch_size=int(row["mbs"])))
        same.append(list(strategy.stage_partition) == json.loads(row["layer_partition"]))
    assert np.mean(same) > 0.9


@pytest.fixture
def repository(tmp_path):
    """A checkout with one profile: layer i takes i + 1 ms, divided by the tensor-parallel size."""
    (tmp_path / FOLDER).mkdir(parents=True)
    for size in TENSOR_PARALLEL_SIZES:
        np.save(tmp_path / FOLDER / f"gpt2_G4_{size}.npy", np.arange(1, 31) / 1000 / size)
    return tmp_path


def test_times_by_layer_and_tensor_parallel_size(repository):
    profile = read_profile(repository, "gpt2_G4")
    assert len(profile) == 30
    assert dict(profile[3]) == {1: 0.004, 2: 0.002, 4: 0.001}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "gpt2_G4_4.npy: there is no such file: give a checkout"),
        (b"version https://git-lfs", "not an array that numpy can read"),
        (np.ones(29), "has shape (29,), and this model has 30 layers"),
        (np.ones((30, 1)), "has shape (30, 1)"),
        (np.ones(30, dtype=int), "holds int64, and times are floating-point numbers"),
        (np.where(np.arange(30) == 4, np.nan, 1.0), "entry 4 is nan"),
        (np.where(np.arange(30) == 7, -1.0, 1.0), "entry 7 is -1.0"),
        (np.where(np.arange(30) == 0, np.inf, 1.0), "entry 0 is inf"),
    ],
)
def test_profiles_that_are_refused(repository, content, message):
    path = repository / FOLDER / "gpt2_G4_4.npy"
    path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    with pytest.raises(DataError, match=re.escape(message)):
        read_profile(repository, "gpt2_G4")


def test_equal_blocks_have_the_time_of_the_fastest() -> None:
    layers = models.gpt2().layers
    seconds = tuple({1: 1.0 + index, 2: 40.0 - index} for index in range(len(layers)))
    by_name = unthrottled(layers, seconds)
    assert {by_name[layer.name][1] for layer in layers[2:26]} == {3.0}
    assert {by_name[layer.name][2] for layer in layers[2:26]} == {40.0 - 25}
    # Others may compute another thing under the same sizes.
    assert all(by_name[layers[index].name] == seconds[index] for index in (0, 1, 26, 27, 28, 29))
