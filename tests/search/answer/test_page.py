import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.draw.html import Panel
from megatron_terapipe.search.answer.answer import runners_up
from megatron_terapipe.search.answer.output_files import MOST_OPS, timeline_of, write_answer
from megatron_terapipe.search.answer.page import render_page
from megatron_terapipe.strategy import Strategy
from tests.search.answer.answers import answer
from tests.search.answer.documents import read

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Nesting(HTMLParser):
    """Checks that every element that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag


ATTACK = "</title></pre></script><script>alert(1)</script><img src=x onerror=alert(1)>"


def test_names_of_files_and_clusters_add_no_script() -> None:
    shown = answer(ATTACK)
    notes = (*shown.notes, ATTACK)
    shown = replace(shown, workload=replace(shown.workload, name=ATTACK), notes=notes)
    panels = [
        Panel(ATTACK, found[0])
        for found in [timeline_of(shown.priced[0].strategy, op_costs(shown.priced[0].strategy))]
        if found
    ]
    plain, attacked = Nesting(), Nesting()
    plain.feed(render_page(answer()))
    attacked.feed(page := render_page(shown, Extras(command=ATTACK, panels=panels, panels_note=ATTACK)))
    assert not attacked.open and "script" not in attacked.seen and "img" not in attacked.seen
    assert page.count(ATTACK) == 0
    # The timeline's page, in its frame, has two scripts of its own: the data and the program.
    (inner,) = re.findall(r'srcdoc="(.*?)"></iframe>', page, re.DOTALL)
    framed = Nesting()
    framed.feed(unescape(inner))
    assert framed.seen.count("script") == 2 and "img" not in framed.seen


def op_costs(strategy: Strategy) -> OpCosts:
    stages = strategy.pipeline_parallel_size * strategy.num_model_chunks
    row = (1.0 / strategy.num_token_slices,) * strategy.num_token_slices
    return OpCosts((row,) * stages, (row,) * stages)


def test_the_page_says_what_there_is_to_say() -> None:
    page = render_page(answer("ours & <theirs>"), Extras(command="deepspeed <run>"))
    parser = Nesting()
    parser.feed(page)
    assert not parser.open
    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        "Notes",
        "How to run it",
        "Why it wins over the runner-up",
        "Ranking",
        "Where an iteration goes",
        "Memory of each pipeline rank",
        "What was rejected",
    ]
    # Nothing from elsewhere.
    assert not re.search(r"(src|href)=", page)
    for text in ("ours & <theirs>", "deepspeed <run>", "[why] <it> falls", "does not fit <memory>"):
        assert text in unescape(page)
        assert text not in page or "<" not in text
    assert "5,000 strategies were considered in 500 ms, and 4,000 rejected. That is 10 k a second." in page
    assert "token slices: 80, 48" in page
    assert "rank 3, layers 3" in page


def test_long_cuts_are_shown_whole() -> None:
    shown = answer()
    first, second, _ = shown.entries
    lengths = tuple(range(400, 0, -2))
    cut = replace(first, strategy=replace(first.strategy, num_token_slices=len(lengths), token_slices=lengths))
    page = render_page(replace(shown, entries=[cut, second]))
    assert f"<td>{', '.join(map(str, lengths))}</td>" in page


def test_the_page_has_a_style_for_paper_and_for_phones() -> None:
    page = render_page(answer(), Extras(panels=[]))
    paper = page[page.index("@media print") :]
    # The ranking is not cut off, frames leave no empty page, and a dark theme is not printed.
    assert ".wide { overflow: visible; }" in paper and ".timeline { display: none; }" in paper
    assert ":root:root:root" in paper
    assert "@media (max-width: 640px)" in page
    style = page[page.index("<style>") : page.index("</style>")]
    assert style.count("{") == style.count("}")


def test_bars_are_as_long_as_what_they_stand_for() -> None:
    page = render_page(answer())
    times = page[page.index("Where an iteration goes") : page.index("Memory of each")]
    rows = times.split('class="row"')[1:]
    sums = [sum(map(float, re.findall(r"width:([\d.]+)%", row))) for row in rows]
    # 1.4 s beside 1.9 s, which is the longest.
    assert sums == [pytest.approx(100 * 1.4 / 1.9, abs=0.1), pytest.approx(100, abs=0.1)]
    assert "compute: 1 s (71.4%)" in times


def test_memory_bars_mark_what_the_device_has() -> None:
    page = render_page(answer())
    memory = page[page.index("Memory of each") : page.index("What was rejected")]
    assert memory.count('class="limit" style="left:100.000%"') == 4
    assert "8 GB of 85.2 GB" in memory


def test_a_page_without_a_winner() -> None:
    shown = answer()
    shown = replace(shown, entries=shown.entries[2:])
    page = render_page(shown)
    assert "No strategy can run" in page
    assert "What was rejected" in page


def test_all_files(tmp_path: Path) -> None:
    written = write_answer(str(tmp_path / "out"), answer(), op_costs)
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


def test_a_model_that_cannot_be_launched_gets_its_report_all_the_same(tmp_path: Path) -> None:
    shown = answer()
    workload = replace(shown.workload, config=None)
    written = write_answer(str(tmp_path), replace(shown, workload=workload), op_costs)
    assert written.why_not is not None and "given by layers" in written.why_not
    assert len(written.files) == 2


def test_timelines_of_many_micro_batches_are_cut() -> None:
    strategy = Strategy(pipeline_parallel_size=4, micro_batch_size=1, global_batch_size=4000, num_token_slices=4)
    drawn = timeline_of(strategy, op_costs(strategy))
    assert drawn is not None
    timeline, note = drawn
    assert sum(map(len, timeline.spans)) <= MOST_OPS
    assert note == "375 of 4000 micro-batches are drawn"
    assert timeline.unit == "s"
    assert timeline_of(Strategy(schedule="optimised"), op_costs(Strategy())) is None


def test_a_runner_up_that_is_a_twin_is_not_the_only_one_to_be_compared() -> None:
    shown = answer()
    first, twin, _ = shown.entries
    other = replace(first, rank=3, strategy=replace(first.strategy, data_parallel_size=1, tensor_parallel_size=4))
    assert runners_up([first]) == []
    assert runners_up([first, twin]) == [twin]
    assert runners_up([first, other, twin]) == [other]
    assert runners_up([first, twin, other]) == [twin, other]
    page = render_page(replace(shown, entries=[first, twin, other]))
    assert "Why it wins over the runner-up" in page
    assert "Why it wins over the best of another kind" in page
    assert "<th>rank 3</th>" in page
