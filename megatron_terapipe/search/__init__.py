"""The strategy search: which (dp, tp, pp, token slices, ...) a model should be trained with on a cluster, and why."""

__all__ = ["machine", "price", "rank"]
