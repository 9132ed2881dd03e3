"""Files and object storage: the lowest layer. Imports nothing of toolkit but its errors."""
