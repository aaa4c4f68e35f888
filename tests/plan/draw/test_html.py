"""The HTML page: what is written into it, and that it needs nothing from elsewhere."""

import json
import re
from html.parser import HTMLParser

import pytest

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.draw import Panel, render_html
from deepspeed_ext.plan.draw.elements import op_colour
from deepspeed_ext.plan.memory import activation_over_time
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape, prerequisites, result
from deepspeed_ext.plan.schedules import SCHEDULES, rank_orders
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.timeline import Span, Timeline, critical_path

KINDS = list(OpKind)


class Page(HTMLParser):
    """Texts of a page by the tag and id they stand in, and all its tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = dict(attrs).get("id") or tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside:
            self.texts[self._inside] = self.texts.get(self._inside, "") + data

    @property
    def panels(self) -> list[dict]:
        return json.loads(self.texts["data"])["panels"]


def timeline_of(name: str, shape: PipelineShape, **costs: float) -> Timeline:
    return simulate(rank_orders(SCHEDULES[name], shape), shape, OpCosts.uniform(shape, **costs))


@pytest.fixture(params=["zero-bubble", "interleaved"])
def timeline(request) -> Timeline:
    if request.param == "interleaved":
        return timeline_of("interleaved", PipelineShape(4, 2, 2, 2), transfer=0.5)
    return timeline_of("zero-bubble", PipelineShape(3, 2, 2), weight_gradient=1.0)


def spans_of(panel: dict) -> list[list[Span]]:
    """The spans that a panel has in its columns."""
    columns = ("kind", "stage", "micro_batch", "token_slice", "start", "end")
    return [
        [
            Span(Op(KINDS[kind], stage, micro_batch, token_slice), start, end)
            for kind, stage, micro_batch, token_slice, start, end in zip(*(rank[name] for name in columns), strict=True)
        ]
        for rank in panel["ranks"]
    ]


def test_the_page_has_every_op_with_its_times(timeline):
    (panel,) = Page(render_html([Panel("p", timeline)], "t")).panels
    assert spans_of(panel) == [list(row) for row in timeline.spans]
    assert panel["makespan"] == timeline.makespan
    assert panel["colours"][1][1] == op_colour(1, 1, timeline.shape.num_token_slices)


def test_the_page_says_what_each_op_needs_and_what_is_critical(timeline):
    (panel,) = Page(render_html([Panel("p", timeline)], "t")).panels
    numbered = [span.op for row in timeline.spans for span in row]
    needs = [needed for rank in panel["ranks"] for needed in rank["needs"]]
    for op, needed in zip(numbered, needs, strict=True):
        assert [result(numbered[number]) for number in needed] == list(prerequisites(op, timeline.shape))
    path = critical_path(timeline)
    assert [numbered[number] for number in panel["critical"]] == list(path.ops)
    slack = [each for rank in panel["ranks"] for each in rank["slack"]]
    assert slack == [pytest.approx(path.slack[op]) for op in numbered]


def test_the_page_says_when_results_arrive_where_that_takes_time():
    timeline = timeline_of("1f1b", PipelineShape(2, 1, 2), transfer=0.5)
    (panel,) = Page(render_html([Panel("p", timeline)], "t")).panels
    assert panel["ranks"][0]["arrival"] == [1.5, 2.5, None, None]
    assert panel["ranks"][1]["arrival"] == [None, None, 5, 6]
    at_once = timeline_of("1f1b", PipelineShape(2, 1, 2))
    assert Page(render_html([Panel("p", at_once)], "t")).panels[0]["ranks"][0]["arrival"] == []


def test_the_page_has_the_memory_curves(timeline):
    curves = activation_over_time(timeline)
    (panel,) = Page(render_html([Panel("p", timeline, curves)], "t")).panels
    for written, curve in zip(panel["memory"], curves, strict=True):
        assert list(zip(written["time"], written["value"], strict=True)) == [pytest.approx(point) for point in curve]
    highest = max(value for curve in curves for _, value in curve)
    assert ["peak memory", f"{highest:.4g}"] in panel["figures"]
    assert all(name != "peak memory" for name, _ in Page(render_html([Panel("p", timeline)], "t")).panels[0]["figures"])


def test_nothing_that_is_shown_can_break_out_of_the_page(timeline):
    title = "</script><script>alert('&amp;')</script><!--"
    page = Page(render_html([Panel(title, timeline)], title))
    assert not set("<>&") & set(page.texts["data"])
    assert page.panels[0]["title"] == title
    assert page.texts["h1"] == title and page.texts["title"] == title
    assert [tag for tag, _ in page.tags].count("script") == 2


def test_the_page_needs_no_network(timeline):
    text = render_html([Panel("p", timeline)], "t")
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|fetch\(|XMLHttpRequest|import\(", text)
    assert not [tag for tag, attributes in Page(text).tags if tag in ("link", "img", "iframe") or "src" in attributes]
    assert "{{" not in text
    asked = set(re.findall(r'getElementById\("([\w-]+)"\)', text))
    assert asked and asked <= {attributes.get("id") for _, attributes in Page(text).tags}
