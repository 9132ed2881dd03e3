"""The subcommands of ``toolkit``, one module each, and their table. Fast to import."""

from functools import cache
from typing import get_args

from toolkit.config import TrainingCommand
from toolkit.errors import notice
from toolkit.extension import Command, all_extensions

TRAINING: tuple[str, ...] = get_args(TrainingCommand)
"""The commands that train."""

_EXAMPLES = {
    "pretrain": "toolkit pretrain smollm2-135m --devices 4 --train.max_tokens 1e9 --train.learning_rate 3e-4",
    "finetune_full": "toolkit finetune_full Qwen/Qwen2.5-0.5B --data JSON --data.json_path chats.json",
    "finetune_lora": "toolkit finetune_lora Qwen/Qwen2.5-7B --data JSON --data.json_path chats.json --lora_r 16",
}
# name: (positional parameters, one-line help)
_COMMANDS = {
    "pretrain": ("model_name", "pretrain a language model or continue pretraining"),
    "finetune_full": ("checkpoint_dir", "train all weights of a checkpoint"),
    "finetune_lora": ("checkpoint_dir", "train LoRA adapters on a checkpoint"),
    "prepare_data": ("", "tokenize the data of a run in advance"),
    "inspect_data": ("", "show tokens and labels, count trained tokens"),
    "generate": ("checkpoint_dir", "generate text from a prompt"),
    "chat": ("checkpoint_dir", "chat with a model"),
    "download": ("repo_id", "download a model from the Hugging Face hub"),
    "convert_from_hf": ("hf_dir out_dir", "import a Hugging Face folder"),
    "convert_to_hf": ("checkpoint_dir out_dir", "export a Hugging Face folder"),
    "merge_lora": ("checkpoint_dir", "merge adapters into the weights"),
    "verify": ("checkpoint_dir", "verify the checksums of a checkpoint"),
    "consolidate": ("checkpoint_dir out_dir", "merge the shards of a checkpoint"),
    "average": ("out_dir", "average the weights of checkpoints"),
    "schema": ("command", "print the JSON Schema of a command's YAML files"),
    "completion": ("shell", "print a completion script for bash, zsh or fish"),
}
GROUPS = {
    "pretrain": "Train", "prepare_data": "Plan and check", "generate": "Use a model", "download": "Convert",
    "verify": "Checkpoints", "schema": "Command line",
}  # fmt: skip
"""The groups of the help, by their first command."""
_CHECK_FOLDER = (*TRAINING, "verify", "consolidate")
COMMANDS: dict[str, Command] = {
    name: Command(
        f"toolkit.commands.{name}",
        text,
        tuple(positionals.split()),
        _EXAMPLES.get(name),
        is_distributed=name in TRAINING,
        checks_folder=name in _CHECK_FOLDER,
    )
    for name, (positionals, text) in _COMMANDS.items()
}
"""The commands of the core by name, in the order of the help."""


@cache
def all_commands() -> dict[str, Command]:
    """Return the commands of the core and of extensions by name, in the order of the help."""
    commands, names = dict(COMMANDS), [*COMMANDS]
    for origin, extension in all_extensions():
        for name, command in extension.commands.items():
            if name in commands:  # an installed package must not stop every command
                notice(f"warning: not used: extension {origin}: commands {name}: this name is already defined")
                continue
            commands[name] = command
    added = [*commands][len(names) :]
    while added:  # a command may follow another extension's
        name = next((name for name in added if commands[name].after in names), added[0])
        after = commands[name].after
        names.insert(names.index(after) + 1 if after in names else len(names), name)
        added.remove(name)
    return {name: commands[name] for name in names}
