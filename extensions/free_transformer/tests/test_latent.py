"""The latent alone: gradient of the mapper, divergence, draws."""

import math

import torch
from toolkit_free_transformer import latent
from torch.utils._python_dispatch import TorchDispatchMode


def naive_mapper(logits: torch.Tensor, weight: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Eq. 8 as it is written, with one-hot vectors and the probabilities of all codes."""
    bits = latent.unpack(torch.arange(weight.size(0)), logits.size(-1)).to(logits.dtype)  # (codes, H)
    p = logits.sigmoid()[..., None, :]
    g = (bits * p + (1 - bits) * (1 - p)).prod(-1)
    y = torch.nn.functional.one_hot(codes, weight.size(0)).to(logits.dtype)
    return (y + g - g.detach()) @ weight


def test_gradient_of_eq_8_equals_autograd(monkeypatch):
    monkeypatch.setattr(latent, "chunk_rows", lambda *sizes: 3)
    for n_bits in (1, 2, 5, 8):
        generator = torch.Generator().manual_seed(n_bits)
        options = {"dtype": torch.float64, "generator": generator}
        logits = (3 * torch.randn(2, 7, n_bits, **options)).requires_grad_()
        weight = torch.randn(1 << n_bits, 6, **options).requires_grad_()
        codes = torch.randint(1 << n_bits, (2, 7), generator=generator)
        upstream = torch.randn(2, 7, 6, **options)
        results = []
        for mapper in (naive_mapper, latent.lookup):
            value = mapper(logits, weight, codes)
            results.append((value, *torch.autograd.grad(value, (logits, weight), upstream)))
        for expected, actual in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        single = latent.lookup(logits.float(), weight.float(), codes)
        gradient = torch.autograd.grad(single, logits, upstream.float())[0]
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-5, atol=1e-6)


def test_m1_no_tensor_has_all_codes_of_all_tokens(monkeypatch):
    monkeypatch.setattr(latent, "chunk_rows", lambda *sizes: 4)
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    logits, weight = torch.randn(2, 64, 8).requires_grad_(), torch.randn(256, 3).requires_grad_()
    with Largest():
        latent.lookup(logits, weight, torch.randint(256, (2, 64))).sum().backward()
    assert largest == 4 * 256


def test_kl_divergence_of_bits():
    for bits in (1, 16):
        assert latent.kl_divergence(torch.zeros(3, bits)).abs().max() < 1e-5
        full = latent.kl_divergence(torch.tensor([50.0, -50.0]).repeat_interleave(bits).view(2, bits))
        torch.testing.assert_close(full, torch.full((2,), bits * math.log(2)))
    logits = torch.randn(1, 1, 3, generator=torch.Generator().manual_seed(0))
    all_codes = torch.arange(8)[None]  # by definition: sum_d G_d (log G_d - log 2^-3)
    log_g = latent.log_probability(logits.expand(1, 8, 3), all_codes)
    expected = (log_g.exp() * (log_g + 3 * math.log(2))).sum()
    torch.testing.assert_close(latent.kl_divergence(logits)[0, 0], expected)
    torch.testing.assert_close(latent.code_probabilities(logits[0].sigmoid()), log_g.exp())


def test_n3_draws_are_a_function_of_seed_row_position_and_bit():
    keys, positions = torch.tensor([5, 0, 7]), torch.arange(64)
    numbers = latent.uniform(3, latent.POSTERIOR, keys, positions, 8)
    assert torch.equal(latent.uniform(3, latent.POSTERIOR, keys[2:], positions[10:20], 4), numbers[2:, 10:20, :4])
    for other in (
        latent.uniform(4, latent.POSTERIOR, keys, positions, 8),
        latent.uniform(3, latent.PRIOR, keys, positions, 8),
        latent.uniform(3, latent.POSTERIOR, keys + 1, positions, 8),
    ):
        assert not torch.equal(other, numbers)
    many = latent.uniform(0, latent.PRIOR, torch.arange(100), torch.arange(100), 4).double()
    assert many.min() >= 0 and many.max() < 1 and abs(many.mean() - 0.5) < 0.005 and abs(many.var() - 1 / 12) < 0.002
    flat = many.flatten(1) - many.mean()
    correlation = (flat[1:] * flat[:-1]).mean() / many.var()  # of neighboring rows
    assert abs(correlation) < 0.02
    codes = latent.sample_codes(torch.full((3, 64, 8), 100.0), numbers)
    assert torch.equal(codes, torch.full((3, 64), 255)) and latent.unpack(torch.tensor(6), 3).tolist() == [0, 1, 1]
