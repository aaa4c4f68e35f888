"""Programs: what every pipeline rank runs, instruction by instruction, and the proof that they end."""
