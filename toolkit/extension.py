"""Find and load extensions: packages and modules with an :class:`Extension` object. Fast to import.

An installed package is found by its entry point in the group ``toolkit.extensions``. A module is listed in
``--extensions``. See tutorials/extend.md.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from toolkit.dotted_paths import add_cwd_to_path, import_object, load_object
from toolkit.errors import UserError, notice, one_line

BUILT_IN = (
    "toolkit_doctor",
    "toolkit_launch",
    "toolkit_serve",
    "toolkit_report",
    "toolkit_foreign",
    "toolkit_metric",
    "toolkit_interop",
    "toolkit_align",
    "toolkit_plan",
    "toolkit_quantized",
)
"""The modules of the built-in extensions, which are installed with toolkit: extensions/NAME/toolkit_NAME.

Modules, not entry points: a distribution has one extension, and an installation may be older than the sources.
"""
GROUP = "toolkit.extensions"
KINDS = (
    "families", "data", "compilers", "strategies", "loggers", "callbacks", "optimizers", "objectives",
    "heads", "option_groups", "metrics", "run_callbacks", "importers", "dialects",
)  # fmt: skip
"""The fields of :class:`Extension` that hold names."""
Names = Mapping[str, str]
PLACES = ("before", "metrics", "outputs", "after")
"""The names of :attr:`Extension.run_callbacks`, in the order of a run's callbacks."""


@dataclass(frozen=True)
class Command:
    """A subcommand of ``toolkit``.

    Args:
        module: Dotted path of a module with ``setup(...)``: its typed parameters are the command's options, their
            descriptions its help. It imports torch only when ``setup`` runs.
        help: One line for ``toolkit --help``.
        positionals: Parameters whose flag may be omitted, in order.
        example: A command line for the help.
        after: The command that precedes it in its group of ``toolkit --help``. Default: listed last, as an extension.
        wraps_training: Whether it takes a training command and its options, as in ``toolkit NAME pretrain ...``. The
            parameters of ``setup`` are ``command``, and the training command's options as ``run``.
        other_words: Words that may stand in place of that training command.
        takes_training: Whether it takes a training command after ``--``, as ``training``, a :class:`CommandLine`.
        is_distributed: Whether it may run on several processes.
        takes_list: Whether the last positional parameter takes several words. ``setup`` gets them joined by commas.
        checks_folder: Whether ``setup`` checks ``checkpoint_dir``, because it may not be a checkpoint.
    """

    module: str
    help: str
    positionals: tuple[str, ...] = ()
    example: str | None = None
    after: str | None = None
    wraps_training: bool = False
    other_words: tuple[str, ...] = ()
    takes_training: bool = False
    is_distributed: bool = False
    takes_list: bool = False
    checks_folder: bool = False

    def load(self) -> Callable[..., None]:
        """Import the command and return its ``setup``."""
        return import_object(f"{self.module}.setup")


class CommandLine(NamedTuple):
    """A training command line: its words, the command first, and its options."""

    words: list[str]
    options: Any  # TrainingOptions


