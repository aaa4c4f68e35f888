"""Checks of the numbers of a run while it trains: what is NaN or infinite, jumps, or differs between copies."""
