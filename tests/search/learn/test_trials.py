import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import published
from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.learn.fit import cost_model_of
from megatron_terapipe.search.learn.trials import Trial, read_trials
from megatron_terapipe.search.machine import library
from megatron_terapipe.search.machine.trainer_files import OF_PACKAGE, Trainers, read_trainers
from megatron_terapipe.search.price.efficiency import HardwareEfficiency
from megatron_terapipe.search.price.memory import Counted, MemoryModel
from megatron_terapipe.search.price.roofline import Roofline
from megatron_terapipe.search.price.step import step_traffic
from tests.architecture.sources import ROOT

TRIALS = ROOT.parent / "shared" / "reference" / "trials"
PUBLISHED = read_trainers(str(published.TRAINERS))

LINE: dict[str, Any] = {
    "source": "a table",
    "id": "row 1",
    "group": "one",
    "model": {"num_layers": 8, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 512, "vocab_size": 1000},
    "cluster": {"device": "A100-SXM4-80GB", "devices_per_node": 8, "num_devices": 8, "inter_node_Gbps": 800},
    "strategy": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "micro_batch_size": 2, "global_batch_size": 8},
    "measured": {"iteration_time_s": 1.5, "peak_memory_gb": 10},
}


def changed(part: str | None = None, **values: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(LINE))
    (document if part is None else document[part]).update(values)
    return document


def read(tmp_path: Path, *documents: Any, trainers: Trainers = OF_PACKAGE) -> list[Trial]:
    path = tmp_path / "trials.jsonl"
    path.write_text("\n".join(json.dumps(document) for document in documents) + "\n\n")
    return read_trials(path, trainers)


def test_a_line(tmp_path: Path) -> None:
    (trial,) = read(tmp_path, LINE)
    assert (trial.source, trial.id, trial.group, trial.line) == ("a table", "row 1", "one", 1)
    assert trial.workload.num_dealt_layers == 8
    assert trial.cluster.num_devices == 8
    assert trial.strategy.num_micro_batches == 4
    assert trial.iteration_time_s == 1.5
    assert trial.peak_memory_bytes == 10 * 2**30
    assert (trial.out_of_memory, trial.activation_limit) == (None, None)
    # Tables that say no more are of plain Megatron in half precision.
    assert (trial.software.name, trial.precision) == ("megatron-lm", "fp16")
    assert (trial.strategy.recompute, trial.strategy.zero_stage) == ("none", 0)


def test_the_cluster_of_a_published_trial(tmp_path: Path) -> None:
    fields = {"device": "A100-SXM4", "devices_per_node": 8, "intra_node_GBps": 250, "inter_node_Gbps": 800}
    (trial,) = read(tmp_path, changed(cluster=fields | {"num_devices": 20}))
    assert [node.num_devices for node in trial.cluster.nodes] == [8, 8, 4]
    node = trial.cluster.nodes[0]
    # 800 Gbit/s are four cards of 200, the line rate of a card of this age.
    assert (node.inside.bandwidth, node.network.bandwidth, node.num_network_cards) == (250e9, 25e9, 4)
    (trial,) = read(tmp_path, changed(cluster={"device": "GH200-96GB", "devices_per_node": 4, "num_devices": 8}))
    assert trial.cluster.nodes[0].inside == library.machine("quad-gh200").inside


def test_models_and_clusters_are_shared(tmp_path: Path) -> None:
    first, second, third = read(tmp_path, LINE, changed(id="2"), changed("model", num_layers=4))
    assert first.workload is second.workload and first.cluster is third.cluster
    assert first.workload is not third.workload


FAILED = {"out_of_memory": True, "longer_than_s": 9}
CHUNKED = {"pipeline_parallel_size": 8, "schedule": "1F1B-I", "num_micro_batches": 16}


