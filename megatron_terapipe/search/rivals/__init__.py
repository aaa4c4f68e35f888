"""What users would run in place of this trainer, priced beside a ranking: so that advice says when not to use it."""
