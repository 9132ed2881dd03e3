"""The subcommands of ``toolkit``, one module each, and their table. Fast to import."""

from typing import get_args

from toolkit.config import TrainingCommand

# name: (positional parameters, one-line help)
_COMMANDS = {
    "pretrain": ("model_name", "pretrain a language model or continue pretraining"),
    "finetune_full": ("checkpoint_dir", "train all weights of a checkpoint"),
    "finetune_lora": ("checkpoint_dir", "train LoRA adapters on a checkpoint"),
    "prepare_data": ("", "tokenize the data of a run in advance"),
    "inspect_data": ("", "show tokens and labels, count trained tokens"),
    "generate": ("checkpoint_dir", "generate text from a prompt"),
    "chat": ("checkpoint_dir", "chat with a model"),
    "serve": ("checkpoint_dir", "serve a model with OpenAI's API"),
    "classify": ("checkpoint_dir", "print labels or scores of texts, by a model with a head"),
    "evaluate": ("checkpoint_dir", "compute loss, perplexity and bits per byte"),
    "download": ("repo_id", "download a model from the Hugging Face hub"),
    "convert_from_hf": ("hf_dir out_dir", "import a Hugging Face folder"),
    "convert_to_hf": ("checkpoint_dir out_dir", "export a Hugging Face folder"),
    "convert_to_peft": ("checkpoint_dir out_dir", "export adapters for peft"),
    "convert_to_gguf": ("checkpoint_dir out_path", "export for llama.cpp, Ollama"),
    "convert_to_litgpt": ("checkpoint_dir out_dir", "export for LitGPT"),
    "merge_lora": ("checkpoint_dir", "merge adapters into the weights"),
    "plan": ("command", "show batch, parameters and memory of a run"),
    "launch": ("format", "write a file that starts a training command on a cluster"),
    "report": ("run_dirs", "write a page about one or several runs"),
    "doctor": ("", "print the environment, check communication and gradients"),
    "verify_parallel": ("command", "compare a run with a single process"),
    "verify": ("checkpoint_dir", "verify the checksums of a checkpoint"),
    "consolidate": ("checkpoint_dir out_dir", "merge the shards of a checkpoint"),
    "schema": ("command", "print the JSON Schema of a command's YAML files"),
    "completion": ("shell", "print a completion script for bash, zsh or fish"),
    "average": ("out_dir", "average the weights of checkpoints"),
}
COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    name: (f"toolkit.commands.{name}", tuple(positionals.split()), text)
    for name, (positionals, text) in _COMMANDS.items()
}
"""{name: (module with setup(...), positional parameters, one-line help)}"""

TRAINING: tuple[str, ...] = get_args(TrainingCommand)
DISTRIBUTED = (*TRAINING, "doctor", "verify_parallel")
"""Commands that can run on several processes."""
WRAPPING = ("plan", "verify_parallel")
"""Commands that take a training command and its options."""
LAUNCH = "launch"
"""The command that takes a training command after ``--``."""

LISTS = ("run_dirs",)
"""Positional parameters that take several words, joined by commas."""

EXAMPLES = {
    "pretrain": "toolkit pretrain smollm2-135m --devices 4 --train.max_tokens 1e9 --train.learning_rate 3e-4",
    "finetune_full": "toolkit finetune_full Qwen/Qwen2.5-0.5B --data JSON --data.json_path chats.json",
    "finetune_lora": "toolkit finetune_lora Qwen/Qwen2.5-7B --data JSON --data.json_path chats.json --lora_r 16",
    "doctor": "toolkit doctor --comm --check_grads --devices 2",
}
"""Example commands for the help."""
