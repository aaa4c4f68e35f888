"""GPT-NeoX configurations, converted to the flags of the trainer.

`python -m megatron_terapipe.neox CONFIG.yml ...` prints the command. What a file leaves out takes NeoX's default, not
the trainer's, so the flags say it; what has no counterpart is listed, with what that means for the training.
"""
