"""Memory of a pipeline rank while a timeline runs: a step function of bytes, and its peak.

For each micro-batch that a stage works on, over its ops F0 F1 ... B1 B0 in time:

    activations         [=== token slice 0 =================]     from the start of F0 to the end of its B or BW
                            [=== token slice 1 ========]          likewise; a share of it may go with BI already
    keys and values     [=== of the whole sequence =========]     from the first forward to the last input gradient
    their gradients                    [=== of the prefix ]       from the first input gradient; a token slice's part
                                                                  until its own input gradient
    states              [=== left by token slice 0 =====]         of layers that carry one: from F0 to B0 or BI0
    logits and loss     [=]  [=]                                  on the last stage, from F to BI or B, token slice by
                                                                  token slice; no more than a limit, if there is one

Gradients of keys and values are there for the tokens before the last token slice; each backward frees its own token
slice's. With one token slice there are none.

Where stages are recomputed, a forward keeps only their input, and the activations exist only during the backward. Where
keys and values go to the host, each token slice has its own:

    stage input         [=== of token slice 0 ==============]     from F0 to B0 or BI0
    activations                                         [===]     during B0, or from BI0 to BW0
    keys and values     [=== of token slice 0 =]    [=======]     from F0 to B0 or BI0, but for the time on the host
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from math import inf
from operator import itemgetter

from deepspeed_ext.plan.costs import at_least_zero, numbers
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import LIVE_CHANGE, OpKind, PipelineShape
from deepspeed_ext.plan.programs.host_copies import TimedCopy
from deepspeed_ext.plan.programs.program import Content
from deepspeed_ext.plan.text_files import parse_json
from deepspeed_ext.plan.timeline import Span, Timeline

__all__ = [
    "StepFunction",
    "TokenBytes",
    "activation_over_time",
    "host_memory_over_time",
    "memory_over_time",
    "peak",
    "peak_activation",
    "token_lengths",
]

StepFunction = Sequence[tuple[float, float]]
"""Points (time, value): from that time on the value holds, until the next. Times rise; the first value is reached from
0, the last is 0. Empty where nothing is held for any time."""


_FIELDS = (
    *("activation", "key_value", "key_value_gradient"),
    *("logits", "freed_by_input_gradient", "logits_limit", "stage_input", "state"),
)


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes that one token of one micro-batch costs on each stage."""

    activation: tuple[float, ...]
    """Per stage, tensors that autograd keeps from forward to backward, without keys and values."""
    key_value: tuple[float, ...]
    """Per stage, keys and values of all its layers."""
    key_value_gradient: tuple[float, ...]
    """Per stage, their gradients, which add up in fp32 and may be kept in fewer bytes."""
    logits: float = 0.0
    """On the last stage, logits and tensors of the loss."""
    freed_by_input_gradient: float = 0.0
    """Share of `activation` that a BI already frees, where the backward is in two parts; inputs of the products of
    weights stay until BW."""
    logits_limit: float = inf
    """Bytes of logits that a rank keeps at most; it frees others, and computes them again."""
    stage_input: tuple[float, ...] | None = None
    """Where stages are recomputed, per stage its input, which is all that a forward keeps but for keys and values;
    `activation` is then computed again. None where forwards keep their activations."""
    state: tuple[float, ...] = ()
    """Per stage, states that a token slice leaves to the next one whatever its length, from its forward to its input
    gradient; the last one's is the gradient of the state that it reads. None are left where a sequence is one
    token slice. Empty without such layers."""

    @classmethod
    def from_json(cls, text: str, shape: PipelineShape) -> "TokenBytes":
        """Read `{"activation": x, ...}`: the fields of this class, of which all but the first may be left out.

        The first three are numbers, or lists with one for each stage; so are `state`, and `stage_input`, where one
        number is for all stages but the first.
        """
        fields = parse_json(text, "the file of sizes")
        if not isinstance(fields, dict) or "activation" not in fields:
            raise PlanError('sizes have no "activation": write {"activation": bytes of a token, ...}, see --help')
        if unknown := fields.keys() - set(_FIELDS):
            raise PlanError(f"sizes have the unknown field {min(unknown)!r}: the fields are {', '.join(_FIELDS)}")

        def size(value: object, name: str) -> float:
            return at_least_zero(value, f"sizes[{name!r}]", "is not a size")

        def by_stage(name: str) -> tuple[float, ...]:
            return numbers(fields.get(name, 0.0), shape.num_stages, "stages", f"sizes[{name!r}]", "is not a size")

        activation, key_value, key_value_gradient = (by_stage(name) for name in _FIELDS[:3])
        logits, freed = (size(fields.get(name, 0.0), name) for name in _FIELDS[3:5])
        limit = size(fields["logits_limit"], "logits_limit") if "logits_limit" in fields else inf
        if freed > 1:
            raise PlanError(f"sizes['freed_by_input_gradient'] is {freed:g}, which is not a share: give 0 to 1")
        stage_input = by_stage("stage_input") if "stage_input" in fields else None
        if stage_input is not None and not isinstance(fields["stage_input"], list):
            stage_input = (0.0, *stage_input[1:])
        return cls(activation, key_value, key_value_gradient, logits, freed, limit, stage_input, by_stage("state"))


