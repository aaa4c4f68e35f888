"""Tokenizers, one kind a file; `data/tokenizer.py` has what they share, and finds the one that flags name."""
