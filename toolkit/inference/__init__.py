"""From a trained model to text: the cache of keys and values, sampling, and text as it grows."""
