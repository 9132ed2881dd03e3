"""The subcommands of ``toolkit``, one file each, and their table. Imports nothing heavy."""

from __future__ import annotations

# name: (module with setup(...), parameters that may be given without their flag, help in one line)
COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "pretrain": ("toolkit.commands.pretrain", ("model_name",), "train a language model, from scratch or further"),
    "finetune_full": (
        "toolkit.commands.finetune_full",
        ("checkpoint_dir",),
        "train all weights of a checkpoint",
    ),
    "finetune_lora": ("toolkit.commands.finetune_lora", ("checkpoint_dir",), "train adapters beside a checkpoint"),
    "prepare_data": ("toolkit.commands.prepare_data", (), "tokenise data once, ahead of a run"),
    "inspect_data": ("toolkit.commands.inspect_data", (), "show tokens and labels, count what is trained"),
    "generate": ("toolkit.commands.generate", ("checkpoint_dir",), "let a model continue a text"),
    "chat": ("toolkit.commands.chat", ("checkpoint_dir",), "talk with a model"),
    "evaluate": ("toolkit.commands.evaluate", ("checkpoint_dir",), "loss, perplexity and bits per byte on data"),
    "download": ("toolkit.commands.download", ("repo_id",), "fetch a model from the Hugging Face hub"),
    "convert_from_hf": ("toolkit.commands.convert_from_hf", ("hf_dir", "out_dir"), "read a Hugging Face folder"),
    "convert_to_hf": ("toolkit.commands.convert_to_hf", ("checkpoint_dir", "out_dir"), "write a Hugging Face folder"),
    "convert_to_peft": ("toolkit.commands.convert_to_peft", ("checkpoint_dir", "out_dir"), "write adapters for peft"),
    "merge_lora": ("toolkit.commands.merge_lora", ("checkpoint_dir",), "make adapters plain weights"),
    "plan": ("toolkit.commands.plan", ("command",), "batch, parameters and memory of a run, ahead of it"),
    "verify": ("toolkit.commands.verify", ("checkpoint_dir",), "compare a checkpoint with its checksums"),
    "consolidate": ("toolkit.commands.consolidate", ("checkpoint_dir", "out_dir"), "join the shards of a checkpoint"),
}

_LITGPT = (
    "; LitGPT's checkpoint folders are read as they are; convert_from_hf reads Hugging Face folders, and convert_to_hf "
    "writes those that LitGPT converts"
)
HINTS = {"convert_to_litgpt": _LITGPT, "convert_from_litgpt": _LITGPT}
"""What to say of commands that other tools have."""
