"""The flags of the command, and their help."""

from pathlib import Path

from deepspeed_ext.plan.ops import Placement
from deepspeed_ext.plan.schedules import OPTIMISED, SCHEDULES
from deepspeed_ext.plan.terminal import CommandParser, add_json_flag

SEQ_LENGTH = 4096
"""Default tokens of a sequence that is cut."""
LAYERS_OF_A_RANK = 8
"""Default layers of a pipeline rank that are dealt to stages."""

_DESCRIPTION = """\
Simulate a pipeline schedule, draw it, and print its idle share; or compare a measured timeline with a simulation.

Every rank starts an op as soon as it is free and the op's inputs have arrived. F0.1 is the forward of token slice 1
of micro-batch 0, B its backward, or BI the part for the input and BW the part for the weights; a dot is idle time.
If ranks own several stages, 2F0.1 is an op of stage 2."""

_EPILOG = """\
costs.json:
  {
    "forward":         [[1.0, 1.2], [1.0, 1.2]],    time of a forward: a row per stage, a time per token slice
    "backward":        [[1.0, 1.2], [1.0, 1.2]],    time of a backward, without the times of the next line
    "weight_gradient": [[1.0, 1.2], [1.0, 1.2]],    optional: time of weight gradients, if they are separate
    "transfer":        0.1,                         optional: time of a transfer between neighbouring stages
    "reductions":      [[0.5, 0.5], [0.5, 0.5]]     optional: times to sum gradients over replicas, last layer first
  }
  Times are in one unit of your choice. A transfer may also be {"latency": x, "bandwidth": y, "bytes": [per token
  slice]}. With model chunks, rows are for stages, or for pipeline ranks, and their stages share the time evenly.
  Without --costs and --attention-share every op takes 1 and transfers take 0.

token_bytes.json:
  {"activation": 81920, "key_value": 8192, "key_value_gradient": 16384, "logits": 200000,
   "freed_by_input_gradient": 0.3, "logits_limit": 500000000, "stage_input": 8192,
   "state": 67108864}
  The first four are the bytes that one token of a micro-batch keeps on a stage: for its backward, as keys and values,
  as their gradients, and as logits on the last stage. Then come the share of the activation that a BI frees, and the
  largest number of bytes of logits that a rank keeps. With stage_input stages are recomputed: a forward keeps their
  input, and the activation exists only during the backward; one number is for all stages but the first, which reads
  tokens. The state is the bytes that a token slice leaves to the next one, whatever its length. These two and the first
  three may be lists with one number for each stage. All but the first may be left out.

examples:
  %(prog)s --schedule 1f1b --stages 4 --micro-batches 4 --token-slices 4
  %(prog)s --schedule interleaved --stages 4 --model-chunks 2 --micro-batches 4 --html plan.html
  %(prog)s --schedule optimised --stages 8 --micro-batches 8 --token-slices 8 \\
      --attention-share 0.6 --solve-slices --memory-limit 1.875 --write-schedule best.txt
  %(prog)s --schedule best.txt --costs costs.json --json
  %(prog)s --schedule breadth-first --stages 4 --model-chunks 4 --micro-batches 1 \\
      --token-slices 32 --seq-length 131072 --token-bytes token_bytes.json --offload --html offload.html
  %(prog)s --timeline measured/ --html measured.html

exit code: 0, or 1 if the schedule deadlocks, or 2 for bad input."""


