"""GPT-NeoX configurations, converted to the flags of the trainer.

`terapipe neox CONFIG.yml ...` prints the command. A setting that a file leaves out takes NeoX's default,
not the trainer's, by an explicit flag. A setting that changes the training and has no counterpart ends the conversion.
"""
