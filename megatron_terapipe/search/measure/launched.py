"""What DeepSpeed's launcher starts on every slot of a hostfile: one rank that measures among all."""

import os
import sys
import time
from typing import Any

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.search.measure.machine import Progress, engine_here, measure_together
from megatron_terapipe.search.measure.on_hosts import lines_of, sizes_of
from megatron_terapipe.search.op_times.profile import Profile
from megatron_terapipe.search.op_times.profile_files import profile_to_json


def main(word: str) -> int:
    """Measure as the word says, and return the exit code; the first rank tells what was measured."""
    sizes, begun = sizes_of(word), time.perf_counter()
    engine = None
    try:
        # The others wait for the first host where they meet.
        if os.environ["CROSS_RANK"] == os.environ["LOCAL_RANK"] == "0":
            tell(Progress(0.0, "the engine"))
            engine = engine_here(sizes, int(os.environ["LOCAL_SIZE"]))
        measure_together(tell, sizes, sizes.budget_s - (time.perf_counter() - begun), engine)
    except UserError as error:
        print(*lines_of({"error": str(error)}), sep="\n", flush=True)
        return 2
    return 0


def tell(news: Any) -> None:
    """Write what was found for whoever launched the ranks; of other ranks than the first, nothing."""
    if os.environ["RANK"] != "0":
        return
    message = {"profile": profile_to_json(news)} if isinstance(news, Profile) else {"progress": news._asdict()}
    for line in lines_of(message):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
