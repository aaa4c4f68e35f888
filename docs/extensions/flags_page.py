"""The tables of the page `docs/reference/arguments.md`: flags of the trainer, presets, flags of other trainers."""

from collections.abc import Iterable

from megatron_terapipe.arguments import flags
from megatron_terapipe.arguments.foreign_flags import foreign_flags
from megatron_terapipe.arguments.parser import OTHER_DEFAULTS, Flag, spellings, title_of
from megatron_terapipe.config.options import flag
from megatron_terapipe.config.presets import MODEL_PRESETS, Preset

FIRST = (
    *("model_preset", "num_layers", "hidden_size", "num_attention_heads", "seq_length"),
    *("data_path", "tokenizer_type", "tokenizer_model", "mock_data"),
    *("pipeline_model_parallel_size", "num_token_slices", "tensor_model_parallel_size", "zero_stage"),
    *("micro_batch_size", "global_batch_size", "train_iters", "lr", "bf16", "save", "load"),
)
"""Fields of the flags that most people set, which the page begins with."""


def markdown() -> str:
    """Return the tables of all flags of the trainer, the presets, and the flags of other trainers."""
    return "\n".join([*_first(), *_own(), *_presets(), *_other_defaults(), *_foreign()]) + "\n"


def _first() -> Iterable[str]:
    by_name = {each.name: each for each in flags()}
    yield from ["", "## Set in most runs", "", *_HEAD]
    for name in FIRST:
        yield from list(_rows(by_name[name]))[:1]


_HEAD = ("| flag | meaning |", "|---|---|")


def _own() -> Iterable[str]:
    section = ""
    for each in flags():
        if each.section != section:
            section = each.section
            yield from ["", f"## {title_of(section)}", "", *_HEAD]
        yield from _rows(each)


def _rows(each: Flag) -> Iterable[str]:
    for names, settings in spellings(each):
        shown = ", ".join(f"`{name}`" for name in names)
        metavar = f" `{settings['metavar']}`" if settings.get("metavar") else ""
        own = names[0] == flag(each.name)
        text = each.help if own else settings["help"]
        default = (
            ""
            if not own
            else each.default_text
            if each.default_text in ("", "required")
            else f"default: {each.default_text}"
        )
        yield _row(f"{shown}{metavar}", f"{text} ({default})" if default else text)


def _presets() -> Iterable[str]:
    yield from ["", "## Presets", ""]
    yield "Settings of `--model-preset`. Flags override them. Parameters are counted with the vocabulary padded."
    yield from ["", "| preset | published as | it sets | from |", "|---|---|---|---|"]
    for name, preset in MODEL_PRESETS.items():
        yield _row(f"`{name}`", _billions(preset.published_parameters), f"`{_words(preset)}`", preset.source)


def _other_defaults() -> Iterable[str]:
    yield from ["", "## Defaults that differ", ""]
    yield "Defaults of Megatron-LM and Megatron-DeepSpeed that differ from ours. Where a training is another one by"
    yield "them, and no flag sets them, a line at the start of a run lists them. `--defaults megatron` sets them all."
    yield from ["", "| flag | there | here |", "|---|---|---|"]
    ours = {each.name: each.default for each in flags()}
    for name, (theirs, _) in OTHER_DEFAULTS.items():
        yield _row(f"`{flag(name)}`", f"{theirs:.10g}", f"{ours[name]:g}")


def _foreign() -> Iterable[str]:
    foreign = foreign_flags()
    yield from ["", "## Accepted", ""]
    yield "Flags of other trainers whose effect is always on. They change nothing."
    yield from ["", "| flag | why |", "|---|---|"]
    for name, each in sorted(foreign.having("accepted").items()):
        values = " `{" + ",".join(each.choices) + "}`" if each.choices else ""
        rule = f"; needs {flag(each.needs)}" if each.needs else ""
        if each.says is not None:
            rule = f"; an error where {flag(each.says[0])} has another value"
        yield _row(f"`{name}`{values}", f"{each.text}{rule}")
    yield from ["", "## Accepted at one value", ""]
    yield "Flags of other trainers that change nothing at one value. All others end the run with one line."
    yield from ["", "| flag | accepted | why no other |", "|---|---|---|"]
    for name, each in sorted(foreign.having("neutral").items()):
        yield _row(f"`{name}`", f"`{each.values[0]}`", each.text)
    yield from ["", "## No effect", ""]
    yield "Flags of other trainers that are taken and have no effect here; one line at the start of a run lists them."
    yield "First those that concern operation only, then those that have no effect without a flag that is refused here."
    yield from ["", "| without | flags |", "|---|---|"]
    idle = foreign.having("idle")
    for owner in dict.fromkeys(each.without for each in idle.values()):
        names = sorted(name for name, each in idle.items() if each.without == owner)
        yield _row(f"`{owner}`" if owner else "", ", ".join(f"`{name}`" for name in names))
    yield from ["", "## Refused", "", "Flags of other trainers that end the run with one line.", ""]
    yield from ["| flag | reason and remedy |", "|---|---|"]
    for name, each in sorted(foreign.having("refused").items()):
        yield _row(f"`{name}`", each.text)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _billions(count: float) -> str:
    return f"{count / 1e9:.4g} B" if count >= 1e9 else f"{count / 1e6:.4g} M"


def _words(preset: Preset) -> str:
    settings = preset.settings
    return " ".join(flag(name) if value is True else f"{flag(name)} {value}" for name, value in settings.items())