@dataclass(frozen=True)
class Extension:
    """The names that an extension registers, each with the dotted path of an object. Objects are imported on first use.

    A package defines it as ``EXTENSION`` in a module that does not import torch, because every command imports it.

    Args:
        families: Model families by Hugging Face model_type; modules like those in toolkit/models/families.
        data: Classes derived from :class:`toolkit.data.DataModule`, by the name of the class, for ``--data``.
        compilers: Functions ``compile_blocks(module, block_classes, longest_ragged, groups)``, for ``--compiler``.
        strategies: Classes derived from :class:`toolkit.distributed.strategy.StrategyExtension`, for ``--strategy``.
        loggers: Functions ``start(folder, log_args, resume_step)`` that return a Lightning logger, for
            ``--logger_name``.
        callbacks: Classes derived from :class:`toolkit.Callback`, for ``--callbacks``.
        optimizers: Classes derived from torch.optim.Optimizer, for ``--optimizer.name``.
        objectives: Classes derived from :class:`toolkit.objectives.Objective`, for ``--objective``.
        heads: Objectives, each of which trains the head of its name, for ``--head``.
        option_groups: Frozen dataclasses, whose fields are options of the training commands: ``--GROUP.FIELD``.
        metrics: Functions ``(answers, references, rows)`` of generated answers, for ``--eval.metric``, see
            tutorials/metric.md.
        run_callbacks: Functions ``make(launch, stack)`` that add callbacks to every run, by their place in
            :data:`PLACES`, see :func:`toolkit.training.callbacks.registered.make_callbacks`.
        importers: Objects of :class:`toolkit.checkpoints.importers.Importer`, which read other tools' checkpoints.
        dialects: Objects of :class:`toolkit.config.dialects.Dialect`: other tools' YAML files and names, for
            ``--config`` and :class:`toolkit.Trainer`.
        commands: Subcommands, by name, if the extension is installed.
        implements: Names of toolkit's options that need such an extension: eval.metric and eval.tasks.
        planner: Path of a module or an object that chooses "auto" by estimates, plans runs and advises when memory is
            out, see :class:`toolkit.planning.planner.Planner`.
        quantizer: Path of a module or an object that quantizes weights in the forward pass and in exports, see
            :class:`toolkit.models.quantizer.Quantizer`.
        check: Path of a function that gets the :class:`toolkit.planning.run_args.RunArgs` of every run and raises a
            UserError if options of the extension have no effect or are incompatible.
        check_start: Path of a function ``(args, has_callbacks)`` that is called in the first process before a run
            starts, and raises a UserError if it cannot use a file, a package or another process.
    """

    families: Names = field(default_factory=dict)
    data: Names = field(default_factory=dict)
    compilers: Names = field(default_factory=dict)
    strategies: Names = field(default_factory=dict)
    loggers: Names = field(default_factory=dict)
    callbacks: Names = field(default_factory=dict)
    optimizers: Names = field(default_factory=dict)
    objectives: Names = field(default_factory=dict)
    heads: Names = field(default_factory=dict)
    option_groups: Names = field(default_factory=dict)
    metrics: Names = field(default_factory=dict)
    run_callbacks: Names = field(default_factory=dict)
    importers: Names = field(default_factory=dict)
    dialects: Names = field(default_factory=dict)
    commands: Mapping[str, Command] = field(default_factory=dict)
    implements: tuple[str, ...] = ()
    planner: str | None = None
    quantizer: str | None = None
    check: str | None = None
    check_start: str | None = None

    def __post_init__(self) -> None:
        for kind in KINDS:
            names = getattr(self, kind)
            pairs = names.items() if isinstance(names, Mapping) else [(names, None)]
            if not all(isinstance(name, str) and isinstance(path, str) for name, path in pairs):
                raise TypeError(f"{kind} {names}: must map names to dotted paths, as strings")
        if unknown := [place for place in self.run_callbacks if place not in PLACES]:
            raise TypeError(f"run_callbacks {unknown[0]}: must be one of {', '.join(PLACES)}")
        if not all(isinstance(command, Command) for command in self.commands.values()):
            raise TypeError(f"commands {self.commands}: must map names to objects of toolkit.extension.Command")


LIBRARIES = Extension(
    optimizers={"AdamWScheduleFree": "schedulefree.AdamWScheduleFree", "SOAP": "pytorch_optimizer.SOAP"},
)
"""Classes of optional packages, as an extension would register them."""


class Entry(NamedTuple):
    """A registered name. ``origin`` is the extension's distribution, or its module if it is not installed.

    For :data:`LIBRARIES` and built-in extensions it is ``toolkit``.
    """

    path: str
    origin: str


_module_extensions: dict[str, Extension] = {}  # by module name, from --extensions


