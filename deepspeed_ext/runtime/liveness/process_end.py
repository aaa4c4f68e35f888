"""The end of a process of which a thread is left in a call that nobody can end."""

import atexit
import os
import sys
import threading
from contextlib import suppress


class ProcessEnd:
    """Ends this process with its exit code, also where daemon threads are left.

    The interpreter ends a daemon thread when it comes back from a call, and before Python 3.14 it does so by unwinding
    its stack. In C++, as in calls of torch to a store or over gloo, that aborts the process: its exit code says SIGABRT
    in place of what happened. Nobody can wait for such a thread, because it may wait for a rank that is gone.

    Make it first of all: what was registered last at `atexit` is called first, and nothing is called after this.
    """

    def __init__(self) -> None:
        self.code = 1
        """Exit code of the process; that of an exception until it is set."""
        atexit.register(self._leave)

    def _leave(self) -> None:
        if any(thread.daemon for thread in threading.enumerate()):
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(self.code)
