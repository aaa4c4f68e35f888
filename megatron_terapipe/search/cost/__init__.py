"""What a strategy costs: seconds of an iteration, and bytes on each pipeline rank."""
