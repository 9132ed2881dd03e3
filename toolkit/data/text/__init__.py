"""Text data modules: documents to token chunks."""
