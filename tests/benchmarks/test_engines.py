"""Engines of the benchmark compute what plain torch does, or refuse; its page has a made-up measurement."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.engines.page import (
    COLUMNS,
    PAGE,
    circumstances,
    compared,
    draw,
    findings,
    main,
    results_markdown,
    rows,
    table,
)
from benchmarks.engines.results import (
    DEEPSPEED,
    IN_ONE_THREAD,
    IN_TWO_THREADS,
    OURS,
    PIPELINE_ENGINE,
    TORCH,
    Document,
    Measured,
    Name,
    Noise,
    Run,
    ours_with,
)
from benchmarks.measuring.report import BEGIN, END, written_between
from megatron_terapipe.config import ModelConfig
from tests.architecture.sources import ROOT
from tests.distributed import run_distributed

if TYPE_CHECKING:
    # With torch's pipelines: a second for each worker that collects these tests.
    from benchmarks.engines.pipelines import Engine, Job

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=2,
    seq_length=32,
    vocab_size=256,
    untie_embeddings_and_output_weights=True,
)
WRONG = Name("of a test", "half the loss")
NEEDED = {"1F1B": 2, "DualPipeV": 4}
"""Fewest micro-batches on two ranks, by schedule; the others take one."""


def _half_the_loss(job: "Job") -> "Engine":
    from benchmarks.engines.pipelines import plain

    engine = plain(job, threads=1)
    for weight in engine.weights.values():
        weight.register_hook(lambda gradient: gradient / 2)
    return engine


def _competed() -> list[tuple[Measured, ...]]:
    from benchmarks.engines.pipelines import Entry, Job, catalogue
    from benchmarks.engines.turns import Competition

    job = Job(MODEL, 1, 2, frozenset((0,)))
    # To find the orders of `optimised`, numba compiles for longer than all of this test takes.
    entries = [
        each
        for each in catalogue([4])
        if "optimised" not in each.name.schedule and "2 threads" not in each.name.schedule
    ]
    # Engines of ours take any number of micro-batches.
    few = Competition(job, [each for each in entries if not each.name.engine.startswith(OURS)])
    many = Competition(replace(job, num_micro_batches=4), [*entries, Entry(WRONG, _half_the_loss)])
    for each in (few, many):
        each.round(0)
    return [few.measured(), many.measured()]


def test_engines_agree_with_plain_torch_or_say_why_not() -> None:
    from benchmarks.engines.turns import TOLERANCE

    (few, many), others = run_distributed(_competed, 2)
    assert [each.name for each in few + many] == [each.name for measured in others for each in measured]
    assert {each.schedule.split(",")[0]: each.needs for each in few if each.needs} == NEEDED
    *timed, wrong = many
    assert wrong.name == WRONG and not wrong.seconds and "gradients by 5" in (wrong.problem or "")
    for each in [*timed, *(each for each in few if each.needs is None)]:
        assert each.problem is None and len(each.seconds) == 1, each
        assert each.loss_difference is not None and each.loss_difference < TOLERANCE
        assert each.gradient_difference is not None and each.gradient_difference < TOLERANCE
        assert sum(each.peak_bytes) > 0
    assert timed[0].name == IN_ONE_THREAD and timed[0].gradient_difference == 0


def test_the_largest_difference_is_a_share_of_the_largest_element() -> None:
    from benchmarks.engines.turns import largest_difference

    expected = {"weight": torch.tensor([[4.0, 1.0]]), "bias": torch.tensor([1.0])}
    assert largest_difference({"weight": torch.tensor([4.0, 2.0])}, expected) == 0.25
    assert largest_difference({"weight": torch.tensor([4.0, 1.0]), "bias": torch.tensor([0.5])}, expected) == 0.5


def _measured(name: Name, *seconds: float, megabytes: int = 100) -> Measured:
    return Measured(
        engine=name.engine,
        schedule=name.schedule,
        seconds=seconds,
        cpu_seconds=tuple(1.5 * each for each in seconds),
        peak_bytes=(megabytes * 2**20, 50 * 2**20),
        loss_difference=0.0,
        gradient_difference=5e-7 if name.engine.startswith(OURS) else 0.0,
    )


RUN = Run(
    num_micro_batches=1,
    engines=(
        _measured(IN_ONE_THREAD, 4.0, 4.2, 4.1),
        _measured(IN_TWO_THREADS, 2.5, 2.5, 2.5),
        _measured(PIPELINE_ENGINE, 4.4, 4.4, 4.4, megabytes=120),
        Measured(engine=DEEPSPEED, schedule="DualPipeV", problem="needs >= 2 * 2", needs=4),
        _measured(Name(TORCH, "GPipe"), 4.3, 4.5, 4.4),
        Measured(engine=TORCH, schedule="Fast", problem="loss differs by 1e-1"),
        _measured(Name(OURS, "1f1b"), 4.6, 4.6, 4.6),
        _measured(Name(ours_with(8), "1f1b"), 2.1, 2.2, 2.3, megabytes=60),
    ),
)
DOCUMENT = Document(
    command="deepspeed --module benchmarks.engines",
    date="2026-11-22",
    machine="2 cores of a test",
    software={"torch": "2.13.0"},
    model={"layers": 4, "tokens": 2048},
    num_ranks=2,
    micro_batch_size=1,
    wall_s=600.0,
    noise=Noise(load_at_start=0.1, others_share=0.02, steal_share=0.001, product_s=(0.1, 0.11, 0.09)),
    runs=(RUN,),
)


def test_every_engine_has_a_row_and_the_page_shows_those_compared() -> None:
    cells = list(rows(DOCUMENT, RUN))
    assert len(cells) == len(RUN.engines) and all(len(row) in (3, len(COLUMNS)) for row in cells)
    assert cells[0][2:7] == ("4.100", "4.000 to 4.200", "1.00", "1.07", "25%")
    assert cells[3][2] == "needs 4 micro-batches" and cells[5][2] == "not timed: loss differs by 1e-1"
    assert cells[7][2:5] == ("**2.200**", "2.100 to 2.300", "**1.86**") and cells[7][7:] == ("60 / 50", "5e-07")
    assert cells[4][8] == "the same"
    lines = table(DOCUMENT, RUN).splitlines()
    assert lines[0] == "### 1 micro-batch of 1 x 2048 tokens"
    shown = [tuple(cell.strip() for cell in line.split("|")[1:-1])[:2] for line in lines[4:]]
    assert shown == compared(RUN) and {IN_ONE_THREAD, IN_TWO_THREADS, PIPELINE_ENGINE} < {*shown}
    assert (ours_with(8), "1f1b") in shown and (TORCH, "Fast") not in shown


def test_findings_name_the_fastest_and_where_others_win() -> None:
    fastest, whole, memory, threads = findings(RUN)
    assert "*ours, 8 token slices: 1f1b*, 2.200 s" in fastest and "100.0% slower." in fastest
    assert "*torch.distributed.pipelining: GPipe*" in whole and "PipelineEngine" in whole
    assert "ours 60 MB" in memory and "rivals 100 MB" in memory and "+13.6%" in threads


def test_findings_say_so_where_a_rival_is_first_and_where_ranges_overlap() -> None:
    rival = _measured(Name(TORCH, "GPipe"), 2.0, 2.15, 2.5)
    fastest, *_ = findings(replace(RUN, engines=(*RUN.engines[:4], rival, *RUN.engines[5:])))
    assert fastest.startswith("Fastest pipeline: *torch") and "engines of ours" in fastest and "overlap" in fastest


def test_circumstances_tell_how_quiet_the_machine_was() -> None:
    text = " ".join(circumstances(DOCUMENT))
    assert "2.0% of the cores' time" in text and "-10.0% to +10.0%" in text and "3 with 1 micro-batch" in text
    assert "up to 10% longer in one round than in another; 2% for the median engine" in text


def test_the_picture_has_a_bar_for_every_engine_that_has_times() -> None:
    root = ElementTree.fromstring(draw(DOCUMENT))
    texts = ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]
    for each in RUN.engines:
        assert str(each.name) in texts
    assert texts.index("ours, 8 token slices: 1f1b") < texts.index("plain torch: one process, 2 threads")
    assert "needs 4 micro-batches" in texts
    bars = [each for each in root.iter("{http://www.w3.org/2000/svg}path") if each.get("class") == "range"]
    assert len(bars) == len(RUN.timed) == 6


def test_times_become_a_page_in_one_step(tmp_path: Path) -> None:
    times, page, picture = tmp_path / "times.json", tmp_path / "page.md", tmp_path / "img" / "engines.svg"
    DOCUMENT.write(times)
    assert Document.read(times) == DOCUMENT
    picture.parent.mkdir()
    page.write_text(f"# Engines\n{BEGIN}\nold\n{END}\nHow to read it.\n")
    arguments = [str(times), "--document", str(page), "--picture", str(picture)]
    assert main(arguments) == 0 and main(arguments) == 0
    text = page.read_text()
    assert "old" not in text and "(img/engines.svg)" in text and text.endswith("How to read it.\n")
    assert text.count("### 1 micro-batch") == 1
    assert Document.read(tmp_path / "page.json") == DOCUMENT
    assert len((tmp_path / "page.csv").read_text().splitlines()) == 1 + len(RUN.engines)


def test_all_documents_have_the_figures_of_the_measurement() -> None:
    document = Document.read(PAGE.with_suffix(".json"))
    text = PAGE.read_text(encoding="utf-8")
    assert written_between(text, results_markdown(document, "../img/engines.svg")) == text
    one, four = ({each.name: each.median_s for each in run.timed} for run in document.runs)

    def best(seconds: dict[Name, float], engine: str) -> float:
        return min(each for name, each in seconds.items() if name.engine.startswith(engine))

    ours, sliced = best(one, OURS), best(four, ours_with(8))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    page = " ".join((ROOT / "docs" / "concepts" / "token-slices.md").read_text(encoding="utf-8").split())
    for where, phrase in (
        (readme, f"**{one[PIPELINE_ENGINE] / ours:.2f}** times as fast as DeepSpeed's PipelineEngine, "),
        (readme, f" {best(one, TORCH) / ours:.2f} times as fast as the best of torch's schedules"),
        (readme, f"plain torch in one process with two threads takes {1 - one[IN_TWO_THREADS] / ours:.0%} less time."),
        (readme, f"our best is {four[PIPELINE_ENGINE] / best(four, OURS):.2f} times as fast as PipelineEngine, "),
        (readme, f" {four[PIPELINE_ENGINE] / sliced:.2f} times with 8 token slices, "),
        (readme, f"and {best(four, OURS) / best(four, TORCH) - 1:.0%} slower than torch's best schedule"),
        (page, f"with 8 token slices are {one[PIPELINE_ENGINE] / ours:.2f} times as fast as DeepSpeed's pipeline "),
        (page, f" {four[PIPELINE_ENGINE] / sliced:.2f} times with four, where torch's best schedule is faster"),
    ):
        assert phrase.replace("%", " %") in where, phrase


def test_a_page_needs_its_markers() -> None:
    assert written_between(PAGE.read_text(encoding="utf-8"), "new").count("new") >= 1
    with pytest.raises(SystemExit, match="has no lines"):
        written_between("# Engines", "new")
