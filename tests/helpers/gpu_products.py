"""Predict matrix products that were measured on an H100."""

import torch
from toolkit_plan.measure.micro_step import seconds
from toolkit_plan.measure.operators import OperatorRecorder

from toolkit.distributed.gpus import GPUS


def head_chunk_ms(vocab_size: int) -> float:
    """Predict the products of the head, as :mod:`toolkit.models.loss` computes them."""
    x, weight, grad = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((4096, 768), (vocab_size, 768), (4096, vocab_size))
    )
    with OperatorRecorder() as trace:
        torch.mm(x, weight.T)
        torch.mm(grad, weight)
        torch.mm(grad.T, x)
    products = [op for op in trace.ops if op.kind == "product"]
    assert len(products) == 3
    return 1e3 * sum(seconds(op, GPUS["H100"]) for op in products)