def memory_over_time(timeline: Timeline, lengths: Sequence[float], token_bytes: TokenBytes) -> list[StepFunction]:
    """Return the bytes that each rank holds over time; without a backward they stay until the rank's last op ends."""
    timeline.shape.check_lengths(lengths)
    shape, limit = timeline.shape, token_bytes.logits_limit
    without_logits = replace(token_bytes, logits=0.0)
    nothing = (0.0,) * shape.num_stages
    stage_input = None if token_bytes.stage_input is None else nothing
    of_logits = TokenBytes(nothing, nothing, nothing, token_bytes.logits, stage_input=stage_input)
    apart = any(copy.content is Content.KEYS_AND_VALUES for copy in timeline.host_copies)
    curves = []
    for rank, spans in enumerate(timeline.spans):
        logits = _steps(_changes(spans, shape, lengths, of_logits))
        held = [0.0, *(min(value, limit) for _, value in logits)]
        kept = [(time, after - before) for (time, _), (before, after) in zip(logits, pairwise(held), strict=True)]
        changes = [*_changes(spans, shape, lengths, without_logits, apart=apart), *kept]
        for copy, size in _copies(timeline, rank, lengths, token_bytes):
            changes += [(copy.dropped, -size), (copy.fetch_start, size)]
        curves.append(_steps(changes))
    return curves


def host_memory_over_time(timeline: Timeline, lengths: Sequence[float], token_bytes: TokenBytes) -> list[StepFunction]:
    """Return the bytes that each rank has on its host over the time of a timeline."""
    timeline.shape.check_lengths(lengths)
    curves = []
    for rank in range(timeline.shape.num_ranks):
        copies = list(_copies(timeline, rank, lengths, token_bytes))
        changes = [(copy.offload_start, size) for copy, size in copies]
        curves.append(_steps([*changes, *((copy.fetch_end, -size) for copy, size in copies)]))
    return curves


def _copies(
    timeline: Timeline, rank: int, lengths: Sequence[float], token_bytes: TokenBytes
) -> Iterator[tuple[TimedCopy, float]]:
    of_content = {
        Content.INPUT: token_bytes.stage_input or (0.0,) * timeline.shape.num_stages,
        Content.KEYS_AND_VALUES: token_bytes.key_value,
    }
    for copy in timeline.host_copies:
        if timeline.shape.rank_of(copy.stage) == rank:
            yield copy, lengths[copy.token_slice] * of_content[copy.content][copy.stage]


def activation_over_time(timeline: Timeline, lengths: Sequence[float] | None = None) -> list[StepFunction]:
    """Return the activation that each rank holds over time, in activations of one micro-batch on one rank.

    Args:
        lengths: tokens, or shares, of the token slices; None for equal ones.
    """
    shape, lengths = timeline.shape, token_lengths(lengths, timeline.shape)
    each = 1 / (sum(lengths) * shape.num_model_chunks)
    nothing = (0.0,) * shape.num_stages
    return memory_over_time(timeline, lengths, TokenBytes((each,) * shape.num_stages, nothing, nothing))


def peak(curve: StepFunction) -> float:
    """The highest value of a step function."""
    return max((value for _, value in curve), default=0.0)


