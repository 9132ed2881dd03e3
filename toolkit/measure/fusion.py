"""Predict which operators of a block torch.compile fuses, by a rule.

Matrix products, attention and other unfusable kernels stay. Between two of them, all element-wise operators and
reductions become one kernel that reads each tensor once and writes only what is used elsewhere: by an unfusable kernel,
by a later fused kernel of the same pass, or outside the block. Like torch's partitioner, the backward pass recomputes
forward values unless they are in memory for another reason.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby

from toolkit.measure.operators import Access, Op

Key = tuple[int, int]


def fuse(ops: list[Op], is_compiled: Callable[[Op], bool]) -> list[Op]:
    """Fuse the operators in compiled regions, where views are free."""
    active = [op for op in ops if op.kind != "view" or not is_compiled(op)]
    fusable = [op.kind == "fusable" and is_compiled(op) for op in active]
    maker: dict[Key, int] = {}
    users: defaultdict[Key, list[int]] = defaultdict(list)
    for i, op in enumerate(active):
        for access in op.reads:
            users[access.key].append(i)
        for access in op.writes:
            maker[access.key] = i

    group_of = _groups(active, fusable, users)

    def is_written(key: Key) -> bool:
        """Whether the tensor is written to memory, not only used inside a fused kernel."""
        i = maker.get(key)
        if i is None or not fusable[i]:
            return True
        producer, uses = active[i], [j for j in users[key] if group_of[j] != group_of[i]]
        if not users[key]:
            return producer.is_backward  # a gradient
        return any(
            not fusable[j] or active[j].layer != producer.layer or active[j].is_backward == producer.is_backward
            for j in uses
        )

    sizes: dict[Key, int] = defaultdict(int)
    for op in active:
        for access in (*op.reads, *op.writes):
            sizes[access.key] = max(sizes[access.key], access.bytes)
    cache: dict[Key, frozenset[Key]] = {}

    def sources(key: Key) -> frozenset[Key]:
        """Return the tensors in memory that a tensor is computed from: itself, or its kernel's inputs."""
        if key not in cache:
            cache[key] = frozenset({key})  # breaks cycles between views of the same memory
            if not is_written(key):
                reads = (sources(access.key) for access in active[maker[key]].reads)
                cache[key] = frozenset().union(*reads)
        return cache[key]

    result: list[Op] = []
    for _, indices in groupby(sorted(range(len(active)), key=group_of.__getitem__), group_of.__getitem__):
        members = list(indices)
        if not fusable[members[0]]:
            result.append(active[members[0]])
            continue
        outputs = {access.key for i in members for access in active[i].writes}
        result.append(_fused([active[i] for i in members], outputs, sources, is_written, sizes))
    return result


def _groups(ops: list[Op], fusable: list[bool], users: Mapping[Key, list[int]]) -> list[int]:
    """Return the kernel number of each operator. An operator fuses with the first one that needs its result."""
    numbers, number, region = [], 0, None
    for i, op in enumerate(ops):
        if not fusable[i] or (op.layer, op.is_backward) != region:
            number += 1 if fusable[i] else 2 - number % 2  # unfusable kernels have even numbers
        region = op.layer, op.is_backward
        number += fusable[i] and number % 2 == 0
        numbers.append(number)
    for i in range(len(ops) - 1, -1, -1):
        if fusable[i]:
            region = ops[i].layer, ops[i].is_backward
            uses = [j for access in ops[i].writes for j in users[access.key] if j > i]
            inside = [numbers[j] - (not fusable[j]) for j in uses if (ops[j].layer, ops[j].is_backward) == region]
            numbers[i] = max(numbers[i], min(inside, default=0))
    return numbers


def _fused(
    members: list[Op],
    outputs: set[Key],
    sources: Callable[[Key], frozenset[Key]],
    is_written: Callable[[Key], bool],
    sizes: dict[Key, int],
) -> Op:
    """Return the fused kernel of a group. ``outputs`` are the tensors that its operators write."""
    parts: defaultdict[Key, set[Access]] = defaultdict(set)  # a kernel may read a part of a tensor
    for op in members:
        for access in op.reads:
            if access.key in outputs:
                continue
            for key in sources(access.key):
                parts[key].add(access if key == access.key else Access(key, -1, sizes[key]))
    reads = [
        Access(key, 0, min(sizes[key], sum(a.bytes for a in accesses)) if key in sizes else 0)
        for key, accesses in parts.items()
        if key not in outputs
    ]
    writes = {a.key: a for op in members for a in op.writes if is_written(a.key)}
    return replace(members[0], name="fused", reads=tuple(reads), writes=tuple(writes.values()))
