"""Flags of other trainers: ours, accepted for a reason, or refused with one; and lines at the start of a run."""

import re
import tomllib
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_terapipe.arguments import flags, parse_arguments, read_arguments
from megatron_terapipe.arguments.foreign_flags import TABLE, ForeignFlag, foreign_flags
from megatron_terapipe.arguments.parser import OTHER_DEFAULTS, spellings
from megatron_terapipe.config import Config
from megatron_terapipe.config.options import flag
from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED as MODEL
from megatron_terapipe.errors import TRAINING_CANNOT_BE_RUN as TRAINING
from megatron_terapipe.errors import ConfigError

REQUIRED = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 --train-iters 10 "
    "--lr 1e-3 --data-path corpus "
)
OWN = {spelling for each in flags() for names, _ in spellings(each) for spelling in names}
FOREIGN = foreign_flags()

# Megatron-DeepSpeed's arguments by its own groups, and the aliases of Seq1F1B and bigscience.
MUST_WORK = """
    tensor-model-parallel-size pipeline-model-parallel-size no-pipeline-parallel local-rank
    deepspeed deepspeed-config zero-stage deepspeed-activation-checkpointing
    num-layers hidden-size num-attention-heads seq-length max-position-embeddings make-vocab-size-divisible-by
    micro-batch-size global-batch-size rampup-batch-size step-batch-size-schedule train-iters seed
    lr min-lr weight-decay clip-grad adam-beta1 adam-beta2
    fp16 bf16
    data-path split vocab-file merge-file tokenizer-type
    save load save-interval
    eval-interval eval-iters eval-global-batch-size eval-micro-batch-size log-interval tensorboard-dir
    sequence-parallel use-rotary-position-embeddings rotary-position-embeddings-theta rotary-percent rotary-base
    position-embedding-type no-position-embedding normalization norm-epsilon layernorm-epsilon swiglu squared-relu
    openai-gelu disable-bias-linear untie-embeddings-and-output-weights attention-dropout hidden-dropout vocab-size
    heterogeneous-layers-config-path num-query-groups num-key-value-heads kv-channels ffn-hidden-size init-method-std
    zero-reduce-scatter zero-reduce-bucket-size zero-allgather-bucket-size
"""


def parse(words: str = "") -> Config:
    return parse_arguments((REQUIRED + words).split())


def refusal(words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(words)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_important_flags_are_ours() -> None:
    assert not {f"--{name}" for name in MUST_WORK.split()} - OWN - FOREIGN.having("accepted").keys()


def test_names_are_there_once() -> None:
    """A name that is known is never refused, so that it cannot be in two tables."""
    assert not OWN & FOREIGN.flags.keys()
    assert not (OWN | FOREIGN.flags.keys()) & FOREIGN.other_names.keys()
    assert set(FOREIGN.other_names.values()) <= OWN
    assert not [name for name in OWN if name.startswith(tuple(FOREIGN.families))]
    assert FOREIGN.needed.keys() <= OWN
    assert {each for others in FOREIGN.needed.values() for each in others} <= OWN | FOREIGN.having("accepted").keys()
    owners = {idle.without.split()[0] for idle in FOREIGN.having("idle").values() if idle.without}
    assert owners <= OWN | FOREIGN.flags.keys()
    assert all(re.fullmatch(r"--[a-zA-Z0-9-]+", name) for name in FOREIGN.flags)


def test_refused_flags_end_in_a_remedy_that_exists() -> None:
    for name, each in FOREIGN.having("refused").items():
        line = each.text
        assert re.search(r": (drop it|use) ?[^:]*$", line) or line.endswith((MODEL, TRAINING)), line
        assert set(re.findall(r"--[a-z0-9-]+", line)) <= OWN | {"--launcher", "--deepspeed"}, line
        assert refusal(name) == f"{name}: {line}"
        # What defines the model is never to be dropped.
        assert not (line.endswith((MODEL, TRAINING)) and "drop" in line)
    assert not [line for line in FOREIGN.families.values() if "drop" in line]


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("--eval_steps 5", "--eval-interval"),
        ("--training.local_batch_size 2", "--micro-batch-size"),
        ("--tokens.batch_accumulation_per_replica 2", "--gradient-accumulation-steps"),
        ("--trainer.max_steps 2", "--train-iters"),
        ("--sequence_len 64", "--seq-length"),
        ("--checkpoint_interval 5", "--save-interval"),
        ("--tp_mode REDUCE_SCATTER", "--sequence-parallel"),
        ("--lora_r 8", TRAINING),
        ("--deepspeed ds.json", "--deepspeed-config"),
        ("--bf16 train.toml", "as flags"),
        ("--bf16 neox.yml", "terapipe neox"),
    ],
)
def test_names_of_other_trainers_lead_to_ours(words: str, remedy: str) -> None:
    assert remedy in refusal(words)


def value_of(each: ForeignFlag, otherwise: str) -> str:
    """A value that a flag may have in its own trainer, and that may have an effect, after a blank."""
    return next((f" {value}" for value in each.choices if value not in each.values), otherwise)


def words_of(name: str) -> str:
    """A flag that is taken, with a value if it takes one, and the flag that it needs."""
    each = FOREIGN.flags[name]
    return (
        name
        + value_of(each, {0: "", 1: " 1", "*": " a 2"}[each.takes])
        + (f" {flag(each.needs)} 2" if each.needs else "")
    )


def test_accepted_flags_change_nothing() -> None:
    for name, each in FOREIGN.having("accepted").items():
        assert parse(words_of(name)) == parse(f"{flag(each.needs)} 2" if each.needs else ""), name


