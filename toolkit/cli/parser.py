"""Parse a subcommand's words and YAML files into the arguments of its ``setup`` function."""

import json
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from toolkit.commands import COMMANDS, TRAINING, all_commands
from toolkit.config import AUTO
from toolkit.config.checks import note
from toolkit.config.classes import class_path
from toolkit.config.command import COMMON_OPTIONS, CommandOptions, flat_parameters
from toolkit.config.dialects import ForeignFile, dialects, set_by, translate
from toolkit.config.values import OptionValue
from toolkit.distributed import rendezvous
from toolkit.distributed.world import count_processes
from toolkit.errors import UserError, did_you_mean
from toolkit.escape import to_yaml
from toolkit.extension import Command, CommandLine, add_extensions, split_names
from toolkit.io.paths import expand_path, require_local
from toolkit.io.safe_parse import parse_yaml, read_yaml

_BOOLEANS = ("true", "false", "yes", "no", "on", "off", "null", "1", "0")
Layer = dict[str, OptionValue]


def parse(name: str, argv: list[str], subcommand: Command | None = None) -> dict[str, Any] | None:
    """Return the arguments for the ``setup`` of a subcommand, or None after printing the help or the configuration.

    ``argv`` are the words after the subcommand's ``name``.
    """
    set_by.clear()
    subcommand = subcommand or COMMANDS.get(name) or all_commands()[name]
    functions, positionals = [subcommand.load()], subcommand.positionals
    training: list[str] = []
    if subcommand.takes_training and "--" in argv:
        at = argv.index("--")
        argv, training = argv[:at], argv[at + 1 :]
    if subcommand.wraps_training and not {"--help", "-h", *subcommand.other_words} & {*argv[:1]}:
        wrapped = COMMANDS[_training_command(name, subcommand, argv)]
        functions.append(wrapped.load())
        positionals = ("command", *wrapped.positionals)
    switches = {key for key, parameter in flat_parameters(functions).items() if parameter.kind is bool}
    words = split_words(argv, positionals, switches, subcommand.takes_list)
    counts = Counter(key for key, _ in words if key not in COMMON_OPTIONS)
    note(*(f"--{key}: given {n} times; using the last value" for key, n in counts.items() if n > 1))
    files = [(file, read_config(file)) for key, file in words if key == "config"]
    extensions = [name for key, text in words if key == "extensions" for name in take_extensions({key: text})]
    extensions += [name for file, values in files for name in take_extensions(values, f"{file}: extensions")]
    command = CommandOptions(*functions)  # after the extensions, which may add options
    flags: Layer = {}
    for key, text in words:
        flags |= {} if key in COMMON_OPTIONS else expand_flag(command, key, text)
    for layer in [*flatten_files(command, files, flags), flags]:
        command.update(layer)
    if "timeout" in command.values:
        rendezvous.user_timeout = command.values["timeout"].text  # also limits the report of invalid options
    options, common = command.options(), dict(words)
    shown = [p.upper() if options[p].is_required else f"[{p.upper()}]" for p in positionals]
    shown += ["..."] * subcommand.takes_list
    dashes = ["-- COMMAND ..."] * subcommand.takes_training
    usage = " ".join([f"toolkit {name}", *shown, "[--option value ...]", *dashes])
    if "help" in common:
        from toolkit.cli.help import format_help

        print(format_help(subcommand.example, command, usage, positionals, common["help"]))
        return None
    values = command.resolve(usage)
    if subcommand.wraps_training and values.get("dry_run"):
        raise UserError(f"--dry_run true: has no effect in `toolkit {name}`; remove it")
    if "print_config" in common:
        print(dump(command, values, extensions), end="")
        return None
    arguments = command.arguments(values)
    if subcommand.takes_training:
        before = ["toolkit", name, *(str(values[p]) for p in positionals)]
        line = _parse_training(name, subcommand, training, " ".join(before))
        return None if line is None else arguments | {"training": line}
    return arguments


def _parse_training(name: str, subcommand: Command, words: list[str], before: str) -> CommandLine | None:
    """Parse the training command after ``--``. Return None after printing its help."""
    if not words:
        raise UserError(f"--: must be given before the training command, as in {before} -- pretrain ...")
    words = words[words[0] == "toolkit" :]
    training = _training_command(name, subcommand, words)
    arguments = parse(training, words[1:])
    return None if arguments is None else CommandLine(words, arguments["options"])


def _training_command(name: str, subcommand: Command, argv: list[str]) -> str:
    """Return the training command: the first of the words in ``argv``."""
    names = [*TRAINING, *subcommand.other_words]
    commands = f"the command to {name.partition('_')[0]} must come first, one of {', '.join(names)}"
    if not argv:
        raise UserError(f"COMMAND: must be given; {commands}")
    if argv[0] not in TRAINING:
        raise UserError(f"{argv[0]}: {commands}{did_you_mean(argv[0], names)}")
    return argv[0]


