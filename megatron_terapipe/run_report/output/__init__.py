"""Output of a report: a page with its charts, JSON with its schema, and one screen of a terminal."""
