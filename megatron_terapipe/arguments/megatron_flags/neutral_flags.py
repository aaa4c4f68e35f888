"""Flags of Megatron-LM, Megatron-DeepSpeed and their relatives that change nothing at one value.

They are refused at all others: sizes of axes that this trainer does not have, and parts of a model that it leaves out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED as MODEL
from megatron_terapipe.errors import TRAINING_CANNOT_BE_RUN as TRAINING


@dataclass(frozen=True, kw_only=True, slots=True)
class NeutralFlag:
    """A flag that changes nothing at one value."""

    neutral: tuple[str, ...]
    """Spellings of that value."""

    otherwise: str
    """Reason and remedy for every other value."""

    several: bool = False
    """Whether it takes several values, all of which have to be neutral."""


def _each(names: str, *neutral: str, otherwise: str, several: bool = False) -> dict[str, NeutralFlag]:
    flag = NeutralFlag(neutral=neutral, otherwise=otherwise, several=several)
    return {f"--{name}": flag for name in names.split()}


_EXPERTS = f"mixtures of experts are not in this trainer: {MODEL}"
_STATES = "the optimizer keeps weights, gradients and states in fp32: use fp32"

NEUTRAL_FLAGS: Mapping[str, NeutralFlag] = MappingProxyType(
    {
        # Axes of ranks.
        **_each("expert-model-parallel-size", "1", otherwise=_EXPERTS),
        **_each(
            "encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size",
            "0",
            otherwise=f"encoder-decoder models are out of scope: {MODEL}",
        ),
        # Parts of a model. Megatron-DeepSpeed calls a dense model one of 1 expert.
        **_each("num-experts", "1", otherwise=_EXPERTS, several=True),
        **_each("mtp-num-layers", "0", otherwise=f"multi-token prediction is not in this trainer: {MODEL}"),
        **_each(
            "hybrid-attention-ratio hybrid-mlp-ratio",
            "0",
            "0.0",
            otherwise=f"Mamba layers are not in this trainer: {MODEL}",
        ),
        **_each("rope-type", "rope", otherwise=f"it belongs to multi-latent attention: {MODEL}"),
        **_each("glu-linear-offset", "0", "0.0", otherwise=f"gates have no offset: {MODEL}"),
        **_each("spec", "local", otherwise=f"layers made by code of its own are not read: {MODEL}", several=True),
        # Memory.
        **_each("cpu-offloading-num-layers", "0", otherwise="activations stay on the accelerator: use 0"),
        **_each("remote-device", "none", otherwise="weights stay on the accelerator: use none"),
        **_each("main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype", "fp32", otherwise=_STATES),
        # Data.
        **_each("vocab-extra-ids", "0", otherwise=f"tokens for masked spans belong to T5: {TRAINING}"),
        **_each(
            "mid-level-dataset-surplus",
            "0.005",
            "5e-3",
            otherwise="it changes which samples are read, and 0.005 is what this trainer reads by: use 0.005",
        ),
    }
)
"""Flags that change nothing at one value, by their spelling with dashes."""
