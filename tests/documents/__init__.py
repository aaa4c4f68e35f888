"""What the documents show is extracted from them and run."""
