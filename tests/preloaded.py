"""Imported once by the server that test ranks are forked from. Nothing here may start threads or touch a device."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepspeed_ext.runtime.initialize  # noqa: F401
