"""The Free Transformer: a decoder with a random latent Z_t per token, injected at its middle block, and its encoder.

Source: Fleuret 2025, arXiv 2510.17558. Let X be the residual stream after L/2 of the L blocks:

- The encoder is one non-causal block. Its query is one learned vector at all positions, which differ only in RoPE;
  keys and values come from X. A linear layer computes the logits of the H bits of Z_t.
- Block L/2 + 1 computes queries from X, and keys and values from X + R, where R_t is the vector of the code Z_t.
- The prior of Z is uniform. The training loss is the cross-entropy given the encoder's Z, plus max(0, KL - kappa) per
  token (Eq. 5).

Random numbers are a function of (seed, row, position, bit). They do not depend on how a batch is split over ranks and
micro-batches, or on a resume.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.models.block import Block, BlockInputs
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT
from toolkit.models.kv_cache import KVCache
from toolkit.models.labels import IGNORE_INDEX
from toolkit.models.masks import AttentionMask
from toolkit.models.rope import RotaryEmbedding
from toolkit_free_transformer.family import LatentOptions, validate
from toolkit_free_transformer.latent import (
    POSTERIOR,
    PRIOR,
    kl_divergence,
    lookup,
    pack,
    sample_codes,
    uniform,
    unpack,
)


class Encoder(nn.Module):
    """A non-causal block with a learned query, and a linear layer for the logits of the latent bits."""

    def __init__(self, config: ModelConfig, latent_bits: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(config.n_embd))
        self.block = Block(config, 0)
        self.readout = nn.Linear(config.n_embd, latent_bits, bias=False)

    def forward(self, x: Tensor, attn_mask: AttentionMask, rope: RotaryEmbedding) -> Tensor:
        """(B, T, n_embd) -> (B, T, latent_bits)."""
        return self.readout(self.block(self.query.view(1, 1, -1), attn_mask, rope, kv_source=x))


class FreeTransformer(GPT):
    """A decoder with a random latent per token; see the module docstring.

    Args:
        config: A config of the family "free_transformer" with :class:`LatentOptions` in ``family_options``.

    Raises:
        UserError: An option is invalid, or the decoder is not a Llama.
    """

    loss_parts = ("ce", "kl", "elbo", "prior_ce")
    is_row_independent = False  # latents depend on the complete prompt
    note = (
        "ce uses the encoder's latents, and the encoder sees the tokens to predict: only elbo (ce + kl) and val_loss "
        "are comparable with a model without latents"
    )

    def __init__(self, config: ModelConfig) -> None:
        validate(config)
        super().__init__(config)
        self.options = options = LatentOptions.of(config)
        self.encoder = Encoder(config, options.latent_bits) if options.encoder else None
        if options.mapper == "exact":
            self.latent: nn.Module = nn.Embedding(1 << options.latent_bits, config.n_embd)
        else:
            self.latent = nn.Linear(options.latent_bits, config.n_embd, bias=False)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        kv_cache: KVCache | None = None,
        logits_to_keep: int = 0,
        sample_keys: Tensor | None = None,
        mode: Literal["training", "inference"] = "inference",
        codes: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute logits, or the loss.

        Args:
            input_ids, labels, positions, documents, kv_cache, logits_to_keep: See :class:`GPT`.
            sample_keys: (B,) int64 row numbers that seed the latents. Default: 0, 1, 2, ...; for "inference" 0, so that
                a sequence does not depend on its batch.
            mode: Source of the latents without labels. "training": the encoder. "inference": the prior, except for
                prompt tokens in a KV cache, whose latents come from the encoder.
            codes: (B, T) int64 latents; only for "inference" without a KV cache.

        Returns:
            Logits (B, T, padded_vocab_size); in mode "training" also the logits of the latent bits, (B, T, H). With
            labels ``(loss_sum, n_tokens)``. If ``self.training``, the loss is the cross-entropy plus the KL divergence
            above kappa. Otherwise it includes all of the KL divergence: this is the negative ELBO, an upper bound of
            the negative log-likelihood, and comparable with a model without latents. The KL includes all tokens up to
            the last supervised token of a document, because their latents can encode later tokens.

        Raises:
            UserError: The model needs an encoder and has none.
            ValueError: Arguments are incompatible, or the sequence is too long.
        """
        if mode not in ("training", "inference"):
            raise ValueError(f"mode {mode!r}: must be 'training' or 'inference'")
        is_inference = labels is None and mode == "inference"
        keys = sample_keys
        if keys is None:
            keys = torch.arange(input_ids.size(0), device=input_ids.device) * (not is_inference)
        if labels is not None:
            return self._loss(input_ids, labels, positions, documents, keys)
        if not is_inference:
            if kv_cache is not None or codes is not None:
                raise ValueError("mode 'training' takes neither a KV cache nor codes")
            x, inputs = self._lower(input_ids, positions=positions, documents=documents)
            z_logits = self._encode(x, inputs, documents, None)
            return self.logits(self._upper(x, inputs, self._draw(z_logits, keys), z_logits)), z_logits
        if codes is None:
            codes = self._inference_codes(input_ids, keys, kv_cache)
        x, inputs = self._lower(input_ids, positions=positions, documents=documents, kv_cache=kv_cache)
        return self.logits(self._upper(x, inputs, codes)[:, -logits_to_keep:])

    # ---- training

    def _loss(
        self, input_ids: Tensor, labels: Tensor, positions: Tensor | None, documents: Tensor | None, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        x, inputs = self._lower(input_ids, labels=labels, positions=positions, documents=documents)
        prior_ce = None
        if not self.training:  # a second pass of the upper half; in training it would take a sixth more time
            with torch.no_grad():
                prior = self._prior_codes(keys, self._positions(input_ids))
                prior_ce = self.cross_entropy(self._upper(x, inputs, prior), labels)
        if self.encoder is None and not self.training:
            assert prior_ce is not None
            ce, kl, loss = prior_ce, torch.zeros_like(prior_ce), prior_ce
        else:
            is_live = live_tokens(labels, documents)
            z_logits = self._encode(x, inputs, documents, is_live)
            per_token = kl_divergence(z_logits).where(is_live, 0.0)
            ce = self.cross_entropy(self._upper(x, inputs, self._draw(z_logits, keys), z_logits), labels)
            kl, kappa = per_token.sum(), self.options.free_bits * math.log(2)
            loss = ce + ((per_token - kappa).clamp(min=0).sum() if self.training else kl)
        parts = {"ce": ce, "kl": kl, "elbo": ce + kl} | ({} if prior_ce is None else {"prior_ce": prior_ce})
        for name, part in parts.items():
            self.loss_part_sums[name] = self.loss_part_sums.get(name, 0) + part.detach()
        return loss, (labels != IGNORE_INDEX).sum()

    def _encode(self, x: Tensor, inputs: BlockInputs, documents: Tensor | None, is_live: Tensor | None) -> Tensor:
        """Return the logits of the latent bits, (B, T, H), fp32.

        Args:
            x: Output of the lower half.
            inputs: The inputs that all blocks share.
            documents: (B, T) document ids of packed rows; latents depend only on their document (N9).
            is_live: (B, T) bool, the tokens that the encoder sees, without padding; None for all tokens.
        """
        if self.encoder is None:
            raise UserError(f"{self.config.name}: cannot be trained without an encoder; use a checkpoint with one")
        return self.encoder(x, encoder_mask(x, documents, is_live), inputs.ropes[0]).float()

    def _draw(self, z_logits: Tensor, keys: Tensor, seed: int | None = None) -> Tensor:
        """Sample codes from the encoder's distribution, (B, T)."""
        seed = (self.seed if self.training else 0) if seed is None else seed
        positions = torch.arange(z_logits.size(1), device=z_logits.device)
        return sample_codes(z_logits, uniform(seed, POSTERIOR, keys, positions, z_logits.size(-1)))

    # ---- halves

    @property
    def _half(self) -> int:
        return self.config.n_layer // 2

    def _lower(self, input_ids: Tensor, **options: Any) -> tuple[Tensor, BlockInputs]:
        x, inputs = self.embed(input_ids, **options)
        return self.run_blocks(x, range(self._half), inputs)[0], inputs

    def _upper(self, x: Tensor, inputs: BlockInputs, codes: Tensor, z_logits: Tensor | None = None) -> Tensor:
        """Run the upper half with the latents. ``z_logits`` receive a gradient through the latents."""
        source = x + self._vectors(codes, z_logits)
        return self.run_blocks(x, range(self._half, self.config.n_layer), inputs, kv_source=source)[0]

    def _vectors(self, codes: Tensor, z_logits: Tensor | None) -> Tensor:
        """(B, T) -> (B, T, n_embd)."""
        if self.options.mapper == "exact":
            if z_logits is None or not z_logits.requires_grad:
                return self.latent(codes)
            assert isinstance(self.latent, nn.Embedding)
            return lookup(z_logits, self.latent.weight, codes)
        bits = unpack(codes, self.options.latent_bits).float()
        if z_logits is not None:
            p = z_logits.sigmoid()
            bits = bits + (p - p.detach())
        assert isinstance(self.latent, nn.Linear)
        return self.latent((2 * bits - 1).to(self.latent.weight.dtype))

    # ---- generation

    def _positions(self, input_ids: Tensor, start: int = 0) -> Tensor:
        return torch.arange(start, start + input_ids.size(1), device=input_ids.device)

    def _prior_codes(self, keys: Tensor, positions: Tensor, seed: int = 0) -> Tensor:
        """Sample codes from the uniform prior, (B, T)."""
        return pack(uniform(seed, PRIOR, keys, positions, self.options.latent_bits) < 0.5)

    def _inference_codes(self, input_ids: Tensor, keys: Tensor, cache: KVCache | None) -> Tensor:
        """Return the codes of new tokens, sampled once per position: prompt from the encoder, others from the prior."""
        if cache is None:
            return self._prior_codes(keys, self._positions(input_ids))
        start = cache.length
        codes = self._prior_codes(keys, self._positions(input_ids, start), cache.seed)
        prompt = cache.prompt
        if prompt is None or self.encoder is None or start >= prompt.size(1):
            return codes
        if cache.state.get("prompt") is not prompt:
            x, inputs = self._lower(prompt)
            of_prompt = self._draw(self._encode(x, inputs, None, None), keys, cache.seed)
            cache.state.update(prompt=prompt, codes=of_prompt)
        cached_codes = cache.state["codes"][:, start : start + input_ids.size(1)]
        return torch.cat((cached_codes, codes[:, cached_codes.size(1) :]), dim=1)


def live_tokens(labels: Tensor, documents: Tensor | None) -> Tensor:
    """Return the tokens up to the last supervised token of their document, (B, T) bool. Later tokens, such as padding,
    do not affect the loss."""
    T = labels.size(1)
    ends = torch.arange(1, T + 1, device=labels.device) * (labels != IGNORE_INDEX)
    documents = torch.zeros_like(labels) if documents is None else documents % T  # padding, -1, becomes the last
    last = torch.zeros_like(labels).scatter_reduce(1, documents, ends, "amax")
    return torch.arange(T, device=labels.device) < last.gather(1, documents)


def encoder_mask(x: Tensor, documents: Tensor | None, is_live: Tensor | None) -> AttentionMask:
    """Return the encoder's attention mask: all live tokens of the document; no mask if all tokens are visible.

    Without documents, all queries share one mask row. Every query needs a key: without documents the first token is
    always visible, and in packed rows each token sees itself.
    """
    T = x.size(1)
    if is_live is None and documents is None:
        return AttentionMask(T)
    if is_live is None:
        is_live = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    if documents is not None:
        mask = (documents[:, :, None] == documents[:, None, :]) & is_live[:, None, :]
        return AttentionMask(T, (mask | torch.eye(T, dtype=torch.bool, device=x.device))[:, None])
    if x.device.type == "cpu" and bool(is_live.all()):  # on other devices this would synchronize
        return AttentionMask(T)
    is_first = torch.arange(T, device=x.device) == 0
    return AttentionMask(T, (is_live | is_first)[:, None, None, :])
