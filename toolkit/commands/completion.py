"""`toolkit completion`: completion of commands, flags and values in a shell."""

import importlib
from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args, get_origin

from toolkit.config import STRATEGIES
from toolkit.config.classes import parameters_of
from toolkit.config.command import COMMON_OPTIONS, CommandOptions
from toolkit.config.types import union_members
from toolkit.extension import registered
from toolkit.io.paths import is_path_option

PATH = "<path>"
_FIND = """\
_toolkit_table='{table}'
_toolkit_choices() {{  # command, the word after it, previous word, current word: sets choices
    local command flag values flags= words=
    while read -r command flag values; do
        if [[ $command != "$1" && $command != "$2" ]]; then continue; fi
        if [[ $flag == "$3" ]]; then choices=$values; return; fi
        if [[ $flag == - ]]; then words="$words $values"; else flags="$flags $flag"; fi
    done <<< "$_toolkit_table"
    if [[ $4 == -* || -z $words ]]; then choices=$flags; else choices=$words; fi
}}
"""
_BASH = """\
_toolkit() {{
    local choices= i=$COMP_CWORD word=${{COMP_WORDS[COMP_CWORD]}}
    # --flag=value is three words
    if [[ $word == = ]]; then word=; elif [[ ${{COMP_WORDS[i-1]}} == = ]]; then ((i--)); fi
    if (( COMP_CWORD == 1 )); then _toolkit_choices toolkit "" "" "$word"
    else _toolkit_choices "${{COMP_WORDS[1]}}" "${{COMP_WORDS[2]}}" "${{COMP_WORDS[i-1]}}" "$word"
    fi
    COMPREPLY=()
    if [[ $choices == *"<path>"* ]]; then compopt -o default; else COMPREPLY=($(compgen -W "$choices" -- "$word")); fi
}}
complete -F _toolkit toolkit
"""
_ZSH = """\
_toolkit() {{
    local choices= word=$words[CURRENT] previous=$words[CURRENT-1]
    if [[ $word == --*=* ]]; then previous=${{word%%=*}} word=${{word#*=}}; compset -P '*='; fi
    if (( CURRENT == 2 )); then _toolkit_choices toolkit "" "" "$word"
    else _toolkit_choices "$words[2]" "$words[3]" "$previous" "$word"
    fi
    if [[ $choices == *"<path>"* ]]; then _files; else compadd -- ${{=choices}}; fi
}}
if [[ $funcstack[1] == _toolkit ]]; then _toolkit "$@"; else compdef _toolkit toolkit; fi
"""


class _Row(NamedTuple):
    command: str  # toolkit: the program itself
    flag: str  # -: a word without a flag
    values: str  # separated by spaces, or PATH


def setup(shell: Literal["bash", "zsh", "fish"]) -> None:
    """Print a script that completes toolkit's commands, flags and values in a shell.

    Write the script again after an update, or after installing an extension.

    Args:
        shell: The shell.
    """
    if shell == "fish":
        print("complete -c toolkit -f", *map(_fish_line, _rows()), sep="\n")
    else:
        script = _FIND + _BASH if shell == "bash" else f"#compdef toolkit\n{_FIND}{_ZSH}"
        print(script.format(table="\n".join(map(" ".join, _rows()))), end="")


def _rows() -> Iterator[_Row]:
    """Yield all flags of all commands."""
    from toolkit.commands import COMMANDS, WRAPPING
    from toolkit.models.families import list_names_by_family

    yield from (_Row("toolkit", flag, "") for flag in ("--help", "--version"))
    yield _Row("toolkit", "-", " ".join(COMMANDS))
    for name, (module, positionals, _) in COMMANDS.items():
        command = CommandOptions(importlib.import_module(module).setup)
        values = {key: _values(option.kind) for key, option in command.options().items()}
        for base in command.class_options:
            classes = command.choices(base)
            values |= {
                f"{base}.{key}": _values(p.annotation) for c in classes.values() for key, p in parameters_of(c).items()
            }
            values[base] = " ".join(classes)
        values |= dict.fromkeys(COMMON_OPTIONS, "")
        if "strategy" in values:
            values["strategy"] = " ".join([*STRATEGIES, *registered("strategies", STRATEGIES)])
        if name == "schema":
            values["command"] = " ".join(command for command in COMMANDS if command not in WRAPPING)
        if "model_name" in values:
            values["model_name"] = " ".join(chain(*list_names_by_family().values()))
        values |= {key: PATH for key in values if is_path_option(key)} | {"config": PATH}
        yield from (_Row(name, f"--{key}", text) for key, text in values.items())
        yield from (_Row(name, "-", values[key]) for key in positionals[:1] if values[key])


def _values(kind: Any) -> str:
    """Return the values of a type's Literals and of booleans."""
    parts = [("true", "false") if part is bool else part for part in union_members(kind)]
    return " ".join(str(v) for p in parts if type(p) is tuple or get_origin(p) is Literal for v in get_args(p) or p)


def _fish_line(row: _Row) -> str:
    condition = "use_subcommand" if row.command == "toolkit" else f"seen_subcommand_from {row.command}"
    flag = "" if row.flag == "-" else f" -l {row.flag[2:]}"
    if row.values == PATH:
        return f"complete -c toolkit -n '__fish_{condition}'{flag} -F" + " -r" * bool(flag)
    values = f" -a '{row.values}'" if row.values else ""
    takes_value = flag and row.command != "toolkit"
    return f"complete -c toolkit -n '__fish_{condition}'{flag}{values}" + " -x" * bool(takes_value)