def split_words(
    argv: list[str], positionals: tuple[str, ...], switches: Collection[str] = (), takes_list: bool = False
) -> list[tuple[str, str | None]]:
    """Split the command line into (option, text) pairs; text is None if the value is missing.

    ``switches`` are boolean options. The word after a switch may be a positional argument instead of its value.
    With ``takes_list``, the last positional argument may be several words.
    """
    words: list[tuple[str, str | None]] = []
    left, rest, listed = list(positionals), list(argv), positionals[-1:] if takes_list else ()
    while rest:
        word = rest.pop(0)
        is_dashed = word.startswith("-") and len(word) > 1
        if word.startswith("--") and len(word) > 2:
            key, equals, text = word[2:].partition("=")
            takes_value = key != "print_config" and not equals and bool(rest) and not rest[0].startswith("--")
            if takes_value and key in switches and left and rest[0].lower() not in _BOOLEANS:
                takes_value = False
            words.append((key, rest.pop(0) if takes_value else text if equals else None))
        elif word == "-h":
            words.append(("help", None))
        elif (left or listed) and not is_dashed:
            words.append((left.pop(0) if left else positionals[-1], word))
        else:
            name = word.partition("=")[0] if is_dashed else word
            raise UserError(f"{name}: unexpected word; options are given as --name value")
    for name in listed:
        texts = [text for key, text in words if key == name and text is not None]
        words = [pair for pair in words if pair[0] != name] + ([(name, ",".join(texts))] if texts else [])
    return words


def flatten_files(
    command: CommandOptions, files: list[tuple[str | None, dict[str, Any]]], flags: Layer
) -> Iterator[Layer]:
    """Yield the options in each YAML file. A training command's files may be in the format of another tool.

    ``files`` are pairs of path and content; ``flags`` override them.
    """
    readers = [*dialects()] if files and "train" in command.groups else []
    foreign = [[(dialect, groups) for dialect in readers if (groups := dialect.groups(values))] for _, values in files]
    layers = []
    for (path, values), parts in zip(files, foreign, strict=True):
        names = {name for _, groups in parts for name in groups}
        layers.append(command.flatten({name: value for name, value in values.items() if name not in names}, path))
    merged = {key: value for layer in (*layers, flags) for key, value in layer.items()}

    def world_size() -> int:
        names = ("devices", "num_nodes", "accelerator")
        texts: list[Any] = [value.text if (value := merged.get(name)) and value.value else AUTO for name in names]
        # other values are reported where the options are checked
        devices, num_nodes = (int(text) if text.isdecimal() else AUTO for text in texts[:2])
        return count_processes(devices, num_nodes, texts[2])

    later = flags
    for i, (path, _) in reversed([*enumerate(files)]):
        for dialect, groups in foreign[i]:
            layers[i] |= translate(dialect, ForeignFile(path or "", groups, layers[i], later, world_size))
        later = layers[i] | later
    yield from layers


def read_config(path: str | None) -> dict[str, Any]:
    """Return the content of a YAML file."""
    if not path:
        raise UserError("--config: needs a value: the path of a YAML file")
    require_local("--config", path)
    path = expand_path("--config", path)
    try:
        # `--config <(command)` passes a pipe under /dev/
        values = parse_yaml(Path(path).read_bytes()) if path.startswith("/dev/") else read_yaml(path)
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"--config {path}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"--config {path}: must contain `name: value` pairs")
    return values


def expand_flag(command: CommandOptions, key: str, text: str | None) -> Layer:
    """Return a flag, or the options of a group flag such as ``--train '{"max_steps": 3}'``."""
    value = OptionValue("", text)
    if key not in command.groups and not (key in command.class_options and (text or "").startswith("{")):
        return {key: value}
    values = None
    with suppress(ValueError):
        values = parse_yaml(text or "")
    if not isinstance(values, dict):
        is_name = text and command.has_name(key)  # --optimizer AdamW
        hint = f"did you mean --{key}.name {text}?" if is_name else f"for example --{key}.NAME VALUE"
        raise UserError(f"{value.display(key)}: {key} is a group; set its options, {hint}")
    return command.flatten({key: values}, "")


def take_extensions(values: dict[str, Any], source: str = "--extensions") -> list[str]:
    """Remove ``extensions`` from the options, add these extensions, and return their names."""
    names = split_names(values.pop("extensions", None), source)
    add_extensions(names, source)
    return names


def dump(command: CommandOptions, values: dict[str, Any], extensions: list[str]) -> str:
    """Return all options as YAML, which ``toolkit SUB --config`` reads as the same configuration."""
    for name, cls in command.selected.items():
        values |= {name: {"class_path": class_path(cls, command.class_options[name]), "init_args": values[name]}}
    if extensions:
        values |= {"extensions": extensions}
    plain = json.loads(json.dumps(values, default=asdict))  # tuples become lists
    return to_yaml(plain)
