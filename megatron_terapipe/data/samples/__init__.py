"""Samples of a run: which documents they hold, their order, their blend, and the micro-batches made of them."""
