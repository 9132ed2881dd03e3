"""One rank of test_strategies.py: trains a toy model with Fabric and Thunder's strategies, and writes what it saw.

Usage: python ranks.py RANK SIZE PORT FOLDER CASE ...
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn import functional as F

ROWS, STEPS, SAVED_AT = 4, 3, 2


class Layer(nn.Module):
    """A block; seven rows do not divide by two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc, self.proj = nn.LayerNorm(6), nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(F.gelu(self.fc(self.norm(x))))


class Toy(nn.Module):
    """Two blocks between an embedding and a head that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.h = nn.Embedding(11, 6), nn.ModuleList([Layer(), Layer()])
        self.ln_f, self.head = nn.LayerNorm(6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 11, (ROWS, 6), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def train_step(fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step, a row per micro-batch; return the gradient norm before clipping."""
    ids, labels = batch(step)
    own = range(fabric.global_rank, ROWS, fabric.world_size)
    for i, row in enumerate(own):
        with fabric.no_backward_sync(model, enabled=i < len(own) - 1):
            loss = F.cross_entropy(model(ids[row : row + 1]).flatten(0, 1), labels[row])
            fabric.backward(loss / len(own))
    norm = fabric.clip_gradients(model, optimizer, max_norm=0.1)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def complete(model: nn.Module) -> dict[str, torch.Tensor]:
    return get_model_state_dict(model._forward_module, options=StateDictOptions(full_state_dict=True))


def run(make_strategy: Callable, folder: Path) -> dict:
    """Train, save, train on; and again from the checkpoint."""
    strategy = make_strategy()
    fabric = Fabric(accelerator="cpu", devices=1, num_nodes=int(os.environ["WORLD_SIZE"]), strategy=strategy)
    fabric.launch()

    def start() -> tuple:
        model = fabric.setup(Toy())
        return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))

    model, optimizer = start()
    norms = []
    for step in range(STEPS):
        if step == SAVED_AT:
            fabric.save(folder / "checkpoint", {"model": model, "optimizer": optimizer, "step": step})
        norms.append(train_step(fabric, model, optimizer, step))
    weights = complete(model)
    model, optimizer = start()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(folder / "checkpoint", state)
    norms.append(train_step(fabric, model, optimizer, state["step"]))
    resumed = complete(model)
    if fabric.global_rank == 0:
        torch.save(weights, folder / "weights.pt")
    return {
        "norms": norms,
        "bit_equal": all(torch.equal(weights[name], resumed[name]) for name in weights),
        "local": sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters()),
        "nodes": strategy.num_nodes,
        "sampler": strategy.distributed_sampler_kwargs,
        "gathers": gathers(model._forward_module),
        "is_folder": (folder / "checkpoint").is_dir(),
    }


def gathers(module: nn.Module) -> list[int]:
    """Return the all-gathers in the compiled forward and backward of the first unit; nothing if it is eager."""
    import thunder

    unit = module.h[0].forward if hasattr(module.h[0].forward, "_kernel") else module.forward
    if unit._kernel is None:
        return []
    jitted = next(iter(unit._kernel._jitted.values()))
    traces = thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]
    return [str(trace).count("= torch_all_gather_prim_impl(") for trace in traces]


def cases() -> dict[str, Callable]:
    from toolkit_thunder import ThunderDDPStrategy as DDP
    from toolkit_thunder import ThunderFSDPStrategy as FSDP

    blocks = [Layer]
    return {
        "zero3": lambda: FSDP(blocks=blocks),
        "zero2 by layer": lambda: FSDP("ZERO2", "LAYER", blocks=blocks, state_dict_type="full"),
        "zero3 by block": lambda: FSDP("ZERO3", "BLOCK", blocks=blocks),
        "zero3 as a whole": lambda: FSDP("ZERO3", "BLOCK", state_dict_type="full"),
        "eager": lambda: FSDP(jit=False, blocks=blocks),
        "ddp": lambda: DDP(blocks=blocks),
        "ddp as a whole": lambda: DDP(),
        "ddp eager": lambda: DDP(jit=False, blocks=blocks),
    }


def main(rank: str, size: str, port: str, folder: str, *names: str) -> None:
    os.environ |= {
        "RANK": rank, "GROUP_RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    torch.set_num_threads(1)
    for name in names:
        (out := Path(folder, name)).mkdir(exist_ok=True)
        (out / f"{rank}.json").write_text(json.dumps(run(cases()[name], out)))


if __name__ == "__main__":
    main(*sys.argv[1:])
