"""All cuts of a short sequence, to hold the solvers against."""

from itertools import combinations, pairwise

from deepspeed_ext.plan.slicing import TokenSlices


def all_cuts(seq_length, counts, granularity=1, min_length=1):
    for count in counts:
        for inner in combinations(range(granularity, seq_length - granularity + 1, granularity), count - 1):
            lengths = tuple(end - start for start, end in pairwise((0, *inner, seq_length)))
            if min(lengths) >= min_length:
                yield TokenSlices(lengths)
