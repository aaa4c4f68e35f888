"""The start of a run: its plan, its settings and all that can be wrong with it, before any process group exists."""
