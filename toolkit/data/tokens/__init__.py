"""Pre-tokenized data: chunks on disk, synthetic tokens, datasets in memory."""
