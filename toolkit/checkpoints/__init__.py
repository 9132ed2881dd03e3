"""Checkpoints on disk: the atomic store, model folders, adapters, and one package per foreign or larger format.

``run`` holds the training state and sharded files, ``hf`` and ``peft`` convert from and to those libraries.
"""
