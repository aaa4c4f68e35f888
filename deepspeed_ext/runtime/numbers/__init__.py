"""Numbers of a run that are wrong: NaN and infinity, where they began, and copies that differ."""
