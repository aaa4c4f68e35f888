"""Links between devices: which of them the groups of a layout cross, and the seconds of collectives and messages."""
