"""What people and programs get to see: tables, JSON, the files to launch a strategy with, a page in HTML."""
