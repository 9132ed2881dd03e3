"""`toolkit schema`: JSON Schema of a command's YAML files."""

from toolkit.commands import all_commands
from toolkit.config.command import CommandOptions
from toolkit.config.schema import format_schema, json_schema
from toolkit.errors import UserError, did_you_mean


def setup(command: str = "pretrain") -> None:
    """Print the JSON Schema of the YAML files that a command takes with --config.

    Editors complete and check files whose first lines name it: `# yaml-language-server: $schema=pretrain.json`.

    Args:
        command: The command, such as pretrain or finetune_lora.
    """
    names = {name: entry for name, entry in all_commands().items() if not entry.wraps_training}
    if command not in names:
        raise UserError(f"command {command}: must be one of {', '.join(names)}{did_you_mean(command, names)}")
    options = CommandOptions(names[command].load())
    print(format_schema(json_schema(command, options)))
