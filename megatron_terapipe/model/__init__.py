"""The layers of a GPT in plain torch."""
