"""Launch a step of many small kernels as one CUDA graph."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from toolkit.data.base import Report
from toolkit.errors import first_line


def capture(
    step: Callable[[], Tensor], undo: Callable[[], None], expected: Tensor, notice: Report, graphs: list[Any]
) -> Callable[[], object] | None:
    """Return a function that replays ``step`` as a CUDA graph; None, with a notice, if the graph cannot be used.

    Args:
        step: Runs one step on tensors with fixed addresses and shapes, and returns a tensor.
        undo: Undoes a complete or partial step. ``capture`` undoes all steps before it returns.
        expected: The step's result without a graph, to compare with the graph's.
        notice: Called with one line if the graph is not used.
        graphs: Graphs that share one memory pool; the new one is added. No output may be read after another's replay.
    """
    try:
        warm_up, stream = _warm_up_stream(expected.device), torch.cuda.current_stream()
        warm_up.wait_stream(stream)
        with torch.cuda.stream(warm_up):  # libraries allocate their workspaces in their first call
            step()
        stream.wait_stream(warm_up)
        undo()
        graph = torch.cuda.CUDAGraph()
        # the outer context restores the stream: torch's does not if the capture fails
        with torch.cuda.stream(stream), torch.cuda.graph(graph, pool=graphs[0].pool() if graphs else None):
            actual = step()
        graph.replay()
        reason = None if is_close(actual, expected) else "its logits differ from the uncaptured step's"
    except RuntimeError as error:
        reason = first_line(error)
    undo()
    if reason is None:
        graphs.append(graph)
        return graph.replay
    notice(f"generating without a CUDA graph, which is slower: {reason}")
    return None


@functools.cache
def _warm_up_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream per device: cuBLAS keeps a workspace for each stream that it has seen."""
    return torch.cuda.Stream(device)


def is_close(actual: Tensor, expected: Tensor) -> bool:
    """Whether two tensors agree where ``expected`` is finite, up to its dtype's rounding; waits for the device."""
    tolerance = 1e-4 if expected.dtype == torch.float32 else 2e-2  # of the largest logit
    is_finite = expected.isfinite()  # the logits of another row may not be
    error, largest = (torch.where(is_finite, x, 0).abs().max() for x in (actual - expected, expected))
    return bool(error <= tolerance * largest)
