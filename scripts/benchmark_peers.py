"""The transformers peer of scripts/benchmark.py: one Trainer run, in its own environment.

    python benchmark_peers.py SETTINGS.json RESULT.json

Does not import toolkit. ``run_transformers`` in benchmark_products.py writes the settings.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments


class TokenDataset(torch.utils.data.Dataset):
    """The first ``seq_length`` tokens of each block of the file."""

    def __init__(self, file: str, seq_length: int) -> None:
        self.blocks, self.seq_length = np.load(file, mmap_mode="r"), seq_length

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(self.blocks[index, : self.seq_length].astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}  # the model shifts the labels


class Clock(TrainerCallback):
    """Records when each optimizer step begins (after data loading) and ends."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.ends: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begins.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # wait for the step to finish
        self.ends.append(time.perf_counter())


def main(settings_file: str, result_file: str) -> None:
    settings = json.loads(Path(settings_file).read_text())
    torch.manual_seed(settings["seed"])
    config = AutoConfig.from_pretrained(settings["config_dir"])
    config.use_cache = False
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    precision = settings["precision"]
    if precision == "bf16-true" and not settings["as_shipped"]:
        model = model.to(torch.bfloat16)
    clock = Clock()
    equal_settings = {
        "learning_rate": settings["learning_rate"],
        "weight_decay": settings["weight_decay"],
        "adam_beta1": settings["betas"][0],
        "adam_beta2": settings["betas"][1],
        "max_grad_norm": settings["max_norm"],
        "bf16": precision == "bf16-mixed",
        "fp16": precision == "16-mixed",
        "torch_compile": settings["compiler"] == "torch",
        "logging_steps": 1,
    }
    arguments = TrainingArguments(
        output_dir=settings["out_dir"],
        max_steps=settings["steps"],
        per_device_train_batch_size=settings["micro_batch_size"],
        gradient_accumulation_steps=settings["batch_size"] // settings["micro_batch_size"],
        gradient_checkpointing=settings["activation_checkpointing"] == "full",
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        eval_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0,
        seed=settings["seed"],
        **({} if settings["as_shipped"] else equal_settings),
    )
    rows = TokenDataset(settings["tokens"], settings["seq_length"])
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[clock]).train()
    result = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "begins": clock.begins,
        "ends": clock.ends,
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9,  # 0 without CUDA
        "optimizer": str(arguments.optim.value),
    }
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
