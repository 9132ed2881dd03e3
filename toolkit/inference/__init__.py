"""Text generation from a trained model: KV cache, sampling and streaming."""
