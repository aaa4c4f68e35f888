"""What a rank runs: its programs, instruction by instruction, its ops, and its messages."""
