"""The command line: dispatch to subcommands, and exit codes. Fast to import."""

import difflib
import importlib
import io
import math
import os
import resource
import shutil
import signal
import sys
import textwrap
import threading
import traceback
from errno import EPIPE
from importlib.abc import MetaPathFinder
from typing import Any, TextIO, cast

from toolkit.commands import COMMANDS, GROUPS, all_commands
from toolkit.config import other_tools
from toolkit.config.checks import print_once
from toolkit.distributed.rendezvous import report_failure
from toolkit.distributed.restarts import end_with_parent, is_supervised, supervise
from toolkit.distributed.signals import hold_signals, ignore_until_exit
from toolkit.errors import CommandError, TerminatedError, did_you_mean, notice, one_line, require_bitsandbytes
from toolkit.extension import Command, missing_built_in
from toolkit.io.atomic import NO_SPACE
from toolkit.io.streams import EscapedOutput, SafeOutput, open_missing_streams

_IMPORT_BYTES = 1_100_000_000  # address space that importing torch takes; with less, OpenBLAS may retry forever
INTERRUPTED, PIPE_CLOSED, TERMINATED = 130, 141, 143  # 128 + SIGINT, SIGPIPE, SIGTERM


def main(argv: list[str] | None = None) -> int:
    """Run ``toolkit ARGV`` and return its exit code (see tutorials/run_files.md)."""
    open_missing_streams()
    if argv is None:  # not called by another program
        sys.stderr = cast("TextIO", SafeOutput(sys.stderr))  # a full disk must not change the exit code
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # like stderr: unencodable text must not end a command
            if sys.stdout.isatty():
                sys.stdout = cast("TextIO", EscapedOutput(sys.stdout))
    code = 0
    try:
        code = dispatch(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        if argv is None:
            ignore_until_exit()
        return code
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise Python reports an error when it flushes stdout at exit
        if isinstance(error, BrokenPipeError):
            return PIPE_CLOSED
        return code or _end("toolkit", f"cannot write its output: {error.strerror}; free some space, or redirect it", 2)


def dispatch(argv: list[str]) -> int:
    name, *rest = argv or ["--help"]
    if name in COMMANDS or name in all_commands():
        return run(name, rest)
    if name in ("-h", "--help"):
        commands, columns = all_commands(), shutil.get_terminal_size().columns
        width = max(map(len, commands))
        others = [name for name, c in commands.items() if name not in COMMANDS and c.after not in commands]
        groups = dict.fromkeys(others[:1], "Extensions") | GROUPS
        usage = "usage: toolkit COMMAND [--option value ...] | COMMAND --help | --version"
        print(textwrap.fill(usage, columns, break_long_words=False))
        for name, command in commands.items():
            if name in groups:
                print(f"\n{groups[name]}")
            line, indent = f"  {name:{width}} {command.help}", " " * (width + 3)
            print(textwrap.fill(line, columns, subsequent_indent=indent, break_long_words=False))
    elif name == "--version":
        print(f"toolkit {importlib.import_module('toolkit').__version__}")
    else:
        hint = other_tools.COMMAND_HINTS.get(name) or did_you_mean(name, all_commands(), cutoff=0.65)
        for similar in () if hint else difflib.get_close_matches(name, other_tools.COMMAND_HINTS, 1, cutoff=0.8):
            hint = other_tools.COMMAND_HINTS[similar]
        message = f"{name}: no such command{hint or '; see toolkit --help'}"
        return _end("toolkit", "; ".join(filter(None, [message, missing_built_in()])), 2)
    return 0


def run(name: str, argv: list[str]) -> int:
    """Run one subcommand and return its exit code, with one line on stderr for errors."""
    command, program = COMMANDS.get(name) or all_commands()[name], f"toolkit {name}"
    is_parsed = False
    try:
        if command.is_distributed and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _terminate)  # report the end to the other processes
        hold_signals(False)
        parse = importlib.import_module("toolkit.cli.parser").parse
        arguments, is_parsed = parse(name, argv), True
        if arguments is not None:
            if missing_built_in():
                notice(f"warning: not used: {missing_built_in()}")
            _check_before_torch(name, command, arguments)
            shared = getattr(arguments.get("options"), "shared", None)
            if shared is not None and shared.max_restarts:
                if not is_supervised():
                    return supervise([name, *argv], shared.max_restarts)
                end_with_parent()
            if "torch" not in sys.modules:
                sys.meta_path.insert(0, _BeforeTorchImport())
            command.load()(**arguments)
        return 0
    except TerminatedError:
        return _end(program, "stopped by SIGTERM before training began or after it ended", TERMINATED)
    except KeyboardInterrupt:
        return _end(program, "interrupted", INTERRUPTED)
    except CommandError as error:
        from toolkit.config.dialects import add_origin  # imports what a command line without errors may not need

        missing = "" if is_parsed else missing_built_in()  # they may define an unknown name
        return _end(program, "; ".join(filter(None, [add_origin(str(error)), missing])), error.exit_code)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (EPIPE, *NO_SPACE):
            raise  # of stdout; or of a file, where no one expects it
        if "Too many open files" in str(error):
            return _end(program, f"{error}; raise the limit of this shell: ulimit -n", 2)
        is_memory_error = isinstance(error, MemoryError) or "annot allocate memory" in str(error)
        # Imports fail in these ways, too, when they run out of address space.
        is_unclear = isinstance(error, SystemError) or "failed to map segment" in str(error)
        if (is_memory_error or is_unclear) and math.isfinite(limit := _max_address_space()):
            sys.unraisablehook = lambda _: None  # exit handlers run out of memory, too
            return _end(program, f"out of memory; raise the limit of this shell: ulimit -v (now {limit // 1024})", 2)
        if is_memory_error:
            return _end(program, "out of CPU memory; set TOOLKIT_TRACEBACK=1 to see where", 1)
        if "torchvision::nms does not exist" in str(error):
            return _end(program, "the installed torchvision breaks torch; run: pip uninstall -y torchvision", 2)
        return _end(program, f"{type(error).__name__}: {error}", 1, is_internal=True)


