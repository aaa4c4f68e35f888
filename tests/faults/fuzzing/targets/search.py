"""Files that the search reads."""

import json
from pathlib import Path

from megatron_terapipe.search.answer.flags import read_strategies
from megatron_terapipe.search.learn.trials import read_trials
from megatron_terapipe.search.machine.cluster_files import read_cluster_with_notes
from megatron_terapipe.search.machine.trainer_files import find_software
from megatron_terapipe.search.price.profile import profile_to_json, read_profile
from megatron_terapipe.search.price.workload_files import read_workload
from megatron_terapipe.strategy import Strategy
from tests.faults.fuzzing.target import Target, as_json, in_file
from tests.search.price.profiles import profile

EXAMPLES = Path(__file__).parents[4] / "examples"


GPT = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128, "vocab_size": 1000}
LAYER = {"tokens": 128, "hidden_size": 64, "products": [{"inputs": 64, "outputs": 256, "parallel": "column"}]}
LAYERED = {
    "seq_length": 128,
    "layers": [
        LAYER | {"repeat": 2, "attention": {"query_heads": 4, "head_size": 16}},
        LAYER | {"kind": "head", "shared_weight": "words", "shared_parameters": 7},
    ],
}
STRATEGY = {"data_parallel_size": 2, "pipeline_parallel_size": 4, "global_batch_size": 16, "num_token_slices": 4}
TRIAL = {
    "id": "a",
    "model": GPT,
    "cluster": {"device": "A100-80GB", "num_devices": 8, "inter_node_Gbps": 100.0},
    "strategy": STRATEGY | {"schedule": "1f1b"},
    "measured": {"iteration_time_s": 9.4, "peak_memory_gb": 20.5},
}

TARGETS = (
    Target(
        name="hostfile",
        read=in_file("hostfile", lambda path: read_cluster_with_notes(path, device="A100-80GB")),
        seeds=(
            b"worker-0 slots=8\nworker-1 slots=8 max_slots=16\n",
            b"# a comment\n\n10.0.0.1 slots=2\nhost.of.mine slots=4\n",
        ),
        found=(b"a slots=" + b"9" * 5000, b"a slots=2000000000"),
    ),
    Target(
        name="cluster (JSON)",
        read=in_file("c.json", read_cluster_with_notes),
        seeds=(
            (EXAMPLES / "clusters/a100-64.json").read_bytes(),
            (EXAMPLES / "clusters/this-machine.json").read_bytes(),
        ),
        found=(
            b'{"nodes": [{"device": "T4", "count": 2, "network": {"bandwidth_Gbps": 1e999}}]}',
            b'{"nodes": [' + b'{"device": "T4", "count": 100000, "devices": 1024},' * 99 + b'{"device": "T4"}]}',
        ),
    ),
    Target(
        name="cluster (YAML)",
        read=in_file("c.yaml", read_cluster_with_notes),
        seeds=tuple(path.read_bytes() for path in sorted((EXAMPLES / "clusters").glob("*.yaml"))),
        found=(b"name: 2024-13-45\nnodes: [{device: T4}]", b"&a [*a, *a]", b"nodes: [{device: T4, name: .inf}]"),
    ),
    Target(
        name="model (JSON)",
        read=in_file("m.json", read_workload),
        seeds=(as_json(GPT), as_json({"preset": "llama2-7b", "seq_length": 8192}), as_json(LAYERED)),
        found=(
            as_json(GPT | {"num_layers": 10**9}),
            as_json(LAYERED | {"layers": [LAYER | {"repeat": 10_000}] * 1000}),
        ),
    ),
    Target(
        name="model (YAML)",
        read=in_file("m.yaml", read_workload),
        seeds=(
            b"num_layers: 4\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 128\nnormalization: rmsnorm\n",
            b"preset: gpt3-13b\nnum_layers: 8\n",
        ),
        found=(b"preset: 2024-13-45\n", b"num_layers: " + b"9" * 5000),
    ),
    Target(
        name="strategies",
        read=in_file("s.jsonl", read_strategies),
        seeds=(
            as_json(STRATEGY),
            as_json(Strategy().to_json())
            + b"\n\n"
            + as_json({"strategy": STRATEGY | {"token_slices": [40, 32, 32, 24]}}),
            json.dumps([STRATEGY, {"stage_partition": [0, 3, 8]}], indent=1).encode(),
        ),
        found=(
            as_json({"data_parallel_size": 20_000_000}),
            b"[" * 3000,
            b'{"schedule": "\\ud800"}',
            b'{"micro_batch_size": NaN}',
            b'{"data_parallel_size": ' + b"9" * 5000 + b"}",
        ),
    ),
    Target(
        name="trials",
        read=in_file("t.jsonl", read_trials),
        seeds=(
            as_json(TRIAL) + b"\n",
            as_json(TRIAL | {"cluster": TRIAL["cluster"] | {"devices_per_node": 4, "intra_node_GBps": 300}}) + b"\n",
            as_json(TRIAL | {"measured": {"longer_than_s": 1e999}}) + b"\n",
            b"\n".join((EXAMPLES.parent / "benchmarks/published/runs.jsonl").read_bytes().splitlines()[:2]),
        ),
        found=(
            as_json(TRIAL | {"model": GPT | {"num_layers": 2**31}}),
            as_json(TRIAL | {"model": {"model_preset": -1}}),
        ),
    ),
    Target(
        name="profile",
        read=in_file("p.json", read_profile),
        seeds=(as_json(profile_to_json(profile())),),
        found=(
            as_json(profile_to_json(profile()) | {"software": 3}),
            as_json(profile_to_json(profile()) | {"device": "\ud800"}),
        ),
    ),
    Target(
        name="software",
        read=in_file("s.json", find_software),
        seeds=(
            b'{"like": "megatron-core", "name": "ours", "communication": {"tensor_parallel_overlap": 0.8}}',
            b'{"like": "fsdp", "attention": {"kernel": "scores", "score_bytes": 9}, "bucket_elements": 1000}',
        ),
    ),
)
