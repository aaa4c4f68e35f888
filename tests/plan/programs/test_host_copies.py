"""Host copies: the inputs of every op are on the device, and the program is otherwise unchanged."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import OpKind, PipelineShape
from deepspeed_ext.plan.programs.host_copies import HostCopySettings, check_host_copies
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.programs.program import DROP, FETCH, HOST_COPIES, OFFLOAD, Content, InstructionKind, Program
from deepspeed_ext.plan.schedules import breadth_first, fixed, forward_order, gpipe
from tests.strategies import host_copy_settings, orders_of_pipelines

COMPUTES = {InstructionKind[kind.name]: kind for kind in OpKind}
BY_CONTENT = {
    (table[content]): (step, content) for step, table in enumerate((OFFLOAD, DROP, FETCH)) for content in Content
}
OFFLOADED, DROPPED, FETCHED = range(3)


planned = orders_of_pipelines(3, 2, 3, 2).flatmap(lambda each: st.tuples(st.just(each), host_copy_settings(each[1])))


def reads(settings: HostCopySettings, stage: int, reader: int, content: Content) -> range:
    """Token slices of which a token slice reads something: itself, or all that have a token in its window."""
    if content is Content.INPUT:
        return range(reader, reader + 1)
    window = (settings.windows or (None,) * (stage + 1))[stage]
    first = sum(settings.lengths[:reader])
    seen = [
        each for each in range(reader + 1) if window is None or sum(settings.lengths[: each + 1]) > first - (window - 1)
    ]
    return range(seen[0], reader + 1)


def replay(program: Program, settings: HostCopySettings) -> float:
    """Run a program by hand: the inputs of an op must be on the device. Returns the most bytes on the host."""
    on_device: set = set()
    way: dict = {}
    held = most = 0.0
    for kind, stage, micro_batch, token_slice, _ in program.instructions:
        if kind in BY_CONTENT:
            step, content = BY_CONTENT[kind]
            thing = (content, stage, micro_batch, token_slice)
            assert way.get(thing) == (None if step == OFFLOADED else step - 1), "once each, in this order"
            assert thing in on_device if step != FETCHED else thing not in on_device
            way[thing] = step
            if step == OFFLOADED:
                held += settings.size(content, stage, token_slice)
                most = max(most, held)
            (on_device.discard if step == DROPPED else on_device.add)(thing)
        elif kind in COMPUTES and COMPUTES[kind] is not OpKind.WEIGHT_GRADIENT:
            if COMPUTES[kind] is OpKind.FORWARD:
                on_device |= {(content, stage, micro_batch, token_slice) for content in Content}
            for content in Content:
                for each in reads(settings, stage, token_slice, content):
                    thing = (content, stage, micro_batch, each)
                    assert thing in on_device, f"{kind} of {stage, micro_batch, token_slice} reads {thing}"
                    if way.get(thing) == FETCHED:
                        # It has arrived: the host frees it.
                        held -= settings.size(content, stage, each)
                        way[thing] = None
    assert all(step in (None, FETCHED) for step in way.values())
    return most


@settings(max_examples=60)
@given(planned)
def test_inputs_of_every_op_are_on_the_device_and_the_program_is_otherwise_unchanged(drawn):
    (orders, shape), copied = drawn
    for before, after in zip(lower(fixed(orders), shape), lower(fixed(orders), shape, host_copies=copied), strict=True):
        assert replay(after, copied) <= copied.host_bytes
        kept = tuple(each for each in after.instructions if each.kind not in HOST_COPIES)
        assert replace(after, instructions=kept) == before


SHAPE = PipelineShape(4, 1, 2, num_model_chunks=2)
SETTINGS = HostCopySettings((2, 2), (0, 0, 0, 0), (1, 1, 1, 1))


def texts(settings: HostCopySettings) -> list[str]:
    """Ops and copies of the first rank."""
    kinds = HOST_COPIES | COMPUTES.keys()
    return [str(each) for each in lower(gpipe, SHAPE, host_copies=settings)[0].instructions if each.kind in kinds]


def test_by_hand():
    # The stages that turn round have no pause: their backwards follow at once.
    assert texts(SETTINGS) == [
        "forward 0F0.0 @0",
        "offload keys and values 0F0.0",
        "forward 0F0.1 @2",
        "offload keys and values 0F0.1",
        "drop keys and values 0F0.0",
        "drop keys and values 0F0.1",
        "forward 2F0.0 @1",
        "forward 2F0.1 @3",
        "backward 2B0.1 @3",
        "fetch keys and values 0F0.0",
        "fetch keys and values 0F0.1",
        "backward 2B0.0 @1",
        "backward 0B0.1 @2",
        "backward 0B0.0 @0",
    ]


NO_KEYS = {"input_bytes": (0, 1, 1, 1), "key_value_bytes": (0,) * 4}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # Inputs wait only for their own backward; the host has room for one; pauses that are too short are not used.
        (NO_KEYS, ["offload input 2F0.0 @1", "drop input 2F0.0 @1", "fetch input 2F0.0 @1"]),
        ({"host_bytes": 3}, [f"{step} keys and values 0F0.1" for step in ("offload", "drop", "fetch")]),
        *((slow, []) for slow in ({"to_host": 0.1}, {"from_host": 0.1})),
    ],
)
def test_copies_with_other_settings(changes, expected):
    found = texts(replace(SETTINGS, **changes))
    assert [text for text in found if not text.startswith(("forward", "backward"))] == expected


def test_evaluation_has_no_copies():
    programs = lower(forward_order, SHAPE, host_copies=SETTINGS)
    assert not any(each.kind in HOST_COPIES for program in programs for each in program.instructions)


NAME = "the keys and values of 0F0.0"
OFFLOAD_IT, DROP_IT, FETCH_IT = (f"{step} keys and values 0F0.0" for step in ("offload", "drop", "fetch"))
LEFT_OUT, TWICE = "", "twice"


@pytest.mark.parametrize(
    ("step", "place", "line"),
    [
        # An instruction that is moved in front of another one, left out, or there twice.
        (FETCH_IT, "backward 0B0.0 @0", f"reads {NAME}, not on its device: fetch it"),
        (DROP_IT, "forward 0F0.1 @2", f"'forward 0F0.1 @2' of rank 0 reads {NAME}"),
        (DROP_IT, OFFLOAD_IT, "is out of order"),
        (FETCH_IT, LEFT_OUT, f"reads {NAME}"),
        (DROP_IT, LEFT_OUT, f"'{FETCH_IT}' of rank 0 is out of order: offload,"),
        (FETCH_IT, TWICE, f"drop and fetch {NAME} once each"),
        (OFFLOAD_IT, TWICE, f"'{OFFLOAD_IT}' of rank 0 is out of order"),
    ],
)
def test_copies_out_of_place(step: str, place: str, line: str) -> None:
    program, other = lower(breadth_first, SHAPE, host_copies=SETTINGS)
    check_host_copies([program, other], SHAPE, SETTINGS)
    steps = list(program.instructions)
    moved = steps.pop(at := [str(each) for each in steps].index(step))
    if place == TWICE:
        steps[at:at] = [moved, moved]
    elif place:
        steps.insert([str(each) for each in steps].index(place), moved)
    with pytest.raises(PlanError) as caught:
        check_host_copies([replace(program, instructions=tuple(steps)), other], SHAPE, SETTINGS)
    assert line in str(caught.value)


def test_a_missing_fetch_is_named() -> None:
    program, _ = lower(breadth_first, SHAPE, host_copies=SETTINGS)
    cut = next(place for place, step in enumerate(program.instructions) if str(step).startswith("backward"))
    with pytest.raises(PlanError, match=r"rank 0 leaves the keys and values of 0F0\.0 on the host: fetch it before"):
        check_host_copies([replace(program, instructions=program.instructions[:cut])], SHAPE, SETTINGS)
