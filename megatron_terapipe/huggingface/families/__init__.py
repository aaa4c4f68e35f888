"""Families of models by their `config.json`: what each means in the model section, and the names of its tensors.

Nothing here needs torch, so that flags and the search can take a model from such a file.
"""
