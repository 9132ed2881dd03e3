"""Random models for comparisons with transformers, built once per run of the tests, and what is compared."""

import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from filelock import FileLock

from helpers.saving import write_checkpoint
from toolkit.checkpoints.folder import load_model, write_model_files
from toolkit.checkpoints.hf.export_hf import export_hf
from toolkit.checkpoints.hf.import_hf import import_hf
from toolkit.models.gpt import GPT

VOCABULARY = 330  # fits the tests' tokenizers; not a multiple of 64, to which toolkit pads its own models


@dataclass(frozen=True)
class TinyModel:
    """A random model on disk, which tests must not change, and its logits for :func:`token_ids` in transformers."""

    hf: Path
    """Folder that transformers wrote."""
    native: Path
    """Checkpoint that :func:`import_hf` made of it."""
    logits: torch.Tensor
    """In fp32."""
    bf16_logits: torch.Tensor


class TinyModels:
    """The models of ``HF_CONFIGS`` by name, in a folder that all workers of the run share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, name: str) -> TinyModel:
        folder = self.folder / name
        with FileLock(self.folder / f"{name}.lock"):
            if not folder.exists():
                with TemporaryDirectory(dir=self.folder) as unfinished:
                    build(name, Path(unfinished, name))
                    os.rename(Path(unfinished, name), folder)
        logits, bf16_logits = torch.load(folder / "logits.pt", weights_only=True)
        return TinyModel(folder / "hf", folder / "native", logits, bf16_logits)


@torch.no_grad()
def build(name: str, folder: Path) -> None:
    from helpers.tiny_configs import HF_CONFIGS

    transformers = pytest.importorskip("transformers")
    config = HF_CONFIGS[name]()
    config.vocab_size = VOCABULARY
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomize(model, seed=0)
    model.save_pretrained(folder / "hf")
    import_hf(folder / "hf", folder / "native")
    logits = model(token_ids()).logits
    torch.save([logits, model.bfloat16()(token_ids()).logits], folder / "logits.pt")


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Set weights large enough for non-uniform attention, and norms and biases away from one and zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0.0, 0.15, generator=generator)
            if p.dim() == 1 and name.endswith(("weight", "scale")):
                p.add_(1.0)
        for name, buffer in model.named_buffers():
            if name in model.state_dict():  # correction biases of DeepSeek-V3's routers
                buffer.normal_(float(name.endswith("layer_scalar")), 0.15, generator=generator)


def token_ids() -> torch.Tensor:
    return torch.randint(0, 96, (2, 48), generator=torch.Generator().manual_seed(1))


def from_folder(folder: Path) -> GPT:
    """Import a Hugging Face folder as users do; the checkpoint is written next to the folder."""
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