@pytest.mark.parametrize(
    ("document", "found"),
    [
        *(
            (changed(measured={**FAILED, "iteration_time_s": time}), {**FAILED, "iteration_time_s": None})
            for time in (None, float("inf"))
        ),
        # Names of papers.
        *(
            (changed("strategy", schedule=name), {"schedule": schedule, "activation_limit": limit})
            for name, schedule, limit in (
                *(("ZB-1p", "zero-bubble", 1.0), ("ZB-2p", "zero-bubble", 2.0)),
                *(("1F1B", "1f1b", None), ("gpipe", "gpipe", None)),
            )
        ),
        # A layer a model chunk, the ends counted.
        (
            changed(model={**LINE["model"], "num_layers": 22}, strategy=CHUNKED),
            {"num_model_chunks": 3, "global_batch_size": 16},
        ),
        # Trials of FSDP were written with ZeRO 1 once.
        (changed("strategy", zero_stage=1) | {"software": "fsdp"}, {"zero_stage": 3}),
    ],
)
def test_fields_of_a_trial_or_its_strategy(tmp_path: Path, document: Any, found: dict[str, Any]) -> None:
    (trial,) = read(tmp_path, document)
    assert {name: getattr(trial if hasattr(trial, name) else trial.strategy, name) for name in found} == found


def test_stages_that_count_the_ends(tmp_path: Path) -> None:
    # Six layers, an embedding and a head on four stages: two each, as BLOOM's 70 + 2 on 12.
    (trial,) = read(tmp_path, changed(model={**LINE["model"], "num_layers": 6}, strategy={"pipeline_parallel_size": 4}))
    stages = trial.workload.stages(trial.workload.partition(trial.strategy.stage_partition, 4))
    kinds = [[trial.workload.layers[index].kind for index in stage] for stage in stages]
    assert kinds == [["embedding", "block"], ["block"] * 2, ["block"] * 2, ["block", "norm", "head"]]
    given = {"pipeline_parallel_size": 2, "layers_per_stage_counting_embedding_and_head": [3, 7]}
    (trial,) = read(tmp_path, changed(strategy=given))
    stages = trial.workload.stages(trial.workload.partition(trial.strategy.stage_partition, 2))
    assert [len(stage) for stage in stages] == [3, 8]


TOKENS, HIDDEN, LAYERS = 512, 256, 8
OF_LAYERS = LAYERS * TOKENS * HIDDEN


def on_h100(changes: dict[str, Any], **values: Any) -> dict[str, Any]:
    cluster = {**LINE["cluster"], "device": "H100-SXM5-80GB"}
    strategy = {"micro_batch_size": 1, "num_micro_batches": 1, **changes}
    return changed(software="megatron-core", precision="bf16", cluster=cluster, strategy=strategy) | values


def time_s(trial: Trial) -> float:
    return cost_model_of(trial).predict_time(trial.strategy).iteration_time_s


def counted(trial: Trial) -> Counted:
    model = MemoryModel(
        workload=trial.workload, cluster=trial.cluster, software=trial.software, precision=trial.precision
    )
    return model.count(trial.strategy)[0]


def product_s(trial: Trial) -> float:
    roofline = Roofline(HardwareEfficiency(), trial.software, trial.precision)
    return float(roofline.product_s(trial.cluster.nodes[0].device, 1e5, 1e5, 1e5))


