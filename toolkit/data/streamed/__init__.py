"""Text of any size from files, object storage or the Hugging Face hub, tokenized in segments while a run trains.

files.py lists and reads files, segments.py cuts them into segments, stream.py caches tokenized segments,
tokenize_worker.py tokenizes ahead of a run in separate processes, and order.py defines the sample order.
"""
