"""The GPT model: embedding, blocks, norm, head. Weight names are LitGPT's, so LitGPT checkpoints load unchanged."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from toolkit.config.options import DEFAULT_SEED
from toolkit.errors import UserError, require_option
from toolkit.extension import require_single
from toolkit.models.attention_dispatch import choose_kernel
from toolkit.models.attention_kernels import Documents
from toolkit.models.block import Block as Block
from toolkit.models.block import BlockInputs as BlockInputs
from toolkit.models.config import ModelConfig
from toolkit.models.execution import Execution
from toolkit.models.families import family_of
from toolkit.models.head import Head, Score
from toolkit.models.init import InitializedModel
from toolkit.models.keyed_random import DropoutBits, derive
from toolkit.models.kv_cache import KVCache, next_positions
from toolkit.models.labels import IGNORE_INDEX
from toolkit.models.loss import RowLoss, mask_until_last_label
from toolkit.models.masks import AttentionMaskBuilder, ContextMaskBuilder, FixedShapeMaskBuilder, MaskBuilder
from toolkit.models.mixed_mm import matmul_dtype
from toolkit.models.neftune import SampleNoise
from toolkit.models.norm import make_norm
from toolkit.models.rope import RotaryFrequencies, document_lengths


class Transformer(nn.ModuleDict):
    """The model without its LM head."""

    wte: nn.Embedding
    wpe: nn.Embedding  # with learned positions only
    h: nn.ModuleList
    ln_f: nn.Module


class Targets(NamedTuple):
    """Labels, and a function to compute from them instead of the cross-entropy.

    Args:
        labels: (B, T), int64, as in :meth:`GPT.forward`.
        head: Takes the model, the last block's output x, (B, T, n_embd), and the labels, as :meth:`GPT.log_probs`.
    """

    labels: Tensor
    head: Callable[["GPT", Tensor, Tensor], Tensor]


class GPT(nn.Module, metaclass=InitializedModel):
    """A decoder-only transformer.

    An extension's model is a subclass that overrides :meth:`forward` and calls :meth:`embed`, :meth:`run_blocks`, and
    :meth:`logits` or :meth:`cross_entropy`.

    Args:
        config: The architecture. ``vocab_size`` must be set (``ModelConfig.with_vocab_size``).
        seed: Seed of the initial weights, see :mod:`toolkit.models.init`.

    Attributes:
        loss_parts: Names of the loss components that a subclass logs.
        loss_part_sums: Sum per loss component. Each forward with labels adds the detached fp32 sum over the supervised
            tokens. All ranks must add the same components.
        execution: How this process computes the model. Change it with :meth:`execute_with`.
        note: Note about the metrics, printed at the start of a run.
        is_row_independent: Whether a row's logits depend only on its tokens and positions. If not, prompts are
            generated one at a time.
        has_dropout: Whether adapters have dropout.

    Embedding and logits have size ``config.padded_vocab_size``, a multiple of ``padding_multiple`` by default. The
    first ``config.vocab_size`` entries are the tokenizer's: ``logits[..., :config.vocab_size]`` leaves the padding out.
    """

    loss_parts: tuple[str, ...] = ()
    note = ""
    is_row_independent = True
    has_dropout = False

    def __init__(self, config: ModelConfig, seed: int = DEFAULT_SEED) -> None:
        super().__init__()
        if config.padded_vocab_size is None:
            raise ValueError(f"the model configuration {config.name!r} has no vocab_size; set it from the tokenizer")
        if not isinstance(self, family_of(config).model_class() or GPT):
            raise UserError(f"family {config.family}: has a model class; use toolkit.models.gpt.build_model")
        self.config = config
        self.execution = Execution(seed)
        self.loss_part_sums: dict[str, Tensor] = {}
        self.dropout_bits = DropoutBits()  # of the head
        if config.head is None:
            self.lm_head = Head(config.n_embd, config.padded_vocab_size, bias=config.lm_head_bias)
        else:
            self.score: nn.Module = Score(config.n_embd, config.n_labels, bias=False)
        parts: dict[str, nn.Module] = {"wte": nn.Embedding(config.padded_vocab_size, config.n_embd)}
        if config.position_embedding == "learned":
            parts["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        parts["h"] = nn.ModuleList(self.make_block(config, layer) for layer in range(config.n_layer))
        parts["ln_f"] = make_norm(config, is_residual_norm=True)
        self.transformer = Transformer(parts)
        self._rotary = RotaryFrequencies(config)
        self.tie_weights()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, instead in {"document_bounds": "documents has the ids", "log_probs": "labels may be Targets"}.items():
            if name in inspect.signature(cls.forward).parameters:
                raise UserError(f"{cls.__qualname__}.forward: {name} is never passed; remove it ({instead})")

    def make_block(self, config: ModelConfig, layer: int) -> Block:
        return Block(config, layer)

    def freeze_quantized(self, device: torch.device | str, dtype: torch.dtype | None) -> None:
        """Quantize the weights once, and merge the adapters of these layers: for inference."""
        self.config = replace(self.config, qat=quantizer_of(self.config).freeze(self, device, dtype))
        self.note = type(self).note

    def execute_with(self, **changes: Any) -> None:
        """Replace fields of :class:`toolkit.models.execution.Execution`."""
        self.execution = replace(self.execution, **changes)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Execution.__dataclass_fields__ or name == "row_loss":  # it would have no effect
            raise AttributeError(f"{name}: use execute_with(), or Targets for a loss")
        super().__setattr__(name, value)

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self.execution.seed

    @property
    def blocks(self) -> list[Block]:
        """The transformer blocks in order."""
        return cast(list[Block], list(self.transformer.h))

    @property
    def head(self) -> nn.Module:
        """The last layer: the LM head, or the score layer."""
        return self.lm_head if self.config.head is None else self.score

    @property
    def vocab_size(self) -> int:
        """Number of tokens, without padding if it is known."""
        return self.config.vocab_size or self.config.padded_vocab_size

    def tie_weights(self) -> None:
        """Tie the LM head to the embedding, if the config requests it.

        Call this again after ``load_state_dict(assign=True)``, which unties them.
        """
        if self.config.tie_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    def __call__(self, input_ids: Tensor, labels: Any = None, *, log_probs: bool = False, **inputs: Any) -> Any:
        """Call :meth:`forward`. ``log_probs`` is short for ``Targets(labels, GPT.log_probs)``."""
        labels = Targets(labels, GPT.log_probs) if log_probs else labels
        return super().__call__(input_ids, labels, **inputs)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | Targets | None = None,
        *,
        positions: Tensor | None = None,
        documents: Tensor | Documents | None = None,
        kv_cache: KVCache | None = None,
        logits_to_keep: int = 0,
        noise: SampleNoise | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the logits, or the loss.

        Args:
            input_ids: (B, T), int64.
            labels: (B, T), int64, aligned with the logits: labels[b, t] is the token that follows input_ids[b, t];
                -100 for tokens excluded from the loss.
            positions: (T,) or (B, T), int64; default: continue after the cached tokens.
            documents: (B, T), int64, document ids of packed rows; tokens attend only within their document (N9).
                ``positions`` should start at 0 in each. Without their bounds, packed rows need attention masks. Not
                supported with a KV cache.
            kv_cache: One cache per block; the new keys and values are appended to it.
            logits_to_keep: Compute logits only for this many last positions; 0 for all.
            noise: Of embeddings and the dropout of adapters, which otherwise takes the numbers of torch's generator.

        Returns:
            Logits (B, T or ``logits_to_keep``, padded_vocab_size); with labels ``(loss_sum, n_tokens)``: the sum of the
            negative log-likelihoods in nats, an fp32 scalar, and the number of supervised tokens, an int64 scalar
            tensor. In training mode, ``loss_sum`` of a model with experts includes the load-balancing loss: per row,
            ``router_aux_loss_coef`` times the mean over layers of :func:`toolkit.models.moe.load_balancing_loss`,
            weighted by the row's supervised tokens. The loss therefore does not depend on the split into micro-batches
            (N2). With :class:`Targets`, the pair is the result of ``head`` and the load-balancing loss, an fp32 scalar.

        Raises:
            ValueError: The sequence is longer than ``config.block_size``.
        """
        rows: dict[str, Any] = {"positions": positions, "documents": documents, "kv_cache": kv_cache, "noise": noise}
        if self.execution.pipeline is not None:
            return self.execution.pipeline.forward(input_ids, labels, logits_to_keep=logits_to_keep, **rows)
        labels, head = labels if isinstance(labels, Targets) else (labels, None)
        is_balanced = self.training and self.config.n_moe_layer > 0 and self.config.router_aux_loss_coef
        token_mask = mask_until_last_label(labels) if labels is not None and is_balanced else None
        x, inputs = self.embed(input_ids, labels, **rows)
        inputs = inputs._replace(token_mask=token_mask)
        x, balancing_losses = self.run_blocks(x, range(self.config.n_layer), inputs)
        if labels is None:
            return self.logits(x[:, -logits_to_keep:])
        labels = self.own_tokens(labels)
        loss = self.cross_entropy(x, labels) if head is None else head(self, x, labels)
        supervised = (labels != IGNORE_INDEX).sum(1)
        if balancing_losses:
            per_row = torch.stack(balancing_losses).mean(0)
            balancing_loss = self.config.router_aux_loss_coef * (per_row * supervised).sum()
            return (loss + balancing_loss, supervised.sum()) if head is None else (loss, balancing_loss)
        return loss, supervised.sum() if head is None else x.new_zeros((), dtype=torch.float32)

    def own_tokens(self, rows: Tensor) -> Tensor:
        """Return what this rank computes with context parallelism, (..., T / size), of complete rows, (..., T)."""
        context = self.execution.context
        return rows if context is None else context.split(rows)

    def embed(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | Documents | None = None,
        kv_cache: KVCache | None = None,
        sequence_length: int | Tensor | None = None,
        x: Tensor | None = None,
        noise: SampleNoise | None = None,
    ) -> tuple[Tensor, BlockInputs]:
        """Return the first block's input, (B, T, n_embd), and the shared block inputs.

        Takes the arguments of :meth:`forward`, ``sequence_length`` to override the KV cache's, and ``x`` if an earlier
        pipeline stage has computed the residual stream.
        """
        T, context = input_ids.size(1), None if labels is None else self.execution.context
        uniform_length = self.execution.uniform_length if kv_cache is None else 0
        documents, bounds = documents if isinstance(documents, Documents) else (documents, None)
        if sequence_length is None and kv_cache is not None:
            sequence_length = kv_cache.sequence_length
        default_positions, length = next_positions(T, input_ids.device, self.config.block_size, kv_cache)
        positions = default_positions if positions is None else positions
        lengths = length if sequence_length is None else sequence_length
        original_max = self.config.original_max_position
        if original_max is not None and kv_cache is None and max(T, uniform_length) > original_max:
            lengths = document_lengths(input_ids, documents, labels)
        own = (lambda rows: rows) if context is None else context.split
        noisy = bits = None
        if noise is not None and self.has_dropout:
            bits = own(noise.dropout_bits(T, input_ids.device))
        if noise is not None and noise.alpha and x is None:
            noisy = own(noise.draw(document_lengths(input_ids, documents, labels), self.config.n_embd).mT).mT
        self.dropout_bits.tokens = None if bits is None else derive(bits, self.config.n_layer)
        input_ids, positions = own(input_ids), own(positions)
        lengths = own(lengths) if isinstance(lengths, Tensor) else lengths
        x = self._embed_tokens(input_ids, positions, noisy) if x is None else x
        kernel, starts = None, None if kv_cache is None else kv_cache.starts
        if self.execution.uses_kernels and kv_cache is None:
            has = (documents is not None, bounds is not None, context is not None)
            kernel = choose_kernel(self.config, x, *has)
        options = (x.device, documents, uniform_length, input_ids.size(0), kernel, bounds, starts)
        masks: MaskBuilder
        if kv_cache is not None and kv_cache.position is not None:
            masks = FixedShapeMaskBuilder(kv_cache.position, length, starts)
        elif context is None:
            masks = AttentionMaskBuilder(length - T, T, *options)
        else:
            masks = ContextMaskBuilder(context, T, *options)
        return x, BlockInputs(masks, self._rotary.embeddings(positions, lengths), kv_cache, dropout_bits=bits)

    def make_cache(self, batch_size: int, max_length: int) -> KVCache:
        """Return an empty KV cache for this rank's heads, on the model's device and in its dtype."""
        weight = next(p for p in self.parameters() if p.is_floating_point())  # the head's weight may be quantized
        ranks = self.execution.tensor_ranks
        return KVCache(self.config, batch_size, max_length, weight.device, weight.dtype, ranks)

    def run_blocks(
        self, x: Tensor, layers: range, inputs: BlockInputs, kv_source: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Run ``layers`` on the residual stream x, (B, T, n_embd), with ``inputs`` from :meth:`embed`.

        The first layer gets ``kv_source``, see :class:`Block`. Returns the residual stream after the layers and the
        load-balancing losses of the MoE layers.
        """
        balancing_losses: list[Tensor] = []
        for i in layers:
            x = self.run_block(i, x, inputs, kv_source if i == layers[0] else None)
            if isinstance(x, tuple):
                x, balancing_loss = x
                balancing_losses.append(balancing_loss)
        return x, balancing_losses

    def run_block(
        self, layer: int, x: Tensor, inputs: BlockInputs, kv_source: Tensor | None = None, **others: Any
    ) -> Any:
        """Run one block, see :class:`Block`. ``others`` are arguments of a subclass's block."""
        block, masks = cast(Block, self.transformer.h[layer]), inputs.masks
        rope, caches = inputs.ropes.get(block.rope_index), inputs.kv_cache
        cache = None if caches is None or layer >= self.config.n_cached_layer else caches[layer]
        attn_mask = masks.for_linear_attention() if block.uses_linear_attention else masks.for_window(block.window)
        bits = block.dropout_bits.tokens = None if inputs.dropout_bits is None else derive(inputs.dropout_bits, layer)
        return block(x, attn_mask, rope, cache, inputs.token_mask, kv_source, bits, **others)

    def logits(self, x: Tensor) -> Tensor:
        """Return logits, (B, T, padded_vocab_size), from the last block's output, (B, T, n_embd).

        With a score layer, return the scores of each token, (B, T, n_labels).
        """
        if self.config.head is not None:
            return self.scores(x)
        logits, softcap = self.lm_head(self.head_input(x)), self.config.final_logit_softcapping
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def cross_entropy(self, x: Tensor, labels: Tensor, row_loss: RowLoss | None = None) -> Tensor:
        """Return the summed cross-entropy in nats, an fp32 scalar, from the last block's output, (B, T, n_embd).

        ``row_loss`` is a loss to use instead.
        """
        return self._head_loss(x, labels, row_loss)

    def log_probs(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return label log-probabilities in nats, (B, T) fp32, from the last block's output, (B, T, n_embd).

        0 where the label is -100.
        """
        return self._head_loss(x, labels, log_probs=True)

    def scores(self, x: Tensor) -> Tensor:
        """Return the scores of tokens, (..., n_labels) fp32, from the last block's output, (..., n_embd)."""
        return self.score(self.transformer.ln_f(x))

    def _head_loss(self, x: Tensor, labels: Tensor, row_loss: RowLoss | None = None, **options: Any) -> Tensor:
        options["softcap"], options["reusable"] = self.config.final_logit_softcapping, self.execution.reusable_loss
        if row_loss is not None and self.execution.tensor_ranks > 1:
            raise UserError("--tensor_parallel_size: this objective's loss needs all logits of a token; use 1")
        loss = row_loss or self.execution.compiled_loss
        return self.lm_head.loss(self.head_input(x), labels, compiled=loss, **options)

    def head_input(self, x: Tensor) -> Tensor:
        """Return the head's input, (B, T, n_embd), from the last block's output."""
        x = self.transformer.ln_f(x)
        return x if self.config.logits_scaling == 1.0 else x / self.config.logits_scaling

    def _embed_tokens(self, input_ids: Tensor, positions: Tensor, noise: Tensor | None) -> Tensor:
        x = self.transformer.wte(input_ids)
        x = x if noise is None else x + noise.to(x.dtype)
        if self.config.position_embedding == "learned":
            x = x + self.transformer.wpe(positions)
        if self.config.scale_embeddings:  # with the factor rounded to the weights' dtype, as these models were trained
            x = x * torch.full((), self.config.n_embd**0.5, dtype=x.dtype, device=x.device)
        x = x if self.config.embedding_multiplier == 1.0 else x * self.config.embedding_multiplier
        return x.to(matmul_dtype(x)) if self.execution.autocasts_residual else x


def build_model(config: ModelConfig) -> GPT:
    """Build a model of the family's class: GPT, or a subclass of GPT (Gemma 4, an extension's)."""
    model_class = family_of(config).model_class()
    hint = f"the family {config.family!r} has no options; remove it"
    require_option(model_class or not config.family_options, "model_config.family_options", config.family_options, hint)
    model = (model_class or GPT)(config)
    if config.qat is not None:
        quantizer_of(config).attach(model)
    return model


def quantizer_of(config: ModelConfig) -> Any:
    """Return the :class:`toolkit.models.quantizer.Quantizer` of a model with ``qat``."""
    return require_single("quantizer", f"--qat.weights {(config.qat or {}).get('weights')}")


def model_on_meta(config: ModelConfig) -> GPT:
    """Build the model on the meta device: names and shapes without memory."""
    with torch.device("meta"):
        return build_model(config)
