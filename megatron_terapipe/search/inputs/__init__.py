"""What the search is asked about: models and clusters, and the files that describe them."""
