"""The answer of a search as a document, a table and a page; the published schema describes the document."""

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import rich.console
from pydantic import ValidationError

from deepspeed_ext.plan.costs import OpCosts
from megatron_terapipe.config.flops import iteration_flops
from megatron_terapipe.console import print_text
from megatron_terapipe.devices import GENERATION_NAMES
from megatron_terapipe.search.answer.answer import compare, document_text, ranking, runners_up
from megatron_terapipe.search.answer.figures import PUBLISHED, best_published, model_flops
from megatron_terapipe.search.answer.json_documents import PredictDocument, RankDocument, WhatIfPart
from megatron_terapipe.search.answer.output_files import write_files
from megatron_terapipe.search.answer.page import MOST_OPS, render_page, timeline_of
from megatron_terapipe.search.answer.screen import notes_of, print_notes, print_table, rows_of
from megatron_terapipe.search.machine.cluster_files import parse_cluster
from megatron_terapipe.search.price.workload_files import parse_workload, read_workload
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import Strategy
from megatron_terapipe.texts import bytes_text, count_text, numbers_text, time_text
from tests.html_pages import Page
from tests.search.answer.answers import (
    BEST,
    READER,
    answer,
    checked,
    prediction,
    read,
    small_problem,
    strategies,
)


def test_the_document_of_a_ranking() -> None:
    document = checked(document_text(answer(notes=["given"])))
    assert (document["schema_version"], document["command"]) == (2, "rank")
    assert document["search"]["rejected"] == {"does not fit <memory>": 3000, "batch": 1000}
    best = "the best published MFU on such devices is 70%: Llama 13B on A100, arXiv 2311.05610"
    assert document["notes"] == ["given", "rank 1: micro-batches extrapolated", best]
    entries = document["entries"]
    assert [entry["rank"] for entry in entries] == [1, 2, 3]
    first, last = entries[0], entries[-1]
    assert Strategy.from_json(first["strategy"]) == BEST
    assert (last["predicted"], last["feasible"], last["reason"]) == (None, False, "[why] <it> falls")
    predicted = first["predicted"]
    assert predicted["iteration_time_s"] == pytest.approx(1.4)
    assert predicted["tokens_per_s"] == pytest.approx(8 * 128 / 1.4)
    assert predicted["tokens_per_s_per_device"] == pytest.approx(8 * 128 / 1.4 / 16)
    assert predicted["tflops_per_device"] == pytest.approx(predicted["mfu"] * 312)
    assert predicted["tflops_per_device_causal"] == pytest.approx(predicted["mfu_causal"] * 312)
    assert 0 < predicted["mfu_causal"] < predicted["mfu"]
    assert sum(predicted["breakdown"].values()) == pytest.approx(1.4)
    assert predicted["memory_per_rank"][0]["total"] == pytest.approx(8e9)


def test_question_of_a_document_round_trips() -> None:
    problem = small_problem()
    document = checked(document_text(PredictDocument(**ranking(problem, strategies(), (), global_batch_size=None))))
    assert parse_workload(document["model"]["settings"], "model").config == problem.workload.config
    again, _ = parse_cluster({"nodes": document["cluster"]["nodes"]}, "cluster")
    assert again.nodes == problem.cluster.nodes
    assert document["cluster"]["devices"] == {"A100-SXM4-80GB": 16}


@pytest.mark.parametrize("part", ["compute_s", "total"])
def test_every_part_of_a_prediction_is_there(part: str) -> None:
    document = checked(document_text(answer()))
    predicted = document["entries"][0]["predicted"]
    for parts in (predicted["breakdown"], *predicted["memory_per_rank"]):
        parts.pop(part, None)
    with pytest.raises(ValidationError, match=f"{part} is missing"):
        READER.validate_python(document)


@pytest.mark.parametrize("fault", [{"schema_version": 1}, {"notes": None}, {"more": 1}, {"command": "slices"}])
def test_other_documents_are_refused(fault: dict[str, object]) -> None:
    document = checked(document_text(answer()))
    with pytest.raises(ValidationError):
        READER.validate_python(document | fault)


