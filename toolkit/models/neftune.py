"""Random numbers of a micro-batch in training: NEFTune's noise (Jain et al. 2023, arXiv 2310.05914), and dropout's."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from toolkit.models.keyed_random import DROPOUT, token_bits

CHUNK = 64
"""Tokens that are drawn at once. CUDA's numbers depend on the shape, and must not depend on a row's padding."""


class SampleNoise(NamedTuple):
    """The noise of a micro-batch. A row's noise depends on its key only, not on the other rows.

    Args:
        alpha: The noise of the embeddings of a document of T tokens is at most alpha / sqrt(T * n_embd).
        seed: The run's seed.
        keys: ``sample_keys`` of the rows.
    """

    alpha: float
    seed: int
    keys: tuple[int, ...]

    def draw(self, lengths: Tensor, width: int) -> Tensor:
        """Return noise, (B, T, width) fp32, for tokens in documents of ``lengths`` tokens, (B, T)."""
        rows, device, n_tokens = [], lengths.device, lengths.size(1)
        for key in self.keys:
            seed = int(np.random.SeedSequence((self.seed, key + 1)).generate_state(1)[0])
            generator = torch.Generator(device).manual_seed(seed)
            chunks = [torch.rand(CHUNK, width, generator=generator, device=device) for _ in range(0, n_tokens, CHUNK)]
            rows.append(torch.cat(chunks)[:n_tokens])
        bound = self.alpha / (lengths.clamp(min=1) * width).sqrt()
        return (2 * torch.stack(rows) - 1) * bound[..., None]

    def dropout_bits(self, n_tokens: int, device: torch.device) -> Tensor:
        """Return random bits of each token for :func:`toolkit.models.keyed_random.keyed_dropout`, (B, T) int64."""
        keys, positions = torch.tensor(self.keys, device=device), torch.arange(n_tokens, device=device)
        return token_bits(self.seed, DROPOUT, keys, positions)
