"""All descriptions by name."""

from collections.abc import Mapping
from types import MappingProxyType

from megatron_terapipe.search.software.deepspeed import DEEPSPEED
from megatron_terapipe.search.software.description import Software
from megatron_terapipe.search.software.fsdp import FSDP
from megatron_terapipe.search.software.megatron_core import MEGATRON_CORE
from megatron_terapipe.search.software.megatron_lm import MEGATRON_LM
from megatron_terapipe.search.software.terapipe import TERAPIPE

SOFTWARE: Mapping[str, Software] = MappingProxyType(
    {each.name: each for each in (TERAPIPE, MEGATRON_LM, DEEPSPEED, MEGATRON_CORE, FSDP)}
)
"""By name. Trials that do not say are taken to be Megatron's: those that this tool writes do say."""
