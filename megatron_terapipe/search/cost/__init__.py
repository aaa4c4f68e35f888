"""What a strategy costs in time: ops, collectives and transfers, and the iteration they make."""
