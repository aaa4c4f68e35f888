"""Seconds that each layer of a model takes on each pipeline rank: what layers are dealt to stages by."""

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cluster.rank_groups import RankGroups
from megatron_terapipe.search.ranking.block_times import RankKinds
from megatron_terapipe.search.ranking.op_tables import OpTables
from megatron_terapipe.search.space import Block
from megatron_terapipe.search.workload import Workload

Floats = NDArray[np.float64]


def layer_times(workload: Workload, block: Block, groups: RankGroups, tables: OpTables) -> Floats:
    """[P, layers] seconds of forward and backward of one micro-batch, for the first value of each axis of a grid.

    Args:
        workload: the layers.
        block: the grid.
        groups: links and devices of its layout.
        tables: prices layers.
    """
    kinds = RankKinds(block, groups, tables)
    kind_of = {id(layer): kind for kind, layer in enumerate(tables.layers)}
    columns = np.array([kind_of[id(layer)] for layer in workload.layers])
    rows = []
    for of_devices in kinds.tables:
        slowest = np.maximum.reduce([(table.whole[0] + table.whole[1])[:, 0, 0, 0, 0] for table in of_devices])
        rows.append(slowest[columns])
    return np.array(rows)[kinds.of_rank]