@cache
def _installed() -> dict[str, tuple[Extension, str]]:
    """Return {distribution: (extension, module)} for installed packages."""
    from importlib import metadata  # slow to import

    extensions_by_name = {}
    for point in metadata.entry_points(group=GROUP):
        name = point.dist.name if point.dist is not None else point.value
        try:
            extensions_by_name[name] = _import_extension(point.value, f"extension {name}"), point.value
        except UserError as error:  # a broken package must not stop every command
            notice(one_line(f"warning: not used: {error}"))
    return extensions_by_name


@cache
def _built_in() -> tuple[dict[str, Extension], str]:
    """Return the built-in extensions, and how to get those that cannot be imported."""
    loaded, errors = {}, {}
    for name in BUILT_IN:
        try:
            loaded[name] = import_object(f"{name}.EXTENSION")
        except Exception as error:  # what does not need it must run
            errors[name] = one_line(error)
    if not errors:
        return loaded, ""
    reason = next(iter(errors.values()))
    hint = "this installation is older than its sources: run pip install -e . again"
    return loaded, f"{', '.join(errors)}: cannot be imported ({reason}); {hint}"


def missing_built_in() -> str:
    """Return a message on built-in extensions that cannot be imported; empty if there are none."""
    return _built_in()[1]


def is_built_in(cls: type) -> bool:
    """Whether toolkit or a built-in extension defines a class."""
    return cls.__module__.partition(".")[0] in ("toolkit", *BUILT_IN)


def all_extensions() -> Iterator[tuple[str, Extension]]:
    """Yield all extensions, the built-in ones first, with their origin, see :class:`Entry`."""
    yield from (("toolkit", extension) for extension in (LIBRARIES, *_built_in()[0].values()))
    yield from extensions().items()


def is_known(name: str) -> bool:
    """Whether an extension with this distribution or module name is loaded."""
    names = [*_module_extensions, *_installed(), *(module for _, module in _installed().values())]
    return _normalize_name(name) in map(_normalize_name, names)


def add_extensions(names: str | Iterable[str] | None, source: str = "--extensions") -> None:
    """Load extensions from modules, also in the current folder. Installed packages are already loaded.

    Args:
        names: Dotted paths of modules with an ``EXTENSION``, or names of distributions.
        source: The option that lists them, for error messages.
    """
    for name in split_names(names, source):
        if not is_known(name):
            add_cwd_to_path()
            _module_extensions[name] = _import_extension(name, f"{source} {name}")


def split_names(value: Any, source: str = "--extensions") -> list[str]:
    """Parse a list of names, such as ``a,b`` or ``["a", "b"]``."""
    names = value.strip("[]").split(",") if isinstance(value, str) else [] if value is None else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name.strip() for name in names):
        raise UserError(f"{source} {value}: must be the names of extensions, such as my_module")
    return [name.strip() for name in names]


def extensions() -> dict[str, Extension]:
    """Return the extensions that are not built in, by origin, see :class:`Entry`."""
    return {name: extension for name, (extension, _) in _installed().items()} | _module_extensions


def registered(kind: str, builtin_names: Collection[str] = ()) -> dict[str, Entry]:
    """Return all extensions' entries of a kind (see :data:`KINDS`) by name. Reject duplicates and ``builtin_names``."""
    entries: dict[str, Entry] = {}
    for origin, extension in all_extensions():
        for name, path in getattr(extension, kind).items():
            if name in builtin_names or name in entries:
                other = entries[name].origin if name in entries else "toolkit"
                raise UserError(f"extension {origin}: {kind} {name}: {other} already defines this name; rename it")
            entries[name] = Entry(path, origin)
    return entries


def load_registered(kind: str, name: str) -> Any:
    """Import the object that an extension registers under a name."""
    if (entry := registered(kind).get(name)) is None:
        raise UserError("; ".join(filter(None, [f"{kind} {name}: no extension defines it", missing_built_in()])))
    return load_object(entry.path, f"extension {entry.origin}: {kind} {name}: {entry.path}")


