"""Text of any size from files, object storage or the Hugging Face hub, tokenized unit by unit while a run trains.

files.py lists files and reads them, units.py cuts the list into units, stream.py tokenizes units into the cache,
preparer.py does it in processes ahead of a run, and order.py is the order in which a run reads them.
"""
