"""Output for people and programs: tables, JSON, a page in HTML, and the files that launch a strategy."""
