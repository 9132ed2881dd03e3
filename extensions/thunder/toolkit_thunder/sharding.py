"""Thunder's FSDP transform, with the sharding and bucketing strategies that lightning-thunder 0.2.6 ignores.

In that version, ``thunder.jit`` keeps gathered weights until the backward pass even under ZERO3, and gathers tensors
one by one under every bucketing strategy, because it does not call its bucketing pass.

Import this after :func:`toolkit_thunder.versions.load_thunder`.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import thunder.torch as operations
import torch
from thunder.core.proxies import DistParallelType, ProxyTag, variableify
from thunder.core.trace import from_trace, tracectx
from thunder.core.transform_common import Transform
from thunder.distributed import FSDPBucketingStrategy, FSDPType, prims
from thunder.distributed import get_extract_bucket_name_from_tensor_proxy as bucket_names
from thunder.distributed.transforms.fsdp_v2 import FSDPTransform
from torch import distributed as dist


def make_transforms(device: torch.device, group: dist.ProcessGroup, sharding: str, bucketing: str) -> list[Any]:
    """Return the transforms for one compiled function.

    Args:
        device: Device of the shards.
        group: The ranks that share the parameters.
        sharding: "ZERO2" or "ZERO3".
        bucketing: "NONE", "LAYER" or "BLOCK".
    """
    strategies = FSDPType[sharding], FSDPBucketingStrategy[bucketing]
    base = FSDPTransform(device, sharding_strategy=strategies[0], bucketing_strategy=strategies[1], process_group=group)
    transforms: list[Any] = [base]
    if bucketing != "NONE":
        transforms.append(_Rewrite(lambda trace: _gather_buckets(trace, group, bucket_names(strategies[1]))))
    if sharding == "ZERO3":
        transforms.append(_Rewrite(_gather_again_in_backward))
    return transforms


class _Rewrite(Transform):
    """Transform that rewrites the computation trace before Thunder derives the backward pass."""

    def __init__(self, rewrite: Callable[[Any], Any]) -> None:
        super().__init__()
        self._rewrite = rewrite

    def transform_traces_pre_prologue(self, prologue: Any, computation: Any, epilogue: Any, **options: Any) -> Any:
        return prologue, self._rewrite(computation), epilogue


def _gather_buckets(trace: Any, group: dist.ProcessGroup, name_of: Callable[[Any], str]) -> Any:
    """Gather parameters with the same bucket and dtype in one collective: concatenate, all-gather, split."""
    buckets: dict[Any, list[Any]] = defaultdict(list)
    for symbol in trace.bound_symbols:
        if symbol.sym is prims.synchronize:
            shard = symbol.args[0]
            buckets[name_of(shard), shard.dtype, shard.requires_grad].append(symbol)
    new, first = from_trace(trace), {id(symbols[0]): symbols for symbols in buckets.values()}
    replaced: dict[Any, Any] = {}
    merged = {id(symbol) for symbols in buckets.values() if len(symbols) > 1 for symbol in symbols}
    for symbol in trace.bound_symbols:
        if id(symbol) not in merged:
            new.bound_symbols.append(symbol.from_bsym_swap_proxies(replaced))
        elif id(symbol) in first:
            replaced |= _gather_bucket(new, first[id(symbol)], group)
    return new


def _gather_bucket(trace: Any, symbols: list[Any], group: dist.ProcessGroup) -> dict[Any, Any]:
    """Append the operations of a bucket to a trace. Return each replaced tensor with its gathered tensor."""
    size, start, parts = group.size(), 0, {}
    with tracectx(trace):
        trace.push_scope([])
        for symbol in symbols:  # FSDPTransform changes the shape only
            symbol.args[0]._numel = math.prod(symbol.args[0].shape)
        flat = operations.cat([operations.reshape(symbol.args[0], (-1,)) for symbol in symbols])
        gathered = prims.synchronize(flat, group, DistParallelType.FULLY_SHARDED)
        by_rank = operations.reshape(gathered, (size, -1))
        for symbol in symbols:
            length = math.prod(symbol.args[0].shape)
            part = operations.getitem(by_rank, (slice(None), slice(start, start + length)))
            parts[variableify(symbol.output)] = operations.reshape(part, tuple(symbol.output.shape))
            start += length
        trace.bound_symbols += trace.pop_scope()
    return parts


def _gather_again_in_backward(trace: Any) -> Any:
    """Mark gathered parameters, and their slices and reshaped views, for recomputation in the backward pass."""
    gathered: set[str] = set()
    views = ("getitem", "reshape", "view")
    for symbol in trace.bound_symbols:
        is_view = symbol.sym.name in views and any(proxy.name in gathered for proxy in symbol.flat_proxy_args)
        if symbol.sym is prims.synchronize or is_view:
            for proxy in symbol.flat_proxy_outs:
                gathered.add(proxy.name)
                proxy.tags.add(ProxyTag.RECOMPUTE_IN_BACKWARD)
    return trace
