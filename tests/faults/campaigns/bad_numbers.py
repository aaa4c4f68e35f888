"""Bad numbers: NaN and infinity, jumps of the loss, and copies that differ, in every precision and layout.

Each run has two ranks. The fault comes in iteration 3 of 6. A run that ended by a bad
loss or gradient is then resumed without the fault, and must continue as a run without it, to the bit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from tests.distributed import run_distributed
from tests.end_to_end.corpus import write_corpus
from tests.end_to_end.launching import error_lines, flags, losses
from tests.faults.campaign import Outcome, Settings, together
from tests.faults.injection import Fault, train_with_fault

LAYOUTS = {
    "pp 2": (),
    "dp 2": ("--pipeline-model-parallel-size", "1"),
    "tp 2": ("--pipeline-model-parallel-size", "1", "--tensor-model-parallel-size", "2"),
}
"""Flags of each layout of two ranks, with four token slices."""

PRECISIONS = {
    "fp32": ("--zero-stage", "0"),
    "fp32, ZeRO 1": ("--zero-stage", "1"),
    "bf16": ("--bf16",),
    # At the lowest scale: a higher one would be lowered first.
    "fp16": ("--fp16", "--initial-loss-scale", "1", "--hysteresis", "1"),
}
"""Flags of each precision."""

HERE = {"rank": 1, "micro_batch": 1, "token_slice": 2}
AT = "on rank 1, at micro-batch 1, token slice 2"
LAYER = "4.mlp"
"""On rank 1 in every layout."""

CONSISTENCY = ("--check-consistency", "1")
RESUMES, ENDS, CONTINUES, REFUSED = "resumes", "ends", "continues", "refused"


@dataclass(frozen=True)
class Case:
    """A fault, and its required outcome."""

    title: str
    fault: Fault
    message: tuple[str, ...]
    """Parts of the line that a user reads."""
    becomes: str = RESUMES
    """Whether the run ends with the previous iteration saved, ends without a checkpoint, continues, or continues and
    saves a checkpoint that is then refused."""
    more: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    """Layouts and precisions in which it can be; all if empty."""

    def fits(self, layout: str, precision: str) -> bool:
        """Whether the fault can be in a run of a layout and a precision."""
        return not self.only or {layout, precision} <= set(self.only)


LAST = ("pp 2", "dp 2", *PRECISIONS)
"""Where the loss of rank 1 is not that of rank 0, too: not in tensor parallelism."""

STATED = ("pp 2", "tp 2", *PRECISIONS)
"""Where a rank has the whole state of an optimizer: not with ZeRO over replicas."""

LOSS, WEIGHT = Fault(kind="loss", **HERE), Fault(kind="weight", name=LAYER, rank=1)
STATE = replace(WEIGHT, kind="state")
LAST_STATE, SAVED_STATE = replace(STATE, iteration=6), replace(STATE, iteration=6, saved=True)
GRADIENT, NAN_LOSS = "iteration 3: the gradient is NaN or infinite", "iteration 3: the loss is nan"

CASES = (
    Case("NaN in the loss", LOSS, (NAN_LOSS, f"in the loss {AT}"), only=LAST),
    Case(
        "infinity in the loss",
        replace(LOSS, value=inf),
        ("iteration 3: the loss is inf", f"in the loss {AT}"),
        only=LAST,
    ),
    Case(
        "NaN in an activation",
        Fault(kind="output", name=LAYER, **HERE),
        (NAN_LOSS, f"in the output of layer {LAYER} {AT}"),
    ),
    Case(
        "infinity in a gradient",
        Fault(kind="gradient", value=inf, name=LAYER, **HERE),
        (GRADIENT, f"in the gradient of the output of layer {LAYER} {AT}"),
    ),
    Case(
        "NaN in the gradient of a weight",
        Fault(kind="weight gradient", name=LAYER, **HERE),
        (GRADIENT, f"in the gradient of weight {LAYER}", AT),
    ),
    Case("NaN once, as from a device", replace(LOSS, once=True), (NAN_LOSS, "computed again it is finite"), only=LAST),
    Case("NaN in a weight", WEIGHT, (NAN_LOSS, f"weight {LAYER}", "on rank 1 (1 of "), ENDS),
    Case(
        "NaN in a state of the optimizer",
        STATE,
        ("iteration 4: the loss is nan", f"exp_avg of {LAYER}", "on rank 1 (1 of "),
        ENDS,
        (),
        STATED,
    ),
    Case(
        "NaN in a weight in the last iteration",
        LAST_STATE,
        ("the model after iteration 6 has NaN or infinity in", f"exp_avg of {LAYER}", "was not saved"),
        ENDS,
        (),
        STATED,
    ),
    Case(
        "NaN in a state of the optimizer in a checkpoint",
        SAVED_STATE,
        ("global_step6 has NaN or infinity in", f"exp_avg of {LAYER}", "load another"),
        REFUSED,
        (),
        STATED,
    ),
    Case(
        "NaN in a weight in a checkpoint, with --finetune",
        SAVED_STATE,
        ("global_step6 has NaN or infinity in", f"weight {LAYER}", "load another"),
        REFUSED,
        ("--finetune",),
        STATED,
    ),
    Case(
        "NaN in the loss, skipped",
        LOSS,
        ("skipped iteration 3: the loss is nan", f"in the loss {AT}"),
        CONTINUES,
        ("--bad-numbers", "skip"),
        LAST,
    ),
    Case(
        "NaN in the loss of every iteration, skipped twice",
        replace(LOSS, iterations=9),
        ("iteration 5: the loss is nan", "it is number 3 in a row"),
        more=("--bad-numbers", "skip", "--max-bad-numbers-in-a-row", "2"),
        only=LAST,
    ),
    Case(
        "one bit of a replica's weight",
        Fault(kind="bit", name="3.mlp.up.weight", rank=1),
        ("copies are not equal", "weight 3.mlp.up.weight on ranks 0, 1 differs (replicas)"),
        ENDS,
        CONSISTENCY,
        ("dp 2", "fp32"),
    ),
    Case(
        "one bit of a weight that tensor parallelism does not cut",
        Fault(kind="bit", name="3.mlp_norm.weight", rank=1),
        ("copies are not equal", "(tensor-parallel ranks)"),
        ENDS,
        CONSISTENCY,
        ("tp 2", "fp32", "bf16", "fp16"),
    ),
    Case(
        "one bit of a tied weight",
        Fault(kind="bit", name="tied_modules", rank=1),
        ("copies are not equal", "(tied stages)"),
        ENDS,
        CONSISTENCY,
        ("pp 2", "fp32"),
    ),
    Case("none, copies compared in every iteration", Fault(kind="bit", iteration=99), (), CONTINUES, CONSISTENCY),
    Case(
        "a loss of 1.5 times those before",
        Fault(kind="spike", value=1.5, iteration=28),
        ("the loss of iteration 28 is", "above"),
        ENDS,
        ("--train-iters", "30", "--spiky-loss", "stop"),
        ("pp 2", "fp32"),
    ),
)


def campaign(settings: Settings) -> Iterator[Outcome]:
    """Put wrong numbers into runs, and check messages, checkpoints and resumed runs."""
    data = write_corpus(settings.folder)
    sound: dict[tuple[str, str], list[float]] = {}
    for case in CASES:
        setups = [(layout, precision) for layout in LAYOUTS for precision in PRECISIONS if case.fits(layout, precision)]
        outcomes = []
        for number, setup in enumerate(setups[:1] if settings.quick else setups):
            folder = settings.folder / f"{CASES.index(case)}-{number}"
            if case.becomes == RESUMES and setup not in sound:
                sound[setup] = _sound_losses(settings.folder / f"sound-{len(sound)}", data, *setup)
            outcomes.append(_outcome(case, folder, data, *setup, sound.get(setup, [])))
        yield together(f"{case.title} ({len(outcomes)} layouts and precisions)", outcomes)


def _words(folder: Path, data: Path, layout: str, precision: str) -> list[str]:
    metrics = folder / "metrics.jsonl"
    paths = ("--save", folder / "checkpoints", "--metrics-file", metrics, "--eval-iters", 0)
    return flags(data, *LAYOUTS[layout], *PRECISIONS[precision], *paths)


def _train(words: Sequence[str], fault: Fault | None) -> tuple[int, str]:
    """The first exit code of both ranks that is not 0, and their output."""
    (first, output), (second, other) = run_distributed(train_with_fault, 2, words, fault)
    return first or second, output + other


def _sound_losses(folder: Path, data: Path, layout: str, precision: str) -> list[float]:
    """Losses of a run without a fault."""
    code, output = _train(_words(folder, data, layout, precision), None)
    assert code == 0, output
    return losses(folder / "metrics.jsonl")


def _outcome(case: Case, folder: Path, data: Path, layout: str, precision: str, sound: Sequence[float]) -> Outcome:
    """Outcome of a fault in one setup."""
    words = _words(folder, data, layout, precision)
    if case.becomes == REFUSED:
        code, output = _train(words, case.fault)
        assert code == 0, output
        code, output = _train([*words, "--load", str(folder / "checkpoints"), *case.more], None)
    else:
        code, output = _train([*words, *case.more], case.fault)
    lines = error_lines(output)
    if case.becomes == CONTINUES:
        lines = [line.strip() for line in output.splitlines() if line.startswith(" skipped")]
    message = lines[0] if lines else ""
    where = f"{layout}, {precision}: "
    broken = [f"{where}{text!r} is not in {message!r}" for text in case.message if text not in message]
    broken += [f"{where}exit code {code}"] if (code == 0) != (case.becomes == CONTINUES) else []
    broken += [f"{where}{len(lines)} lines"] if case.message and len(lines) != 1 else []
    latest = folder / "checkpoints" / "latest"
    if case.becomes == ENDS and latest.exists():
        broken.append(f"{where}{latest.read_text()} was saved")
    if case.becomes == RESUMES:
        broken += [where + line for line in _resumed(case, folder, words, sound)]
    return Outcome(fault=case.title, tried=1, message=message, broken=tuple(broken))


def _resumed(case: Case, folder: Path, words: Sequence[str], sound: Sequence[float]) -> Iterator[str]:
    """Yield faults of the run that resumes without the fault."""
    code, output = _train([*words, "--load", str(folder / "checkpoints")], None)
    if code != 0:
        yield f"resuming ended with {error_lines(output)[:1]}"
    elif case.more:
        return  # what was skipped is not trained on again
    elif losses(folder / "metrics.jsonl") != list(sound):
        yield "the losses are not those of a run without the fault"
