"""The model: its section, the shapes of its layers, and the parameters, FLOPs and bytes that follow from them."""
