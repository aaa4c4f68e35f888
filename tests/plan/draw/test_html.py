"""The HTML page: its data, and that it loads no other file."""

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
    """Texts of a page by the tag or id around them, and all its tags."""

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


CASES = {
    "interleaved": (PipelineShape(4, 2, 2, 2), {"transfer": 0.5}),
    "zero-bubble": (PipelineShape(3, 2, 2), {"weight_gradient": 1.0}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_data_are_those_of_the_timeline(name):
    shape, costs = CASES[name]
    timeline = simulate(rank_orders(SCHEDULES[name], shape), shape, OpCosts.uniform(shape, **costs))
    curves = activation_over_time(timeline)
    (panel,) = Page(render_html([Panel("p", timeline, curves)], "t")).panels
    columns = ("kind", "stage", "micro_batch", "token_slice", "start", "end")
    for rank, row in zip(panel["ranks"], timeline.spans, strict=True):
        ops = zip(*(rank[name] for name in columns), strict=True)
        assert [Span(Op(KINDS[kind], *unit), start, end) for kind, *unit, start, end in ops] == list(row)
        arrivals = {transfer.op: transfer.end for transfer in timeline.transfers}
        assert rank["arrival"] == ([arrivals.get(result(span.op)) for span in row] if arrivals else [])
    assert panel["makespan"] == timeline.makespan
    assert panel["colours"][1][1] == op_colour(1, 1, shape.num_token_slices)
    numbered = [span.op for row in timeline.spans for span in row]
    needs = [needed for rank in panel["ranks"] for needed in rank["needs"]]
    for op, needed in zip(numbered, needs, strict=True):
        assert [result(numbered[number]) for number in needed] == list(prerequisites(op, shape))
    path = critical_path(timeline)
    assert [numbered[number] for number in panel["critical"]] == list(path.ops)
    slack = [each for rank in panel["ranks"] for each in rank["slack"]]
    assert slack == [pytest.approx(path.slack[op]) for op in numbered]
    for written, curve in zip(panel["memory"], curves, strict=True):
        assert list(zip(written["time"], written["value"], strict=True)) == [pytest.approx(point) for point in curve]
    highest = max(value for curve in curves for _, value in curve)
    assert ["peak memory", f"{highest:.4g}"] in panel["figures"]


def test_the_page_loads_no_other_file_and_text_cannot_end_its_elements():
    shape, title = PipelineShape(1, 1, 1), "</script><script>alert('&amp;')</script><!--"
    text = render_html([Panel(title, Timeline(shape, ((Span(Op.parse("0F0"), 0.0, 1.0),),)))], title)
    page = Page(text)
    assert not set("<>&") & set(page.texts["data"])
    assert page.panels[0]["title"] == page.texts["h1"] == page.texts["title"] == title
    assert [tag for tag, _ in page.tags].count("script") == 2
    code = text.replace(title, "")
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|fetch\(|XMLHttpRequest|import\(", code)
    assert not [tag for tag, attributes in page.tags if tag in ("link", "img", "iframe") or "src" in attributes]
    assert "{{" not in text
    used = set(re.findall(r'getElementById\("([\w-]+)"\)', text))
    assert used and used <= {attributes.get("id") for _, attributes in page.tags}