def test_warning_about_more_than_the_peak() -> None:
    assert "peak" not in answer().answer
    first = strategies()[0]
    impossible = replace(first, prediction=replace(first.price, iteration_time_s=1e-9))
    assert "; no device does more than its peak: correct " in answer(entries=[impossible]).answer


def printed(document: RankDocument, width: int) -> list[str]:
    stream = io.StringIO()
    print_table(document, rich.console.Console(file=stream, width=width))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_the_table() -> None:
    lines = printed(answer(), 170)
    assert (
        lines[0]
        == "dp 2, tp 2, pp 4, 2 slices: 1.4 s a step, 731 tokens/s, MFU 0% (best published: 70%), 8 GB of 85.2 GB"
    )
    assert lines[1].startswith("4x64 (") and lines[1].endswith(
        "128 x 8 tokens a step, on 16 x A100-SXM4-80GB in 2 nodes, bf16"
    )
    head = next(line for line in lines if "rank" in line)
    # What all rows share is said once below them.
    names = "rank dp tp pp S recompute time interval tokens/s MFU causal MFU bubble memory"
    assert head.split() == names.split()
    first = next(line for line in lines if line.split()[:1] == ["1"]).split()
    assert first[:6] == ["1", "2", "2", "4", "2", "none"]
    text = "\n".join(lines)
    assert "-10 +20 %" in text and "rank 3 cannot run: [why] <it> falls" in lines
    assert "all rows: mbs 1, schedule 1f1b, V 1, ZeRO 1, sp no" in lines
    assert "S: token slices, V: model chunks, mbs: micro-batch size" in lines


@pytest.mark.parametrize(
    ("peak", "said"), [(9e9, "because it holds 1 GB less"), (8e9, "because it sends less between nodes"), (0, "")]
)
def test_why_the_first_is_before_a_faster_one(peak: float, said: str) -> None:
    first, second, _ = strategies()
    faster = replace(prediction(1.0, 0.19, ranks=4, peak=peak or 8e9), iteration_time_s=1.39 if peak else 1.41)
    lines = printed(answer(entries=[first, replace(second, prediction=faster)]), 100)
    found = [line for line in lines if "rank 1 comes first" in line]
    assert found == ([f"rank 2 is 0.7% faster; within 1% of time rank 1 comes first {said}"] if said else [])


def change(name: str, share: float) -> WhatIfPart:
    return WhatIfPart(
        name=name, value=None, strategy=None, iteration_time_s=None, change=share, line=f"{name} {share}", more="More."
    )


def test_notes_are_few_and_ordered_by_what_they_can_change() -> None:
    """One of a kind; trainers that cannot run are in full sentences only."""
    names = [("a", 0.1), ("b", 0.05), ("b", 0.04), ("c " * 60, 0.03), *((x, 0.02) for x in "def"), ("none", 0.0)]
    document = answer(advice=[change(*each) for each in names], notes=["given"])
    assert notes_of(document)[:2] == ["a 0.1", "b 0.05"] and "none 0.0" not in notes_of(document)
    for explained in (False, True):
        stream = io.StringIO()
        print_notes(document, explained=explained, console=rich.console.Console(file=stream, width=100))
        lines = stream.getvalue().splitlines()
        assert all(len(line) <= 100 for line in lines)
        assert explained or sum(line.startswith("- ") for line in lines) == 5
        assert ("- given" in lines) == explained == ("- b 0.04. More." in lines)


