"""The layers of a GPT in plain torch, and `flops`, which counts their work without torch."""
