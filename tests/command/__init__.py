"""The command `terapipe`."""
