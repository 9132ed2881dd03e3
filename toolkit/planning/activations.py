"""Measure the activation and logits memory of a training step, without allocating tensors.

The forward pass of a model with one block of each kind runs on meta tensors that look like CUDA tensors, or on fake CPU
tensors. The tensors that remain in memory are the saved activations: autograd's saved tensors and, with activation
checkpointing, the block inputs and the outputs that "selective" saves. This works for any layer.
"""

from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from toolkit.models.activation_checkpointing import checkpoint_blocks
from toolkit.models.aligned import aligned_size
from toolkit.models.block import Block
from toolkit.models.distillation import CHUNK_TENSORS
from toolkit.models.gpt import GPT
from toolkit.models.head import Head
from toolkit.models.lora import is_adapter
from toolkit.models.loss import chunk_rows
from toolkit.planning.memory_inputs import FP32, MemoryInputs, cached_by_text
from toolkit.planning.sample_model import (
    AUTOCAST,
    micro_batch,
    one_layer_of_each_kind,
    quantized_weights,
    sample_model,
)
from toolkit.planning.speed.cuda_on_meta import cuda_on_meta
from toolkit.private_torch import FakeTensorMode, TorchDispatchMode, tree_leaves


class Activations(NamedTuple):
    """Activation bytes on one device.

    Args:
        saved: Tensors saved for the backward pass, without ``cast_weights``.
        cast_weights: Autocast's 16-bit copies of weights.
        recomputed: With activation checkpointing, extra bytes while the largest block is recomputed.
    """

    saved: float
    cast_weights: float
    recomputed: float


def measure_activations(setup: MemoryInputs) -> Activations:
    """Return the activation memory of a micro-batch.

    Extrapolates linearly from 2 and 3 rows. Some tensors, such as masks, are shared by all rows.
    """
    few, more = _measure(setup, 2), _measure(setup, 3)
    rows = setup.micro_batch_size - 2
    return Activations(*(a + rows * (b - a) for a, b in zip(few, more, strict=True)))


def _measure(setup: MemoryInputs, n_rows: int) -> Activations:
    config, counts = one_layer_of_each_kind(setup.config, n_first=int(setup.lora is not None), n_last=1)
    sample = setup.of_forward(config=config, micro_batch_size=n_rows)
    parts = _live_bytes(sample)
    saved, casts = 0, 0
    for part, size in parts.items():
        total = size if part.layer is None else counts[part.layer] * size
        saved, casts = (saved, casts + total) if part.is_cast else (saved + total, casts)
    if setup.activation_checkpointing == "none":
        return Activations(saved, casts, 0.0)
    base = _live_bytes(replace(sample, activation_checkpointing="none"))
    recomputed = max(base[Origin(i)] - parts[Origin(i)] + base[Origin(i, is_cast=True)] for i in range(len(counts)))
    return Activations(saved, casts, recomputed)


class Origin(NamedTuple):
    """Origin of a tensor: its layer (None: outside the blocks), and whether it is a block output or a cast weight."""

    layer: int | None
    is_output: bool = False
    is_cast: bool = False


class _HeadThatSavesNothing(Head):
    def loss(self, x: Tensor, labels: Tensor, **options: Any) -> Tensor:
        return x.sum()


@cached_by_text
def _live_bytes(setup: MemoryInputs) -> defaultdict[Origin, int]:
    """Return the bytes in memory after the forward pass, by origin."""
    autocast = AUTOCAST.get(setup.precision)
    with ExitStack() as stack:
        if is_cuda := setup.device == "cuda":
            device = "meta"
        else:
            device = "cpu"
            stack.enter_context(FakeTensorMode())
        model = sample_model(setup, device)
        checkpoint_blocks(model, (Block,), setup.activation_checkpointing)
        model.lm_head = _HeadThatSavesNothing(1, 1, device=device)
        storages = _Storages(model, setup)
        stack.enter_context(storages)
        if is_cuda:
            stack.enter_context(cuda_on_meta(autocast))
        else:
            enabled = autocast is not None
            stack.enter_context(torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=enabled))
        loss_sum, _ = model(**micro_batch(setup, device))
        live = storages.live()
        del loss_sum
    return live


