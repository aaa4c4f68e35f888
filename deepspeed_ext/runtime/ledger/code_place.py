"""Where in the code the main thread of this process is, seen from another thread, at no cost to the main thread."""

import sys
import threading
import traceback
from pathlib import Path

_LIBRARIES = tuple(f"/site-packages/{name}/" for name in ("torch", "deepspeed"))
_MOST_FRAMES = 40


def main_stack() -> traceback.StackSummary:
    """Stack of the main thread, its innermost frame last; empty if it is gone."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return traceback.StackSummary()
    return traceback.StackSummary.extract(list(traceback.walk_stack(frame))[:_MOST_FRAMES][::-1], lookup_lines=True)


def innermost_caller(stack: traceback.StackSummary) -> str:
    """The innermost place that is not in torch or DeepSpeed: `save.py:88 save_checkpoint`; empty if there is none."""
    for frame in reversed(stack):
        if not any(library in frame.filename for library in _LIBRARIES):
            return f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
    return ""


def is_in_collective(stack: traceback.StackSummary) -> bool:
    """Whether a stack ends in a call of a collective, or in the wait for one."""
    if not stack:
        return False
    last = stack[-1]
    return last.filename.endswith("torch/distributed/distributed_c10d.py") or ".wait(" in (last.line or "")
