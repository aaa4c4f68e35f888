"""Families of models by their `config.json`: their fields of the model section, and the names of their tensors.

Needs no torch: flags and the search read models from such files.
"""
