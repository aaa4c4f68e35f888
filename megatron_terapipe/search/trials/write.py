"""Writing a trial as a line that `read_trials` reads back."""

import json
from collections.abc import Mapping
from typing import Any

from megatron_terapipe.search.trials.trial import GIBIBYTE
from megatron_terapipe.strategy import Strategy


def trial_line(
    *,
    source: str,
    group: str,
    model: Mapping[str, Any],
    cluster: Mapping[str, Any],
    strategy: Strategy,
    software: str,
    precision: str,
    iteration_time_s: float | None,
    peak_memory_bytes: float | None = None,
    out_of_memory: bool | None = None,
    trial_id: str = "",
    more: Mapping[str, Any] | None = None,
) -> str:
    """One line, without its end.

    Args:
        source: who measured it.
        group: trials of one model, devices, batch and day.
        model: fields of the trainer's model section.
        cluster: what `parse_cluster` reads.
        strategy: what ran.
        software: name of what ran it, in `software.SOFTWARE`.
        precision: `fp16`, `bf16` or `fp32`.
        iteration_time_s: seconds of one iteration; None = it failed.
        peak_memory_bytes: of the fullest device; None = not measured.
        out_of_memory: whether memory ran out; None = not known.
        trial_id: name within the source.
        more: other things that were measured.
    """
    measured: dict[str, Any] = {"iteration_time_s": iteration_time_s, **(more or {})}
    if peak_memory_bytes is not None:
        measured["peak_memory_bytes"] = peak_memory_bytes
        measured["peak_memory_gb"] = round(peak_memory_bytes / GIBIBYTE, 3)
    if out_of_memory is not None:
        measured["out_of_memory"] = out_of_memory
    document = {
        "source": source,
        **({"id": trial_id} if trial_id else {}),
        "group": group,
        "software": software,
        "precision": precision,
        "model": dict(model),
        "cluster": dict(cluster),
        "strategy": strategy.to_json(),
        "measured": measured,
    }
    return json.dumps(document, allow_nan=False)
