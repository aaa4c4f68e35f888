"""Cores and threads of ranks that compute on CPUs."""

import os

import torch


def settle_on_cores(local_rank: int, local_size: int) -> None:
    """Use a share of the cores and as many threads, and flush denormals.

    A message between two ranks takes 20 us when each stays on its core and up to 2 ms when the scheduler moves them;
    threads of several ranks on one core wait for each other; denormals, common in fresh models, cost a factor of ten.
    With more ranks than cores the cores are left to the scheduler. OMP_NUM_THREADS, if set, decides the threads.
    """
    torch.set_flush_denormal(True)
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // local_size
    if share:
        os.sched_setaffinity(0, cores[local_rank * share : (local_rank + 1) * share])
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, share))
