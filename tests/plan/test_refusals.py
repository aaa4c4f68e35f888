"""Bad input of plans: one line with the value, the rule and the remedy."""

import json
from collections.abc import Callable
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
from deepspeed_ext.plan.programs.lowering import SimulatedSchedule, check_lowering, lower
from deepspeed_ext.plan.schedule_file import parse_schedule, read_schedule
from deepspeed_ext.plan.schedules import fixed, gpipe, interleaved, one_f_one_b, rank_orders, zero_bubble
from deepspeed_ext.plan.simulate import check_orders, simulate
from deepspeed_ext.plan.simulate.compiled import CompiledOrders
from deepspeed_ext.plan.slicing import TokenSlices, parts_of_rank
from deepspeed_ext.plan.solve import PolynomialCosts, TerapipeProblem, solve_stages, solve_token_slices
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


def costs(shape: PipelineShape = SHAPE, **fields: object) -> Callable[[], object]:
    table = [[1, 2]] * shape.num_stages
    return partial(OpCosts.from_json, json.dumps({"forward": table, "backward": table, **fields}), shape)


def timeline(fields: object) -> Callable[[], object]:
    return partial(Timeline.from_json, json.dumps(fields))


def written(**fields: object) -> dict[str, object]:
    one_op = Timeline(ALONE, (spans("0F0"),), "s")
    return json.loads(one_op.to_json()) | fields


def step(**fields: object) -> Callable[[], object]:
    return partial(StepRecord.from_json, json.dumps(json.loads(StepRecord(STEP).to_json()) | fields))


def in_order(*orders: str) -> list[list[Op]]:
    return [[Op.parse(word) for word in order.split()] for order in orders]


def checks(*orders: str) -> list[Callable[[], object]]:
    return [partial(check, in_order(*orders), SHAPE) for check in (check_orders, CompiledOrders.of)]


