"""Files of the plan: schedules, stage partitions, timelines, costs."""

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.layout import StagePartition
from deepspeed_ext.plan.measured import StepRecord
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedule_file import read_schedule
from deepspeed_ext.plan.text_files import read_text
from tests.faults.fuzzing.target import Target, in_file

TARGETS = (
    Target(
        name="schedule text",
        read=in_file("file", read_schedule),
        seeds=(
            b"# two ranks\n0F0.0, 0F0.1,        ,        , 0B0.1, 0B0.0\n     , 1F0.0, 1F0.1, 1B0.1, 1B0.0\n",
            b"0F0,0F1,,0I0,0W0,0B1\n1F0,1I0,1F1,1W0,1B1\n",
            b"0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0\n",
        ),
        found=(b"0F0." + b"9" * 5000, b"999999999F0.0", b"0F99999999999.0"),
        words=(b"B", b"F", b"BI", b"BW", b"I", b"W", b"0F0.1", b"2F0.0", b"#", b'"'),
    ),
    Target(
        name="stage partition",
        read=in_file("file", StagePartition.parse),
        seeds=(b"[0, 5, 12]", b"[0, 1]\n"),
        found=(b"\xff\xfe", b"[0, " + b"7" * 5000 + b"]"),
    ),
    Target(
        name="stage partition, as a flag",
        read=lambda data, _: StagePartition.parse(data.decode(errors="surrogateescape")),
        seeds=(b"0,5,12", b"0, 1"),
        found=(b"0," + b"7" * 5000, b"a\x00b", b"a\nb"),
    ),
    Target(
        name="timeline",
        read=in_file("file", lambda path: StepRecord.from_json(read_text(path))),
        seeds=(
            b'{"num_stages": 2, "num_micro_batches": 1, "num_token_slices": 1, "unit": "s", "spans": '
            b'[[["0F0.0", 0, 1], ["0B0.0", 3, 4]], [["1F0.0", 1, 2], ["1B0.0", 2, 3.5]]], "transfers": '
            b'[["0F0.0", 1, 1.5, 1.25]], "reductions": [[1, 0, 3.5, 4]], "schedule": "1f1b", "iteration": 3, '
            b'"token_slices": [8]}',
            b'{"num_stages": 2, "num_micro_batches": 1, "num_token_slices": 2, "num_model_chunks": 2, '
            b'"placement": "v", "unit": "s", "spans": [[["0F0.0", 0, 1], ["1F0.1", 1, 2]]]}',
        ),
        found=(
            b'{"num_stages": 1, "num_micro_batches": 1, "num_token_slices": 1, "unit": "s", "spans": [[[5, 0, 1]]]}',
            b'{"num_stages": 1, "num_micro_batches": 1, "num_token_slices": 1, "unit": "s", "spans": [[["0F0.0", 0, 1'
            + b"0" * 400
            + b"]]]}",
        ),
    ),
    Target(
        name="costs",
        read=in_file("file", lambda path: OpCosts.from_json(read_text(path), PipelineShape(2, 1, 2))),
        seeds=(
            b'{"forward": [[1, 2], [3, 4]], "backward": [[2, 4], [6, 8]], "weight_gradient": [[1, 1], [1, 1]], '
            b'"transfer": {"latency": 0.1, "bandwidth": 10, "bytes": [1, 2]}, "reductions": [[1], [2, 3]]}',
            b'{"forward": [[1, 2], [3, 4]], "backward": [[2, 4], [6, 8]], "transfer": 0.5}',
        ),
    ),
)
