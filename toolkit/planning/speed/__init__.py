"""Predict the speed of a training step: FLOPs, GPUs and time."""
