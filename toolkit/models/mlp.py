"""The dense MLPs of a block: (..., n_embd) -> (..., n_embd)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.models.config import ModelConfig


class LLaMAMLP(nn.Module):
    """SwiGLU (Shazeer 2020): proj(silu(fc_1(x)) * fc_2(x))."""

    may_be_unit = True  # of FSDP, by size or class

    def __init__(self, config: ModelConfig, intermediate_size: int | None = None) -> None:
        super().__init__()
        width = intermediate_size or config.intermediate_size
        self.fc_1 = nn.Linear(config.n_embd, width, bias=config.bias)
        self.fc_2 = nn.Linear(config.n_embd, width, bias=config.bias)
        self.proj = nn.Linear(width, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.silu(self.fc_1(x)) * self.fc_2(x))


class GemmaMLP(LLaMAMLP):
    """GeGLU (Shazeer 2020): proj(gelu(fc_1(x)) * fc_2(x)), with the exact gelu or its tanh approximation."""

    def __init__(self, config: ModelConfig, intermediate_size: int | None = None) -> None:
        super().__init__(config, intermediate_size)
        self.gelu_approximate = config.gelu_approximate

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc_1(x), approximate=self.gelu_approximate) * self.fc_2(x))


class GptNeoxMLP(nn.Module):
    """proj(gelu(fc(x))), with the exact gelu or its tanh approximation."""

    may_be_unit = True  # of FSDP, by size or class

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, config.intermediate_size, bias=config.bias)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=config.bias)
        self.gelu_approximate = config.gelu_approximate

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x), approximate=self.gelu_approximate))


class XieluMLP(GptNeoxMLP):
    """proj(xielu(fc(x))). xIELU is quadratic above zero and exponential below, both with a learned slope.

    Source: Huang and Schlag 2024, arXiv 2411.13010, as in transformers, whose files contain the constants.
    """

    beta: Tensor
    eps: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.alpha_p, self.alpha_n = (nn.Parameter(torch.empty(1)) for _ in range(2))
        for name in ("beta", "eps"):
            self.register_buffer(name, torch.empty(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        beta, eps = self.beta.to(x.dtype), self.eps.to(x.dtype)
        above, below = F.softplus(self.alpha_p).to(x.dtype), beta + F.softplus(self.alpha_n).to(x.dtype)
        y = torch.where(x > 0, above * x * x, (torch.expm1(torch.minimum(x, eps)) - x) * below)
        return self.proj(y + beta * x)


def make_mlp(config: ModelConfig) -> nn.Module:
    """Return the MLP of a layer without experts."""
    kinds: dict[str, type[LLaMAMLP | GptNeoxMLP]] = {
        "GemmaMLP": GemmaMLP, "GptNeoxMLP": GptNeoxMLP, "XieluMLP": XieluMLP,
    }  # fmt: skip
    return kinds.get(config.mlp_class_name, LLaMAMLP)(config)
