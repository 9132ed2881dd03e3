"""The subcommands of ``toolkit``, one module each, and their table. Fast to import."""

from typing import get_args

from toolkit.config import TrainingCommand

# name: (module with setup(...), positional parameters, one-line help)
COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "pretrain": ("toolkit.commands.pretrain", ("model_name",), "pretrain a language model or continue pretraining"),
    "finetune_full": ("toolkit.commands.finetune_full", ("checkpoint_dir",), "train all weights of a checkpoint"),
    "finetune_lora": ("toolkit.commands.finetune_lora", ("checkpoint_dir",), "train LoRA adapters on a checkpoint"),
    "prepare_data": ("toolkit.commands.prepare_data", (), "tokenize the data of a run in advance"),
    "inspect_data": ("toolkit.commands.inspect_data", (), "show tokens and labels, count trained tokens"),
    "generate": ("toolkit.commands.generate", ("checkpoint_dir",), "generate text from a prompt"),
    "chat": ("toolkit.commands.chat", ("checkpoint_dir",), "chat with a model"),
    "serve": ("toolkit.commands.serve", ("checkpoint_dir",), "serve a model with OpenAI's API"),
    "evaluate": ("toolkit.commands.evaluate", ("checkpoint_dir",), "compute loss, perplexity and bits per byte"),
    "download": ("toolkit.commands.download", ("repo_id",), "download a model from the Hugging Face hub"),
    "convert_from_hf": ("toolkit.commands.convert_from_hf", ("hf_dir", "out_dir"), "import a Hugging Face folder"),
    "convert_to_hf": ("toolkit.commands.convert_to_hf", ("checkpoint_dir", "out_dir"), "export a Hugging Face folder"),
    "convert_to_peft": ("toolkit.commands.convert_to_peft", ("checkpoint_dir", "out_dir"), "export adapters for peft"),
    "convert_to_gguf": (
        "toolkit.commands.convert_to_gguf",
        ("checkpoint_dir", "out_path"),
        "export for llama.cpp, Ollama",
    ),
    "convert_to_litgpt": ("toolkit.commands.convert_to_litgpt", ("checkpoint_dir", "out_dir"), "export for LitGPT"),
    "merge_lora": ("toolkit.commands.merge_lora", ("checkpoint_dir",), "merge adapters into the weights"),
    "plan": ("toolkit.commands.plan", ("command",), "show batch, parameters and memory of a run"),
    "report": ("toolkit.commands.report", ("run_dirs",), "write a page about one or several runs"),
    "doctor": ("toolkit.commands.doctor", (), "print the environment, check communication and gradients"),
    "verify_parallel": ("toolkit.commands.verify_parallel", ("command",), "compare a run with a single process"),
    "verify": ("toolkit.commands.verify", ("checkpoint_dir",), "verify the checksums of a checkpoint"),
    "consolidate": ("toolkit.commands.consolidate", ("checkpoint_dir", "out_dir"), "merge the shards of a checkpoint"),
    "schema": ("toolkit.commands.schema", ("command",), "print the JSON Schema of a command's YAML files"),
    "completion": ("toolkit.commands.completion", ("shell",), "print a completion script for bash, zsh or fish"),
    "average": ("toolkit.commands.average", ("out_dir",), "average the weights of checkpoints"),
}

TRAINING: tuple[str, ...] = get_args(TrainingCommand)
DISTRIBUTED = (*TRAINING, "doctor", "verify_parallel")
"""Commands that can run on several processes."""
WRAPPING = ("plan", "verify_parallel")
"""Commands that take a training command and its options."""

LISTS = ("run_dirs",)
"""Positional parameters that take several words, joined by commas."""

EXAMPLES = {
    "pretrain": "toolkit pretrain smollm2-135m --devices 4 --train.max_tokens 1e9 --train.learning_rate 3e-4",
    "finetune_full": "toolkit finetune_full Qwen/Qwen2.5-0.5B --data JSON --data.json_path chats.json",
    "finetune_lora": "toolkit finetune_lora Qwen/Qwen2.5-7B --data JSON --data.json_path chats.json --lora_r 16",
    "doctor": "toolkit doctor --comm --check_grads --devices 2",
}
"""Example commands for the help."""
