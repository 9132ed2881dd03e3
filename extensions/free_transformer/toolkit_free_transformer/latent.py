"""The latent of a token: H independent bits. Sampling, KL divergence from the prior, and the binary mapper.

Notation of the paper (arXiv 2510.17558): logits l_h of the bits B_h, the code d = sum_h 2^h B_h (Eq. 7), and
G_d = prod_h sigma(l_h)^U_h(d) (1 - sigma(l_h))^(1 - U_h(d)), the probability of code d, whose bits are U(d).
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from toolkit.models import keyed_random
from toolkit.models.loss import chunk_rows

POSTERIOR, PRIOR = 0, 1
"""Random number streams."""


def uniform(seed: int, stream: int, keys: Tensor, positions: Tensor, bits: int) -> Tensor:
    """Return random numbers in [0, 1), (B, T, bits) fp32, each a pure function of its indices.

    They do not depend on the device, or on how a batch is split into micro-batches and ranks.

    Args:
        seed: Seed of the run.
        stream: POSTERIOR or PRIOR.
        keys: (B,) int64 row keys.
        positions: (T,) int64 positions in the row.
        bits: Numbers per position.
    """
    return keyed_random.uniform(keyed_random.token_bits(seed, stream, keys, positions), bits)


def pack(bits: Tensor) -> Tensor:
    """Convert bits (..., H) bool to codes (...) int64."""
    return (bits.long() << torch.arange(bits.size(-1), device=bits.device)).sum(-1)


def unpack(codes: Tensor, n_bits: int) -> Tensor:
    """Convert codes (...) int64 to bits (..., H) int64, 0 or 1."""
    return (codes[..., None] >> torch.arange(n_bits, device=codes.device)) & 1


def sample_codes(logits: Tensor, numbers: Tensor) -> Tensor:
    """Sample codes (B, T), whose bits are 1 with probability sigma(logits), from uniform ``numbers`` (B, T, H)."""
    return pack(numbers < logits.detach().float().sigmoid())


def kl_divergence(logits: Tensor) -> Tensor:
    """Return the KL divergence of the bits from uniform bits in nats: (..., H) -> (...), fp32.

    H ln 2 - sum_h (entropy of bit h), where the entropy is softplus(l) - l sigma(l).
    """
    logits = logits.float()
    return logits.size(-1) * math.log(2) - (F.softplus(logits) - logits * logits.sigmoid()).sum(-1)


def log_probability(logits: Tensor, codes: Tensor) -> Tensor:
    """Return log G_d for the codes d, (B, T), in nats."""
    logits = logits.float()
    return F.logsigmoid(torch.where(unpack(codes, logits.size(-1)) > 0, logits, -logits)).sum(-1)


def code_probabilities(p: Tensor) -> Tensor:
    """Convert the probabilities of h bits, (n, h), to the probabilities of their codes, (n, 2^h)."""
    table = p.new_ones(p.size(0), 1)
    for h in range(p.size(1)):
        bit = p[:, h : h + 1]
        table = torch.cat((table * (1 - bit), table * bit), dim=1)
    return table


def lookup(logits: Tensor, weight: Tensor, codes: Tensor) -> Tensor:
    """Return Z @ weight for Z = Y + G - stopgrad(G) (Eq. 8), where Y is the one-hot vector of the code.

    The value is a row of the weight. The gradient of the logits flows through G over all 2^H codes. It is computed for
    a chunk of tokens at a time, because a tensor of all tokens times 2^H would be too large.

    Args:
        logits: (B, T, H).
        weight: (2^H, width).
        codes: (B, T) int64.

    Returns:
        (B, T, width).
    """
    device_type = weight.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype
    return _Lookup.apply(logits, weight, codes, dtype)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, weight, codes, dtype):
        ctx.save_for_backward(logits, weight, codes)
        ctx.dtype = dtype
        return F.embedding(codes, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, weight, codes = ctx.saved_tensors
        grad_logits = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_logits = _grad_of_logits(logits, weight, grad, ctx.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.ops.aten.embedding_dense_backward(grad.contiguous(), codes, weight.size(0), -1, False)
        return grad_logits, grad_weight, None, None


def _grad_of_logits(logits: Tensor, weight: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sum_d v_d G_d U_h(d) - sigma(l_h) sum_d v_d G_d for each bit h, with v = grad @ weight.T.

    G is the outer product of the probabilities of the low and the high half of the bits. Both sums are therefore
    products of v with one half and then with the other.
    """
    n_bits = logits.size(-1)
    n_low = n_bits // 2
    total = torch.float64 if logits.dtype == torch.float64 else torch.float32
    p = logits.reshape(-1, n_bits).to(total).sigmoid()
    rows, matrix = grad.reshape(-1, grad.size(-1)).to(dtype), weight.to(dtype)
    low_bits, high_bits = (unpack(torch.arange(1 << n, device=p.device), n).to(total) for n in (n_low, n_bits - n_low))
    result = torch.empty_like(p)
    step = chunk_rows(weight.size(0), weight.device)
    for i in range(0, p.size(0), step):
        chunk = slice(i, i + step)
        low, high = code_probabilities(p[chunk, :n_low]), code_probabilities(p[chunk, n_low:])
        v = (rows[chunk] @ matrix.t()).to(total).view(-1, high.size(1), low.size(1))
        by_high = high * torch.bmm(v, low.unsqueeze(2)).squeeze(2)
        by_low = low * torch.bmm(high.unsqueeze(1), v).squeeze(1)
        result[chunk] = torch.cat((by_low @ low_bits, by_high @ high_bits), dim=1)
        result[chunk] -= p[chunk] * by_high.sum(1, keepdim=True)
    return result.view_as(logits).to(logits.dtype)
