"""One rank that joins the others by `init_distributed`, and writes its place and the ranks that it met.

The trainer and models of users join the same way; this starts sooner.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from deepspeed_ext.runtime.initialize import init_distributed

if __name__ == "__main__":
    init_distributed(dist_backend="gloo", verbose=False)
    ranks = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    ranks[dist.get_rank()] = dist.get_rank() + 1
    dist.all_reduce(ranks)
    told = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
    Path(sys.argv[1], f"rank{dist.get_rank()}.json").write_text(json.dumps({"met": ranks.tolist(), "told": told}))
    dist.destroy_process_group()
