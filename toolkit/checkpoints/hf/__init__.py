"""Hugging Face folders: import, export and download."""
