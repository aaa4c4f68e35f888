"""Facts of its run that a checkpoint keeps in `run.json`. Needs no torch.

CHECKPOINTS/latest                       tag of the newest whole checkpoint, written last
CHECKPOINTS/global_step100/run.json      iteration, model, layout, tokenizer: read before any process group
CHECKPOINTS/global_step100/layer_00-...  weights, a file per layer and tensor-parallel rank, whatever the stage; of
                                         experts, where ranks have different ones, a file per expert-parallel rank
CHECKPOINTS/global_step100/...           optimizer state, as DeepSpeed cuts it
CHECKPOINTS/global_step100/model_files/  files beside the weights: tokenizer, settings of generation, licence
CHECKPOINTS/global_step100/manifest.json size and hash of each of these files
"""

import json
import re
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.text_files import bounded_text, parse_json
from megatron_terapipe.checkpoint.manifest import Manifest
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import output_layer
from megatron_terapipe.config.model import OF_TRAINING
from megatron_terapipe.config.options import flag
from megatron_terapipe.errors import CheckpointError


def _layers_of(program: str | None) -> str:
    return "the layers of the GPT" if program is None else f"layers of {program}"


RUN_FILE = "run.json"

_ROTATIONS = {
    *("rotary_base", "rotary_scaling", "rotary_scaling_factor", "rotary_original_length", "rotary_attention_factor"),
    *("rotary_short_factors", "rotary_long_factors"),
    *("rotary_low_frequency_factor", "rotary_high_frequency_factor", "rotary_beta_slow", "rotary_beta_fast"),
}
"""Settings that change the meaning of weights; training on longer sequences adapts them."""
EXPERTS = "mlp.experts."
"""In the names of weights that have a row for each expert: expert-parallel ranks have rows of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """Facts of the run that saved a checkpoint."""

    iteration: int
    consumed_samples: int
    model: dict[str, Any]
    """The model section, vocabulary size included."""
    layout: ParallelLayout
    optimizer: str | None
    """Name of the optimizer of the saved state; None without one."""
    partitioned: bool
    """Whether that state is spread over data-parallel ranks: under ZeRO 1, and always in bf16."""
    tokenizer: dict[str, Any]
    """Type, files and sizes of the tokenizer."""
    skipped_iterations: int = 0
    """Iterations done that did not update the weights, because of an overflow in fp16."""
    skipped_samples: int = 0
    family: str | None = None
    """`model_type` of the Hugging Face model that the run began with; None for one that began with none."""
    vocabulary_parts: int = 1
    """Layers that the output layer was saved as."""
    optimizer_schedule: dict[str, Any] = field(default_factory=dict)
    """Fields that set learning rate and weight decay over the training, data and batch; earlier versions have fewer."""
    program: str | None = None
    """File of the program whose layers it has; None for the GPT's."""

    @classmethod
    def read(cls, directory: Path) -> "CheckpointInfo":
        """Read it from one checkpoint's directory, if it is as the manifest has it."""
        Manifest.read(directory).check_content(directory, [RUN_FILE])
        found: Any = parse_json(bounded_text(directory / RUN_FILE), RUN_FILE)
        values = {each.name: found[each.name] for each in fields(cls) if each.name in found}
        layout = {
            each.name: values["layout"][each.name] for each in fields(ParallelLayout) if each.name in values["layout"]
        }
        info = cls(**values | {"layout": ParallelLayout(**layout)})
        match = re.match(r"global_step(\d{1,18})(\.\w+)?$", directory.name)
        if match and int(match[1]) != info.iteration:
            name = f"global_step{info.iteration}"
            raise CheckpointError(f"checkpoint {directory} was saved after iteration {info.iteration}: name it {name}")
        return info

    @classmethod
    def imported(
        cls, family: str, model: ModelConfig, *, tokenizer: Mapping[str, Any] | None = None
    ) -> "CheckpointInfo":
        """Return the facts of a model of Hugging Face: saved by one rank, without a state of the optimizer."""
        return cls(
            iteration=0,
            consumed_samples=0,
            model=asdict(model),
            layout=ParallelLayout(),
            optimizer=None,
            partitioned=False,
            tokenizer=dict(tokenizer or {}),
            family=family,
        )

    def text(self) -> str:
        """Return the content of the file."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @property
    def was_trained(self) -> bool:
        """Whether a run has saved it; if not, it was imported, and not trained since."""
        return self.family is None or self.iteration > 0

    def has_files_of_experts(self, name: str = EXPERTS) -> bool:
        """Whether a weight is in files of its own, as experts are where ranks have different ones."""
        return EXPERTS in name and self.layout.expert_parallel_size > 1

    def deals(self, name: str, size: int = 1) -> bool:
        """Whether a weight is of experts that are dealt to ranks: of the GPT, or where several ranks share them.

        Args:
            size: expert-parallel ranks of the run that loads it.
        """
        return EXPERTS in name and (self.program is None or max(size, self.layout.expert_parallel_size) > 1)

    def ranks_of_copy(self, name: str) -> int:
        """Return the ranks of a stage, one after the other, that have a weight once."""
        return self.layout.expert_parallel_size if self.has_files_of_experts(name) else self.layout.tensor_parallel_size

    def num_parts(self, layer: int, name: str = "") -> int:
        """Parts in which a shared weight of a layer was saved, or experts if it is theirs.

        The index of the layer is that with an output layer in one piece.
        """
        if self.deals(name):
            return self.layout.expert_parallel_size
        is_output = layer == output_layer(self.model["num_layers"])
        return self.layout.tensor_parallel_size * (self.vocabulary_parts if is_output else 1)

    def place(self, layer: int, part: int, name: str = "") -> tuple[int, int]:
        """Return the layer, and the tensor- or expert-parallel rank, by which a part of a weight was saved."""
        if self.deals(name):
            return layer, part
        stage, rank = divmod(part, self.layout.tensor_parallel_size)
        return layer + stage, rank

    def changed_schedule(self, now: Mapping[str, Any]) -> str:
        """Return the flags of `optimizer_schedule` with other values in a run, each with both values."""
        then = {name: self.optimizer_schedule.get(name, value) for name, value in now.items()}
        return ", ".join(
            f"{flag(name)} {then[name]!r} (now {value!r})" for name, value in now.items() if then[name] != value
        )

    def check(
        self,
        model: ModelConfig,
        layout: ParallelLayout,
        optimizer: str,
        *,
        weights_only: bool,
        extends_positions: bool = False,
        program: str | None = None,
    ) -> None:
        """Refuse a run in which a weight has another shape or meaning, or whose optimizer cannot use the state.

        Layouts may differ. With `extends_positions`, rotations may differ.

        Args:
            program: file of the program whose layers the run has; None for the GPT's.
        """
        if (self.program is None) != (program is None):
            raise CheckpointError(
                f"the checkpoint has {_layers_of(self.program)}, this run {_layers_of(program)}: load another"
            )
        self._check_model(model, _ROTATIONS if extends_positions else set())
        sizes = self.layout.tensor_parallel_size, layout.tensor_parallel_size
        rows = [model.padded_vocab_size(size) for size in sizes]
        if rows[0] != rows[1]:
            raise CheckpointError(
                f"the checkpoint's vocabulary is padded to {rows[0]} for tensor parallel size {sizes[0]}, this run's "
                f"to {rows[1]} for {sizes[1]}: use a tensor parallel size that divides --make-vocab-size-divisible-by "
                f"{model.make_vocab_size_divisible_by}"
            )
        if weights_only:
            return
        if self.optimizer is None:
            raise CheckpointError(
                "the checkpoint has no state of the optimizer: load only the weights, with --no-load-optim or "
                "--finetune"
            )
        if self.optimizer != optimizer:
            raise CheckpointError(
                f"the checkpoint has the state of --optimizer {self.optimizer}, this run uses {optimizer}: set "
                f"--optimizer {self.optimizer}, or load only the weights with --no-load-optim"
            )

    def of_gpt(self, directory: Path) -> "CheckpointInfo":
        """Return these facts of a directory, for work that needs the GPT's layers; refuse another model."""
        if self.program is None:
            return self
        raise CheckpointError(
            f"checkpoint {directory} has {_layers_of(self.program)}, and only the GPT's are converted, exported and "
            "run outside of training: load it in that program"
        )

    def _check_model(self, model: ModelConfig, extended: Set[str]) -> None:
        # A checkpoint of an older version has no values of newer settings.
        known = {each.name for each in fields(ModelConfig)}
        before = ModelConfig(**{name: value for name, value in self.model.items() if name in known})
        ours, theirs_by_name = asdict(model), asdict(before) | self.model
        may_change = OF_TRAINING | extended
        if model.position_embedding_type != "learned_absolute":
            may_change.add("max_position_embeddings")  # no weight has a row for each
        if model.rotary_scaling in ("none", "linear"):
            may_change.add("rotary_original_length")  # it has no effect
        for name, theirs in theirs_by_name.items():
            if name not in may_change and ours.get(name) != theirs:
                otherwise = "load another checkpoint"
                if name == "vocab_size" and (tokenizer := self.tokenizer.get("tokenizer_type")):
                    otherwise = f"give the tokenizer of the checkpoint, {tokenizer}, or {otherwise}"
                if name in _ROTATIONS:
                    otherwise = "train on for longer sequences with --extend-positions --finetune"
                raise CheckpointError(
                    f"the checkpoint has {flag(name)} {theirs}, this run {ours.get(name)}: "
                    f"set {flag(name)} {theirs}, or {otherwise}"
                )