@pytest.mark.parametrize(
    ("document", "others", "measured", "expected"),
    [
        # A ring passes keys on, and no output of attention exists twice.
        (
            on_h100({"context_parallel_size": 2}, software="megatron-lm"),
            [on_h100({"sequence_parallel_size": 2}, software="megatron-lm")],
            lambda one, other: (one.strategy, counted(other).activations - counted(one).activations),
            lambda one, other: (other.strategy, OF_LAYERS),
        ),
        # Four ranks share the experts, two of them each expert.
        (
            on_h100({"data_parallel_size": 4, "expert_parallel_size": 2, "expert_tensor_parallel_size": 2}),
            [],
            lambda one: (one.strategy.expert_parallel_size, one.software.communication.cuts_experts),
            lambda one: (4, True),
        ),
        # Twice the peak of half precision, of which 0.97 times the share is reached.
        (
            on_h100({}, precision="fp8"),
            [on_h100({})],
            lambda one, other: (product_s(other) / product_s(one), time_s(one) != time_s(other)),
            lambda one, other: (pytest.approx(2 * 0.97, rel=0.01), True),
        ),
        # Gradients of 2 bytes in place of 4, and one of 4 for each of the parameters that the rank steps.
        (
            on_h100(
                {"data_parallel_size": 2, "zero_stage": 1}, software={"like": "megatron-core", "gradients": "bf16"}
            ),
            [on_h100({"data_parallel_size": 2, "zero_stage": 1})],
            lambda one, other: (counted(other).gradients - counted(one).gradients, counted(one).step),
            lambda one, other: (pytest.approx(2 * one.workload.parameters), pytest.approx(2 * one.workload.parameters)),
        ),
        # And fewer bytes of reductions than in fp32.
        (
            on_h100({"data_parallel_size": 8}, software={"like": "megatron-core", "gradients": "fp32"}),
            [on_h100({"data_parallel_size": 8}, software={"like": "megatron-core", "gradients": "bf16"})],
            lambda one, other: [step_traffic(each.software, "bf16", 0).reduced_bytes for each in (one, other)],
            lambda one, other: [4, 2],
        ),
        # Optimizer states of 12 bytes, divided by two ranks of eight.
        (
            on_h100({"data_parallel_size": 8, "zero_stage": 1, "zero_shard_size": 2}),
            [on_h100({"data_parallel_size": 8, "zero_stage": 1})],
            lambda one, other: [counted(one).optimizer, counted(other).optimizer],
            lambda one, other: [pytest.approx(12 * one.workload.parameters / size) for size in (2, 8)],
        ),
        # Weights too, in stage 3 of Megatron's FSDP.
        (
            on_h100({"data_parallel_size": 4, "tensor_parallel_size": 2, "zero_stage": 3}),
            [on_h100({"data_parallel_size": 4, "tensor_parallel_size": 2, "zero_stage": 1})],
            lambda one, other: (counted(one).weights, time_s(one) > time_s(other)),
            lambda one, other: (counted(other).weights / 4, True),
        ),
        # And of 4 bytes in PyTorch's.
        (
            on_h100({"data_parallel_size": 8, "zero_stage": 3, "zero_shard_size": 2}, software="fsdp"),
            [on_h100({"data_parallel_size": 8, "zero_stage": 3}, software="fsdp")],
            lambda one, other: [counted(one).weights, counted(other).weights],
            lambda one, other: [pytest.approx(4 * one.workload.parameters / size) for size in (2, 8)],
        ),
        # Two of eight layers run again.
        (
            on_h100({"recompute": "full", "recompute_num_layers": 2}),
            [on_h100({"recompute": "none"}), on_h100({"recompute": "full"})],
            lambda one, none, full: (time_s(one) - time_s(none), counted(none).activations - counted(one).activations),
            lambda one, none, full: (
                pytest.approx(2 / LAYERS * (time_s(full) - time_s(none))),
                pytest.approx(2 / LAYERS * (counted(none).activations - counted(full).activations)),
            ),
        ),
    ],
    ids="ring expert-tensor-ranks fp8 gradients reductions node-local-zero zero-3 hsdp some-layers-recomputed".split(),
)
def test_a_value_is_priced(
    tmp_path: Path,
    document: dict[str, Any],
    others: list[dict[str, Any]],
    measured: Callable[..., Any],
    expected: Callable[..., Any],
) -> None:
    trials = read(tmp_path, document, *others)
    assert measured(*trials) == expected(*trials)
    assert not trials[0].ignored


