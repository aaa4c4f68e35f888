"""Launches of strategies: started, watched and ended on all hosts, and written to the trials file."""
