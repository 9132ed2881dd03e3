"""Checkpoints on disk: atomic storage, model folders and adapters.

``run`` saves and loads training state and sharded checkpoints. ``remote`` stores checkpoints on remote storage. ``hf``
converts from and to Hugging Face's format; extensions read others (``importers``).
"""
