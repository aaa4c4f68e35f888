"""Detection of dead ranks, stalls, and values that are not finite or differ between replicas."""

__all__ = ["rank_watch"]