def test_only_the_first_layers_of_each_stage_are_recomputed(tmp_path: Path) -> None:
    strategy = {"pipeline_parallel_size": 2, "recompute": "full", "recompute_num_layers": 3}
    (trial,) = read(tmp_path, changed(strategy=strategy))
    blocks = [layer.recomputed for layer in trial.workload.layers if layer.is_block]
    assert blocks == [True, True, True, False] * 2


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (changed("model", num_layers=None), "model: num_layers must be given: add it"),
        (changed("model", num_layers="8"), 'model: num_layers "8" is not a whole number'),
        ({key: value for key, value in LINE.items() if key != "measured"}, "measured is missing"),
        (changed("cluster", device="A1000"), "did you mean"),
        (changed("cluster", num_devices=2), "cluster.num_devices: make them agree"),
        (changed("strategy", schedule="gpip"), "did you mean"),
        (changed("strategy", global_batch_size=9), "global_batch_size 9 is not a multiple"),
        (changed("strategy", num_micro_batches=3), "contradicts global_batch_size 8"),
        (changed("strategy", pipeline_parallel_size=16), "8 layers on 16 stages"),
        (changed("strategy", pipeline_parallel_size=8), "more than the 8 devices"),
        (changed("strategy", layers_per_stage_counting_embedding_and_head=[1, 2]), "adds up to 3, not 10"),
        (changed("strategy", layers_per_stage_counting_embedding_and_head=[10]), "does not have 2 stages"),
        (changed("measured", iteration_time_s=-1), "measured.iteration_time_s -1 is not a number above 0"),
        (changed("measured", out_of_memory=1), "measured.out_of_memory 1 is not true or false"),
        (changed(software="megatron"), 'software.like "megatron" is not a known trainer: did you mean megatron-lm?'),
        (changed(precision="int8"), 'precision "int8" is not known'),
        (changed(precision="fp8", software="megatron-core"), 'precision "fp8" is not in the products of a A100-SXM4'),
        (changed(precision="fp8"), "megatron-lm has no states in fp8 at zero_stage 0: choose one of fp32 at 0"),
        (changed(software={"like": "megatron"}), 'software.like "megatron" is not a known trainer: did you mean'),
        (changed(software={"gradients": "int8"}), 'software.gradients "int8" is not known: choose among bf16'),
        (
            changed(software={"products": {"kernels": 1}}),
            "software.products.kernels is not known: did you mean forward_kernels",
        ),
        (changed(software=3), "software.like 3 is not a known trainer"),
        (
            changed("strategy", context_parallel_size=2, sequence_parallel_size=4),
            "contradicts sequence_parallel_size 4",
        ),
        (changed("strategy", recompute_num_layers=2), "recompute_num_layers 2 goes with recompute full, not none"),
        ([1], "is not an object"),
    ],
)
def test_errors_name_place_and_value(tmp_path: Path, document: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, LINE, document)
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 'trials.jsonl'}:2: ") or ":2 holds" in message
    assert said in message and "\n" not in message