@settings(max_examples=20, deadline=None)
@given(st.permutations(sorted(FOREIGN.having("accepted"))))
def test_accepted_flags_change_nothing_together(names: list[str]) -> None:
    assert parse(" ".join(map(words_of, names))) == parse("--num-key-value-heads 2")


def test_values_that_another_trainer_refuses_are_refused() -> None:
    listed = {name: each for name, each in FOREIGN.flags.items() if each.choices}
    assert {name.removeprefix("--") for name in listed} == tomllib.loads(TABLE.read_text())["choices"].keys()
    for name, each in listed.items():
        assert each.takes and set(each.values) <= set(each.choices)
        for value in each.choices:
            assert parse(f"{name} {value}") == parse(), name
        assert f"{name} foo is not known: choose {each.choices[0]}" in refusal(
            f"{name} {each.choices[0]} --seed 2 {name} foo"
        )


def test_neutral_values_change_nothing() -> None:
    for name, each in FOREIGN.having("neutral").items():
        for value in each.values:
            assert parse(f"{name} {value}") == parse(f"{name}={value}") == parse(), name
        assert refusal(f"{name} 2") == f"{name} 2: {each.text}"
        assert each.text.endswith((MODEL, TRAINING)) or re.search(r": use [^:]*$", each.text)
        assert "drop" not in each.text


def test_idle_flags_that_have_an_effect_with_another_one_are_then_refused() -> None:
    with_effect = {name: each for name, each in FOREIGN.having("idle").items() if each.without and each.text}
    values = {"--num-experts": (1, 8), "--mtp-num-layers": (0, 1)}
    assert {each.without for each in with_effect.values()} == values.keys()
    for name, each in with_effect.items():
        value = value_of(each, " 2" if each.takes else "")
        without, beside = (f"{each.without} {number}" for number in values[each.without])
        assert refusal(f"{beside} {name}{value}") == f"{name}{value}: {each.text}"
        assert each.text.endswith((MODEL, TRAINING)) or re.search(r": use [^:]*$", each.text)
        assert set(re.findall(r"--[a-z0-9-]+", each.text)) <= OWN
        assert parse(f"{without} {name}{value}") == parse()
        for harmless in each.values:
            words = (REQUIRED + f"{beside} {name} {harmless}").split()
            assert read_arguments(words).config == parse(beside)
            assert not [line for line in read_arguments(words).notices if name in line]


def test_scripts_with_experts_of_megatron() -> None:
    kernels = "--moe-grouped-gemm --moe-permute-fusion --moe-router-dtype fp32 --moe-flex-dispatcher-backend hybridep"
    sigmoid = "--moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-enable-expert-bias"
    words = f"--num-experts 8 --moe-token-dispatcher-type flex --expert-tensor-parallel-size 1 {sigmoid} {kernels}"
    model = parse(words).model
    assert (model.num_experts, model.moe_token_dispatcher_type, model.moe_router_pre_softmax) == (8, "auto", False)
    assert parse("--num-experts 0 --moe-router-topk 2") == parse("--num-experts 1") == parse()
    with_limit = (REQUIRED + "--num-experts 8 --moe-expert-capacity-factor 1.5").split()
    said = "--moe-token-drop-policy position (there probs)"
    assert [
        said in " ".join(read_arguments(line).notices)
        for line in (with_limit, [*with_limit, "--moe-token-drop-policy", "position"])
    ] == [True, False]


def test_idle_flags_are_listed_in_one_line() -> None:
    idle = FOREIGN.having("idle")
    arguments = read_arguments((REQUIRED + " ".join(map(words_of, idle))).split())
    assert arguments.config == parse()
    operation, others = [line for line in arguments.notices if "no effect" in line]
    names = [name for name, each in idle.items() if not each.without]
    assert operation == f"These flags concern operation only and have no effect here: {', '.join(names)}"
    named = [f"{name} ({each.without})" for name, each in idle.items() if each.without]
    assert others == f"These flags have no effect without another one (in brackets): {', '.join(named)}"
    assert not [line for line in read_arguments(REQUIRED.split()).notices if "no effect" in line]


BOTH_DROPOUTS = "--hidden-dropout 0 --attention-dropout 0 "


@pytest.mark.parametrize(
    ("words", "differing"),
    [
        ("", "--hidden-dropout 0 (there 0.1), --attention-dropout 0 (there 0.1)"),
        ("--hidden-dropout 0 --log-interval 3", "--attention-dropout 0 (there 0.1)"),
        ("--hidden-dropout 0.1 --attention_dropout 0.1 --fp16", "--initial-loss-scale 65536 (there 4294967296)"),
        ("--defaults megatron --fp16", ""),
        *((BOTH_DROPOUTS + more, "") for more in ("", "--fp16 --loss-scale 128", "--fp16 --initial-loss-scale 65536")),
    ],
)
def test_defaults_that_train_differently_are_listed_where_no_flag_sets_them(words: str, differing: str) -> None:
    lines = [line for line in read_arguments((REQUIRED + words).split()).notices if "defaults" in line]
    line = f"These defaults differ from Megatron's, and no flag sets them: {differing}; "
    line += "--defaults megatron sets Megatron's"
    assert lines == ([line] if differing else [])


def test_defaults_of_megatron_differ() -> None:
    ours = {each.name: each.default for each in flags()}
    theirs = {name: value for name, (value, _) in OTHER_DEFAULTS.items()}
    assert all(type(ours[name]) is type(value) and ours[name] != value for name, value in theirs.items())
    config = parse("--defaults megatron --max-position-embeddings 4096")
    sections = [asdict(getattr(config, name)) for name in config.sections()]
    assert theirs.items() <= {name: value for section in sections for name, value in section.items()}.items()