def peak_activation(timeline: Timeline, lengths: Sequence[float] | None = None) -> tuple[float, ...]:
    """Per rank the most activation it holds, in activations of one micro-batch on one pipeline rank.

    A token slice of one stage counts its share of the tokens, over the number of model chunks, from its forward until
    all of its backward is done.

    Args:
        lengths: tokens, or shares, of the token slices; None for equal ones.
    """
    shape = timeline.shape
    lengths = token_lengths(lengths, shape)
    # Summed as given and divided last, so that whole tokens give exact peaks.
    whole = sum(lengths) * shape.num_model_chunks
    changes = ([LIVE_CHANGE[op.kind] * lengths[op.token_slice] for op, *_ in spans] for spans in timeline.spans)
    return tuple(max(accumulate(of_rank), default=0.0) / whole for of_rank in changes)


def token_lengths(lengths: Sequence[float] | None, shape: PipelineShape) -> Sequence[float]:
    """Return lengths as they were given, or equal ones."""
    lengths = [1] * shape.num_token_slices if lengths is None else lengths
    shape.check_lengths(lengths)
    return lengths


def _changes(
    spans: Sequence[Span],
    shape: PipelineShape,
    lengths: Sequence[float],
    token_bytes: TokenBytes,
    *,
    apart: bool = False,
) -> Iterator[tuple[float, float]]:
    """When a rank holds how much more, or less. `apart`: keys and values of token slices are."""
    stage_input = token_bytes.stage_input
    given_back: dict[tuple[int, int, int], float] = defaultdict(float)
    sequences: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for op, start, end in spans:
        sequences[op.stage, op.micro_batch].append(Span(op, start, end))
        unit = op[1:]
        tokens = lengths[op.token_slice]
        activation = tokens * token_bytes.activation[op.stage]
        logits = tokens * token_bytes.logits if op.stage == shape.last_stage else 0.0
        # Bytes that a forward keeps, and that a backward computes again.
        kept, again = activation + logits, 0.0
        if stage_input is not None:
            kept, again = tokens * stage_input[op.stage], kept
        if token_bytes.state and shape.num_token_slices > 1:
            kept += token_bytes.state[op.stage]
        if op.kind is OpKind.FORWARD:
            yield start, kept
            given_back[unit] = kept
            continue
        if again and op.kind is not OpKind.WEIGHT_GRADIENT:
            yield start, again
            given_back[unit] += again
        freed = given_back[unit]
        if op.kind is OpKind.INPUT_GRADIENT:
            freed -= (1 - token_bytes.freed_by_input_gradient) * activation
        given_back[unit] -= freed
        yield end, -freed
    last = max((span.end for span in spans), default=0.0)
    for left in given_back.values():
        yield last, -left
    for (stage, _), ops in sequences.items():
        yield from _key_value_changes(ops, last, stage, lengths, token_bytes, apart=apart)


def _key_value_changes(
    ops: Sequence[Span], last: float, stage: int, lengths: Sequence[float], token_bytes: TokenBytes, *, apart: bool
) -> Iterator[tuple[float, float]]:
    """Changes of one micro-batch on one stage, given its ops in order."""
    forwards = [span for span in ops if span.op.kind is OpKind.FORWARD]
    backwards = [span for span in ops if span.op.kind in (OpKind.BACKWARD, OpKind.INPUT_GRADIENT)]
    if apart:
        read_until = {span.op.token_slice: span.end for span in backwards}
        for op, start, _ in forwards:
            keys_and_values = lengths[op.token_slice] * token_bytes.key_value[stage]
            yield start, keys_and_values
            yield read_until.get(op.token_slice, last), -keys_and_values
    elif forwards:
        keys_and_values = sum(lengths) * token_bytes.key_value[stage]
        yield forwards[0].start, keys_and_values
        yield (backwards[-1].end if backwards else last), -keys_and_values
    if backwards:
        of_token = token_bytes.key_value_gradient[stage]
        gradients = sum(lengths[: backwards[0].op.token_slice]) * of_token
        yield backwards[0].start, gradients
        for span in backwards[1:]:
            yield span.end, -lengths[span.op.token_slice] * of_token
            gradients -= lengths[span.op.token_slice] * of_token
        yield last, -gradients  # those that no backward freed


def _steps(changes: Iterable[tuple[float, float]]) -> StepFunction:
    """Add changes up, all of one time in one step: an op starts with the room that the one before it left."""
    steps: list[tuple[float, float]] = []
    held = 0.0
    for time, of_one_time in groupby(sorted(changes), key=itemgetter(0)):
        change = sum(change for _, change in of_one_time)
        held += change
        if change:
            steps.append((time, held))
    if steps:  # everything is freed: the remainder is rounding
        steps[-1] = (steps[-1][0], 0.0)
    return steps
