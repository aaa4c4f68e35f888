"""Text that commands share: their help and errors, a line of progress, and the files that users name."""
