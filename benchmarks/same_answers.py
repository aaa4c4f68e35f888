"""Whether two commits answer alike: the same commands in both checkouts, and their figures side by side.

python -m benchmarks.same_answers BEFORE [--trials FOLDER] [--amp FOLDER] [--only WORD]

BEFORE is a checkout of the other commit (`git worktree add BEFORE COMMIT`), this checkout is the one after. Commands
write JSON, whose numbers must agree to 1e-9, and whose words must be equal. `--trials` is a folder of trial files, as
`validate` reads them; `--amp` one with a checkout of AMP's repository. Differences are printed, a line each. Times of
this machine (`measure`, `trial`) differ from run to run; `measure` is compared by the sizes that it measures.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

TOLERANCE = 1e-9
"""Relative difference of two numbers that are the same."""

HERE = Path(__file__).parents[1]
SHOWN = 8
"""Differences of one command that are printed."""

TRAINERS = ("--trainers", "benchmarks/published/trainers.yaml")
"""Left out in a checkout without the file: its search has the trainers itself."""

SEARCH = ("-m", "megatron_terapipe.search")
PLAN = ("-m", "deepspeed_ext.plan")
JSON = ("--json", "-")

STRATEGY = {"data_parallel_size": 2, "tensor_parallel_size": 4, "pipeline_parallel_size": 8, "global_batch_size": 64}
STRATEGIES = {
    "plain": STRATEGY,
    "slices": STRATEGY | {"num_token_slices": 8, "sequence_parallel": True, "recompute": "selective"},
    "zero": STRATEGY | {"schedule": "zero-bubble", "num_token_slices": 4, "micro_batch_size": 2},
    "interleaved": STRATEGY | {"schedule": "interleaved", "num_model_chunks": 5, "zero_stage": 0},
    "gpipe": STRATEGY | {"schedule": "gpipe", "recompute": "full", "micro_batch_size": 4},
}


class Case(NamedTuple):
    """One command."""

    name: str
    words: tuple[str, ...]
    """Arguments of Python; `{work}` is a folder with the strategies, `{trials}` and `{amp}` from the flags, `{out}`
    a file that the command writes instead of printing its JSON."""
    is_timed: bool = False
    """Whether the figures are times of this machine: then only their names are compared."""


def cases() -> Iterator[Case]:
    """Yield the commands."""
    clusters = "examples/clusters"
    for model, cluster, batch, more in (
        ("gpt3-13b", "a100-64.json", 1536, ()),
        ("gpt3-13b", "a100-64.json", 64, ("--precision", "fp16", "--explain")),
        ("gpt3-175b", "a100-64.json", 64, ("--effort", "0.3")),
        ("gpt3-13b", "mixed-1024.yaml", 1024, ("--precision", "fp16", "--effort", "0.2")),
        ("gpt3-6.7b", "g4dn-and-p3.yaml", 32, ("--precision", "fp16")),
        ("gpt3-6.7b", "p3.16xlarge-48.yaml", 128, ("--precision", "fp16", "--schedule", "1f1b,gpipe")),
        ("gpt2", "own-device.yaml", 64, ()),
        ("examples/models/tiny.json", "this-machine.json", 8, ("--precision", "fp32")),
        (
            "examples/models/transgan.json",
            "p3.16xlarge-48.yaml",
            64,
            ("--precision", "fp16", "--num-token-slices", "1"),
        ),
        ("examples/models/llama2-7b-32k.json", "a100-64.json", 16, ("--top", "3")),
        ("gpt3-13b", "a100-64.json", 64, ("--tensor-parallel-size", "8", "--num-token-slices", "1,4")),
        ("gpt3-13b", "a100-64.json", 64, ("--stage-partition", "uniform", "--zero-stage", "0")),
    ):
        words = (*SEARCH, "rank", model, f"{clusters}/{cluster}", "--global-batch-size", str(batch), *JSON, *more)
        yield Case(f"rank {Path(model).stem} {cluster} {batch} {' '.join(more)}", words)
    for name in STRATEGIES:
        path = f"{{work}}/{name}.json"
        yield Case(
            f"predict {name}", (*SEARCH, "predict", "gpt3-13b", f"{clusters}/a100-64.json", "--strategies", path, *JSON)
        )
    for name, more in (("plain", ()), ("zero", ("--count", "1,2,4")), ("gpipe", ("--count", "8")), ("interleaved", ())):
        path = f"{{work}}/{name}.json"
        words = (*SEARCH, "slices", "gpt3-13b", f"{clusters}/a100-64.json", "--strategy", path, *JSON, *more)
        yield Case(f"token slices of {name}", words)
    for schedule in ("1f1b", "zero-bubble", "interleaved"):
        model_chunks = ("--model-chunks", "2") if schedule == "interleaved" else ()
        shape = ("--stages", "4", "--micro-batches", "4", "--token-slices", "4", *model_chunks)
        yield Case(f"plan {schedule}", (*PLAN, "--schedule", schedule, *shape, *JSON))
    optimised = ("--schedule", "optimised", "--stages", "4", "--micro-batches", "4", "--token-slices", "4")
    yield Case("plan optimised", (*PLAN, *optimised, "--attention-share", ".6", "--solve-slices", *JSON))
    for names in (
        *(("bigscience",), ("sc21", "seqsel", "zero_bubble"), ("vtrain_multi",), ("vtrain_single", "sc21")),
        *(("modern",), ("sailor_gh200", "fsdp_a100", "fsdp_h100"), ("dgxc_h100", "dense_2025")),
    ):
        files = tuple(f"{{trials}}/{name}.jsonl" for name in names)
        words = (*SEARCH, "validate", "--trials", *files, "--folds", "2", *JSON, *TRAINERS)
        yield Case(f"validate {' '.join(names)}", words)
    calibrated = (*SEARCH, "rank", "gpt3-13b", f"{clusters}/a100-64.json", "--global-batch-size", "64")
    yield Case("rank calibrated", (*calibrated, "--calibrate", "{trials}/sc21.jsonl", *JSON))
    yield Case("terapipe's settings", ("examples/terapipe/settings.py", *JSON))
    for experiment in ("homogeneous", "het_cluster", "het_model"):
        yield Case(f"amp {experiment}", ("examples/amp/run.py", experiment, "--amp-repo", "{amp}", "--json", "{out}"))
    measured = ("measure", "examples/models/tiny.json", "--budget-s", "5", "--precision", "fp32", "--json", "{out}")
    yield Case("measure", (*SEARCH, *measured), is_timed=True)


def answer(checkout: Path, case: Case, places: Mapping[str, str]) -> object:
    """Return the JSON that a command prints, or its exit code and errors."""
    out = Path(places["out"])
    out.unlink(missing_ok=True)
    given = case.words if (checkout / TRAINERS[1]).exists() else [word for word in case.words if word not in TRAINERS]
    words = [word.format_map(places) if "{" in word else word for word in given]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=checkout,
        env={"PATH": str(Path(sys.executable).parent), "PYTHONPATH": str(checkout), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    text = out.read_text(encoding="utf-8") if out.exists() else done.stdout
    start = min((text.find(each) for each in "[{" if each in text), default=-1)
    if done.returncode or start < 0:
        return {"exit code": done.returncode, "errors": done.stderr.strip().splitlines()[-1:]}
    document = json.JSONDecoder().raw_decode(text[start:])[0]
    return names_of(document) if case.is_timed else document


def names_of(document: object) -> object:
    """Return the names of a JSON value's figures, of each list its first entry's."""
    if isinstance(document, dict):
        return {key: names_of(value) for key, value in document.items()}
    return [names_of(each) for each in document[:1]] if isinstance(document, list) else type(document).__name__


def differences(before: object, after: object, place: str = "") -> Iterator[str]:
    """Yield the differences between two JSON values, a line each."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            if key not in before or key not in after:
                yield f"{place}.{key} is only {'after' if key in after else 'before'}"
            else:
                yield from differences(before[key], after[key], f"{place}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{place}[{index}]")
    elif isinstance(before, int | float) and isinstance(after, int | float) and not isinstance(before, bool):
        if not math.isclose(before, after, rel_tol=TOLERANCE, abs_tol=1e-12):
            yield f"{place}: {before} before, {after} after"
    elif before != after:
        yield f"{place}: {str(before)[:80]} before, {str(after)[:80]} after"


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, and return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="checkout of the commit before")
    parser.add_argument("--trials", type=Path, help="folder of trial files")
    parser.add_argument("--amp", type=Path, help="checkout of AMP's repository")
    parser.add_argument("--only", default="", metavar="WORD", help="commands whose names have this in them")
    options = parser.parse_args(argv)
    different = number = 0
    with tempfile.TemporaryDirectory() as work:
        for name, strategy in STRATEGIES.items():
            Path(work, f"{name}.json").write_text(json.dumps(strategy), encoding="utf-8")
        places = {
            "work": work,
            "trials": str(options.trials),
            "amp": str(options.amp),
            "out": str(Path(work, "out.json")),
        }
        for case in cases():
            needs = [name for name in ("trials", "amp") if any(f"{{{name}}}" in word for word in case.words)]
            if options.only not in case.name or any(getattr(options, name) is None for name in needs):
                continue
            number += 1
            found = list(
                islice(
                    differences(*(answer(each, case, places) for each in (options.before.resolve(), HERE))), SHOWN + 1
                )
            )
            different += bool(found)
            print(f"{'differs' if found else 'same':8}{case.name}", flush=True)
            for line in found[:SHOWN]:
                print(f"          {line}", flush=True)
    print(f"{number} commands, {different} differ")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
