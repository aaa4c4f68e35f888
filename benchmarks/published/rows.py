"""Rows of published tables of mixtures of experts, as trials.

python -m benchmarks.published.rows ROWS.jsonl > TRIALS.jsonl
terapipe search validate --trials TRIALS.jsonl --trainers benchmarks/published/trainers.yaml

A row is a line whose `model` is a name. It has the figures as they were printed: `system`, `gpus`, `precision`, `tp`,
`pp`, `cp`, `ep`, `etp`, `vpp`, `micro_batch`, `global_batch`, `seq`, `step_time_s` and some more. A row is left out,
with the reason, where it is not a step of pretraining, where the layout or the model is not known, and where no formula
describes the layers. A setting that a table does not print has the value of Megatron's recipes for throughput: routers
choose evenly, optimizer states are divided, gradients are in bf16 (`grad_reduce_in_fp32 = False`), nothing is
recomputed. `rows.toml` has the models, the systems and their sources.
"""

import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.measuring.command import Parser
from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.config.presets import LLAMA, UNTIED, find_preset
from megatron_terapipe.search.learn.trials import TrialReader
from megatron_terapipe.search.machine.trainer_files import read_trainers

LAYOUT = ("gpus", "tp", "pp", "cp", "ep", "micro_batch", "global_batch", "seq")

TRAINERS = str(Path(__file__).with_name("trainers.yaml"))

NO_SPEED = "headline", "measured, short"
"""Beginnings of the `quality` of rows that measure no steady step."""


class LeftOutError(Exception):
    """A row that cannot be a trial, with the reason."""


@cache
def tables() -> dict[str, Any]:
    """Return the tables of `rows.toml`."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def trial_of_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object of a trial; raises a `LeftOutError` where it has none."""
    _check(row)
    model, cluster, devices = _settings(row), tables()["clusters"][_system(row)], row["gpus"]
    ranks = row["tp"] * row["pp"] * row["cp"]
    chunks = row.get("vpp") or 1
    # Megatron's default are the tensor-parallel ranks of attention; recipes of other publications set 1.
    cut = row.get("etp") or (row["tp"] if "dgxc" in row["source"] else 1)
    dispatcher, overlaps = _exchange(row)
    strategy = {
        "data_parallel_size": devices // ranks,
        "context_parallel_size": row["cp"],
        "tensor_parallel_size": row["tp"],
        "pipeline_parallel_size": row["pp"],
        "expert_parallel_size": row["ep"],
        "expert_tensor_parallel_size": cut,
        "expert_dispatcher": dispatcher,
        "overlaps_expert_exchange": overlaps,
        "micro_batch_size": row["micro_batch"],
        "global_batch_size": row["global_batch"],
        "num_model_chunks": chunks,
        "schedule": "interleaved" if chunks > 1 else "1f1b",
        "sequence_parallel": row["tp"] > 1,
        "zero_stage": 1,
        "recompute": "full" if "full" in str(row.get("recompute")) else "none",
    }
    precision = _precision(row)
    names = {"layers": model["num_layers"], "gpus": devices, "batch": row["global_batch"], "tokens": row["seq"]}
    group = ", ".join([_known(row), _system(row), *(f"{name} {value}" for name, value in names.items())])
    return {
        "source": f"Megatron-core, {precision}, {_system(row)}",
        "id": str(row.get("id", "")),
        "group": group,
        "model": model,
        "cluster": {**cluster, "num_devices": devices},
        "software": {"like": _trainer(row, precision), "gradients": "bf16"},
        "precision": precision,
        "forced_balance": not str(row.get("routing")).startswith("real"),
        "strategy": strategy,
        "measured": {"iteration_time_s": row["step_time_s"]},
    }


PRECISIONS = {"bf16": "bf16", "fp8": "fp8", "fp8cs": "fp8", "fp8ds": "fp8", "mxfp8": "mxfp8", "fp8mx": "mxfp8"}
"""Precision by its name in tables; fp8 has one scale for a tensor, of this step (cs) or from steps before (ds)."""


def _precision(row: Mapping[str, Any]) -> str:
    found = PRECISIONS.get(re.sub("[^a-z0-9]", "", row["precision"].lower()))
    if found is None:
        raise LeftOutError(f"products in {row['precision']}, which are not priced")
    return found


