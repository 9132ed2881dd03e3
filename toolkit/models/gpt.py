"""The model: embedding, blocks, norm, head. Names of the weights are LitGPT's, so that its files load."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from toolkit.models.attention import CausalSelfAttention, LayerCache
from toolkit.models.config import ModelConfig
from toolkit.models.labels import IGNORE_INDEX
from toolkit.models.latent_attention import LatentAttention
from toolkit.models.lora import LoRALinear
from toolkit.models.loss import head_loss
from toolkit.models.masks import AttentionMask, AttentionMaskBuilder
from toolkit.models.mlp import make_mlp
from toolkit.models.moe import LLaMAMoE, before_last_label
from toolkit.models.norm import make_norm
from toolkit.models.rope import RotaryEmbedding, attention_factor, document_lengths, inverse_frequencies


class Block(nn.Module):
    """Attention and MLP, each behind its norm: the unit that is wrapped, sharded, checkpointed and compiled."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.norm_1 = make_norm(config) if config.norm_1 else nn.Identity()
        self.attn = (CausalSelfAttention if config.latent_attention is None else LatentAttention)(config)
        self.post_attention_norm = make_norm(config) if config.post_attention_norm else nn.Identity()
        if config.shared_attention_norm:
            self.norm_2 = None
        else:
            self.norm_2 = make_norm(config) if config.norm_2 else nn.Identity()
        self.mlp = LLaMAMoE(config) if config.has_experts(layer) else make_mlp(config)
        self.post_mlp_norm = make_norm(config) if config.post_mlp_norm else nn.Identity()
        self.parallel_residual, self.residual_multiplier = config.parallel_residual, config.residual_multiplier
        self.window, self.rope_index = config.window(layer), config.rope_index(layer)
        self.has_experts = config.has_experts(layer)

    def forward(
        self,
        x: torch.Tensor,
        seen: AttentionMask,
        rotation: RotaryEmbedding | None,
        cache: LayerCache | None = None,
        counted: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """(B, T, n_embd) -> (B, T, n_embd).

        Mask and rotation come ready-made: a block that looked them up itself would be compiled once more for the layer
        that makes them.

        Where there are experts and ``counted`` (B, T) says which tokens count, also (B,): how unevenly each row uses
        them. It is returned, not kept aside, because FSDP's hooks see what is returned only.
        """
        normed = self.norm_1(x)
        attended = x + self._added(self.post_attention_norm(self.attn(normed, seen, rotation, cache)))
        if self.norm_2 is not None:
            normed = self.norm_2(x if self.parallel_residual else attended)
        if counted is None or not self.has_experts:
            return attended + self._added(self.post_mlp_norm(self.mlp(normed)))
        y, imbalance = self.mlp(normed, counted)
        return attended + self._added(self.post_mlp_norm(y)), imbalance

    def _added(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.residual_multiplier == 1.0 else x * self.residual_multiplier


class GPT(nn.Module):
    """A decoder-only transformer.

    Args:
        config: The architecture. Its vocabulary must be known (``ModelConfig.with_vocab_size``).

    Attributes:
        uniform_length: Masks and rotations have the form that rows of so many tokens need, however short a row is: for
            compiled blocks, of which each form is another graph. 0: each row the form that is fastest for it.

    The weights are torch's own random ones until :func:`toolkit.models.init.initialize` or a checkpoint sets them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.padded_vocab_size is None:
            raise ValueError(f"the model configuration {config.name!r} has no vocab_size: it comes from the tokenizer")
        self.config = config
        self.uniform_length = 0
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=config.lm_head_bias)
        parts: dict[str, nn.Module] = {"wte": nn.Embedding(config.padded_vocab_size, config.n_embd)}
        if config.position_embedding == "learned":
            parts["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        parts["h"] = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        parts["ln_f"] = make_norm(config)
        self.transformer = nn.ModuleDict(parts)
        self._frequencies: dict[tuple, torch.Tensor] = {}  # not buffers: see rope.py
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
        sequence_length: int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute logits, or the loss.

        Args:
            input_ids: (B, T), int64.
            labels: (B, T), int64, aligned with the logits: labels[b, t] is the token that follows input_ids[b, t];
                -100 where there is nothing to learn.
            positions: (T,) or (B, T), int64; counted on from what the cache holds when not given.
            documents: (B, T), int64: which of the documents packed into a row each token belongs to; tokens see only
                their own (N9). ``positions`` should start at 0 in each. Not together with a cache.
            kv_cache: One cache per block; the new keys and values are appended to it.
            sequence_length: Tokens of the whole sequence, where this pass and the cache hold its beginning only; one
                kind of rotation (longrope) depends on it.

        Returns:
            Logits (B, T, padded_vocab_size); with labels ``(loss_sum, n_tokens)``: the sum of the negative
            log-likelihoods in nats, an fp32 scalar, and the number of supervised tokens, an int64 scalar tensor. In
            training mode, ``loss_sum`` of a model with experts also has ``router_aux_loss_coef`` times the mean over
            the layers of each row's :func:`toolkit.models.moe.imbalance`, times the row's supervised tokens: so it
            is the same whatever the split of a global batch into micro-batches (N2).

        Raises:
            ValueError: The sequence is longer than ``config.block_size``.
        """
        is_balanced = self.training and labels is not None and self.config.n_moe_layer > 0
        counted = before_last_label(labels) if is_balanced and self.config.router_aux_loss_coef else None
        lengths, border = sequence_length, self.config.original_max_position
        longest = max(input_ids.size(1), self.uniform_length if kv_cache is None else 0)
        if border is not None and longest > border:
            lengths = document_lengths(input_ids, documents, labels)
        x, imbalances = self._embed_and_run_blocks(input_ids, positions, documents, kv_cache, counted, lengths)
        if self.config.logits_scaling != 1.0:
            x = x / self.config.logits_scaling
        head, cap = self.lm_head, self.config.final_logit_softcapping
        if labels is None:
            logits = head(x)
            return logits if cap is None else cap * torch.tanh(logits / cap)
        low_rank = head.low_rank(x, x.dtype) if isinstance(head, LoRALinear) else None
        loss_sum = head_loss(x, head.weight, head.bias, labels, low_rank, cap)
        supervised = (labels != IGNORE_INDEX).sum(1)
        if imbalances:
            of_rows = torch.stack(imbalances).mean(0)
            loss_sum = loss_sum + self.config.router_aux_loss_coef * (of_rows * supervised).sum()
        return loss_sum, supervised.sum()

    def _embed_and_run_blocks(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor | None,
        documents: torch.Tensor | None,
        kv_cache: Sequence[LayerCache] | None,
        counted: torch.Tensor | None,
        lengths: torch.Tensor | int | None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        T, device = input_ids.size(1), input_ids.device
        held = 0 if kv_cache is None else kv_cache[0].length
        if held + T > self.config.block_size:
            raise ValueError(f"a sequence of {held + T} tokens: the model takes at most {self.config.block_size}")
        if positions is None:
            positions = torch.arange(held, held + T, device=device)
        x = self._embed(input_ids, positions)
        visibility = AttentionMaskBuilder(held, T, device, documents, self.uniform_length if kv_cache is None else 0)
        rotations = self._rotations(positions, held + T if lengths is None else lengths)
        imbalances: list[torch.Tensor] = []
        for i, block in enumerate(self.transformer.h):
            seen, rotation = visibility.for_window(block.window), rotations.get(block.rope_index)
            x = block(x, seen, rotation, None if kv_cache is None else kv_cache[i], counted)
            if isinstance(x, tuple):
                x, imbalance = x
                imbalances.append(imbalance)
        return self.transformer.ln_f(x), imbalances

    def _embed(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.transformer.wte(input_ids)
        if self.config.position_embedding == "learned":
            x = x + self.transformer.wpe(positions)
        if self.config.scale_embeddings:  # by a number of the weights' dtype, as these models were trained
            x = x * torch.full((), self.config.n_embd**0.5, dtype=x.dtype, device=x.device)
        return x if self.config.embedding_multiplier == 1.0 else x * self.config.embedding_multiplier

    def _rotations(self, positions: torch.Tensor, lengths: torch.Tensor | int) -> dict[int, RotaryEmbedding]:
        """By the rope index of the layers; layers of another index are not rotated."""
        if self.config.position_embedding == "learned":
            return {}
        used = {self.config.rope_index(layer) for layer in range(self.config.n_layer)} - {-1}
        return {
            index: RotaryEmbedding(
                positions,
                self._frequencies_of(lengths, positions.device, local=index == 1),
                attention_factor(self.config, local=index == 1),
            )
            for index in used
        }

    def _frequencies_of(self, lengths: torch.Tensor | int, device: torch.device, local: bool) -> torch.Tensor:
        """(rope_n_elem / 2,), or (B, T, rope_n_elem / 2) where each token has a length of its own."""
        border = self.config.original_max_position
        is_long = False if border is None else lengths > border
        if isinstance(is_long, bool):
            return self._frequencies_on(device, local, is_long)
        short, long = (self._frequencies_on(device, local, which) for which in (False, True))
        return torch.where(is_long.unsqueeze(-1), long, short)

    def _frequencies_on(self, device: torch.device, local: bool, is_long: bool) -> torch.Tensor:
        key = (device, local, is_long)
        if key not in self._frequencies:
            inverse = inverse_frequencies(self.config, is_long, local).to(device)
            if type(inverse) is not torch.Tensor:  # a FakeTensor must not outlive its mode
                return inverse
            self._frequencies[key] = inverse
        return self._frequencies[key]
