"""Instruction data: read files and published datasets, tokenize and pack them."""
