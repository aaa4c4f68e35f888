"""How the model is trained: learning rate, DeepSpeed settings, and the loop around the engine."""
