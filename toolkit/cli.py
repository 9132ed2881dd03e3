"""The command line: the table of subcommands, and how a command's end becomes an exit code. Imports nothing heavy."""

from __future__ import annotations

import importlib
import os
import sys
import traceback

from toolkit.errors import GuardError, StoppedBySignal, UserError, did_you_mean

# name: (module with setup(...), parameters that may be given without their flag, help in one line)
COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "pretrain": ("toolkit.commands.pretrain", ("model_name",), "train a language model, from scratch or further"),
    "prepare_data": ("toolkit.commands.prepare_data", (), "tokenise data once, ahead of a run"),
    "generate": ("toolkit.commands.generate", ("checkpoint_dir",), "let a model continue a text"),
    "evaluate": ("toolkit.commands.evaluate", ("checkpoint_dir",), "loss, perplexity and bits per byte on data"),
    "convert_to_hf": ("toolkit.commands.convert_to_hf", ("checkpoint_dir", "out_dir"), "write a Hugging Face folder"),
}
INTERRUPTED, PIPE_CLOSED = 130, 141  # 128 + SIGINT, 128 + SIGPIPE


def main(argv: list[str] | None = None) -> int:
    """Run ``toolkit ARGV`` and return its exit code (DESIGN section 3)."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(overview())
    elif name == "--version":
        print(f"toolkit {importlib.import_module('importlib.metadata').version('toolkit')}")
    elif name in COMMANDS:
        return run(name, rest)
    else:
        print(f"toolkit: {name}: no such command{did_you_mean(name, COMMANDS)}", file=sys.stderr)
        return 2
    return 0


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {help_line}" for name, (_, _, help_line) in COMMANDS.items()]
    head = "usage: toolkit COMMAND [--option value ...]\n       toolkit COMMAND --help\n       toolkit --version\n"
    return "\n".join([head, "commands:", *lines])


def run(name: str, argv: list[str]) -> int:
    """Run one subcommand and turn the way it ends into an exit code, with one line on stderr if it is not a success."""
    module, positionals, _ = COMMANDS[name]
    try:
        setup = importlib.import_module(module).setup
        arguments = importlib.import_module("toolkit.cli_parser").parse(name, setup, positionals, argv)
        if arguments is not None:
            setup(**arguments)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains when it flushes stdout at exit
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return _end(name, "interrupted", INTERRUPTED)
    except UserError as error:
        return _end(name, error, 2)
    except GuardError as error:
        return _end(name, error, 3)
    except StoppedBySignal as error:
        return _end(name, error, 128 + error.signal_number)
    except Exception as error:
        if "torchvision::nms does not exist" in str(error):
            return _end(name, "the installed torchvision breaks torch; run: pip uninstall -y torchvision", 2)
        traceback.print_exc()
        return 1


def _end(name: str, message: object, code: int) -> int:
    if os.environ.get("TOOLKIT_TRACEBACK") == "1":
        traceback.print_exc()
    print(f"toolkit {name}: {' '.join(str(message).split())}", file=sys.stderr)
    return code
