"""How many configurations of other projects run here, and which features stop the rest."""