class _Storages(TorchDispatchMode):
    """Tracks the storages that operators allocate in a forward pass of ``model``. Ignores weights and buffers."""

    def __init__(self, model: GPT, setup: MemoryInputs) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int, Origin]] = {}
        self._layer: int | None = None
        self._weights = {_key(t) for t in (*model.parameters(), *model.buffers())}
        self._in_4_bits = set(map(_key, quantized_weights(setup, model).values()))
        matrices = {_key(p) for n, p in model.named_parameters() if p.ndim > 1 and not is_adapter(n)}
        self._cast = matrices - self._in_4_bits
        for i, block in enumerate(model.blocks):
            block.register_forward_pre_hook(lambda *_, layer=i: self._enter(layer))
            block.register_forward_hook(lambda _, __, output, layer=i: self._leave(layer, output))

    def _enter(self, layer: int) -> None:
        self._layer = layer

    def _leave(self, layer: int, output: Any) -> None:
        self._layer = None
        key = _key(output[0] if isinstance(output, tuple) else output)
        self._storages[key] = (*self._storages[key][:2], Origin(layer, is_output=True))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "aten::_local_scalar_dense":  # ``.item()`` in the model
            return True
        if any(hasattr(cls, "__tensor_flatten__") for cls in types):
            return NotImplemented  # continues with the operators on the parts of an fp8 tensor
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor):
                continue
            key, storage = _key(tensor), tensor.untyped_storage()
            if key in self._weights or (key in self._storages and not self._storages[key][0].expired()):
                continue
            source = _key(args[0]) if func.name() == "aten::_to_copy" else None
            size = 0 if source in self._in_4_bits else storage.nbytes()  # dequantized again for each matmul
            part = Origin(self._layer, is_cast=source in self._cast)
            self._storages[key] = StorageWeakRef(storage), size, part
        return out

    def live(self) -> defaultdict[Origin, int]:
        """Return the bytes of the storages that still exist, by origin."""
        sizes = defaultdict[Origin, int](int)
        for storage, size, part in self._storages.values():
            sizes[part] += 0 if storage.expired() else size
        return sizes


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def logits_bytes(setup: MemoryInputs) -> float:
    """Return the bytes of the chunked cross-entropy: one chunk of logits, and the gradients of head and input.

    See models/loss.py. The head's gradient accumulates in fp32; under 16-bit compute, each chunk's gradient is 16-bit.
    The input is cast and masked. FSDP's 16-bit weights are copied if their rows are padded, see models/aligned.py.
    """
    config, c, n = setup.config, setup.compute_bytes, setup.tokens
    size, vocabulary = config.padded_vocab_size // setup.tensor, _computed_vocabulary(setup)
    head = vocabulary * config.n_embd
    rows = min(chunk_rows(size, torch.device(setup.device)), n)
    chunk = rows * vocabulary * (FP32 + (c if c != FP32 else 0))
    trained = head * (FP32 + (c if c != FP32 else 0)) if setup.lora is None else 0
    is_copied = setup.is_mixed or (setup.strategy.kind == "fsdp" and vocabulary > size)
    rounded = head * c if is_copied else 0
    return chunk + trained + rounded + n * config.n_embd * (2 * c + setup.weight_bytes)


def frozen_loss_bytes(setup: MemoryInputs) -> float:
    """Return what the loss needs of a frozen model: hidden states, its head, gathered, and logits in smaller chunks."""
    if setup.frozen is None:
        return 0.0
    vocabulary, width = setup.config.padded_vocab_size, setup.frozen.n_embd
    rows = min(chunk_rows(CHUNK_TENSORS * vocabulary, torch.device(setup.device)), setup.tokens)
    head = setup.frozen_itemsize * setup.frozen.padded_vocab_size * width if setup.strategy.kind == "fsdp" else 0
    return head + setup.tokens * width * (FP32 + setup.compute_bytes) + CHUNK_TENSORS * FP32 * rows * vocabulary


def frozen_forward_bytes(setup: MemoryInputs, model: GPT) -> float:
    """Return what the forward pass of a frozen model needs: a layer's widest activations, and with FSDP two blocks."""
    config, block = model.config, sum(p.numel() for p in model.blocks[0].parameters())
    width = 2 * config.n_embd + 3 * max(config.intermediate_size, config.n_head * config.value_size)
    gathered = 2 * block * setup.frozen_itemsize if setup.strategy.kind == "fsdp" else 0
    return gathered + setup.tokens * setup.compute_bytes * width


def kept_loss_bytes(setup: MemoryInputs) -> float:
    """Return the bytes that the loss keeps until its backward pass: the gradients of head and input."""
    trained = FP32 * _computed_vocabulary(setup) * setup.config.n_embd if setup.lora is None else 0
    return trained + setup.tokens * setup.config.n_embd * setup.compute_bytes


def _computed_vocabulary(setup: MemoryInputs) -> int:
    dtype = AUTOCAST.get(setup.precision, setup.dtype)
    return aligned_size(setup.config.padded_vocab_size // setup.tensor, torch.device(setup.device), dtype)
