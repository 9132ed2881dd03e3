"""Instruction data: rows of files and of published datasets to tokenized, packed samples."""
