"""Tokenize conversations with chat templates and prompt styles, and compute loss masks."""
