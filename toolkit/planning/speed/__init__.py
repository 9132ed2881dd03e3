"""Speed: FLOPs, cards, and the predicted time of a training step."""
