"""The model: embedding, blocks, norm, head. Names of the weights are LitGPT's, so that its files load."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from toolkit.models.attention import CausalSelfAttention, LayerCache, cache_mask, document_mask
from toolkit.models.config import ModelConfig
from toolkit.models.labels import IGNORE_INDEX
from toolkit.models.lora import LoRALinear
from toolkit.models.loss import head_loss
from toolkit.models.mlp import make_mlp
from toolkit.models.norm import make_norm
from toolkit.models.rope import Rotation, inverse_frequencies


class Block(nn.Module):
    """Attention and MLP, each behind its norm: the unit that is wrapped, sharded, checkpointed and compiled."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_1 = make_norm(config)
        self.attn = CausalSelfAttention(config)
        self.norm_2 = None if config.shared_attention_norm else make_norm(config)
        self.mlp = make_mlp(config)
        self.parallel_residual = config.parallel_residual

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation | None = None,
        mask: torch.Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        """(B, T, n_embd) -> (B, T, n_embd)."""
        normed = self.norm_1(x)
        attended = self.attn(normed, rotation, mask, cache)
        if self.parallel_residual:
            return x + attended + self.mlp(normed if self.norm_2 is None else self.norm_2(x))
        x = x + attended
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A decoder-only transformer.

    Args:
        config: The architecture. Its vocabulary must be known (``ModelConfig.with_vocab_size``).

    The weights are torch's own random ones until :func:`toolkit.models.init.initialize` or a checkpoint sets them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.padded_vocab_size is None:
            raise ValueError(f"the model configuration {config.name!r} has no vocab_size: it comes from the tokenizer")
        self.config = config
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=config.lm_head_bias)
        parts: dict[str, nn.Module] = {"wte": nn.Embedding(config.padded_vocab_size, config.n_embd)}
        if config.position_embedding == "learned":
            parts["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        parts["h"] = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        parts["ln_f"] = make_norm(config)
        self.transformer = nn.ModuleDict(parts)
        self._inverse_frequencies: dict[torch.device, torch.Tensor] = {}  # not a buffer: see rope.py
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make embedding and head one tensor, where the config says so.

        ``load_state_dict(assign=True)`` unties them: call this again after it.
        """
        if self.config.tie_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
        kv_cache: Sequence[LayerCache] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute logits, or the loss.

        Args:
            input_ids: (B, T), int64.
            labels: (B, T), int64, aligned with the logits: labels[b, t] is the token that follows input_ids[b, t];
                -100 where there is nothing to learn.
            positions: (T,) or (B, T), int64; counted on from what the cache holds when not given.
            documents: (B, T), int64: which of the documents packed into a row each token belongs to; tokens see only
                their own (law N9). ``positions`` should start at 0 in each. Not together with a cache.
            kv_cache: One cache per block; the new keys and values are appended to it.

        Returns:
            Logits (B, T, padded_vocab_size); with labels ``(loss_sum, n_tokens)``: the sum of the negative
            log-likelihoods in nats, an fp32 scalar, and the number of supervised tokens, an int64 scalar tensor.

        Raises:
            ValueError: The sequence is longer than ``config.block_size``.
        """
        x = self._embed_and_run_blocks(input_ids, positions, documents, kv_cache)
        if labels is None:
            return self.lm_head(x)
        head = self.lm_head
        low_rank = head.low_rank(x, x.dtype) if isinstance(head, LoRALinear) else None
        loss_sum = head_loss(x, head.weight, head.bias, labels, low_rank)
        return loss_sum, (labels != IGNORE_INDEX).sum()

    def _embed_and_run_blocks(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor | None,
        documents: torch.Tensor | None,
        kv_cache: Sequence[LayerCache] | None,
    ) -> torch.Tensor:
        T = input_ids.size(1)
        held = 0 if kv_cache is None else kv_cache[0].length
        if held + T > self.config.block_size:
            raise ValueError(f"a sequence of {held + T} tokens: the model takes at most {self.config.block_size}")
        if positions is None:
            positions = torch.arange(held, held + T, device=input_ids.device)
        x = self.transformer.wte(input_ids)
        rotation = None
        if self.config.position_embedding == "learned":
            x = x + self.transformer.wpe(positions)
        else:
            rotation = Rotation(positions, self._inverse_frequencies_on(input_ids.device))
        assert documents is None or kv_cache is None, "packed documents are for training, a cache is for generation"
        mask = cache_mask(held, T, input_ids.device) if documents is None else document_mask(documents)
        for i, block in enumerate(self.transformer.h):
            x = block(x, rotation, mask, None if kv_cache is None else kv_cache[i])
        return self.transformer.ln_f(x)

    def _inverse_frequencies_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._inverse_frequencies:
            inverse = inverse_frequencies(self.config).to(device)
            if type(inverse) is not torch.Tensor:  # a FakeTensor must not outlive its mode
                return inverse
            self._inverse_frequencies[device] = inverse
        return self._inverse_frequencies[device]
