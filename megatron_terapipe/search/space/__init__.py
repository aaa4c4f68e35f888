"""What could be run: the values of every dimension, the rules that strategies must keep, and what they reject."""

from megatron_terapipe.search.space.block import AXES, Block
from megatron_terapipe.search.space.choices import Choices, all_choices
from megatron_terapipe.search.space.funnel import Funnel
from megatron_terapipe.search.space.problem import Problem
from megatron_terapipe.search.space.walk import LegalBlock, legal_blocks

__all__ = ["AXES", "Block", "Choices", "Funnel", "LegalBlock", "Problem", "all_choices", "legal_blocks"]
