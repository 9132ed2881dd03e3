"""A CUDA graph on a CPU: the operators of a step, run again on the same memory without its Python code."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toolkit.inference import cuda_graph


class Recording(TorchDispatchMode):
    """Records operators with their arguments and results."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self):
        for func, args, kwargs, result in self.calls:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # not a view, not in place
                    old.copy_(new)


def capture(step, undo, expected, notice, graphs):
    """In place of :func:`toolkit.inference.cuda_graph.capture`, with its check."""
    with Recording() as recording:
        actual = step()
    undo()
    assert all(func is not torch.ops.aten._local_scalar_dense.default for func, *_ in recording.calls)  # none waits
    recording.replay()
    assert cuda_graph.is_close(actual, expected)
    undo()
    graphs.append(recording)
    return recording.replay
