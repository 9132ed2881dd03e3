"""`toolkit schema`: JSON Schema of a command's YAML files."""

import importlib

from toolkit.commands import COMMANDS, WRAPPING
from toolkit.config.command import CommandOptions
from toolkit.config.schema import format_schema, json_schema
from toolkit.errors import UserError, did_you_mean


def setup(command: str = "pretrain") -> None:
    """Print the JSON Schema of the YAML files that a command takes with --config.

    Editors complete and check files whose first lines name it: `# yaml-language-server: $schema=pretrain.json`.

    Args:
        command: The command, such as pretrain or finetune_lora.
    """
    names = [name for name in COMMANDS if name not in WRAPPING]
    if command not in names:
        raise UserError(f"command {command}: must be one of {', '.join(names)}{did_you_mean(command, names)}")
    options = CommandOptions(importlib.import_module(COMMANDS[command][0]).setup)
    print(format_schema(json_schema(command, options)))