def _trainer(row: Mapping[str, Any], precision: str) -> str:
    """Name of its trainer in `trainers.yaml`; cards of recipes are of the last releases."""
    release, setup = str(row.get("release") or ""), f"{_known(row)} {_system(row)}"
    graphs, recomputing = tables()["graphs"], tables()["recomputing"]
    if "Bridge" in row["source"] and precision == "mxfp8" and setup not in graphs["without"]:
        if release == "verification card" or release >= graphs["release"]:
            return "bridge-graphs"
    if precision == "bf16" and setup in recomputing["setups"] and release >= recomputing["release"]:
        return "bridge-recomputing"
    return "megatron-core"


def _exchange(row: Mapping[str, Any]) -> tuple[str, bool]:
    """Dispatcher, and whether its exchanges are hidden."""
    named = str(row.get("dispatcher") or (row.get("features") or {}).get("moe_dispatcher") or "").lower()
    recipes, setup = tables()["recipes"], f"{_known(row)} {_system(row)} {row.get('release')}"
    recipe = recipes["usual"]
    if "Bridge" in row["source"] and not named:
        recipe = next((each for start, each in recipes.items() if setup.startswith(start)), recipe)
    dispatcher = next((each for each in ("deepep", "hybridep", "alltoall") if each in named), recipe[0])
    return dispatcher, bool(row.get("a2a_overlap", recipe[1]))


def _system(row: Mapping[str, Any]) -> str:
    return str(row.get("system")).lower().removeprefix("dgx-")


def _check(row: Mapping[str, Any]) -> None:
    if not str(row.get("task")).startswith("pretrain"):
        raise LeftOutError("not pretraining")
    if str(row.get("quality")).startswith(NO_SPEED):
        raise LeftOutError("a headline, or a few steps")
    if row.get("release") == "verification card" and row["task"] == "pretrain":
        raise LeftOutError("a check of correctness, whose publisher calls its speed no result")
    if row.get("in_head") is False:
        raise LeftOutError("corrected or withdrawn by its publisher")
    missing = [name for name in (*LAYOUT, "precision", "step_time_s") if row.get(name) is None]
    if missing or row.get("fsdp"):
        raise LeftOutError(f"layout not known ({', '.join(missing) or 'weights divided among replicas'})")
    if row["gpus"] % (row["tp"] * row["pp"] * row["cp"]):
        raise LeftOutError("ranks that do not divide the GPUs")
    if _system(row) not in tables()["clusters"]:
        raise LeftOutError(f"no data sheet of {_system(row)}")


def _known(row: Mapping[str, Any]) -> str:
    """Name of its model among `tables`."""
    name = re.sub(r"[^a-z0-9]", "", row["model"].lower()).removeprefix("release")
    for pattern, cause in tables()["not_written"].items():
        if re.search(pattern, name):
            raise LeftOutError(cause)
    known: str | None = max((each for each in tables()["models"] if name.startswith(each)), key=len, default=None)
    if known is None:
        raise LeftOutError(f"model {row['model']} not known")
    return known


def _settings(row: Mapping[str, Any]) -> dict[str, Any]:
    model, families = dict(tables()["models"][_known(row)]), tables()["families"]
    of_all = {"moe_token_dispatcher_type": "alltoall", "seq_length": row["seq"], "max_position_embeddings": row["seq"]}
    if "preset" in model:
        model = {**find_preset(model.pop("preset")).settings, **model}
    else:
        sizes = zip(families["sizes"], model.pop("sizes"), strict=True)
        model = {**LLAMA, **UNTIED, **families[model.pop("family")], **dict(sizes), **model}
    if row.get("layers"):
        model["num_layers"] = row["layers"]
    return model | of_all


def trials_of_rows(rows: Iterable[Mapping[str, Any]], left_out: Counter[str]) -> list[dict[str, Any]]:
    """Return the objects of the trials; `left_out` counts the other rows by reason."""
    trials, reader = [], TrialReader("rows", read_trainers(TRAINERS))
    for number, row in enumerate(rows, start=1):
        try:
            trial = trial_of_row(row)
            reader.read(number, json.dumps(trial))
            trials.append(trial)
        except LeftOutError as reason:
            left_out[str(reason)] += 1
        except UserError:
            left_out["a layout that no strategy describes"] += 1
    return trials


def main(argv: Sequence[str] | None = None) -> int:
    """Print the trials, and to the standard error the number of rows that are left out, by reason."""
    parser = Parser(description=__doc__)
    parser.add_argument("path", type=Path, metavar="ROWS.jsonl")
    left_out: Counter[str] = Counter()
    lines = parser.parse_args(argv).path.read_text(encoding="utf-8").splitlines()
    for trial in trials_of_rows(map(json.loads, lines), left_out):
        print(json.dumps(trial))
    for reason, count in left_out.most_common():
        print(f"{count} left out: {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
