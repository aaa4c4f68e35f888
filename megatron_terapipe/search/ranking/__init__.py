"""The best strategies of a space: all are priced in closed form, and those that may win on their schedule."""

from megatron_terapipe.search.ranking.ranked import Ranked, ranked_in_order

__all__ = ["Ranked", "ranked_in_order"]