@pytest.mark.parametrize("width", range(32, 60))
def test_values_and_flags_are_in_one_line(width: int) -> None:
    whole = (
        "1.4 s",
        "tp 2,",
        "MFU 63% (best published: 70%),",
        "8 GB of 85 GB:",
        "pp 4 ·",
        "--effort 4",
        "for 4% less",
    )
    stream = io.StringIO()
    print_text(rich.console.Console(file=stream, width=width), f"- {' '.join(whole * 2)}", indent="  ")
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width and " ".join(" ".join(lines).split()) == f"- {' '.join(whole * 2)}"
    assert all(sum(line.count(each) for line in lines) == 2 for each in whole[:-1])


def test_published_figures_are_named_as_those_of_dense_models_beside_a_mixture() -> None:
    mixture = replace(small_problem(), workload=read_workload("mixtral-8x7b"))
    assert "(best published, dense models: 68%)" in answer(mixture).answer


def test_published_figures_are_those_of_the_generation() -> None:
    assert set(PUBLISHED) <= set(GENERATION_NAMES)
    # A product of large matrices alone reaches 0.73 (GB200) to 0.87 (A100).
    assert all(0.3 < each.causal_share <= each.share < 0.73 for each in PUBLISHED.values())
    names = {("A100-80GB",): "ampere", ("A100-80GB", "A100-40GB"): "ampere", ("A100-80GB", "H100"): ""}
    for devices, generation in names.items():
        cluster, _ = parse_cluster({"nodes": [{"device": name, "devices": 8} for name in devices]}, "cluster")
        assert best_published(cluster) == PUBLISHED.get(generation)
    runs = {
        "ampere": (40, 5120, 2048, 2 * 5120 * 4 * 5120 + 6 * 5120 * 13824, 128000),
        "hopper": (32, 4096, 8192, 2 * 4096 * (2 * 4096 + 2 * 1024) + 6 * 4096 * 14336, 128256),
        "blackwell": (126, 16384, 8192, 2 * 16384 * (2 * 16384 + 2 * 1024) + 6 * 16384 * 53248, 128256),
    }
    for name, (layers, hidden, tokens, products, vocab) in runs.items():
        whole = layers * (products + 4 * tokens * hidden) + 2 * hidden * vocab
        causal = whole - layers * 2 * tokens * hidden
        assert PUBLISHED[name].causal_share == pytest.approx(PUBLISHED[name].share * causal / whole, abs=0.001)
    # The step time of the table, on eight devices.
    flops = 3 * 8192 * 128 * (32 * (runs["hopper"][3] + 4 * 8192 * 4096) + 2 * 4096 * 128256)
    assert PUBLISHED["hopper"].share == pytest.approx(flops / 12.27 / 8 / 989.4e12, abs=0.001)


def test_why_the_winner_wins() -> None:
    first, second, _ = answer().entries
    changes, sentences = compare(first, second)
    assert changes == [("token slices", "2", "1"), ("lengths of token slices", "80, 48", "equal")]
    assert sentences[:3] == [
        "An iteration takes 500 ms less (26.3%).",
        "It saves most in bubbles (600 ms).",
        "It pays most in compute (100 ms).",
    ]
    assert compare(second, first)[1][0] == "An iteration takes 500 ms more (35.7%)."


@pytest.mark.parametrize("name", ["gpt2", "llama2-7b", "gpt3-175b", "mistral-7b"])
def test_utilization_is_counted_as_the_trainer_logs_it(name: str) -> None:
    workload = read_workload(name)
    assert workload.config is not None
    assert model_flops(workload) == iteration_flops(workload.config, 1)
    assert model_flops(workload, causal=True) == iteration_flops(workload.config, 1, causal=True)


