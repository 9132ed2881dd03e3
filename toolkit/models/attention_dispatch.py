"""Choose a model's attention kernel. A self-check on the device compares it with masked attention first."""

import functools
import math
import warnings
from contextlib import nullcontext
from importlib.metadata import Distribution
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from toolkit.errors import first_line, notice
from toolkit.models.attention import attend
from toolkit.models.attention_kernels import document_bounds
from toolkit.models.config import ModelConfig
from toolkit.models.context_parallel import ContextGroup
from toolkit.models.masks import AttentionMaskBuilder, ContextMaskBuilder, KernelChoice, MaskBuilder
from toolkit.models.mixed_mm import matmul_dtype
from toolkit.private_torch import has_no_data

DEVICES: tuple[str, ...] = ("cuda",)
DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
MAX_WIDTH = 256
MIN_FLEX_WIDTH = 16
"""Smallest head of FlexAttention, whose products are Triton's ``tl.dot``. Rows may have any length."""

TOLERANCE = 0.02
"""Maximum relative error in the self-check. bf16 rounds to 0.004; a wrong mask, scale or sink causes more than 0.1."""


NEWER_FLASH = {"FA3": ("flash-attn-3", (9,)), "FA4": ("flash-attn-4", (9, 10))}
"""torch's names of FlashAttention 3 and 4: the package, and the major compute capabilities that it supports."""
_failed = set[str]()


class KernelCase(NamedTuple):
    """A kernel and the attention variant to test it with in the self-check."""

    kernel: KernelChoice
    device: torch.device
    dtype: torch.dtype
    heads: tuple[int, int, int]  # n_head, n_query_groups, width
    scale: float
    softcap: float | None
    has_windows: bool
    has_documents: bool
    has_context: bool = False
    is_decoding: bool = False  # one query per row, of the last of the keys


def kernel_of(config: ModelConfig, has_documents: bool, has_context: bool = False) -> KernelChoice | None:
    """Return the kernel that replaces masks on CUDA in 16 bits; None if there is none or no mask is needed."""
    layers = map(config.layer, range(config.n_layer))
    width = max(max(layer.head_size, layer.value_size) for layer in layers)
    if width > MAX_WIDTH:
        return None
    if config.attention_logit_softcapping is not None:
        return KernelChoice("flex", for_causal=True) if width >= MIN_FLEX_WIDTH else None
    if has_documents or _has_windows(config) or config.attention_sinks or has_context:
        return KernelChoice("flash", for_causal=config.attention_sinks or has_context)
    return None


def _has_windows(config: ModelConfig) -> bool:
    return any(config.window(layer) is not None for layer in range(config.n_layer))


def needs_masks(config: ModelConfig | None, length: int | None) -> bool:
    """Whether attention over rows of ``length`` tokens (None: packed, ragged rows) needs masks.

    Returns True without a config (user-provided module).
    """
    return config is None or any(
        window is not None and (length is None or window < length)
        for window in map(config.window, range(config.n_layer))
    )


def choose_kernel(
    config: ModelConfig,
    x: Tensor,
    has_documents: bool = False,
    has_bounds: bool = False,
    has_context: bool = False,
) -> KernelChoice | None:
    """Return the kernel for a forward pass without a KV cache; None for ``scaled_dot_product_attention``.

    The first use on a device runs a self-check: milliseconds for FlashAttention, seconds for FlexAttention, which is
    compiled. If the check fails, this warns with the reason and falls back to masks.

    Args:
        config: The architecture.
        x: Embedded tokens. The blocks run on this device and, without autocast, in this dtype.
        has_documents: Rows are packed.
        has_bounds: The batch has the document bounds that FlashAttention needs.
        has_context: Queries are of a part of each row, see :mod:`toolkit.models.context_parallel`.
    """
    device = x.device
    # compiling the complete model cannot include the self-check
    if device.type not in DEVICES or torch.compiler.is_compiling():
        return None
    kernel = kernel_of(config, has_documents, has_context)
    dtype = matmul_dtype(x)
    if kernel is None or dtype not in DTYPES or (kernel.name == "flash" and has_documents and not has_bounds):
        return None
    groups = config.n_head if config.latent_attention is not None else config.n_query_groups
    case = KernelCase(
        kernel,
        device,
        dtype,
        (config.n_head, groups, max(config.head_size, config.value_size)),
        config.attention_scale,
        config.attention_logit_softcapping,
        _has_windows(config),
        has_documents,
        has_context,
    )
    # planning uses meta tensors, which have no values to compare
    return kernel if has_no_data(x) or _passes(case) else None


@functools.cache
def _passes(case: KernelCase) -> bool:
    if case.kernel.name == "flash":
        for failure in activate_newer_flash(case):
            warnings.warn(f"{failure}; it is not used", stacklevel=2)
    error = check_kernel(case)
    if error is not None:
        what = f"{case.kernel.name} attention in {case.dtype} on {case.device}: {error}"
        warnings.warn(f"{what}; attention masks are used instead, which need more time and memory", stacklevel=2)
    return error is None