def build_parser(prog: str) -> CommandParser:
    """Return the parser of the command line. Only this package reads the fields of its options."""
    parser = CommandParser(prog=prog, description=_DESCRIPTION, epilog=_EPILOG)
    simulated = parser.add_argument_group("pipeline to simulate")
    simulated.add_argument(
        "--schedule",
        metavar="NAME|FILE",
        help=f"one of {', '.join(SCHEDULES)}, {OPTIMISED}; or a file: a line of ops for each rank",
    )
    simulated.add_argument("--stages", type=int, metavar="P", help="pipeline ranks; stages, if each rank owns one")
    simulated.add_argument(
        "--model-chunks",
        "--num-model-chunks",
        type=int,
        metavar="V",
        help="stages that each pipeline rank owns (default: 1; for the schedule "
        f"{OPTIMISED} with --attention-share: 1 or 2, whichever is faster)",
    )
    simulated.add_argument(
        "--placement",
        "--model-chunk-placement",
        choices=[placement.value for placement in Placement],
        help="stages of a rank: looped = stage modulo P, v = the stages fold back (default: looped; where the "
        "model chunks are chosen, whichever is faster)",
    )
    simulated.add_argument("--micro-batches", type=int, metavar="M", help="micro-batches of an optimizer step")
    simulated.add_argument(
        "--token-slices",
        metavar="S|N,N,...",
        help="token slices of a micro-batch, or the tokens of each, such as 704,688,656 (default: 1)",
    )
    simulated.add_argument(
        "--seq-length",
        type=int,
        metavar="N",
        help=f"tokens of a sequence, cut evenly unless they are listed (with --solve-slices, default: {SEQ_LENGTH})",
    )
    simulated.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE|DIR",
        help="show a timeline and its simulation instead: a file or the directory that the trainer wrote with "
        "--timeline, or a file written by --json",
    )
    simulated.add_argument(
        "--hardware-queues",
        type=int,
        metavar="N",
        help="CUDA_DEVICE_MAX_CONNECTIONS of the devices; if a rank has more streams, refuse programs that could "
        "deadlock, however these share the queues (default: a queue for each stream)",
    )
    simulated.add_argument(
        "--moe-token-dispatcher-type",
        choices=["alltoall", "allgather"],
        help="stages exchange tokens among expert-parallel ranks in their ops: prove that programs end although hosts "
        "wait in every forward for the sizes (alltoall), or with known sizes (default: no such ranks)",
    )

    costs = parser.add_argument_group("costs")
    costs.add_argument("--costs", type=Path, metavar="FILE", help="times of ops and transfers, in the format below")
    costs.add_argument(
        "--attention-share",
        type=float,
        metavar="RHO",
        help="instead of --costs: the share of attention in the forward, 0 to 1; the forward of a micro-batch on a "
        "rank takes 1",
    )
    costs.add_argument(
        "--head-share",
        type=float,
        metavar="X",
        help="with --attention-share: the last stage also computes a language-model head, which costs X times the "
        "forward of a rank (default: 0)",
    )
    costs.add_argument(
        "--window",
        type=int,
        metavar="W",
        help="with --attention-share: a token attends to the last W tokens, itself included, as in sliding windows; "
        "token slices have to be given in tokens, or with --seq-length (default: to all before it)",
    )
    costs.add_argument(
        "--token-bytes",
        type=Path,
        metavar="FILE",
        help="count memory in bytes: file of the bytes that a token keeps, in the format below",
    )
    host = parser.add_argument_group("copies to the host")
    host.add_argument(
        "--offload",
        action="store_true",
        help="with --token-bytes: keys, values and stage inputs that are not read for long wait on the host, and are "
        "back in time",
    )
    host.add_argument(
        "--host-bandwidth",
        metavar="B[,B]",
        help="with --offload: bytes per time from a device to its host, and back if that differs (default: copies take "
        "no time)",
    )
    host.add_argument(
        "--host-bytes",
        type=float,
        metavar="N",
        help="with --offload: bytes that a rank may use on its host (default: no limit)",
    )
    find = parser.add_argument_group("search")
    find.add_argument(
        "--solve-slices",
        action="store_true",
        help="with --attention-share: find the lengths of the token slices that make this schedule fastest",
    )
    find.add_argument(
        "--solve-stages",
        action="store_true",
        help="with --solve-slices: also find the number of layers of each stage, for example where a head makes the "
        "last stage slow",
    )
    find.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help=f"with --solve-stages: layers of the model (default: {LAYERS_OF_A_RANK} for each rank)",
    )
    find.add_argument(
        "--min-token-slice",
        type=int,
        metavar="N",
        help="fewest tokens of a token slice, for --solve-slices (default: 1)",
    )
    find.add_argument(
        "--memory-limit",
        type=float,
        metavar="A",
        help="largest activation memory of any rank, in activations of one micro-batch on it. It limits the schedule "
        f"{OPTIMISED}; other schedules are refused above it",
    )
    find.add_argument(
        "--effort",
        type=float,
        metavar="X",
        help="time to search: 2 takes twice as long as 1 and often finds better schedules (default: 1)",
    )
    out = parser.add_argument_group("output")
    add_json_flag(out, "the figures, the op orders and the timeline")
    out.add_argument("--svg", type=Path, metavar="FILE", help="write a drawing")
    out.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page with the timeline and memory curves, which can be zoomed and moved",
    )
    out.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace, which Perfetto opens")
    out.add_argument("--write-schedule", type=Path, metavar="FILE", help="write the op orders, for --schedule FILE")
    return parser