@pytest.mark.parametrize(
    ("text_of", "texts"),
    [
        (count_text, {999_885_952: "1 B", 999_400_000: "999 M", 8_030_261_248: "8.03 B", 494e6: "494 M", 12: "12"}),
        (
            time_text,
            {12.345: "12.3 s", 1234.5: "1,234 s", 0.0123: "12.3 ms", 0.9996: "1 s", 3e-6: "3 us", 0.0: "0 us"},
        ),
        (bytes_text, {8.04e10: "80.4 GB", 1.2e12: "1.2 TB"}),
        (
            numbers_text,
            {
                (80, 48): "80, 48",
                (16,) * 128: "128 x 16",
                (64, 64, 48, 48, 32): "2 x 64, 2 x 48, 32",
                (*range(8, 16), *range(8)): "8 to 15, 0 to 7",
                (0, 1, 2, 9): "0, 1, 2, 9",
                (): "",
            },
        ),
    ],
)
def test_texts_of_figures(text_of: Callable[[Any], str], texts: dict[Any, str]) -> None:
    assert {value: text_of(value) for value in texts} == texts


@pytest.mark.parametrize(
    ("width", "dropped"),
    [
        (60, {"V", "interval", "recompute", "mbs", "MFU", "tokens/s"}),
        (70, {"V", "interval", "mbs", "MFU", "tokens/s"}),
        (80, {"mbs", "MFU", "tokens/s"}),
        (90, {"tokens/s"}),
        (100, set()),
    ],
)
def test_a_narrow_terminal_drops_columns_instead_of_cutting_them(width: int, dropped: set[str]) -> None:
    first, second, _ = strategies()
    sizes = {
        f"{name}_parallel_size": size for name, size in {"data": 1, "sequence": 2, "tensor": 1, "pipeline": 8}.items()
    }
    changed = {"schedule": "zero-bubble", "num_model_chunks": 12, "micro_batch_size": 2, "recompute": "selective"}
    other = replace(second.strategy, **sizes, **changed)
    lines = printed(answer(entries=[first, replace(second, strategy=other)]), width)
    assert "\u2026" not in "".join(lines) and max(map(len, lines)) <= width
    head = next(line for line in lines if "rank" in line).split()
    names = set("rank dp seq tp pp S mbs schedule V recompute time interval tokens/s MFU memory".split())
    assert names - set(head) == dropped, head


def test_no_utilization_of_a_guess() -> None:
    cluster, _ = parse_cluster({"nodes": [{"device": "cpu-core", "count": 8}]}, "c.json")
    assert "MFU" in rows_of(answer().entries)[0]
    assert "MFU" not in rows_of(answer(replace(small_problem(), cluster=cluster)).entries)[0]


ATTACK = "</title></pre></script><script>alert(1)</script><img src=x onerror=alert(1)>"


def test_names_of_files_and_clusters_add_no_script() -> None:
    problem = with_workload(small_problem(ATTACK), name=ATTACK)
    page = render_page(answer(problem, notes=[ATTACK]), problem, op_costs, command=ATTACK)
    assert not {"script", "img"} & set(Page(page).tags) and ATTACK not in page
    # The timeline's page, in its frame, has two scripts of its own: the data and the program.
    (inner,) = re.findall(r'srcdoc="(.*?)"></iframe>', page, re.DOTALL)
    framed = Page(unescape(inner))
    assert framed.tags.count("script") == 2 and "img" not in framed.tags


def with_workload(problem: SearchProblem, **changes: object) -> SearchProblem:
    return replace(problem, workload=replace(problem.workload, **changes))


def op_costs(strategy: Strategy) -> OpCosts:
    stages = strategy.pipeline_parallel_size * strategy.num_model_chunks
    row = (1.0 / strategy.num_token_slices,) * strategy.num_token_slices
    return OpCosts((row,) * stages, (row,) * stages)


def test_sections_of_the_page() -> None:
    problem = small_problem("ours & <theirs>")
    page = render_page(answer(problem, notes=["given"]), problem, op_costs, command="deepspeed <run>")
    assert Page(page).headings == [
        "Notes",
        "How to run it",
        "Why it wins over the runner-up",
        "Ranking",
        "Where an iteration goes",
        "Memory of each pipeline rank",
        "Timeline",
        "Rejected strategies",
    ]
    assert not re.search(r"(src|href)=", page), "it loads nothing"
    for text in ("ours & <theirs>", "deepspeed <run>", "[why] <it> falls", "does not fit <memory>"):
        assert text in unescape(page)
        assert text not in page or "<" not in text
    assert "Of 5,000 combinations of settings, 4,000 break a rule or equal others, and 1,000 were priced: 1,000" in page
    assert "token slices: 80, 48" in page
    assert "rank 3, layers 3" in page


