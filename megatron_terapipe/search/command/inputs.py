"""Flags that several commands have, and what they name: the model, the cluster, where costs come from."""

import argparse
from typing import Any

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.options import field_help
from megatron_terapipe.search.cluster.files import read_cluster_with_notes
from megatron_terapipe.search.cluster.library import needs_fp16
from megatron_terapipe.search.cluster.machine import Cluster
from megatron_terapipe.search.workload import Workload
from megatron_terapipe.search.workload.files import parse_workload, read_workload

CHANGES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("seq_length", "vocab_size"),
)
"""Fields of the model section that flags of the search may change."""

FLAGS_ALONE = "-"
"""MODEL that is no file and no preset: flags say all of it."""

PRECISIONS = ("bf16", "fp16", "fp32")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and the flags that change it."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "model",
        metavar="MODEL",
        help="JSON or YAML file, or the name of a preset such as gpt3-13b (docs/arguments.md); - is nothing but flags",
    )
    meanings = field_help(ModelConfig)
    for name in CHANGES:
        meaning = meanings[name].partition(". ")[0].rstrip(".")
        group.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{meaning} (default: MODEL's)")


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    """Add CLUSTER and the device of a hostfile."""
    group = parser.add_argument_group("cluster")
    group.add_argument("cluster", metavar="CLUSTER", help="JSON or YAML file of nodes, or a hostfile with --device")
    group.add_argument(
        "--device", metavar="NAME", help="device or machine of the library that every host of the hostfile has"
    )


def add_cost_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what costs are made of."""
    group = parser.add_argument_group("costs")
    group.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="of matrix products (default: bf16; fp16 where a device has no bf16; fp32 on CPUs)",
    )
    times = group.add_mutually_exclusive_group()
    times.add_argument("--profile", metavar="FILE", help="op times and links that the command measure has measured")
    times.add_argument(
        "--tables",
        action="store_true",
        help="kernels measured by others: of the package aiconfigurator-core, if installed",
    )
    calibration = group.add_mutually_exclusive_group()
    calibration.add_argument(
        "--calibrate", metavar="FILE", help="trials of this cluster, a JSON object a line (.jsonl), to fit physics to"
    )
    calibration.add_argument("--calibration", metavar="FILE", help="constants that --save-calibration once wrote")


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag for results that programs read."""
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - is the terminal")


def model_of(options: argparse.Namespace) -> Workload:
    """Read the model that the flags name."""
    changes: dict[str, Any] = {name: value for name in CHANGES if (value := getattr(options, name, None)) is not None}
    if options.model == FLAGS_ALONE:
        return parse_workload({}, "MODEL -", changes)
    return read_workload(options.model, changes)


def cluster_of(options: argparse.Namespace) -> tuple[Cluster, tuple[str, ...]]:
    """Read the cluster that the flags name, and what had to be assumed of it."""
    return read_cluster_with_notes(options.cluster, device=options.device)


def precision_of(options: argparse.Namespace, cluster: Cluster) -> str:
    """The precision that was asked for, or the one that all devices can do best."""
    if options.precision is not None:
        return str(options.precision)
    devices = {node.device for node in cluster.nodes}
    if any(not device.is_gpu for device in devices):
        return "fp32"
    return "fp16" if any(needs_fp16(device.name) for device in devices) else "bf16"
