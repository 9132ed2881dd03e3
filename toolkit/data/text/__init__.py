"""Text data modules: tokenize documents into blocks."""
