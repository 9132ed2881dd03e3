"""Random models for comparisons with transformers, and what is compared."""

from pathlib import Path

import torch

from toolkit.checkpoints.folder import load_model, write_model_files
from toolkit.checkpoints.hf.export_hf import export_hf
from toolkit.checkpoints.hf.import_hf import import_hf
from toolkit.checkpoints.store import write_checkpoint
from toolkit.models.gpt import GPT


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Set weights large enough for non-uniform attention, and norms and biases away from one and zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0.0, 0.15, generator=generator)
            if p.dim() == 1 and name.endswith("weight"):
                p.add_(1.0)
        for name, buffer in model.named_buffers():
            if name in model.state_dict():  # correction biases of DeepSeek-V3's routers
                buffer.normal_(0.0, 0.15, generator=generator)


def token_ids() -> torch.Tensor:
    return torch.randint(0, 96, (2, 48), generator=torch.Generator().manual_seed(1))


def from_folder(folder: Path) -> GPT:
    """Import a Hugging Face folder as users do; the checkpoint is written beside the folder."""
    native = folder.with_name(f"{folder.name}-native")
    import_hf(folder, native)
    return load_model(native).eval()


def to_folder(model: GPT, folder: Path) -> None:
    files = {"state_dict": model.state_dict(), "config": model.config, "hyperparameters": None, "tokenizer": None}
    checkpoint = folder.with_name(f"{folder.name}-checkpoint")
    write_checkpoint(checkpoint, lambda tmp: write_model_files(tmp, **files))
    export_hf(checkpoint, folder)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.float() - expected).abs().max() / expected.abs().max()).item()
