"""Facts of each trainer that affect time or memory, and do not depend on the hardware."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from megatron_terapipe.config.flops import LOGITS_AT_ONCE

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType({"fp16": 2, "bf16": 2, "fp32": 4})
"""Bytes of a number that layers compute with, by precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """Facts about the trainer that runs a strategy.

    Attributes:
        name: as `software` in trials names it.
        attention: `flash` keeps no scores; `scores` computes, keeps and reads back the matrix of them.
        skips_masked_scores: whether causal attention leaves out what it would mask.
        overlaps_transfers: whether messages between stages travel under ops; else both ends wait for each.
        shares_transfers: whether each tensor-parallel rank sends its part of an activation, and the other end gathers.
        overlaps_gradient_reduction: whether data-parallel reductions travel under the last backward, layer by layer.
        reduction_bytes: bytes of an entry in data-parallel reductions.
            None = as DeepSpeed's optimizers do it by precision and ZeRO stage (see `cost.step_costs`).
        weight_bytes: bytes of a parameter that products read (half precision).
        gradient_bytes: bytes of a parameter's gradient kept over micro-batches.
        optimizer_bytes: bytes of a parameter's fp32 copy and moments; ZeRO 1 divides them by the data-parallel size.
        selective_recomputes: what recompute "selective" runs again: the `attention` core (Korthikanti et al., arXiv
            2205.05198 section 5), or `norms` and activation functions (docs/adr/0014).
        residual_dropout: whether masks of dropout are written and read with each residual.
        attention_dropout: whether scores that are written out are kept a second time, with a mask.
        logits_at_once: logits of a rank that may be alive, others being computed again, and the gradient of the head's
            weight at once (docs/adr/0024); None = the loss keeps all of them in fp32.
        launch_factor: host time to launch an op, in that of a Megatron layer of 2021 written in Python.
    """

    name: str
    attention: Literal["flash", "scores"]
    skips_masked_scores: bool
    overlaps_transfers: bool
    shares_transfers: bool
    overlaps_gradient_reduction: bool
    reduction_bytes: int | None
    weight_bytes: int = 2
    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    selective_recomputes: Literal["attention", "norms"] = "attention"
    residual_dropout: bool = True
    attention_dropout: bool = True
    logits_at_once: int | None = None
    launch_factor: float = 1.0


TERAPIPE = Software(
    name="terapipe",
    attention="flash",
    skips_masked_scores=True,
    overlaps_transfers=True,
    shares_transfers=False,
    overlaps_gradient_reduction=True,
    reduction_bytes=None,
    selective_recomputes="norms",
    residual_dropout=False,
    logits_at_once=LOGITS_AT_ONCE,
)
"""This trainer."""

MEGATRON = Software(
    name="megatron",
    attention="scores",
    skips_masked_scores=False,
    overlaps_transfers=False,
    shares_transfers=True,
    overlaps_gradient_reduction=False,
    reduction_bytes=2,
)
"""Megatron-LM and Megatron-DeepSpeed as they were when most published tables were measured (2021 to 2023)."""

SOFTWARE: Mapping[str, Software] = MappingProxyType({each.name: each for each in (TERAPIPE, MEGATRON)})
"""By name. Trials that do not say are taken to be Megatron's: those that this tool writes do say."""
