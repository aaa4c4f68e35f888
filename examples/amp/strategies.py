"""Lines of a strategy file: the product's fields, or the short names of AMP's tables."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed_ext.plan.text_files import read_text
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.strategy import Strategy

SHORT_NAMES = {
    "mbs": "micro_batch_size",
    "tp": "tensor_parallel_size",
    "mp": "tensor_parallel_size",
    "dp": "data_parallel_size",
    "pp": "pipeline_parallel_size",
    "gbs": "global_batch_size",
    "layer_partition": "stage_partition",
}
"""AMP's names, and ours."""


def read_strategies(path: Path, global_batch_size: int) -> list[tuple[Strategy, bool]]:
    """Read one strategy a line, and whether it gives a stage partition.

    Args:
        path: a JSONL file. A line is a strategy, or an object that holds one under `strategy`.

    Raises:
        UserError: if it cannot be read, or a line is not a strategy; it names the line.
    """
    text = read_text(path, "--strategies")
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                found.append(_strategy(json.loads(line), global_batch_size))
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"--strategies {path} line {number}: not JSON ({error.msg}): write an object"
                ) from None
            except ConfigError as error:
                raise ConfigError(f"--strategies {path} line {number}: {error}") from None
    if not found:
        raise ConfigError(f"--strategies {path}: holds no strategy: write one a line")
    return found


def _strategy(document: object, global_batch_size: int) -> tuple[Strategy, bool]:
    if isinstance(document, Mapping) and isinstance(document.get("strategy"), Mapping):
        document = document["strategy"]
    if not isinstance(document, Mapping):
        raise ConfigError("strategy: not a JSON object: write one")
    # AMP ran without ZeRO.
    values: dict[str, Any] = {"global_batch_size": global_batch_size, "zero_stage": 0}
    for name, value in document.items():
        values[SHORT_NAMES.get(name, name)] = value
    if values["global_batch_size"] is None:
        values["global_batch_size"] = global_batch_size
    if values.get("placement") == "default":
        values["placement"] = None
    partition = values.get("stage_partition")
    if isinstance(partition, str) and partition.startswith("["):
        values["stage_partition"] = json.loads(partition)
    return Strategy.from_json(values), partition is not None
