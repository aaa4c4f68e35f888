"""Flags of Megatron whose values set our fields: layers of stages, YaRN, and NullTokenizer.

The layers of stages come from a number of layers, from weights, or from Megatron's text:

Et*3|(tt|)*6t|L      stages are divided by |
E  t t t | t t | ... | L      E embedding, t transformer layer, L loss; x*3 is xxx, (x)*3 too; commas mean nothing
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

from deepspeed_ext.plan.layout import StagePartition
from megatron_terapipe.config.experts import EXPERT_FIELDS
from megatron_terapipe.config.options import check, option, with_value
from megatron_terapipe.errors import ConfigError

ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spellings:
    """Other spellings of the layout and the tokenizer."""

    num_layers_per_virtual_pipeline_stage: int | None = option(None, least=1, most=10_000)
    """Transformer layers of each stage, instead of `--num-model-chunks`."""

    pipeline_model_parallel_layout: str | None = option(
        None, metavar="LAYOUT", excludes=("num_layers_per_virtual_pipeline_stage",)
    )
    """Layers of each stage in Megatron's text, such as Ett|(tt|)*6tL. The number of model chunks follows from it."""

    decoder_first_pipeline_num_layers: int | None = option(
        None, excludes=("pipeline_model_parallel_layout",), least=1, most=10_000
    )
    """Transformer layers of the first pipeline rank, which also holds the embedding; the others share the rest
    evenly."""

    decoder_last_pipeline_num_layers: int | None = option(
        None, excludes=("pipeline_model_parallel_layout",), least=1, most=10_000
    )
    """Transformer layers of the last pipeline rank, which also holds the output layer; the others share the rest
    evenly."""

    account_for_embedding_in_pipeline_split: bool = option(False, excludes=("pipeline_model_parallel_layout", *ENDS))
    """Count the embedding as a layer of the first stage, where all stages have equally many."""

    account_for_loss_in_pipeline_split: bool = option(False, excludes=("pipeline_model_parallel_layout", *ENDS))
    """Count the output layer as a layer of the last stage, where all stages have equally many."""

    legacy_tokenizer: bool = False
    """Let NullTokenizer add an id that ends a document to `--vocab-size`, as Megatron did until 2026. Now the highest
    of these ids does."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def ends(self) -> dict[str, int]:
        """Number of layers by field, for the fields that set the layers of the first or last pipeline rank."""
        return {name: number for name in ENDS if (number := getattr(self, name)) is not None}

    def stages(self, num_layers: int, num_ranks: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the number of model chunks and the stage partition, where one of these flags sets them."""
        self._check_other_partitions(given)
        each, model_chunks = self.num_layers_per_virtual_pipeline_stage, given.get("num_model_chunks")
        if self.pipeline_model_parallel_layout is not None:
            further = given.get("mtp_num_layers") or 0
            stages, model_chunks = layout_stages(self.pipeline_model_parallel_layout, num_ranks, further)
            return {"stage_partition": str(stages), "num_model_chunks": model_chunks}
        found: dict[str, Any] = {}
        embedding, output = self.account_for_embedding_in_pipeline_split, self.account_for_loss_in_pipeline_split
        counted = num_layers + embedding + output
        if each is not None:
            if counted % (each * num_ranks):
                raise ConfigError(
                    f"--num-layers {counted} is not a multiple of --num-layers-per-virtual-pipeline-stage {each} x "
                    f"--pipeline-model-parallel-size {num_ranks} = {each * num_ranks}: change one of them, or give "
                    "--num-model-chunks, which deals layers unevenly"
                )
            model_chunks = found["num_model_chunks"] = counted // (each * num_ranks)
        model_chunks = model_chunks or 1
        self._check_ends(num_ranks, model_chunks, given.get("model_chunk_placement", "looped"))
        if counted > num_layers:
            weighed = weighed_stages(num_layers, num_ranks * model_chunks, embedding=embedding, output=output)
            found["stage_partition"] = str(weighed)
        elif self.ends and num_ranks * model_chunks <= num_layers:
            found["stage_partition"] = str(self._uneven_stages(num_layers, num_ranks, model_chunks))
        return found

    def _check_other_partitions(self, given: Mapping[str, Any]) -> None:
        """Check that no field of ours deals the layers, too."""
        for each in fields(self):
            value = getattr(self, each.name)
            both_set_chunks = each.name in ("num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout")
            for other in ("stage_partition", *(("num_model_chunks",) if both_set_chunks else ())):
                if value not in (None, False) and given.get(other) not in (None, "uniform"):
                    both = f"{with_value(each.name, value)} and {with_value(other, given[other])}"
                    raise ConfigError(f"{both} both deal layers to stages: drop one of them")

    def _check_ends(self, num_ranks: int, model_chunks: int, placement: str) -> None:
        words = [with_value(*end) for end in self.ends.items()]
        if len(words) > num_ranks - 1:
            raise ConfigError(
                f"{' and '.join(words)} leave no other stage for the rest of the layers: raise "
                "--pipeline-model-parallel-size, or drop it"
            )
        if words and model_chunks > 1 and placement != "looped":
            raise ConfigError(
                f"{words[0]} with --model-chunk-placement {placement}, where one rank has the first and the last "
                "stage, is ambiguous: use --stage-partition with a list"
            )
        for name, number in self.ends.items():
            if number % model_chunks:
                raise ConfigError(
                    f"{with_value(name, number)} cannot be dealt to {model_chunks} model chunks: give a multiple of "
                    f"{model_chunks}, or use --stage-partition with a list"
                )

    def _uneven_stages(self, num_layers: int, num_ranks: int, model_chunks: int) -> StagePartition:
        """Return the layers of each stage, as even as possible except for the ends; stage i is of rank i mod P."""
        given = {num_ranks - 1 if "last" in name else 0: number for name, number in self.ends.items()}
        num_between = (num_ranks - len(given)) * model_chunks
        rest = num_layers - sum(given.values())
        if rest < num_between:
            raise ConfigError(
                f"the first and last stage leave {max(rest, 0)} of {num_layers} layers for {num_between} stages: give "
                "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers fewer"
            )
        between = StagePartition.uniform(rest, num_between)
        others = iter([len(between.layers(stage)) for stage in range(num_between)])
        ranks = (stage % num_ranks for stage in range(num_ranks * model_chunks))
        sizes = [given[rank] // model_chunks if rank in given else next(others) for rank in ranks]
        return StagePartition(tuple(accumulate(sizes, initial=0)))


ABSENT = (("--num-experts", "0"), ("--num-experts", "1"), ("--mtp-num-layers", "0"))
"""Flags that with these values give the model no such layers, in Megatron-LM and Megatron-DeepSpeed."""


def normalize_flags(typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a command line, with Megatron's replaced by those that have their meaning here."""
    given = dict(typed)
    if given.get("num_experts") in (0, 1):
        for name in EXPERT_FIELDS:
            given.pop(name, None)
    if given.get("moe_router_score_function") == "sigmoid":
        given.pop("moe_router_pre_softmax", None)  # Megatron reads it for softmax only.
    if given.get("legacy_tokenizer") and given.get("tokenizer_type") == "NullTokenizer" and "vocab_size" in given:
        given["vocab_size"] += 1
    if given.get("position_embedding_type") == "yarn":
        for name, needed in (("rotary_scaling", "yarn"), ("rotary_percent", 1.0), ("rotary_interleaved", False)):
            if given.setdefault(name, needed) != needed:
                raise ConfigError(
                    f"--position-embedding-type yarn contradicts {with_value(name, given[name])}: drop one of them"
                )
        given["position_embedding_type"] = "rope"
        given.setdefault("rotary_original_length", 4096)  # Megatron's default.
    return given


def resolve_spellings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of fields of ours, with those that follow from `Spellings`."""
    names = {each.name for each in fields(Spellings)}
    spellings = Spellings(**{name: value for name, value in given.items() if name in names})
    ours = {name: value for name, value in given.items() if name not in names}
    num_layers, num_ranks = given.get("num_layers") or 0, given.get("pipeline_model_parallel_size", 1)
    # The sections refuse sizes below 1.
    sizes = (num_layers, num_ranks, given.get("num_model_chunks") or 1)
    return ours | (spellings.stages(num_layers, num_ranks, given) if min(sizes) > 0 else {})


def weighed_stages(num_layers: int, num_stages: int, *, embedding: bool, output: bool) -> StagePartition:
    """Return equally many layers for each stage, where the embedding or the output layer counts as one."""
    counted = num_layers + embedding + output
    each, rest = divmod(counted, num_stages)
    if rest:
        raise ConfigError(
            f"--num-layers {num_layers} with {embedding + output} more for --account-for-embedding-in-pipeline-split "
            f"and --account-for-loss-in-pipeline-split is {counted}, which {num_stages} stages cannot share equally: "
            "change it, or use --stage-partition with a list"
        )
    inner = [each * stage - embedding for stage in range(1, num_stages)]
    return StagePartition((0, *inner, num_layers))


LAYOUT = "--pipeline-model-parallel-layout"

MOST_LAYERS = 10_000
"""Symbols of a text once repetitions are written out."""

_REPEATED_LAYERS = re.compile(r"(?:\(([^()*]*)\)|([^()*|]))\*([0-9]{1,5})")


def layout_stages(text: str, num_ranks: int, mtp_num_layers: int = 0) -> tuple[StagePartition, int]:
    """Return the transformer layers of each stage, and the number of model chunks.

    Args:
        num_ranks: pipeline ranks. Stage i belongs to rank i mod `num_ranks`, as in Megatron.
        mtp_num_layers: layers that predict further tokens, each an m, on the stage of the output layer.
    """
    stages = _expanded_layout(text).split("|")
    if unknown := sorted({*"".join(stages)} - {*"EtmL"}):
        raise ConfigError(f"{LAYOUT} {text}: {unknown[0]} is not among E, t, m and L: write another layout")
    if "".join(stages).count("m") != mtp_num_layers or not stages[-1].removesuffix("L").endswith("m" * mtp_num_layers):
        raise ConfigError(
            f"{LAYOUT} {text}: --mtp-num-layers {mtp_num_layers} is as many m before the L, on its stage: end it with "
            f"{'m' * mtp_num_layers}L"
        )
    first, last = stages[0], stages[-1]
    whole = "".join(stages)
    if not (
        first.startswith("E") and last.endswith("L") and whole.count("E") == whole.count("L") == 1 and "t" in whole
    ):
        raise ConfigError(
            f"{LAYOUT} {text} does not begin with its one E, go on with t and end with its one L: write Et|t|tL"
        )
    if "" in stages:
        raise ConfigError(f"{LAYOUT} {text}: stage {stages.index('')} has no layer: give it a t, or drop the stage")
    numbers = [stage.count("t") for stage in stages]
    if len(stages) % num_ranks:
        raise ConfigError(
            f"{LAYOUT} {text} has {len(stages)} stages, not a multiple of --pipeline-model-parallel-size {num_ranks}: "
            "change one of them"
        )
    return StagePartition(tuple(accumulate(numbers, initial=0))), len(stages) // num_ranks


def _expanded_layout(text: str) -> str:
    written = "".join(text.replace(",", "").split())
    while match := _REPEATED_LAYERS.search(written):
        grouped, single, number = match.groups()
        repeated = grouped if grouped is not None else single
        if len(written) + len(repeated) * int(number) > MOST_LAYERS:
            raise ConfigError(f"{LAYOUT} {text[:80]} has more than {MOST_LAYERS:,} symbols: write fewer")
        written = f"{written[: match.start()]}{repeated * int(number)}{written[match.end() :]}"
    if re.search(r"[()*]", written):
        raise ConfigError(f"{LAYOUT} {text}: a repetition is written x*3 or (xy)*3: change it")
    return written
