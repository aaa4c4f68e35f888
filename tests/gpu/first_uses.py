"""First uses of a CUDA device, in a process that has imported nothing else; prints one line of JSON.

python -m tests.gpu.first_uses FREE     # bytes that were free on the device before
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_BUSY_S = 1.0
_CYCLES = 10**8
"""Of a wait on the device, to measure its clock."""


def main(argv: list[str]) -> None:
    start = time.perf_counter()
    import torch

    firsts: list[tuple[str, float, int]] = [("import torch", time.perf_counter() - start, 0)]
    kept: list[Any] = []

    def first(name: str, use: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        kept.append(use())
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        used = int(argv[0]) - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
        firsts.append((name, seconds, used))

    first("context", lambda: torch.ones(64, 64, device="cuda"))
    half = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    first("product in bf16", lambda: half @ half)
    heads = half.view(1, 16, 4, 64)
    first(
        "flash attention",
        lambda: torch.ops.aten._flash_attention_forward(heads, heads, heads, None, None, 16, 16, 0.0, True, False),
    )
    first("product in fp32", lambda: kept[0] @ kept[0])
    waits = [measured(torch, "lgamma", lambda: torch.lgamma(kept[0]))]
    waits.append(measured(torch, "lgamma again", lambda: torch.lgamma(kept[0])))
    try:
        from tests.gpu.triton_kernel import compiled

        waits.append(measured(torch, "Triton, compiled before", compiled(kept[0])))
    except Exception as error:  # Another Triton than this was written for.
        waits.append(("Triton", f"failed: {type(error).__name__}: {error}"))
    print(json.dumps({"firsts": firsts, "waits": waits}))


def measured(torch: Any, name: str, use: Callable[[], Any]) -> tuple[Any, ...]:
    """Seconds of a use while the device is busy, and of what other threads do meanwhile."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1)
    begin.record()
    torch.cuda._sleep(_CYCLES)
    end.record()
    end.synchronize()
    cycles = int(_CYCLES * _BUSY_S * 1e3 / begin.elapsed_time(end))
    other, done = torch.cuda.Stream(), threading.Event()
    pauses, queries = [0.0], [0.0]

    def tick() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            pauses.append(now - last)
            last = now

    def query(event: Any) -> None:
        while not done.is_set():
            before = time.perf_counter()
            event.query()
            queries.append(time.perf_counter() - before)
            time.sleep(0.001)

    start = time.perf_counter()
    with torch.cuda.stream(other):
        torch.cuda._sleep(cycles)
        busy = torch.cuda.Event()
        busy.record()
    threads = [threading.Thread(target=tick), threading.Thread(target=query, args=(busy,))]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    before = time.perf_counter()
    use()
    seconds = time.perf_counter() - before
    busy.synchronize()
    total = time.perf_counter() - start
    done.set()
    for thread in threads:
        thread.join()
    return name, total, seconds, max(queries), max(pauses)


if __name__ == "__main__":
    main(sys.argv[1:])
