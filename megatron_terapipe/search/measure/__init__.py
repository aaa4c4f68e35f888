"""Measures this machine: the layers of a model as the engine runs them, the links, and the engine around them."""
