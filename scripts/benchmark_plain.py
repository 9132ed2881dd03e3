"""The plain peer of scripts/benchmark.py: a short PyTorch loop for GPT-2 and Llama, without any framework.

    python benchmark_plain.py SETTINGS.json RESULT.json

The complete model is compiled, the vocabulary is padded to a multiple of 128 (GPT-2's 50,257 to 50,304), AdamW is
fused, and bf16-mixed is autocast: what the hardware gives. ``run_plain`` in benchmark_products.py writes the settings.
"""

import json
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

PADDING = 128


class Block(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        d, bias, size = config["n_embd"], config["bias"], config["head_size"]
        self.heads, self.groups, self.size = config["n_head"], config["n_query_groups"], size
        self.is_gated = config["mlp_class_name"] == "LLaMAMLP"
        norm = nn.RMSNorm if config["norm_class_name"] == "RMSNorm" else nn.LayerNorm
        self.norm_1, self.norm_2 = norm(d, eps=config["norm_eps"]), norm(d, eps=config["norm_eps"])
        self.qkv = nn.Linear(d, (self.heads + 2 * self.groups) * size, bias)
        self.proj = nn.Linear(self.heads * size, d, bias)
        self.up = nn.Linear(d, config["intermediate_size"] * (1 + self.is_gated), bias)
        self.down = nn.Linear(config["intermediate_size"], d, bias)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.groups, self.groups], 1)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups != self.heads)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        up = self.up(self.norm_2(x))
        if self.is_gated:
            gate, up = up.chunk(2, -1)
            return x + self.down(F.silu(gate) * up)
        return x + self.down(F.gelu(up, approximate="tanh"))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat([-b, a], -1) * sin).type_as(x)


class Model(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, d = config, config["n_embd"]
        vocab = -(-config["vocab_size"] // PADDING) * PADDING
        self.tokens = nn.Embedding(vocab, d)
        self.positions = nn.Embedding(config["block_size"], d) if config["position_embedding"] == "learned" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config["n_layer"]))
        self.norm = type(self.blocks[0].norm_1)(d, eps=config["norm_eps"])
        self.head = nn.Linear(d, vocab, bias=False)
        if config["tie_embeddings"]:
            self.head.weight = self.tokens.weight
        self.n_padding = (vocab - config["vocab_size"]) * d * (1 if config["tie_embeddings"] else 2)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, rope, positions = self.tokens(ids), None, torch.arange(ids.shape[1], device=ids.device)
        if self.positions is not None:
            x = x + self.positions(positions)
        else:
            size = self.config["head_size"]
            inverse = self.config["rope_base"] ** (-torch.arange(0, size, 2, device=ids.device) / size)
            angles = torch.outer(positions.float(), inverse).repeat(1, 2)
            rope = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, rope)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def train(settings: dict[str, Any], device: str) -> dict[str, Any]:
    """Run all steps, and return their times, losses, and the peak memory."""
    torch.manual_seed(settings["seed"])
    with torch.device(device):
        model = Model(settings["config"])
    precision, rate, is_compiled = settings["precision"], settings["learning_rate"], settings["compiler"] == "torch"
    if precision == "bf16-true":
        model = model.to(torch.bfloat16)
    autocast = partial(torch.autocast, device, torch.bfloat16) if precision == "bf16-mixed" else nullcontext
    loss_of = torch.compile(model) if is_compiled else model
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": settings["weight_decay"]},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, rate, settings["betas"], fused=True)
    rows, n, micro = np.load(settings["tokens"], mmap_mode="r"), settings["batch_size"], settings["micro_batch_size"]
    begins, ends, losses = [], [], []
    for step in range(settings["steps"]):
        batch = torch.from_numpy(rows[step * n : (step + 1) * n].astype(np.int64)).to(device)
        begins.append(time.perf_counter())
        total = torch.zeros((), device=device)
        for part in batch.split(micro):
            with autocast():
                loss = loss_of(part[:, :-1], part[:, 1:]) * (micro / n)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), settings["max_norm"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())  # waits for the step
        ends.append(time.perf_counter())
    return {
        "parameters": sum(p.numel() for p in model.parameters()) - model.n_padding,
        "begins": begins, "ends": ends, "losses": losses,
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9,  # 0 without CUDA
    }  # fmt: skip


if __name__ == "__main__":
    settings_file, result_file = map(Path, sys.argv[1:])
    result = train(json.loads(settings_file.read_text()), "cuda" if torch.cuda.is_available() else "cpu")
    result_file.write_text(json.dumps(result))
