"""Programs: the instructions of every pipeline rank, and the proof that they end."""
