"""What a rank has done of its program, and why it stands still."""
