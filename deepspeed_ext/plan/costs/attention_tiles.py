"""Tiles of attention that is written out: how many queries are computed at once. Kernel and prices both read it."""

SCORES_AT_ONCE = 2**27
"""Scores that exist at once, if a tile has more than one query: 512 MiB in fp32 for each tensor of their shape."""

SHORTEST_IN_WINDOW = 128
"""Queries of a tile in a narrow window: fewer at once would launch many small kernels."""


def longest_in_window(window: int) -> int:
    """Queries of a tile at most, in a sliding window of W tokens.

    A tile of n queries computes W - 1 + n scores for each of them, where W would do.
    """
    return max(window // 2, SHORTEST_IN_WINDOW)


def tile_length(
    num_queries: int, num_keys: int, heads: int, window: int | None, scores_at_once: int = SCORES_AT_ONCE
) -> int:
    """Queries of a tile, but for the last.

    Args:
        window: tokens that a token attends to, itself included; None for all before it.
    """
    longest, reached = num_queries, num_keys
    if window is not None:
        longest = min(num_queries, longest_in_window(window))
        reached = min(num_keys, window - 1 + longest)
    return min(longest, max(1, scores_at_once // (heads * reached)))
