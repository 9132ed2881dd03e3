"""Predict which operators of a block torch.compile fuses, by a rule.

Matrix products, attention and other unfusable kernels stay. Between two of them, all element-wise operators and
reductions become one kernel that reads each tensor once and writes only what is used elsewhere: by an unfusable kernel,
by a later fused kernel of the same pass, or outside the block. Like torch's partitioner, the backward pass recomputes
forward values unless they are in memory for another reason.
"""

from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import groupby

from toolkit_plan.measure.operators import Access, Op

FUSED = "fused"
"""Name of fused kernels."""
Key = tuple[int, int]


def fuse(ops: list[Op]) -> list[Op]:
    """Fuse the operators of blocks and of the compiled loss, where views are free."""
    ops = [op for op in ops if op.kind != "view" or op.layer is None]
    maker: dict[Key, int] = {}
    users: defaultdict[Key, list[int]] = defaultdict(list)
    sizes: defaultdict[Key, int] = defaultdict(int)
    for i, op in enumerate(ops):
        for access in op.reads:
            users[access.key].append(i)
        maker |= {access.key: i for access in op.writes}
        for access in (*op.reads, *op.writes):
            sizes[access.key] = max(sizes[access.key], access.bytes)
    groups = _groups(ops, users)

    @cache
    def is_written(key: Key) -> bool:
        """Whether the tensor is written to memory, not only used inside a fused kernel."""
        if key not in maker or not _is_fusable(ops[maker[key]]):
            return True
        made = ops[maker[key]]
        if not users[key]:
            return made.is_backward  # a gradient
        elsewhere = [ops[j] for j in users[key] if groups[j] != groups[maker[key]]]
        return any(
            not _is_fusable(op) or op.layer != made.layer or op.is_backward == made.is_backward for op in elsewhere
        )

    known: dict[Key, frozenset[Key]] = {}

    def sources(key: Key) -> frozenset[Key]:
        """Return the tensors in memory that a tensor is computed from: itself, or its kernel's inputs."""
        if key not in known:
            known[key] = frozenset({key})  # breaks cycles between views of the same memory
            if not is_written(key):
                known[key] = frozenset().union(*(sources(access.key) for access in ops[maker[key]].reads))
        return known[key]

    result: list[Op] = []
    for _, indices in groupby(sorted(range(len(ops)), key=groups.__getitem__), groups.__getitem__):
        members = [ops[i] for i in indices]
        if not _is_fusable(members[0]):
            result += members
            continue
        writes = {access.key: access for op in members for access in op.writes}
        parts: defaultdict[Key, set[Access]] = defaultdict(set)  # a kernel may read a part of a tensor
        for access in (access for op in members for access in op.reads if access.key not in writes):
            for key in sources(access.key) - writes.keys():
                parts[key].add(access if key == access.key else Access(key, -1, sizes[key]))
        reads = [Access(key, 0, min(sizes[key], sum(a.bytes for a in accesses))) for key, accesses in parts.items()]
        written = tuple(access for key, access in writes.items() if is_written(key))
        result.append(replace(members[0], name=FUSED, reads=tuple(reads), writes=written))
    return result


def _is_fusable(op: Op) -> bool:
    return op.kind == "fusable" and op.layer is not None


def _groups(ops: list[Op], users: dict[Key, list[int]]) -> list[int]:
    """Return the kernel number of each operator. An operator fuses with the first one that needs its result."""
    places = [(op.layer, op.is_backward) for op in ops]
    groups: list[int] = []
    number = 0
    for i, op in enumerate(ops):
        if i and (places[i] != places[i - 1] or not _is_fusable(ops[i - 1])):
            number += 2
        groups.append(number + (not _is_fusable(op)))  # unfusable kernels have odd numbers
    for i in reversed(range(len(ops))):
        if _is_fusable(ops[i]):
            uses = [j for access in ops[i].writes for j in users[access.key] if j > i and places[j] == places[i]]
            groups[i] = max(groups[i], min((groups[j] // 2 * 2 for j in uses), default=0))
    return groups
