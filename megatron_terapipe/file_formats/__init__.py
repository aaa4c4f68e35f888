"""The files that users write or read, each with its JSON Schema: `table` has them all."""
