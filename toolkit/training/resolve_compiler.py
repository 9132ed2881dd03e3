"""Resolve ``--compiler auto`` after data preparation, when row lengths and run length are known."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from toolkit.config import AUTO
from toolkit.distributed import ranks
from toolkit.planning.compiler import choose_compiler
from toolkit.planning.resolve import ResolvedConfig


def resolve_compiler(config: ResolvedConfig, device: torch.device | None) -> ResolvedConfig:
    """Return the configuration with the compiler and the reason for the choice. Collective.

    "auto" compiles only if torch.compile works on the devices of all ranks; None: they are not here.
    """
    if config.args.compiler != AUTO:
        return config
    name, reason = ranks.broadcast_from_rank0(choose_compiler(config))  # nodes may have different GPUs
    if (
        name != "none"
        and device is not None
        and (errors := [e for e in ranks.all_gather_object(compile_error(device)) if e])
    ):
        name, reason = "none", f"auto: torch.compile fails: {errors[0]}"
    return replace(config, args=replace(config.args, compiler=name), reasons={**config.reasons, "compiler": reason})


def compile_error(device: torch.device) -> str:
    """Return why torch.compile fails on a device; empty if it works with correct values and gradients.

    It needs Triton and a C compiler on CUDA, and a C++ compiler on a CPU.
    """
    x = torch.linspace(-2, 2, 4096, device=device).view(64, 64)

    def scaled(x: Tensor) -> Tensor:
        return functional.silu(x) * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1)

    def evaluate(function: object) -> list[Tensor]:
        assert callable(function)
        leaf = x.clone().requires_grad_()
        out = function(leaf)
        (grad,) = torch.autograd.grad(out.square().sum(), leaf)
        return [out.detach(), grad]

    try:
        compiled = evaluate(torch.compile(scaled))
    except Exception as error:  # compilers raise arbitrary exceptions
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
    is_equal = all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(compiled, evaluate(scaled), strict=True))
    return "" if is_equal else "its results are wrong"