def activate_newer_flash(case: KernelCase) -> list[str]:
    """Use FlashAttention 3 or 4 if it is installed and passes the check; return the errors of the ones that fail."""
    failures = []
    while (name := _newer_flash(case.device)) is not None and (error := _activate(name, case)) is not None:
        failures.append(f"FlashAttention {name[-1]} in {case.dtype} on {case.device}: {error}")
        _failed.add(name)
        _passes.cache_clear()  # the cases that passed were checked with the implementation that is now replaced
    return failures


def _newer_flash(device: torch.device) -> str | None:
    """Return the implementation of FlashAttention to use; None for torch's own, or another that the user activated."""
    current = current_flash_attention_impl()
    if current is not None and current not in _failed:  # the user's choice, or the one of an earlier case
        return current if current in NEWER_FLASH else None
    for name, (package, capabilities) in NEWER_FLASH.items():
        is_installed = name not in _failed and any(Distribution.discover(name=package))
        if is_installed and torch.cuda.get_device_capability(device)[0] in capabilities:
            return name
    return None


def _activate(name: str, case: KernelCase) -> str | None:
    """Use an implementation if it passes the check, also in ``scaled_dot_product_attention``; return an error."""
    try:
        if is_new := current_flash_attention_impl() != name:
            activate_flash_attention_impl(name)
    except Exception as raised:  # importing the package may raise anything
        return f"{type(raised).__name__}: {first_line(raised)}"
    plain = case._replace(kernel=KernelChoice("sdpa", False), has_windows=False, has_documents=False, has_context=False)
    error = check_kernel(case) or check_kernel(plain) or check_kernel(plain._replace(is_decoding=True))
    if error is not None:
        restore_flash_attention_impl()
    elif is_new and not case.device.index:
        notice(f"attention: FlashAttention {name[-1]} ({NEWER_FLASH[name][0]}) replaces torch's own")
    return error


def check_kernel(case: KernelCase) -> str | None:
    """Compare a kernel with masked fp32 attention on small random inputs; return an error message or None."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            error = largest_error(case)
    except Exception as raised:  # the kernel or torch.compile may raise anything
        return f"{type(raised).__name__}: {first_line(raised)}"
    return None if error <= TOLERANCE else f"a relative error of {error:.3g} in the self-check"


def largest_error(case: KernelCase) -> float:
    """Return the largest relative error of output and gradients, see :func:`check_kernel`; inf if one is not finite."""
    T, (n_head, n_groups, width) = 320, case.heads
    n_head, n_groups = 2 * n_head // n_groups, 2
    generator = torch.Generator().manual_seed(0)  # a separate generator keeps the run's RNG state
    queries = (2, n_head, 1 if case.is_decoding else T // 2 if case.has_context else T, width)
    shapes = [queries, *[(2, n_groups, T, width)] * 2, queries, (n_head,)]
    q, k, v, direction, sinks = (torch.randn(shape, generator=generator, dtype=torch.float32) for shape in shapes)
    scores = (case.softcap or 5.0) / 5  # standard deviation, large enough for the cap to matter
    inputs = [q * scores / (case.scale * width**0.5), k, v]
    if case.kernel.name == "flash" and case.kernel.for_causal:
        inputs.append(sinks)
    inputs = [t.to(case.device, case.dtype) for t in inputs]
    errors, exact = [], torch.promote_types(case.dtype, torch.float32)
    is_sdpa = case.kernel.name == "sdpa"
    kernel = None if is_sdpa else case.kernel._replace(for_causal=True)
    for window in (None, 100) if case.has_windows else (None,):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if is_sdpa else nullcontext():
            actual = _outputs(case, kernel, inputs, direction, window)
        with sdpa_kernel(SDPBackend.MATH):
            expected = _outputs(case, None, [t.to(exact) for t in inputs], direction, window)
        errors += [(a.to(exact) - b).norm() / b.norm() for a, b in zip(actual, expected, strict=True)]
    error = float(torch.stack(errors).detach().max())
    return error if math.isfinite(error) else math.inf


def _outputs(
    case: KernelCase,
    kernel: KernelChoice | None,
    values: list[Tensor],
    direction: Tensor,
    window: int | None,
) -> tuple[Tensor, ...]:
    """Return the output, and the gradients of q, k, v and any sinks."""
    mask = _check_masks(case, values[1].size(2), kernel).for_window(window)
    q, k, v, *sinks = inputs = [value.detach().requires_grad_() for value in values]
    with torch.autocast(case.device.type, enabled=False):
        y = attend(q, k, v, mask, case.scale, case.softcap, sinks[0] if sinks else None)
    return y, *torch.autograd.grad(y, inputs, direction.to(y))


def _check_masks(case: KernelCase, T: int, kernel: KernelChoice | None) -> MaskBuilder:
    """Return masks for two rows: several documents with padding, and a single document."""
    documents, bounds = None, None
    if case.has_documents:
        documents = torch.zeros(2, T, dtype=torch.int64)
        documents[0, 150:] = 1
        documents[0, 151:] = 2
        documents[0, 280:] = -1
        bounds = document_bounds(documents).to(case.device)
        documents = documents.to(case.device)
    options, n_cached = (case.device, documents, 0, 2, kernel, bounds), T - 1 if case.is_decoding else 0
    if case.has_context:
        return ContextMaskBuilder(ContextGroup(rank=0, size=2), T, *options)
    return AttentionMaskBuilder(n_cached, T - n_cached, *options)
