"""Triton's loss kernel, run by Triton's interpreter on a CPU and compiled for GPUs that are not here."""

import importlib.util
import itertools
import re

import pytest
import torch
from helpers.cases import check_each
from helpers.processes import start
from torch.nn import functional as F

from toolkit.models.cross_entropy import cross_entropy_

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton, which CPU builds lack"),
]
RUN = """
import sys, torch
from toolkit.models.cross_entropy_triton import triton_cross_entropy
torch.save([triton_cross_entropy(*case) for case in torch.load(sys.argv[1])], sys.argv[2])
"""
CHECK = """
import torch
from toolkit.models import cross_entropy
for options in ((torch.bfloat16, 0.7, torch.bfloat16, 3), (None, None, torch.float16, 0)):
    print(cross_entropy._checked_kernel(torch.device("cpu"), 160, *options).__name__)
"""
COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from toolkit.models import cross_entropy_triton as module
size, n_tokens = 50_304, 50_257
types = {"logits": "*fp32", "targets": "*i64", "ignored": "*i1", "bias": "*fp32", "losses": "*fp32", "grad": "*bf16"}
values = {"stride": size, "size": size, "n_tokens": n_tokens, "softcap": None, "block": module.COLUMNS}
types |= dict.fromkeys(values, "constexpr")
aligned = {(i,): [["tt.divisibility", 16]] for i in range(6)}
source = ASTSource(module._kernel, types, values, aligned)
result = compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": module.WARPS})
print(result.asm["ttir"], result.asm["ptx"])
"""
ROWS = 5


def finished(*arguments: str, **environ: str) -> str:
    """Run Python in a new process: Triton reads the environment once, when it is imported."""
    process = start(*arguments, **environ)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def interpreted(cases, folder):
    """Return the losses and gradients of each case, a tuple of arguments."""
    torch.save(cases, folder / "cases.pt")
    finished("-W", "ignore", "-c", RUN, str(folder / "cases.pt"), str(folder / "results.pt"), TRITON_INTERPRET="1")
    return torch.load(folder / "results.pt")


def arguments(size, padding=0, softcap=None, bias=None, masked="none", dtype=torch.bfloat16, stride=None, vectors=1):
    """Return inputs of a kernel. ``stride`` is that of the rows of logits, ``vectors`` that of all vectors."""
    g = torch.Generator().manual_seed(size)
    logits = (4 * torch.randn(ROWS, stride or size, generator=g))[:, :size]
    bias = None if bias is None else torch.randn(size, generator=g).to(bias)
    targets = torch.randint(0, size - padding, (ROWS,), generator=g)
    ignored = {"none": None, "some": torch.arange(ROWS) % 3 == 1, "all": torch.ones(ROWS, dtype=torch.bool)}[masked]
    if ignored is not None:
        targets[ignored] = -100
        logits[ignored, 0] = torch.nan
    views = (
        None if t is None else torch.stack([t, *[t.flip(0)] * (vectors - 1)], 1)[:, 0] for t in (targets, ignored, bias)
    )
    return logits, *views, softcap, dtype, padding


def test_all_options_give_the_losses_and_gradients_of_cross_entropy(tmp_path):
    options = {
        "padding": (0, 7),
        "softcap": (None, 0.7, 30.0),
        "bias": (None, torch.float32, torch.bfloat16),
        "masked": ("none", "some", "all"),
        "dtype": (torch.bfloat16, torch.float16),
    }
    table = [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
    table = [{"size": 160} | case for case in table]
    sizes = itertools.product((8, 4096, 4100, 8193), (0, 7), (None, 0.7))  # blocks of 4,096 columns
    table += [{"size": n, "padding": padding, "softcap": cap, "masked": "some"} for n, padding, cap in sizes]
    table += [{"size": 1}, {"size": 160, "stride": 200}]
    table += [{"size": 160, "vectors": 2, "bias": torch.float32, "masked": "some"}]
    results = interpreted([arguments(**case) for case in table], tmp_path)

    def check(number, case):
        logits, targets, ignored, *rest = arguments(**case)
        expected_losses, expected = cross_entropy_(logits.clone(), targets, ignored, *rest)
        losses, grad = results[number]
        assert losses.dtype == torch.float32 and grad.dtype == expected.dtype
        torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad, expected, rtol=8e-3, atol=5e-7)  # one rounding may go the other way
        assert ignored is None or not (losses[ignored].any() or grad[ignored].any())
        assert not grad[:, case["size"] - case.get("padding", 0) :].any()

    check_each(check, enumerate(table))


def test_n7_losses_are_exact_or_not_finite(tmp_path):
    """As those of cross_entropy_, far beyond 80 nats as well; a target outside the vocabulary has no loss."""
    logits, targets, *rest = arguments(5001)
    large = 300 * logits
    special = logits.repeat(2, 1)
    for row, column, value in ((0, 0, 1), (1, 4096, 1), (2, 5000, 1), (3, 0, -1), (4, 5000, -1)):
        special[row, column] = value * torch.inf
    special[5, 9], special[6, 4096], special[7, ::2], special[8] = torch.nan, torch.nan, -torch.inf, -torch.inf
    at = targets.repeat(2)
    at[4] = 5000
    outside = torch.tensor([-1, 5001, -100, 1 << 40, 0])
    capped = (None, None, 30.0, *rest[3:])
    cases = [(large, targets, *rest), (special, at, *rest), (special, at, *capped), (logits, outside, *rest)]
    exact, *results, invalid, empty = interpreted([*cases, (logits[:0], targets[:0], *rest)], tmp_path)
    expected = F.cross_entropy(large.double(), targets, reduction="none")
    assert expected.min() > 1000
    torch.testing.assert_close(exact[0].double(), expected, rtol=1e-6, atol=0)
    for case, result, n_nan in zip(cases[1:], results, (6, 2), strict=False):
        expected = cross_entropy_(special.clone(), *case[1:])
        assert expected[0].isnan().sum() == n_nan and (n_nan == 2 or expected[0][4].isposinf())
        torch.testing.assert_close(result, expected, rtol=8e-3, atol=2e-7, equal_nan=True)
    assert invalid[0][:4].isnan().all() and invalid[0][4].isfinite()
    assert empty[0].shape == (0,) and empty[1].shape == (0, 5001)


def test_the_check_chooses_the_kernel():
    assert (
        finished("-W", "error::UserWarning", "-c", CHECK, TRITON_INTERPRET="1").split() == ["triton_cross_entropy"] * 2
    )


def test_compiled_code_reads_the_logits_twice():
    """In vectors of 16 bytes, with 64-bit offsets of rows and no atomics; a thread has 8 columns, 2 reads per pass."""
    code = finished("-c", COMPILE, TRITON_INTERPRET="0")
    assert len(re.findall(r"ld\.global\.v4\.b32", code)) == 2 * 2 * 2  # passes, reads, logits and bias
    assert len(re.findall(r"ld\.global", code)) == 8 + 4  # the target, its logit and bias, and whether it is ignored
    assert len(re.findall(r"st\.global\.v4\.b32", code)) == 1 and len(re.findall(r"st\.global", code)) == 2
    assert not re.search(r"\b(atom|red)\.", code)
    for name in ("logits", "grad"):
        assert re.search(rf"tt\.addptr %{name}, %\w+ : !tt\.ptr<\w+>, i64", code)
