"""Rows of `toolkit doctor --prove` for kernels: values and gradients against fp64 on the CPU."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit.distributed.device import without_cudnn_attention
from toolkit.errors import CommandError, require_bitsandbytes
from toolkit.inference.generate import generate
from toolkit.inference.sampling import GREEDY
from toolkit.models.aligned import aligned_size
from toolkit.models.attention import fused_attention
from toolkit.models.attention_dispatch import TOLERANCE, KernelCase, activate_newer_flash, largest_error
from toolkit.models.cross_entropy import CrossEntropy, choose_cross_entropy, compiled_kernel, triton_kernel
from toolkit.models.families import get_config
from toolkit.models.gpt import GPT
from toolkit.models.linear_4bit import Linear4bit
from toolkit.models.loss import head_loss
from toolkit.models.masks import KernelChoice
from toolkit.models.mixed_mm import addmm_fp32_, mm_out_fp32
from toolkit.models.moe import grouped_product
from toolkit_doctor.prove_row import Machine, Outcome, Row, relative_difference


def _dtype(machine: Machine) -> torch.dtype:
    return torch.bfloat16 if machine.device.type == "cuda" else torch.float32


def _compare(
    machine: Machine,
    function: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    *shapes: tuple[int, ...],
    dtype: torch.dtype | None = None,
) -> Outcome:
    """Compare the result and all gradients of a function with a reference in fp64 on the CPU."""
    dtype, generator, found = dtype or _dtype(machine), torch.Generator().manual_seed(0), []
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    for compute, to in ((function, machine.device), (reference, torch.float64)):
        leaves = [value.to(to).requires_grad_() for value in inputs]
        y = compute(*leaves)
        direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(y)
        found.append([y, *torch.autograd.grad(y, leaves, direction)])
    return Outcome(relative_difference(*found), 0.02 if dtype.itemsize == 2 else 1e-4)


def _masked(kernel: KernelChoice, softcap: float | None, documents: bool, context: bool, machine: Machine) -> Outcome:
    machine.require_cuda()
    shape = torch.bfloat16, (8, 2, 128), 128**-0.5
    case = KernelCase(kernel, machine.device, *shape, softcap, not context, documents, context)
    if kernel.name == "flash" and (failures := activate_newer_flash(case)):
        raise CommandError("; ".join(failures))
    return Outcome(largest_error(case), TOLERANCE)


def _sdpa(groups: int, is_masked: bool, has_cudnn: bool, dtype: torch.dtype | None, machine: Machine) -> Outcome:
    visible = torch.ones(192, 192, dtype=torch.bool).tril().triu(-100 if is_masked else -192)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fused_attention(q, k, v, visible.to(q.device) if is_masked else None, not is_masked, 0.125)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, visible, scale=0.125, enable_gqa=True)

    with nullcontext() if has_cudnn else without_cudnn_attention():
        return _compare(machine, attend, exact, (2, 8, 192, 64), *[(2, groups, 192, 64)] * 2, dtype=dtype)


def _head_loss(load: Callable[[], CrossEntropy] | None, vocab_size: int, machine: Machine) -> Outcome:
    softcap, compiled = 30.0, None
    labels = torch.randint(0, vocab_size, (300,), generator=torch.Generator().manual_seed(0))
    labels[::7] = -100
    if load is not None:
        machine.require_cuda()
        compiled = load()
        size = aligned_size(vocab_size, machine.device, torch.bfloat16)
        logits = torch.empty(8, size, device=machine.device)
        chosen = choose_cross_entropy(logits, None, softcap, torch.bfloat16, size - vocab_size)
        if load is triton_kernel and chosen is not compiled:
            raise CommandError("the kernel fails its check")

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        logits = softcap * torch.tanh(x @ weight.mT / softcap)
        return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")

    def chunked(x: Tensor, weight: Tensor) -> Tensor:
        return head_loss(x, weight, None, labels.to(x.device), softcap=softcap, compiled=compiled or False)

    return _compare(machine, chunked, exact, (300, 64), (vocab_size, 64))


def _mixed_mm(machine: Machine) -> Outcome:
    a, b = (torch.randn(512, 512, generator=torch.Generator().manual_seed(n)).to(_dtype(machine)) for n in range(2))
    out, total = torch.empty(2, 512, 512, device=machine.device).fill_(1)
    mm_out_fp32(out, a.to(machine.device), b.to(machine.device))
    addmm_fp32_(total, a.to(machine.device), b.to(machine.device))
    exact = a.double() @ b.double()
    return Outcome(relative_difference([out, total], [exact, 1 + exact]), 1e-5)


def _experts(machine: Machine) -> Outcome:
    sizes = [37, 0, 64, 3, 0, 83, 1, 12]  # odd sizes, and experts without tokens

    def grouped(x: Tensor, weights: Tensor) -> Tensor:
        ends = torch.tensor(sizes, device=x.device).cumsum(0).int()
        return grouped_product(x, weights.mT.contiguous().mT, ends)  # the layout of a layer's weights

    def exact(x: Tensor, weights: Tensor) -> Tensor:
        return torch.cat([part @ w for part, w in zip(x.split(sizes), weights, strict=True)])

    return _compare(machine, grouped, exact, (200, 64), (8, 64, 128))


def _linear_4bit(machine: Machine) -> Outcome:
    require_bitsandbytes("--quantize")
    weight, layers = torch.randn(256, 128, generator=torch.Generator().manual_seed(0)), []
    for device in (machine.device, torch.device("cpu")):
        layers.append(Linear4bit(128, 256, bias=False))
        layers[-1].quantize_weight(weight, True, device)
    exact = layers[1].base_weight().double()
    return _compare(machine, layers[0].project, lambda x: x @ exact.mT, (64, 128))


def _cuda_graph(machine: Machine) -> Outcome:
    machine.require_cuda()
    torch.manual_seed(0)
    model = GPT(get_config("pico-llama").with_vocab_size(512)).eval().to(machine.device)
    notices = list[str]()
    run = partial(generate, model, torch.arange(1, 20), max_new_tokens=60, sampling=GREEDY, notice=notices.append)
    graph, plain = list(run(cuda_graph=True)), list(run(cuda_graph=False))
    if notices:
        raise CommandError(notices[0])
    return Outcome(sum(a != b for a, b in zip(graph, plain, strict=True)), 0)


_FLASH, _CAUSAL, _FLEX = KernelChoice("flash", False), KernelChoice("flash", True), KernelChoice("flex", True)
_BY_ITSELF = "no option: runs check it and use"
_FP64, _FP32 = "result and gradients against fp64", "--precision 32-true"
KERNELS = [
    # before the others, which may activate FlashAttention 3 or 4 in scaled_dot_product_attention too
    Row("attention, cuDNN", _FP64, _FP32, partial(_sdpa, 8, False, True, None)),
    Row("attention, grouped", _FP64, _FP32, partial(_sdpa, 2, False, False, None)),
    Row("attention, masks", _FP64, _FP32, partial(_sdpa, 2, True, False, None)),
    Row("attention, fp32", _FP64, "--accelerator cpu", partial(_sdpa, 2, False, False, torch.float32)),
    *(
        Row(
            name,
            "output and gradients against masks in fp32",
            f"{_BY_ITSELF} another kernel or masks",
            partial(_masked, *case),
        )
        for name, case in {
            "flash, windows": (_FLASH, None, False, False),
            "flash, packed rows": (_FLASH, None, True, False),
            "flash, sinks": (_CAUSAL, None, True, False),
            "flash, context parallel": (_CAUSAL, None, True, True),
            "flex, soft cap": (_FLEX, 50.0, False, False),
            "flex, packed rows": (_FLEX, 50.0, True, False),
        }.items()
    ),
    Row("loss", _FP64, _FP32, partial(_head_loss, None, 512)),
    *(
        Row(name, _FP64, f"{_BY_ITSELF} a slower loss", partial(_head_loss, *case))
        for name, case in {
            "loss, Triton": (triton_kernel, 512),
            "loss, Triton, odd vocabulary": (triton_kernel, 509),
            "loss, compiled": (compiled_kernel, 512),
        }.items()
    ),
    Row("fp32 products", "of 16-bit factors against fp64", f"{_BY_ITSELF} 16-bit results", _mixed_mm),
    Row("experts", _FP64, _FP32, _experts),
    Row("4-bit layer", _FP64, "finetune_lora without --quantize", _linear_4bit),
    Row("CUDA graph", "60 tokens with and without it", f"{_BY_ITSELF} single kernels", _cuda_graph),
]
