"""Bad input of plans: one line with the value, the rule and the remedy."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest

from deepspeed_ext.plan.costs import OpCosts, attention_costs
from deepspeed_ext.plan.draw import Panel, render_comparison, render_html
from deepspeed_ext.plan.errors import PlanError, UserError
from deepspeed_ext.plan.layout import ParallelLayout, StagePartition
from deepspeed_ext.plan.measured import Comparison, StepRecord, measured_costs
from deepspeed_ext.plan.memory import TokenBytes, memory_over_time, peak_activation
from deepspeed_ext.plan.ops import Op, PipelineShape, Placement, check_num_ops
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.lowering import ProvenSchedule, lower
from deepspeed_ext.plan.schedule_file import parse_schedule, read_schedule
from deepspeed_ext.plan.schedules import fixed, gpipe, interleaved, one_f_one_b, rank_orders, zero_bubble
from deepspeed_ext.plan.simulate import check_orders, simulate
from deepspeed_ext.plan.simulate.compiled import CompiledOrders
from deepspeed_ext.plan.slicing import TokenSlices, parts_of_rank
from deepspeed_ext.plan.solve import PolynomialCosts, solve_stages, solve_token_slices
from deepspeed_ext.plan.solve.cuts import CutGrid, DocumentCuts
from deepspeed_ext.plan.solve.orders import optimise
from deepspeed_ext.plan.text_files import MOST_LEVELS, check_values, parse_json, read_text, write_text
from deepspeed_ext.plan.timeline import Span, Timeline, critical_path

SHAPE = PipelineShape(num_stages=2, num_micro_batches=1, num_token_slices=2)
ALONE = PipelineShape(1, 1, 1)
THREE = PipelineShape(3, 1, 2)
ROUND = PipelineShape(4, 2, 2, num_model_chunks=2)
UNIFORM = OpCosts.uniform(SHAPE)
EVEN = PolynomialCosts.of_layers([1, 1], 16, 0.5)
COPIED = HostCopySettings((2, 2), (0, 0, 0, 0), (1, 1, 1, 1))
LINK = {"latency": 0.5, "bandwidth": 4, "bytes": [8, 2]}
PARTITION = StagePartition((0, 5, 12))


def spans(*texts: str) -> tuple[Span, ...]:
    """Ops one after the other, each of which takes 1."""
    return tuple(Span(Op.parse(text), float(start), start + 1.0) for start, text in enumerate(texts))


STEP = Timeline(ALONE, (spans("0F0", "0B0"),), "s")
TWICE = PipelineShape(1, 2, 1)
FORWARDS_FIRST, IN_TURN = (
    Timeline(TWICE, (spans(*words.split()),), "s") for words in ("0F0 0F1 0B0 0B1", "0F0 0B0 0F1 0B1")
)


Row = tuple[str, Callable[[], object]]


def rows(message: str, function: Callable[..., object], *arguments: object, **more: object) -> list[Row]:
    """A row for each argument of a function that is refused with one message."""
    return [(message, partial(function, each, **more)) for each in arguments]


def costs(shape: PipelineShape = SHAPE, **fields: object) -> OpCosts:
    table = [[1, 2]] * shape.num_stages
    return OpCosts.from_json(json.dumps({"forward": table, "backward": table, **fields}), shape)


def timeline(base: Timeline = STEP, **fields: object) -> Timeline:
    return Timeline.from_json(json.dumps(json.loads(base.to_json()) | fields))


def step(**fields: object) -> StepRecord:
    return StepRecord.from_json(json.dumps(json.loads(StepRecord(STEP).to_json()) | fields))


def orders(*texts: str) -> list[list[Op]]:
    return [[Op.parse(word) for word in text.split()] for text in texts]


def copied(**wrong: object) -> object:
    return lower(gpipe, replace(ROUND, num_micro_batches=1), host_copies=replace(COPIED, **wrong))


def nested(depth: int) -> object:
    """A document that refers to its parts twice on each level."""
    document: list[object] = []
    for _ in range(depth):
        document = [document, document]
    return document


def by_lengths(lengths: list[float]) -> Iterator[Callable[[], object]]:
    simulated = simulate(rank_orders(gpipe, SHAPE), SHAPE, UNIFORM)
    yield partial(attention_costs, SHAPE, lengths, 0.5)
    yield partial(optimise, SHAPE, UNIFORM, lengths=lengths)
    yield partial(peak_activation, simulated, lengths)
    yield partial(memory_over_time, simulated, lengths, TokenBytes((), (), ()))
    yield partial(CompiledOrders.of_schedule(gpipe, SHAPE).peak_activation, lengths)


REFUSED: list[Row] = [
    # Ops and shapes
    *rows("write it as 2F0.3", Op.parse, "", "F0.0", "2F", "2X0.0", "-1F0.0", "2F0.0 2F0.1"),
    *rows("is not a positive whole number", lambda extents: PipelineShape(*extents), (0, 1), (1, 1, 0), (1.0, 1)),
    (
        "expert parallel size 4 does not divide the data x sequence x tensor parallel size 3 x 1 x 2 = 6 of a stage",
        lambda: ParallelLayout(data_parallel_size=3, tensor_parallel_size=2, expert_parallel_size=4),
    ),
    *rows("is not a positive whole number", lambda size: ParallelLayout(tensor_parallel_size=size), 0, 1.5),
    ("granularity=0 is not a positive whole number", lambda: CutGrid(100, 0)),
    ("5 stages cannot be dealt as 2 model chunks", lambda: PipelineShape(5, 1, 1, num_model_chunks=2)),
    ("102,400,000 forwards and backwards, more than", lambda: check_num_ops(PipelineShape(4, 200_000, 64))),
    ("2,097,152 forwards and backwards on each rank, more", lambda: check_num_ops(PipelineShape(1, 2**20, 1))),
    (
        "stages 1 x micro-batches 1000000000 x token slices 1 make a step of 2,000,000,000",
        lambda: ProvenSchedule(one_f_one_b).proof(PipelineShape(1, 10**9, 1)),
    ),
    # Layouts and partitions
    (
        "12 is not a multiple of sequence x tensor x pipeline parallel size 4 x 2 x 1 = 8",
        lambda: ParallelLayout.for_world_size(12, sequence_parallel_size=4, tensor_parallel_size=2),
    ),
    ("rank 4 is outside 0..3", lambda: ParallelLayout(data_parallel_size=4).coordinate(4)),
    *rows("does not rise from 0", StagePartition, (), (0,), (1, 5), (0, 5, 5, 9), (0, 0), (0, 5, 3)),
    *rows("does not rise from 0", StagePartition.parse, "0,0,0,5", "0,5,5,5", "0,-1,5"),
    *rows("is neither uniform", StagePartition.parse, "balance", "0,five", "missing.json"),
    ("give 4 bounds, the last one 12", lambda: PARTITION.covering(12, 3)),
    *rows("give between 1 and 3 stages", partial(StagePartition.uniform, 3), 0, 4),
    *rows("give between 1 and 3 stages", partial(StagePartition.balanced, [1.0] * 3), 0, 4),
    # Token slices
    ("but the sequence has 2000 tokens: change one of them by -48", lambda: TokenSlices((1024, 1024)).covering(2000)),
    *rows("are not whole numbers with commas", TokenSlices.parse, "", "1,,2", "1.5"),
    *rows("each of at least one token", TokenSlices, (), (0,), (4, -1)),
    *rows("give between 1 and 4 token slices", partial(TokenSlices.uniform, 4), 0, 5),
    ("give between 1 and 4 token slices", lambda: TokenSlices.balanced(4, 5, 0.5)),
    ("must be positive", lambda: DocumentCuts(seq_length=8, num_token_slices=2, linear_cost=0, attention_costs={})),
    ("token slice 1 of 8,6,5 has 6 tokens, which 4", lambda: parts_of_rank(TokenSlices((8, 6, 5)), 0, 4)),
    # Costs
    ("costs file is not JSON", lambda: OpCosts.from_json("{", SHAPE)),
    ("costs are not a JSON object", lambda: OpCosts.from_json("[]", SHAPE)),
    ("unknown field 'forwards'", lambda: costs(forwards=1)),
    *rows("costs['forward'] is not a list of lists", lambda table: costs(forward=table), None, [1, 2]),
    ("costs['backward'] has rows of [2] times for 2 stages of 2 token", lambda: costs(backward=[[1, 2]])),
    *rows("which is not a time", lambda wrong: costs(forward=[[1, wrong], [3, 4]]), -2, True, "2"),
    ("contains the number nan", lambda: costs(transfer={**LINK, "latency": float("nan")})),
    ("costs['transfer'] has the entry None", lambda: costs(transfer=None)),
    ("costs['transfer'] has no 'bandwidth'", lambda: costs(transfer={"latency": 1})),
    ("unknown field 'size'", lambda: costs(transfer={**LINK, "size": 1})),
    ("['bytes'] has 3 entries for 2", lambda: costs(transfer={**LINK, "bytes": [1, 2, 3]})),
    ("['latency'] has 1 entries for 2", lambda: costs(THREE, transfer={**LINK, "latency": [1]})),
    ("['bandwidth'] is 0", lambda: costs(transfer={**LINK, "bandwidth": 0})),
    *rows("which cannot be", lambda wrong: costs(transfer={**LINK, "bytes": wrong}), -1, [1, "2"], True),
    *rows("reductions", lambda table: costs(reductions=table), [[1.0]], [[], [1.0]], [[1.0], [-1.0]], 3),
    *rows(
        "computes weight gradients apart, and the costs have no weight_gradient",
        lambda call: call(),
        lambda: UNIFORM.duration(Op.parse("1BW0.0")),
        lambda: simulate(rank_orders(zero_bubble, SHAPE), SHAPE, UNIFORM),
        lambda: CompiledOrders.of_schedule(zero_bubble, SHAPE).simulate(UNIFORM),
    ),
    *rows("window of", lambda window: attention_costs(SHAPE, (1, 1), 0.6, window=window), 0, float("inf")),
    ("attention share 1.5 is not a share", lambda: attention_costs(SHAPE, [1, 1], 1.5)),
    ("head share -1 is not a share", lambda: attention_costs(SHAPE, [1, 1], 0.5, head_share=-1)),
    *(("give one above 0 for each", call) for lengths in ([1], [1, 0]) for call in by_lengths(lengths)),
    # Orders
    *(
        (message, partial(check, orders(*texts), SHAPE))
        for check in (check_orders, CompiledOrders.of)
        for message, texts in (
            ("1 op orders for 2 pipeline ranks", ["0F0.0"]),
            *((f"op {op} does not belong to rank 0", [op, ""]) for op in ("1F0.0", "0F1.0", "0F0.2")),
            ("op 0F0.0 appears twice in the order of rank 0", ["0F0.0 0F0.0", ""]),
            ("op 0BI0.0 appears twice in the order of rank 0", ["0B0.0 0BI0.0", ""]),
            ("op 0B0.0 appears twice in the order of rank 0", ["0BW0.0 0B0.0", ""]),
        )
    ),
    ("'0F0.0' in the order of rank 0 is not an op", lambda: simulate([["0F0.0"]], ALONE, UNIFORM)),
    ("'1f1b' has one stage on each pipeline rank, and there are 2", lambda: rank_orders(one_f_one_b, ROUND)),
    ("placement is 'v'", lambda: rank_orders(interleaved, PipelineShape(4, 2, 2, 2, Placement.V))),
    # Files of schedules
    *rows("no ops", parse_schedule, "", "# nothing\n , ,\n"),
    *rows("line 2: op '0X0' is not written as stage", parse_schedule, "0F0 0B0\n0X0"),
    *rows("line 3: op '0' is not written as stage", parse_schedule, "\n\n0F0.0 0F0,0 0B0"),
    *rows("line 3: op 1F0.0 appears twice", parse_schedule, "0F0 0B0\n# rank 1\n1F0 1B0 1F0"),
    *rows("line 1: op 1F0.0 is on rank 0, and stage 1 of 2 on 2", parse_schedule, "1F0 1B0\n0F0 0B0"),
    *rows("rank 1's if rank = stage modulo 2 (looped), ", parse_schedule, "0F0 1F0 1B0 0B0\n2F0 3F0 3B0 2B0"),
    *rows("3 stages are on 2 lines", parse_schedule, "0F0 2F0 2B0 0B0\n1F0 1B0"),
    *rows("stage 1 has no ops, and there are 3 stages", parse_schedule, "0F0 0B0\n2F0 2B0"),
    *rows("op 0B1.0 is missing in the order of rank 0", parse_schedule, "0F0 0F1 0B0"),
    *rows("rank 0 at 0BW0.0 waits for 0BI0.0", parse_schedule, "0F0 0BW0 0BI0"),
    *rows("none.txt cannot be read (No such file", read_schedule, "none.txt"),
    # Timelines and measured steps
    *rows("timeline", Timeline.from_json, "spans", "[]", "{}"),
    *rows("timeline", lambda count: timeline(num_stages=count), 0, 2),
    *rows(
        "timeline",
        lambda spans: timeline(spans=spans),
        *([[]], [[["F0.0", 0, 1]]], [[["0F0.0", 0]]], [[["0F0.0", 0, "later"]]], [[["0F0.0", 1, 0]]]),
        *([[["0F0.0", 0, float("nan")]]], [[["1F0.0", 0, 1]]], [[["0F0.2", 0, 1]]], [[[5, 0, 1]]]),
    ),
    *rows(
        "timeline",
        lambda wrong: timeline(simulate(rank_orders(gpipe, SHAPE), SHAPE, UNIFORM), transfers=[wrong]),
        *(["0F0.0", 1, 2], ["1F0.0", 1, 2, 2], ["9F0.0", 1, 2, 2], ["0F0.0", 2, 1, 1], ["0BW0.0", 1, 2, 2], 7),
    ),
    *rows(
        "timeline",
        lambda wrong: timeline(host_copies=[wrong]),
        *(["keys", 0, 0, 0, 0, 1, 1, 2, 3], ["input", 9, 0, 0, 0, 1, 1, 2, 3]),
        *(["input", 0, 0, 0, 2, 1, 1, 2, 3], ["input", 0.5, 0, 0, 0, 1, 1, 2, 3]),
    ),
    ("timeline", lambda: timeline(reductions=[["a", 0, 0, 1]])),
    ("not a measured step", lambda: step(schedule=1)),
    ("not a measured step", lambda: step(iteration="x")),
    *rows("not a measured step", lambda lengths: step(token_slices=lengths), [1, 2], "a"),
    ("no op 0B0.0 and none of its kind", lambda: measured_costs([Timeline(ALONE, (spans("0F0"),))])),
    *rows("step 1 differs from the first", lambda first: Comparison((first, IN_TURN)), STEP, FORWARDS_FIRST),
    ("no measured step", lambda: Comparison(())),
    ("op 0B0.0 is earlier than an op", lambda: critical_path(Timeline(ALONE, (spans("0B0", "0F0"),)))),
    ("2 timelines in 2 units", lambda: render_comparison([("a", STEP), ("b", replace(STEP, unit=""))])),
    ("2 timelines in 2 units", lambda: render_html([Panel("a", STEP), Panel("b", replace(STEP, unit=""))], "t")),
    ("give at least one", lambda: render_comparison([])),
    # Host copies
    ("to_host=0.0 bytes per time", lambda: copied(to_host=0.0)),
    ("host_bytes=-1.0 cannot be", lambda: copied(host_bytes=-1.0)),
    ("input_bytes [nan] cannot be", lambda: copied(input_bytes=(float("nan"),))),
    ("1 input_bytes for 4 stages", lambda: copied(input_bytes=(1,))),
    ("1 windows for 4 stages", lambda: copied(windows=(1,))),
    # Solvers
    ("memory limit 0.5 is less than one micro-batch", lambda: optimise(SHAPE, UNIFORM, memory_limit=0.5)),
    ("effort 0 leaves no time", lambda: optimise(SHAPE, UNIFORM, effort=0)),
    ("3 layers on 4 stages", lambda: solve_stages(PipelineShape(4, 1), 3, 8, lambda layers: EVEN, schedule=gpipe)),
    (
        # gpipe keeps both micro-batches with any layers and token slices.
        "memory limit 1.5: no cut was found with which this schedule keeps it, the best holds 2",
        lambda: solve_stages(
            PipelineShape(2, 2, 2), 4, 16, lambda layers: EVEN, schedule=gpipe, memory_limit=1.5, effort=0.1
        ),
    ),
    (
        "deadlocks, whatever the token slices",
        lambda: solve_token_slices(
            SHAPE, 16, EVEN, schedule=fixed([order[::-1] for order in rank_orders(gpipe, SHAPE)])
        ),
    ),
    ("5 token slices of 100 tokens, each of at least 30", lambda: CutGrid(100, 1, 30).check_count(5)),
    # JSON and files
    *rows("f is not JSON", parse_json, "", "9" * 5000, "[" * 100_000, described="f"),
    *rows("contains the number inf", parse_json, "[1e999]", described="f"),
    *rows("whole number of 19 digits", parse_json, f"[{2**63}]", described="f"),
    *rows("half a character", parse_json, '["\\ud800"]', described="f"),
    *rows("levels deep", parse_json, "[" * (MOST_LEVELS + 1) + "]" * (MOST_LEVELS + 1), described="f"),
    *rows("key 'a' appears twice", parse_json, '{"a": 1, "a": 2}', described="f"),
    ("refers to its own parts", lambda: check_values(nested(40), "f", 200)),
    *rows("cannot be read (", read_text, "absent", "a\x00b", "n" * 300, "."),
    *rows("cannot be written (", write_text, "a\x00b", "n" * 300, ".", text=""),
]


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=[f"{number}" for number in range(len(REFUSED))])
def test_bad_input_is_one_line(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(UserError) as caught:
        call()
    assert message in str(caught.value) and str(caught.value).isprintable()


def test_files(tmp_path):
    path = tmp_path / "f.json"
    for content in ('{"bounds": [0, 5]}', "[0, 2.5, 5]", '["0", "5"]', "[0, true]"):
        path.write_text(content)
        with pytest.raises(PlanError, match="does not hold a list of whole numbers"):
            StagePartition.parse(str(path))
    path.write_bytes(b"ab\xff")
    with pytest.raises(UserError) as caught:
        read_text(path, "--flag")
    assert str(caught.value) == f"--flag {path} is not UTF-8 text (byte 2 is 0xff): fix the file"
