"""Fields of the JSON documents of the search, and the JSON Schema that follows from them."""
