"""GPT-NeoX configurations, converted to the flags of the trainer.

`terapipe neox CONFIG.yml ...` prints the command. What a file leaves out takes NeoX's default, not
the trainer's, so the flags say it. A setting that decides what is trained and has no counterpart ends the conversion.
"""