def _check_before_torch(name: str, command: Command, arguments: dict[str, Any]) -> None:
    """Check checkpoint folder and packages before importing torch. Some commands check the folder themselves."""
    from toolkit.checkpoints.find import find_checkpoint_dir
    from toolkit.io.paths import is_url

    values = dict(arguments)
    for group in arguments.keys() & {"options", "shared"}:
        values |= vars(arguments[group])
    folder = values.get("checkpoint_dir")
    is_checked = command.checks_folder or (name == "merge_lora" and is_url(folder))
    if folder is not None and not is_checked:
        find_checkpoint_dir(folder)
    if values.get("quantize") is not None:
        require_bitsandbytes(f"--quantize {values['quantize']}")


def _max_address_space() -> float:
    """Return the limit of the address space (``ulimit -v``) in bytes; inf if there is none."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return math.inf if limit == resource.RLIM_INFINITY else limit


class _BeforeTorchImport(MetaPathFinder):
    """Checks the address space before torch is imported, and prints a line on a terminal: the import takes seconds."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.startswith("torch."):  # "torch" alone is also looked for without an import
            if _max_address_space() < _IMPORT_BYTES:
                raise MemoryError
            sys.meta_path.remove(self)
            if sys.stderr.isatty():
                print_once("loading PyTorch")


def _terminate(number: int, frame: object) -> None:
    raise TerminatedError


def _end(program: str, message: object, code: int, is_internal: bool = False) -> int:
    error, text = sys.exc_info()[1], one_line(message)  # no control sequences from untrusted files
    if is_internal or (os.environ.get("TOOLKIT_TRACEBACK") == "1" and error):
        traceback.print_exc()

    def report(prefix: str) -> None:
        if text and not is_internal:
            notice(f"{program}: {prefix}{text}")

    command = all_commands().get(program.removeprefix("toolkit "))
    is_alone = command is not None and not command.is_distributed  # no other process waits for it
    report("") if is_alone else report_failure(error, text, code, report)
    return code