def test_no_file_and_no_trial(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_trials(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="holds no trial"):
        read(tmp_path)
    (tmp_path / "broken.jsonl").write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.jsonl:1 is not JSON"):
        read_trials(tmp_path / "broken.jsonl")


@pytest.mark.skipif(not TRIALS.is_dir(), reason="the published trials are not part of the project")
@pytest.mark.parametrize(
    ("name", "trials", "groups"),
    [
        *(("bigscience", 77, 34), ("dense_2025", 151, 129), ("dgxc_h100", 12, 3), ("fsdp_a100", 30, 30)),
        *(("fsdp_h100", 35, 35), ("modern", 208, 32), ("sailor_gh200", 13, 12), ("sc21", 5, 1), ("seqsel", 4, 1)),
        *(("vtrain_multi", 41, 2), ("vtrain_single", 720, 72), ("zero_bubble", 24, 6)),
    ],
)
def test_published_trials(name: str, trials: int, groups: int) -> None:
    found = read_trials(TRIALS / f"{name}.jsonl", PUBLISHED)
    assert (len(found), len({(one.source, one.group) for one in found})) == (trials, groups)
    # A cluster in the form of nodes may have more devices than ranks.
    assert all(one.cluster.num_devices >= one.strategy.world_size for one in found)


@pytest.mark.parametrize(
    ("source", "named", "group", "software", "precision"),
    [
        ("VIA-Research/vTrain", None, "g", "deepspeed", "fp16"),
        ("eth-easl/sailor", None, "g", "deepspeed-eager", "fp16"),
        ("MosaicML llm-foundry throughput tables", "fsdp", "g", "llm-foundry", "fp16"),
        ("Hagemann et al., arXiv 2311.05610", "megatron-core", "30B_ckpt", "scaling-eager", "fp16"),
        ("Hagemann et al., arXiv 2311.05610", "megatron-core", "30B", "scaling", "fp16"),
        ("bigscience-workshop/bigscience tr11 chronicles-prequel", None, "h1_l1_02-27_hd1", "deepspeed", "fp16"),
        ("bigscience-workshop/bigscience tr11 chronicles-prequel", None, "h1_l1_02-28_hd1", "deepspeed", "bf16"),
        ("pytorch/torchtitan benchmarks", "fsdp", "titan_8B_bf16", "torchtitan", "fp16"),
        ("someone", "fsdp", "g", "fsdp", "fp16"),
        ("someone", "internevo", "g", "internevo", "bf16"),
        ("someone", None, "g", "megatron-lm", "fp16"),
    ],
)
def test_trainers_of_published_trials(
    tmp_path: Path, source: str, named: str | None, group: str, software: str, precision: str
) -> None:
    given = None if precision == "fp16" or source != "someone" else precision
    document = changed(source=source, group=group, software=named, precision=given)
    (trial,) = read(tmp_path, document, trainers=PUBLISHED)
    assert (trial.software.name, trial.precision) == (software, precision)


def test_what_a_publication_says_for_its_trials(tmp_path: Path) -> None:
    rule = {"source": "a page", "recompute": "selective", "half_flops": "250 TFLOP/s"}
    path = tmp_path / "trainers.json"
    path.write_text(json.dumps({"trials": [rule]}))
    said, other = read(tmp_path, changed(source="a page"), changed(source="another"), trainers=read_trainers(str(path)))
    assert (said.strategy.recompute, said.cluster.nodes[0].device.half_flops) == ("selective", 250e12)
    assert said.strategy == replace(other.strategy, recompute="selective")
    assert said.cluster.nodes[0].device == replace(other.cluster.nodes[0].device, half_flops=250e12)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "holds [], which is not an object"),
        ({"trainer": {}}, "trainer {} is not a known field: did you mean trainers?"),
        ({"trainers": {"fsdp": {"like": "fsdp"}}}, "trainers.fsdp is a trainer of the package: give it another name"),
        (
            {"trainers": {"ours": {"like": "fsdb"}}},
            'trainers.ours.like "fsdb" is not a known trainer: did you mean',
        ),
        ({"trainers": {"ours": {"like": "fsdp", "launches": 1}}}, "trainers.ours.launches is not known"),
        ({"trials": [{"software": "fsdp"}]}, "trials[0].source is missing"),
        ({"trials": [{"source": "a", "software": "b"}]}, 'trials[0].software "b" is not a known trainer'),
        ({"trials": [{"source": "a", "group": "("}]}, 'trials[0].group "(" is not a regular expression'),
        ({"trials": [{"source": "a", "precision": "int8"}]}, 'trials[0].precision "int8" is not known'),
    ],
)
def test_refused_files_of_trainers(tmp_path: Path, document: object, said: str) -> None:
    path = tmp_path / "trainers.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError) as error:
        read_trainers(str(path))
    assert said in str(error.value) and str(error.value).startswith(str(path)) and "\n" not in str(error.value)
