"""Layers whose matrices are cut over ranks, as Megatron cuts them (Shoeybi et al., arXiv 1909.08053 section 3).

    columns     rows                  Every rank holds a part of each matrix:
    X @ [A1|A2] , Y1 @ [B1]           the first by columns, the second by rows, so that nothing is sent between them.
                  + Y2 @ [B2]         One sum per pair, forward and backward.

With sequence parallelism (Korthikanti et al., arXiv 2205.05198 section 4.2.2) that sum becomes a reduce-scatter along
the tokens, and a gather before the next pair: the same traffic, and between the pairs each rank has its part of the
tokens alone.
"""