def test_lengths_of_bars_are_times() -> None:
    page = render_page(answer(), small_problem(), op_costs)
    times = page[page.index("Where an iteration goes") : page.index("Memory of each")]
    rows = times.split('class="row"')[1:]
    sums = [sum(map(float, re.findall(r"width:([\d.]+)%", row))) for row in rows]
    # 1.4 s beside 1.9 s, which is the longest.
    assert sums == [pytest.approx(100 * 1.4 / 1.9, abs=0.1), pytest.approx(100, abs=0.1)]
    assert "compute: 1 s (71.4%)" in times


def test_memory_bars_mark_the_capacity() -> None:
    page = render_page(answer(), small_problem(), op_costs)
    memory = page[page.index("Memory of each") : page.index("Rejected strategies")]
    assert memory.count('class="limit" style="left:100.000%"') == 4
    assert "8 GB of 85.2 GB" in memory


def test_a_page_without_a_winner() -> None:
    page = render_page(answer(entries=strategies()[2:]), small_problem(), op_costs)
    assert "No strategy can run" in page
    assert "Rejected strategies" in page


def test_all_files(tmp_path: Path) -> None:
    document = write_files(answer(), small_problem(), op_costs, directory=str(tmp_path / "out"), html=None)
    written = document.launch
    names = [Path(path).name for path in written.files]
    assert names == ["ranking.json", "report.html", "strategy.json", "hostfile", "ds_config.json", "launch.sh"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert written.command is not None and written.command in unescape(page)
    # The timelines are a page in a page, quoted.
    (inner,) = re.findall(r'srcdoc="([^"]*)"', page)
    assert "<!doctype html>" in unescape(inner)
    data = re.search(r'id="data" type="application/json">(.*?)</script>', unescape(inner), re.DOTALL)
    assert data is not None
    assert [panel["title"][:6] for panel in json.loads(data[1])["panels"]] == ["rank 1", "rank 2"]
    assert read(tmp_path / "out" / "ranking.json")["entries"][0]["rank"] == 1


def test_model_that_cannot_be_launched_has_a_report(tmp_path: Path) -> None:
    problem = with_workload(small_problem(), config=None)
    written = write_files(answer(problem), problem, op_costs, directory=str(tmp_path), html=None).launch
    assert written.why_not is not None and "given by layers" in written.why_not
    assert len(written.files) == 2


def test_timelines_of_many_micro_batches_are_cut() -> None:
    strategy = Strategy(pipeline_parallel_size=4, micro_batch_size=1, global_batch_size=4000, num_token_slices=4)
    ((timeline, note),) = timeline_of(strategy, op_costs(strategy))
    assert sum(map(len, timeline.spans)) <= MOST_OPS
    assert note == "375 of 4000 micro-batches are drawn"
    assert timeline.unit == "s"
    assert not list(timeline_of(Strategy(schedule="optimised"), op_costs(Strategy())))


def test_runner_up_of_another_layout_is_compared_too() -> None:
    first, twin, _ = strategies()
    changed = replace(first, rank=3, strategy=replace(first.strategy, data_parallel_size=1, tensor_parallel_size=4))
    shown = answer(entries=[first, twin, changed])
    first, twin, other = shown.entries
    assert runners_up([first]) == []
    assert runners_up([first, twin]) == [twin]
    assert runners_up([first, other, twin]) == [other]
    assert runners_up([first, twin, other]) == [twin, other]
    page = render_page(shown, small_problem(), op_costs)
    assert "Why it wins over the runner-up" in page
    assert "Why it wins over the best of another kind" in page
    assert "<th>rank 3</th>" in page
