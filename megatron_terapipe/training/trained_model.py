"""The model that a run trains: its layers, loss and data, of the GPT or of a program of the user's own.

Torch takes seconds to import, so nothing here imports it before the flags are known to be good.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_terapipe.checkpoint.directories import names_model_folder
from megatron_terapipe.config import Config
from megatron_terapipe.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_terapipe.model.gpt import ModelRanks

Layers = Callable[[Config, "ModelRanks"], Sequence[Any]]
"""Returns the layers of a model, first to last, for the ranks that share each of them."""

Loss = Callable[[Any, "tuple[Tensor, Tensor]"], "Tensor"]
"""Returns the mean loss of the labelled tokens of a token slice, from the outputs of the last layer [B, N, ...], and
(labels, loss mask), each [B, N]."""

Datasets = Callable[[Config], "tuple[Any, Any, Any]"]
"""Returns the data for training, validation and test, each with `len` and samples by number; None for no data."""


def gpt_layers(config: Config, ranks: "ModelRanks") -> Sequence[Any]:
    """Return the layers of the GPT that the flags describe."""
    from megatron_terapipe.model.gpt import gpt_layers

    return gpt_layers(
        config.model,
        ranks.tensor,
        recompute_cheap=config.training.recompute_granularity == "selective",
        latents_kept=config.training.latent_kept == "latent",
        vocabulary_parts=config.parallel.vocabulary_parts,
        expert_ranks=ranks.expert,
    )


@dataclass(frozen=True)
class TrainedModel:
    """A model and its data; by default the GPT, and the data of the flags."""

    layers: Layers = gpt_layers
    loss: Loss | None = None
    """None for the cross-entropy of the next token."""
    datasets: Datasets | None = None
    program: str = "pretrain_gpt.py"
    """File that defines it, as messages and checkpoints name it."""

    @property
    def is_gpt(self) -> bool:
        """Whether the formulas of the GPT's work and memory hold for it, and the formats of its weights."""
        return self.layers is gpt_layers

    @property
    def own_program(self) -> str | None:
        """The program, if the layers are its own; None for the GPT."""
        return None if self.is_gpt else self.program

    def makes_data(self, config: Config) -> bool:
        """Whether a run trains on the data that the program makes."""
        return self.datasets is not None and not config.data.mock_data

    def check(self, config: Config) -> None:
        """Refuse flags that only the GPT's layers, or its loss, can follow."""
        if config.model.mtp_num_layers and (self.loss is not None or not self.is_gpt):
            raise ConfigError(
                f"--mtp-num-layers {config.model.mtp_num_layers} adds layers and losses to the GPT's, and "
                f"{self.program} gives {'a loss' if self.is_gpt else 'layers'} of its own: drop it"
            )
        if self.is_gpt:
            return
        load = config.checkpoint.load
        if load is not None and names_model_folder(load):
            raise ConfigError(
                f"--load {load} holds a model of Hugging Face, whose weights are read into the GPT's layers only: read "
                f"them in {self.program}, in `layers`"
            )
        if config.parallel.vocabulary_stages:
            raise ConfigError(
                f"--vocabulary-stages divides the GPT's output layer, and the layers are of {self.program}: drop it"
            )
        if config.training.recompute_granularity == "selective":
            raise ConfigError(
                "--recompute-granularity selective computes norms and activations of the GPT's layers again, and the "
                f"layers are of {self.program}: use full or stage, or recompute within these layers"
            )
