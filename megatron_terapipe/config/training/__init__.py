"""The training recipe: batch size, length, optimizer, number types, and what is checked of the numbers."""