def load_from_all(kind: str, name: str) -> Iterator[Any]:
    """Import what each extension registers under a name that several may have."""
    for origin, extension in all_extensions():
        if (path := getattr(extension, kind).get(name)) is not None:
            yield load_object(path, f"extension {origin}: {kind} {name}: {path}")


def import_by_name(package: str, paths: Names) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package (PEP 562), which imports an object by the dotted path of its name.

    Built-in extensions add the names of the kind that the package is called.
    """

    def get(name: str) -> Any:
        kind = package.rpartition(".")[2]
        added = [getattr(extension, kind) for extension in _built_in()[0].values()] if kind in KINDS else []
        for names in (paths, *added):
            if name in names:
                return import_object(names[name])
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


def load_single(kind: str) -> Any | None:
    """Return the ``planner`` or ``quantizer``; None if no extension has one."""
    paths = [(origin, path) for origin, extension in all_extensions() if (path := getattr(extension, kind)) is not None]
    if not paths:
        return None
    origin, path = paths[-1]  # a user's replaces the built-in one
    return load_object(path, f"extension {origin}: {kind} {path}")


def require_single(kind: str, option: str) -> Any:
    """Return the ``planner`` or ``quantizer`` that an option needs."""
    if (loaded := load_single(kind)) is None:
        raise UserError("; ".join(filter(None, [f"{option}: needs an extension with a {kind}", missing_built_in()])))
    return loaded


def run_checks(name: str, *args: Any) -> None:
    """Call each extension's ``check`` or ``check_start``."""
    for origin, extension in all_extensions():
        if (path := getattr(extension, name)) is not None:
            load_object(path, f"extension {origin}: {name} {path}")(*args)


def missing_message(name: str) -> str:
    """Return a message on how to get a missing extension."""
    is_name = re.fullmatch(r"[\w.-]+", name) is not None
    if is_name and "-" not in name:
        file = f"{name.partition('.')[0]}.py"
        return f"needs the extension {name}: add --extensions {name} in the folder of {file}, or install it"
    return f"needs the extension {name!r}, which is not installed; install it if you trust where the name comes from"


def describe_extensions() -> Iterator[str]:
    """Yield one line per extension with its registered names."""
    from importlib.metadata import version

    for origin, extension in extensions().items():
        kinds = [kind for kind in (*KINDS, "commands") if getattr(extension, kind)]
        names = [f"{kind.replace('_', ' ')}: {', '.join(getattr(extension, kind))}" for kind in kinds]
        number = f" {version(origin)}" if origin in _installed() else ""
        yield f"{origin}{number} ({'; '.join(names)})"


def extension_versions() -> dict[str, str]:
    """Return each extension's version and source hash, by origin."""
    from importlib.metadata import version

    from toolkit.source_hash import hash_sources  # slow to import

    versions = {}
    for origin, extension in extensions().items():
        installed = _installed().get(origin)
        paths = [path for kind in KINDS for path in getattr(extension, kind).values()]
        paths += filter(None, [extension.check, extension.check_start, extension.planner, extension.quantizer])
        modules = {(origin if installed is None else installed[1]), *(path.rpartition(".")[0] for path in paths)}
        modules |= {command.module for command in extension.commands.values()}
        number = "" if installed is None else f"{version(origin)} "
        versions[origin] = f"{number}(sources {hash_sources(modules - {''})})"
    return versions


def _import_extension(module: str, what: str) -> Extension:
    """Import a module and return its ``EXTENSION``. For ``what`` see :func:`load_object`."""
    extension = getattr(load_object(module, what), "EXTENSION", None)
    if not isinstance(extension, Extension):
        raise UserError(f"{what}: has no EXTENSION, an object of toolkit.extension.Extension")
    return extension


def _normalize_name(name: str) -> str:
    """Normalize a package name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
