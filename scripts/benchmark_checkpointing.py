"""Measure the memory and time of a training step with each activation checkpointing mode, on the CPU.

    python scripts/benchmark_checkpointing.py --model SmolLM2-135M --seq_length 256 --batch_size 1

One process runs forward and backward passes with the three modes in turn; ratios are computed within each round.
Seconds are CPU time over all threads, which other processes hardly affect. Bytes include all existing tensors except
weights and gradients.
"""

import argparse
import time
from collections.abc import Iterable
from statistics import median
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toolkit.models.activation_checkpointing import checkpoint_blocks
from toolkit.models.block import Block
from toolkit.models.families import get_config
from toolkit.models.gpt import GPT

MODES = ("none", "selective", "full")
VOCAB_SIZE = 8192  # for models without a vocab_size


class LiveBytes(TorchDispatchMode):
    """Mode that counts the bytes of existing storages that operations have created in it.

    Args:
        ignored: Tensors to ignore.

    Attributes:
        peak: Peak bytes.
    """

    def __init__(self, ignored: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._ignored = {t.untyped_storage().data_ptr() for t in ignored}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(cls, "__tensor_flatten__") for cls in types):
            return NotImplemented  # continues with the operators on the parts of an fp8 tensor
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self._ignored:
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        self._storages = {key: pair for key, pair in self._storages.items() if not pair[0].expired()}
        return sum(nbytes for _, nbytes in self._storages.values())


def measure_bytes(model: GPT, ids: torch.Tensor) -> tuple[int, int]:
    """Return the bytes after the blocks, and the peak bytes of the forward and backward pass."""
    kept: list[int] = []
    with LiveBytes([*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]) as live:
        hook = model.transformer.ln_f.register_forward_hook(lambda _, __, out: kept.append(live.now() - out.nbytes))
        model(ids, ids)[0].backward()
    hook.remove()
    return kept[0], live.peak


def measure_seconds(model: GPT, ids: torch.Tensor) -> float:
    started = time.process_time()
    model(ids, ids)[0].backward()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="SmolLM2-135M", help="a name of `toolkit pretrain list`")
    parser.add_argument("--seq_length", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = GPT(get_config(options.model).with_vocab_size(VOCAB_SIZE))
    ids = torch.randint(0, model.config.vocab_size, (options.batch_size, options.seq_length))
    measure_seconds(model, ids)  # the first step also allocates the gradients
    sizes, seconds = {}, {mode: [] for mode in MODES}
    for mode in MODES:
        checkpoint_blocks(model, (Block,), mode)
        sizes[mode] = measure_bytes(model, ids)
    for _ in range(options.rounds):
        for mode in MODES:
            checkpoint_blocks(model, (Block,), mode)
            seconds[mode].append(measure_seconds(model, ids))
    print(f"{options.model}, {options.batch_size} x {options.seq_length} tokens, fp32, {options.threads} thread(s)\n")
    print("| mode | MB after the forward pass | peak MB | CPU s per step | / none |\n|---|---|---|---|---|")
    for mode in MODES:
        ratios = [own / plain for own, plain in zip(seconds[mode], seconds["none"], strict=True)]
        times = f"{median(seconds[mode]):.2f} ({min(seconds[mode]):.2f} to {max(seconds[mode]):.2f})"
        relative = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {mode} | {sizes[mode][0] / 1e6:.0f} | {sizes[mode][1] / 1e6:.0f} | {times} | {relative} |")


if __name__ == "__main__":
    main()