REFUSED: list[tuple[str, list[Callable[[], object]]]] = [
    # Ops and shapes
    (
        "write it as 2F0.3",
        [partial(Op.parse, text) for text in ("", "F0.0", "2F", "2X0.0", "-1F0.0", "2F0.0 2F0.1")],
    ),
    (
        "is not a positive whole number",
        [
            *(partial(PipelineShape, *extents) for extents in ((0, 1), (1, 1, 0), (1.0, 1))),
            *(partial(ParallelLayout, tensor_parallel_size=size) for size in (0, 1.5)),
            partial(CutGrid, 100, 0),
        ],
    ),
    ("5 stages cannot be dealt as 2 model chunks", [lambda: PipelineShape(5, 1, 1, num_model_chunks=2)]),
    *(
        (
            message,
            [
                partial(check_num_ops, PipelineShape(*extents)),
                partial(check_lowering, SimulatedSchedule.of(one_f_one_b), PipelineShape(*extents)),
            ],
        )
        for extents, message in (
            ((1, 10**9, 1), "stages 1 x micro-batches 1000000000 x token slices 1 make a step of 2,000,000,000 forw"),
            ((4, 200_000, 64), "102,400,000 forwards and backwards, more than the 33,554,432 that can be planned"),
            ((1, 2**20, 1), "2,097,152 forwards and backwards on each rank, more than the 1,048,576 that can be"),
        )
    ),
    # Layouts and partitions
    (
        "12 is not a multiple of sequence x tensor x pipeline parallel size 4 x 2 x 1 = 8",
        [lambda: ParallelLayout.for_world_size(12, sequence_parallel_size=4, tensor_parallel_size=2)],
    ),
    ("rank 4 is outside 0..3", [lambda: ParallelLayout(data_parallel_size=4).coordinate(4)]),
    ("does not rise from 0", [partial(StagePartition, bounds) for bounds in ((), (0,), (1, 5), (0, 5, 5), (0, 5, 3))]),
    ("is neither uniform", [partial(StagePartition.parse, text) for text in ("balance", "0,five", "missing.json")]),
    ("give 4 bounds, the last one 12", [lambda: PARTITION.covering(12, 3)]),
    (
        "give between 1 and 3 stages",
        [
            each
            for count in (0, 4)
            for each in (partial(StagePartition.uniform, 3, count), partial(StagePartition.balanced, [1.0] * 3, count))
        ],
    ),
    # Token slices
    (
        "sum to 2048, but the sequence has 2000 tokens: change one of them by -48",
        [lambda: TokenSlices((1024, 1024)).covering(2000)],
    ),
    ("are not whole numbers with commas", [partial(TokenSlices.parse, text) for text in ("", "1,,2", "1.5")]),
    ("each of at least one token", [partial(TokenSlices, lengths) for lengths in ((), (0,), (4, -1))]),
    (
        "give between 1 and 4 token slices",
        [
            *(partial(TokenSlices.uniform, 4, count) for count in (0, 5)),
            lambda: TokenSlices.balanced(4, 5, linear_cost=1, attention_cost=1),
        ],
    ),
    (
        "must be positive",
        [
            *(
                partial(TokenSlices.balanced, 8, 2, linear_cost=linear, attention_cost=attention)
                for linear, attention in ((-1, 1), (1, -1), (0, 0))
            ),
            lambda: DocumentCuts(seq_length=8, num_token_slices=2, linear_cost=0, attention_costs={None: 0}),
        ],
    ),
    (
        "token slice 1 of 8,6,5 has 6 tokens, which 4 sequence-parallel ranks",
        [lambda: parts_of_rank(TokenSlices((8, 6, 5)), 0, 4)],
    ),
    # Costs
    ("costs file is not JSON", [lambda: OpCosts.from_json("{", SHAPE)]),
    ("costs are not a JSON object", [lambda: OpCosts.from_json("[]", SHAPE)]),
    ("unknown field 'forwards'", [costs(forwards=1)]),
    ("costs['forward'] is not a list of lists", [costs(forward=None), costs(forward=[1, 2])]),
    ("costs['backward'] has rows of [2] times for 2 stages of 2 token slices", [costs(backward=[[1, 2]])]),
    ("which is not a time", [costs(forward=[[1, wrong], [3, 4]]) for wrong in (-2, True, "2")]),
    ("contains the number nan", [costs(transfer={**LINK, "latency": float("nan")})]),
    ("costs['transfer'] has the entry None", [costs(transfer=None)]),
    ("costs['transfer'] has no 'bandwidth'", [costs(transfer={"latency": 1})]),
    ("unknown field 'size'", [costs(transfer={**LINK, "size": 1})]),
    ("['bytes'] has 3 entries for 2", [costs(transfer={**LINK, "bytes": [1, 2, 3]})]),
    ("['latency'] has 1 entries for 2", [costs(THREE, transfer={**LINK, "latency": [1]})]),
    ("['bandwidth'] is 0", [costs(transfer={**LINK, "bandwidth": 0})]),
    ("which cannot be", [costs(transfer={**LINK, "bytes": wrong}) for wrong in (-1, [1, "2"], True)]),
    ("reductions", [costs(reductions=rows) for rows in ([[1.0]], [[], [1.0]], [[1.0], [-1.0]], 3)]),
    (
        "computes weight gradients apart, and the costs have no weight_gradient",
        [
            lambda: UNIFORM.duration(Op.parse("1BW0.0")),
            lambda: simulate(rank_orders(zero_bubble, SHAPE), SHAPE, UNIFORM),
            lambda: CompiledOrders.of_schedule(zero_bubble, SHAPE).simulate(UNIFORM),
        ],
    ),
    ("window of", [partial(attention_costs, SHAPE, (1, 1), 0.6, window=window) for window in (0, float("inf"))]),
    ("attention share 1.5 is not a share", [lambda: attention_costs(SHAPE, [1, 1], 1.5)]),
    ("head share -1 is not a share", [lambda: attention_costs(SHAPE, [1, 1], 0.5, head_share=-1)]),
    (
        "for 2 token slices: give one above 0 for each of them",
        [
            each
            for lengths in ([1], [1, 0])
            for each in (
                partial(attention_costs, SHAPE, lengths, 0.5),
                partial(optimise, SHAPE, UNIFORM, lengths=lengths),
                partial(peak_activation, simulate(rank_orders(gpipe, SHAPE), SHAPE, UNIFORM), lengths),
                partial(
                    memory_over_time,
                    simulate(rank_orders(gpipe, SHAPE), SHAPE, UNIFORM),
                    lengths,
                    TokenBytes((), (), ()),
                ),
                partial(CompiledOrders.of_schedule(gpipe, SHAPE).peak_activation, lengths),
            )
        ],
    ),
    # Orders
    ("1 op orders for 2 pipeline ranks", checks("0F0.0")),
    *((f"op {op} does not belong to rank 0", checks(op, "")) for op in ("1F0.0", "0F1.0", "0F0.2")),
    *(
        (f"op {op} appears twice in the order of rank 0", checks(order, ""))
        for op, order in (("0F0.0", "0F0.0 0F0.0"), ("0BI0.0", "0B0.0 0BI0.0"), ("0B0.0", "0BW0.0 0B0.0"))
    ),
    ("'0F0.0' in the order of rank 0 is not an op: yield Op(...)", [lambda: simulate([["0F0.0"]], ALONE, UNIFORM)]),
    *(
        (
            f"schedule '{name}' has one stage on each pipeline rank, and there are 2 ",
            [partial(rank_orders, schedule, ROUND)],
        )
        for name, schedule in (("1f1b", one_f_one_b), ("zero-bubble", zero_bubble))
    ),
    (
        "'interleaved' goes round and round, and the placement is 'v'",
        [lambda: rank_orders(interleaved, PipelineShape(4, 2, 2, 2, Placement.V))],
    ),
    # Files of schedules
    ("no ops", [partial(parse_schedule, text) for text in ("", "# nothing\n , ,\n")]),
    *(
        (message, [partial(parse_schedule, text)])
        for text, message in (
            ("0F0 0B0\n0X0", "line 2: op '0X0' is not written as stage"),
            ("\n\n0F0.0 0F0,0 0B0", "line 3: op '0' is not written as stage"),
            ("0F0 0B0\n# rank 1\n1F0 1B0 1F0", "line 3: op 1F0.0 appears twice"),
            ("1F0 1B0\n0F0 0B0", "line 1: op 1F0.0 is on rank 0, and stage 1 of 2 on 2 ranks is rank 1's"),
            ("0F0 2F0 2B0 0B0\n1F0 1B0", "3 stages are on 2 lines"),
            ("0F0 0B0\n2F0 2B0", "stage 1 has no ops, and there are 3 stages"),
            ("0F0 1F0 1B0 0B0\n2F0 3F0 3B0 2B0", "rank 1's if stages go round and round (looped), rank 1's if they"),
            ("0F0 0F1 0B0", "op 0B1.0 is missing in the order of rank 0"),
            ("0F0 0BW0 0BI0", "rank 0 at 0BW0.0 waits for 0BI0.0"),
        )
    ),
    ("none.txt cannot be read (No such file", [lambda: read_schedule("none.txt")]),
    # Timelines and measured steps
    (
        "timeline",
        [
            partial(Timeline.from_json, "spans"),
            *(timeline(fields) for fields in ([], {})),
            *(
                timeline(written(spans=rows))
                for rows in (
                    *([[]], [[["F0.0", 0, 1]]], [[["0F0.0", 0]]], [[["0F0.0", 0, "later"]]], [[["0F0.0", 1, 0]]]),
                    *([[["0F0.0", 0, float("nan")]]], [[["1F0.0", 0, 1]]], [[["0F0.2", 0, 1]]], [[[5, 0, 1]]]),
                )
            ),
            *(timeline(written(num_stages=count)) for count in (0, 2)),
            *(
                timeline(
                    {**json.loads(simulate(rank_orders(gpipe, SHAPE), SHAPE, UNIFORM).to_json()), "transfers": [wrong]}
                )
                for wrong in (
                    *(["0F0.0", 1, 2], ["1F0.0", 1, 2, 2], ["9F0.0", 1, 2, 2], ["0F0.0", 2, 1, 1]),
                    *(["0BW0.0", 1, 2, 2], 7),
                )
            ),
            timeline(written(reductions=[["a", 0, 0, 1]])),
            timeline(written(unit="\ud800")),
            *(
                timeline(written(host_copies=[entry]))
                for entry in (
                    *(["keys", 0, 0, 0, 0, 1, 1, 2, 3], ["input", 9, 0, 0, 0, 1, 1, 2, 3]),
                    *(["input", 0, 0, 0, 2, 1, 1, 2, 3], ["input", 0.5, 0, 0, 0, 1, 1, 2, 3]),
                )
            ),
        ],
    ),
    (
        "not a measured step",
        [step(schedule=1), step(iteration="x"), step(token_slices=[1, 2]), step(token_slices="a")],
    ),
    ("no op 0B0.0 and none of its kind", [lambda: measured_costs([Timeline(ALONE, (spans("0F0"),))])]),
    ("step 1 has the shape", [lambda: Comparison((STEP, IN_TURN))]),
    ("step 1 ran its ops in another order", [lambda: Comparison((FORWARDS_FIRST, IN_TURN))]),
    ("no measured step", [lambda: Comparison(())]),
    ("op 0B0.0 is earlier than an op", [lambda: critical_path(Timeline(ALONE, (spans("0B0", "0F0"),)))]),
    (
        "2 timelines in 2 units on one axis",
        [
            lambda: render_comparison([("a", STEP), ("b", replace(STEP, unit=""))]),
            lambda: render_html([Panel("a", STEP), Panel("b", replace(STEP, unit=""))], "t"),
        ],
    ),
    ("give at least one", [lambda: render_comparison([]), lambda: render_html([], "t")]),
    # Host copies
    *(
        (
            message,
            [
                lambda wrong=wrong: lower(
                    gpipe, replace(ROUND, num_micro_batches=1), host_copies=replace(COPIED, **wrong)
                )
            ],
        )
        for wrong, message in (
            ({"to_host": 0.0}, "to_host=0.0 bytes per time would never end: give more than 0"),
            ({"least_pause": -1.0}, "least_pause=-1.0 cannot be: give 0 or more"),
            ({"input_bytes": (float("nan"),)}, "input_bytes [nan] cannot be: give finite numbers of bytes >= 0"),
            ({"input_bytes": (1,)}, "1 input_bytes for 4 stages: give one for each stage"),
            ({"windows": (1,)}, "1 windows for 4 stages: give one for each stage"),
        )
    ),
    # Solvers
    ("memory limit 0.5 is less than one micro-batch", [lambda: optimise(SHAPE, UNIFORM, memory_limit=0.5)]),
    ("effort 0 leaves no time to search", [lambda: optimise(SHAPE, UNIFORM, effort=0)]),
    ("3 layers on 4 stages", [lambda: solve_stages(PipelineShape(4, 1), 3, 8, lambda layers: EVEN, schedule=gpipe)]),
    (
        # gpipe holds both micro-batches, however layers and token slices are dealt.
        "memory limit 1.5: no cut was found with which this schedule keeps it, the best holds 2",
        [
            lambda: solve_stages(
                PipelineShape(2, 2, 2), 4, 16, lambda layers: EVEN, schedule=gpipe, memory_limit=1.5, effort=0.1
            )
        ],
    ),
    (
        "deadlocks, whatever the token slices",
        [
            lambda: solve_token_slices(
                SHAPE, 16, EVEN, schedule=fixed([order[::-1] for order in rank_orders(gpipe, SHAPE)])
            )
        ],
    ),
    (
        "micro-batches of 2 sequences do not fill a batch of 3",
        [lambda: TerapipeProblem.of({2: EVEN}, CutGrid(6), 3, 2, 1).solve()],
    ),
    (
        "granularity 1 leaves 8192 places to cut 8192 tokens at: give 8 or more",
        [lambda: TerapipeProblem.of({1: EVEN}, CutGrid(8192), 1, 2, 1)],
    ),
    (
        "5 token slices of 100 tokens, each of at least 30",
        [lambda: TerapipeProblem.of({1: EVEN}, CutGrid(100, 1, 30), 1, 1, 0).solve(5)],
    ),
    # JSON and files
    *(
        (message, [partial(parse_json, text, "f")])
        for text, message in (
            ("", "f is not JSON"),
            ("[1e999]", "contains the number inf"),
            ("9" * 5000, "f is not JSON"),
            (f"[{2**63}]", "whole number of 19 digits"),
            ('["\\ud800"]', "half a character"),
            ("[" * 100_000, "f is not JSON"),
            ("[" * (MOST_LEVELS + 1) + "]" * (MOST_LEVELS + 1), "levels deep: make it flatter"),
            ('{"a": 1, "a": 2}', "key 'a' appears twice"),
        )
    ),
    ("refers to its own parts", [lambda: check_values(nested(40), "f", 200)]),
    ("cannot be read (", [partial(read_text, name) for name in ("absent", "a\x00b", "n" * 300, ".")]),
    ("cannot be written (", [partial(write_text, name, "") for name in ("a\x00b", "n" * 300, ".")]),
]


def nested(depth: int) -> object:
    """A document that refers to its parts twice on each level."""
    document: list[object] = []
    for _ in range(depth):
        document = [document, document]
    return document


@pytest.mark.parametrize(("message", "calls"), REFUSED, ids=[message for message, _ in REFUSED])
def test_bad_input_is_one_line(message: str, calls: list[Callable[[], object]]) -> None:
    for call in calls:
        with pytest.raises(UserError) as caught:
            call()
        assert message in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.parametrize("content", ['{"bounds": [0, 5]}', "[0, 2.5, 5]", '["0", "5"]', "[0, true]"])
def test_a_file_of_no_partition(content, tmp_path):
    (tmp_path / "partition.json").write_text(content)
    with pytest.raises(PlanError, match="does not hold a list of whole numbers"):
        StagePartition.parse(str(tmp_path / "partition.json"))


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "f").write_bytes(b"ab\xff")
    with pytest.raises(UserError) as caught:
        read_text(tmp_path / "f", "--flag")
    assert str(caught.value) == f"--flag {tmp_path / 'f'} is not UTF-8 text (byte 2 is 0xff): fix the file"
