"""Package layering: allowed imports, modules without heavy imports, and forbidden calls (S4 no-code-from-files)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import pytest
from helpers.sources import EXTENSIONS, FILES, FOLDERS, PACKAGE, file_name, module_name

import toolkit
from toolkit.commands import all_commands
from toolkit.extension import BUILT_IN

# From the bottom up; a package may import itself and lower ones. Imports inside functions and for types count too.
LAYERS = [
    {"deferred", "dotted_paths", "errors", "escape", "private_torch", "source_hash", "version"},
    {"io"},
    {"extension"},
    {"config"},
    {"ui"},
    {"models"},
    {"data"},
    {"distributed"},
    {"optim"},
    {"checkpoints"},
    {"inference"},
    {"objectives"},
    {"planning"},
    {"training"},
    {"api", "commands", "model"},
    {*BUILT_IN},
    {"cli", "__main__"},
]
BETWEEN: dict[tuple[str, str], str] = {}
"""Imports between built-in extensions, with the reason."""
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}
LIGHT = [
    "toolkit", "toolkit.cli", "toolkit.cli.parser", "toolkit.cli.help", "toolkit.config",
    "toolkit.config.command", "toolkit.planning.run_args", "toolkit.planning.start_checks",
    "toolkit.planning.compatibility", "toolkit.planning.facts", "toolkit.planning.training_options",
    "toolkit.errors", "toolkit.io.checksums",
    "toolkit.io.tempfiles", "toolkit.io.paths", "toolkit.io.safe_parse", "toolkit.models.config",
    "toolkit.models.config_checks",
    "toolkit.models.families", "toolkit.data", "toolkit.objectives", "toolkit.ui",
    *BUILT_IN, *(command.module for command in all_commands().values()),
]  # fmt: skip
HEAVY = {"torch", "lightning.fabric", "litdata", "transformers", "tokenizers", "numpy", "rich"}


def level(module: str) -> int | None:
    """Return the level of a module of toolkit or of a built-in extension; None for the package toolkit itself."""
    rest = module.removeprefix("toolkit.")
    is_config = re.match(r"models\.config(_checks)?(\.|$)", rest)
    return LEVEL["config"] if is_config else LEVEL.get(rest.partition(".")[0])


@cache
def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


@pytest.fixture(scope="module", autouse=True)
def _nodes():
    yield
    nodes_of.cache_clear()


def imported(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, module) for all imports from toolkit and built-in extensions, inside functions and for types too."""
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] in FOLDERS)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                base = module.split(".")[: len(module.split(".")) - node.level + is_package]
                origin = ".".join([*base, *filter(None, [origin])])
            if origin.split(".")[0] in FOLDERS:
                # `from toolkit.models import config` imports toolkit.models.config
                yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def upward_imports(source: str, module: str, is_package: bool) -> list[str]:
    own = level(module)
    return [
        f"{module}:{line} imports {name}"
        for line, name in imported(source, module, is_package)
        if own is not None
        and (level(name) is None or level(name) > own)
        and not (module.split(".")[0] in BUILT_IN and name.partition(".")[2] in toolkit.__all__)  # as users do
    ]


def imports_between(source: str, module: str, is_package: bool) -> set[tuple[str, str]]:
    """Return the imports of other built-in extensions, as pairs of packages."""
    own = module.partition(".")[0]
    packages = {name.partition(".")[0] for _, name in imported(source, module, is_package)}
    return {(own, package) for package in packages - {own, "toolkit"} if own in BUILT_IN}


def test_imports_go_one_way():
    found = [
        wrong
        for file in FILES
        for wrong in upward_imports(file.read_text(encoding="utf-8"), module_name(file), file.name == "__init__.py")
    ]
    assert not found, f"the order is {LAYERS}"


def test_built_in_extensions_import_each_other_only_with_a_reason():
    found = set()
    for file in FILES:
        found |= imports_between(file.read_text(encoding="utf-8"), module_name(file), file.name == "__init__.py")
    assert found == BETWEEN.keys()
    assert imports_between("def f():\n    from toolkit_doctor import verify", BUILT_IN[-1], True) or len(BUILT_IN) == 1


def extensions_named(source: str) -> list[str]:
    """Return the built-in extensions that a module names in a string."""
    strings = [node.value for node in nodes_of(source) if isinstance(node, ast.Constant)]
    return [name for text in strings if isinstance(text, str) for name in re.findall("|".join(BUILT_IN), text)]


def test_toolkit_names_built_in_extensions_in_one_tuple():
    files = [file for file in FILES if module_name(file).partition(".")[0] == "toolkit"]
    found = {file_name(file): names for file in files if (names := extensions_named(file.read_text(encoding="utf-8")))}
    names = found.pop("extension.py")
    assert not found and names == [*BUILT_IN]
    assert extensions_named("import_object('toolkit_doctor.verify')") and not extensions_named("x = toolkit_doctor")


def test_built_in_extensions_are_the_folders_without_a_distribution():
    folders = {path for path in EXTENSIONS.iterdir() if path.is_dir() and not (path / "pyproject.toml").exists()}
    assert folders == {FOLDERS[name].parent for name in BUILT_IN}
    assert all((folder / "README.md").exists() and any((folder / "tests").glob("test_*.py")) for folder in folders)


def test_no_module_names_a_higher_one_in_a_string():
    """Such as for import_object("toolkit.commands.pretrain"), an import that the layers do not see."""
    found = []
    for file in FILES:
        module = module_name(file)
        for node in nodes_of(file.read_text(encoding="utf-8")):
            text = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(r"toolkit(\.\w+)+\.?", text) and level(module) is not None:
                found += [f"{module}:{node.lineno} {text}"] if (level(text) or 0) > level(module) else []
    assert not found


def test_contributing_has_the_order_of_the_layers():
    line = re.search(r"^`(errors, .+)`,$", (PACKAGE.parent / "CONTRIBUTING.md").read_text(), re.M)[1]
    said = [{*layer.split(", ")} for layer in line.replace("(built-in extensions)", ", ".join(BUILT_IN)).split(" < ")]
    small = {"deferred", "version", "model", "__main__"}  # files that say nothing by their place
    assert said == [layer - small for layer in LAYERS]


def test_every_module_has_a_layer():
    homeless = [module_name(f) for f in FILES if module_name(f) != "toolkit" and level(module_name(f)) is None]
    assert not homeless


def test_upward_imports_are_detected():
    assert upward_imports("def f():\n    from toolkit.training.trainer import Trainer", "toolkit.data.base", False)
    assert upward_imports("from toolkit import training", "toolkit.data.base", False)
    assert upward_imports("from ..models import gpt", "toolkit.ui.live", False)
    assert upward_imports("import toolkit.models.gpt", "toolkit.models.config", False)
    assert not upward_imports("from toolkit.models.config import ModelConfig", "toolkit.ui.live", False)
    assert not upward_imports("from . import base", "toolkit.data", True)
    assert upward_imports("import toolkit_doctor", "toolkit.training.engine", False)
    assert upward_imports("from toolkit.cli import parser", "toolkit_doctor.verify", False)
    assert not upward_imports("from toolkit.training.run import Run", "toolkit_doctor.verify", False)


def import_graph(sources: dict[str, tuple[str, bool]]) -> dict[str, set[str]]:
    """Return the modules that each module imports, also inside functions and under TYPE_CHECKING.

    Args:
        sources: Content of each module, and whether it is a package.
    """
    graph = {}
    for module, (source, is_package) in sources.items():
        names = {name for _, name in imported(source, module, is_package)}
        # `from toolkit.models.config import ModelConfig` imports toolkit.models.config
        graph[module] = {name if name in sources else name.rpartition(".")[0] for name in names} - {module}
    return graph


def import_circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of modules that import each other, directly or through others (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for other in sorted(graph.get(module, ())):
            if other not in order:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == order[module]:
            at = stack.index(module)
            if len(stack) > at + 1:
                circles.append(sorted(stack[at:]))
            del stack[at:]

    for module in graph:
        if module not in order:
            visit(module)
    return circles


def test_imports_have_no_circles():
    graph = import_graph({module_name(f): (f.read_text(encoding="utf-8"), f.name == "__init__.py") for f in FILES})
    found = import_circles(graph)
    drawn = [f"{module} -> {', '.join(sorted(graph[module] & {*circle}))}" for circle in found for module in circle]
    assert not found, "share what both need in a third module, or pass it as an argument:\n" + "\n".join(drawn)


def test_circular_imports_are_detected():
    def circles(source: str, *others: str) -> list[list[str]]:
        sources = {f"toolkit.ui.{name}": (text, False) for name, text in zip("abc", (source, *others), strict=False)}
        return import_circles(import_graph(sources))

    late = "def f():\n    from toolkit.ui import b"
    for_types = "if TYPE_CHECKING:\n    from toolkit.ui.b import B"
    assert circles(late, "from toolkit.ui.a import A") == [["toolkit.ui.a", "toolkit.ui.b"]]
    assert circles(for_types, "import toolkit.ui.c", late.replace("b", "a")) == [[f"toolkit.ui.{m}" for m in "abc"]]
    assert not circles(late, "") and not circles(
        for_types, "import toolkit.ui.c", "from toolkit.errors import UserError"
    )
    assert upward_imports("if TYPE_CHECKING:\n    from toolkit.training.run import Run", "toolkit.data.base", False)


def unknown_references(source: str, sources: dict[str, str]) -> list[str]:
    """Return the references of docstrings, such as :func:`toolkit.x.f`, that no module defines."""
    references = re.findall(r":(?:func|class|data|meth|mod|attr):`~?(toolkit[\w.]*)`", source)
    unknown = []
    for reference in references:
        module = reference
        while module not in sources:
            module = module.rpartition(".")[0]
        name = reference.removeprefix(module).strip(".").partition(".")[0]
        nodes = nodes_of(sources[module])
        defined = {getattr(node, "name", None) or getattr(node, "id", None) for node in nodes}
        if name and name not in defined and not (module == "toolkit" and name in toolkit.__all__):
            unknown.append(reference)
    return unknown


def test_references_in_docstrings_exist():
    sources = {module_name(file): file.read_text(encoding="utf-8") for file in FILES}
    found = {module: unknown for module, text in sources.items() if (unknown := unknown_references(text, sources))}
    assert not found


def private_torch_names(source: str) -> list[str]:
    """Private modules and functions of torch that a module uses."""
    names = []
    for node in nodes_of(source):
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names.append(ast.unparse(node))
    return [name for name in names if re.fullmatch(r"torch(\.\w+)*\._[a-z]\w*(\.\w+)*", name)]


def test_private_apis_of_torch_are_in_one_module():
    assert private_torch_names("from torch._dynamo import config") == ["torch._dynamo.config"]
    assert private_torch_names("f = torch.optim._muon, torch.nn.Linear, torch.__version__") == ["torch.optim._muon"]
    exempt = ("toolkit.private_torch", "toolkit_plan.measure.")  # the latter: from shapes alone
    files = [f for f in FILES if not module_name(f).startswith(exempt)]
    assert not {module_name(f): names for f in files if (names := private_torch_names(f.read_text(encoding="utf-8")))}


def unsafe_calls(source: str) -> list[str]:
    """weights_only=False, unpicklers, torch.load without weights_only=True, YAML loaders that create objects."""
    found = []
    for node in nodes_of(source):
        if isinstance(node, ast.ClassDef) and any("Unpickler" in ast.unparse(base) for base in node.bases):
            found.append(f"line {node.lineno}: class {node.name}")
        if not isinstance(node, ast.Call):
            continue
        called, keywords = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
        wrong = (
            called.rpartition(".")[0] in ("pickle", "_pickle", "dill", "joblib") and "dump" not in called,
            called == "torch.load" and keywords.get("weights_only") != "True",
            keywords.get("weights_only", "True") != "True",
            called in ("yaml.unsafe_load", "yaml.full_load", "eval", "exec"),
            called == "yaml.load" and keywords.get("Loader") != "yaml.SafeLoader",
        )
        if any(wrong):
            found.append(f"line {node.lineno}: {ast.unparse(node)[:80]}")
    return found


def test_s4_nothing_that_can_run_code_is_unpickled():
    found = {module_name(file): unsafe_calls(file.read_text(encoding="utf-8")) for file in FILES}
    # The one unpickler makes plain values only; tests/checkpoints/run/test_sharded.py shows what it refuses.
    (unpickler,) = found.pop("toolkit.checkpoints.run.shard_metadata")
    assert unpickler.endswith("class _Unpickler")
    assert not {name: calls for name, calls in found.items() if calls}


@pytest.mark.parametrize(
    "call",
    [
        "torch.load(f)", "torch.load(f, weights_only=False)", "load(f, weights_only=flag)", "pickle.load(f)",
        "pickle.Unpickler(f)", "yaml.unsafe_load(f)", "yaml.load(f, Loader=yaml.Loader)",
    ],
)  # fmt: skip
def test_s4_unsafe_calls_are_detected(call):
    assert unsafe_calls(f"def f():\n    return {call}")


def test_s4_unpickler_subclasses_are_detected():
    assert unsafe_calls("class U(pickle.Unpickler):\n    pass")


UNBOUNDED = {  # reads without a limit, with the reason
    "reads no file": {
        "checkpoints/hf/files.py part", "checkpoints/hf/import_hf.py hf_weights[name]",
        "checkpoints/hf/import_hf.py stored[name]", "checkpoints/hf/import_hf.py a", "checkpoints/hf/import_hf.py b",
        "checkpoints/hf/mtp.py weight",
        "toolkit_plan/dry_run.py reader",
        "training/callbacks/metrics.py self.throughput", "training/callbacks/metrics.py trainer.step_times",
        "training/engine.py run.reader",
    },
    "the kernel's": {
        "distributed/cpu_memory.py root / 'proc' / 'self' / 'cgroup'", "distributed/cpu_memory.py above / file",
        "toolkit_doctor/environment.py Path('/proc/cpuinfo')", "toolkit_doctor/environment.py Path('/proc/meminfo')",
        "distributed/device.py Path('/proc/meminfo')", "io/tempfiles.py _BOOT_ID",
        "io/tempfiles.py Path(f'/proc/{pid}/stat')",
        "training/memory_stats.py Path('/proc/self/statm')",
    },
    "installed": {
        "data/chat/sources.py _STYLES / f'{style}.jinja'", "source_hash.py file",
        "toolkit_doctor/environment.py file", "data/text/python_stdlib.py path",
        "toolkit_report/page.py files('toolkit_report') / name",
    },
    "written by this process": {
        "checkpoints/hf/export_hf.py Path(out_dir) / CONFIG", "checkpoints/hf/push.py path",
        "checkpoints/hf/import_hf.py Path(folder) / 'tokenizer.json'", "checkpoints/lock.py file",
        "checkpoints/remote/uploader.py path", "training/time_breakdown.py json.load(file)",
    },
    "the user's cache": {
        "data/cache.py folder / MANIFEST", "data/cache.py folder / CHECKSUMS", "data/streamed/open_text.py saved",
        "data/streamed/open_text.py stream.error_file(number)",
        "data/streamed/stream_reader.py file", "data/streamed/stream_reader.py error",
        "data/streamed/stream.py folder / f'{origin}{SOURCE}'",
        "data/text/prepare_text.py key_file", "data/streamed/stream.py self._counts_file(number)",
        "data/streamed/tokenize_worker.py sys.stdin.buffer",
    },
    "what the user names or types": {
        "toolkit_interop/gguf/export_gguf.py path", "cli/parser.py Path(path)", "commands/chat.py sys.stdin",
        "commands/generate.py sys.stdin", "data/chat/sources.py file", "data/sft/readers.py path",
        "inference/batch.py sys.stdin", "inference/batch.py Path(path)",
    },
    "read_json has read it before": {"data/tokens/chunks.py self.folder / INDEX"},
}  # fmt: skip
FOLLOWED = {"data/streamed/stream_reader.py lock_file"}  # in the user's cache


def risky_file_calls(source: str, file: str) -> tuple[set[str], set[str]]:
    """Return the files, as the module writes them, that are read without a limit, and appended to through links."""
    unbounded, followed = set(), set()
    for node in nodes_of(source):
        function = getattr(node, "func", None)
        if isinstance(function, ast.Attribute):
            name, owner = function.attr, function.value
            if name in ("read_bytes", "read_text") or (name in ("read", "readlines") and not node.args):
                unbounded.add(f"{file} {ast.unparse(owner)}")
            elif name == "load" and ast.unparse(owner) == "json":
                unbounded.add(f"{file} {ast.unparse(node)}")
        elif isinstance(function, ast.Name) and function.id == "open":
            options = [ast.unparse(part) for part in (*node.args[1:2], *(k.value for k in node.keywords))]
            if options and options[0].startswith("'a") and "no_follow" not in options:
                followed.add(f"{file} {ast.unparse(node.args[0])}")
    return unbounded, followed


def test_files_are_read_to_a_limit_and_appended_to_without_following_links():
    """Files of a stranger's folder may be huge or links: toolkit.io.safe_parse has read_bounded and no_follow."""
    found = [risky_file_calls(file.read_text(encoding="utf-8"), file_name(file)) for file in FILES]
    unbounded, followed = (set().union(*calls) for calls in zip(*found, strict=True))
    assert unbounded == set().union(*UNBOUNDED.values()), "read_bounded, or a reason here"
    assert followed == FOLLOWED, "open(path, 'a', opener=no_follow), or a reason here"


def test_unbounded_reads_and_followed_links_are_detected():
    for call in ("open(path).read()", "path.read_bytes()", "(a / b).read_text(encoding='utf-8')", "json.load(file)"):
        assert risky_file_calls(call, "")[0], call
    assert not any(risky_file_calls("file.read(10); read_bounded(path); open(path, 'ab', opener=no_follow)", ""))
    assert risky_file_calls("open(path, 'a+b')", "")[1]


WRITTEN = {  # texts that are written to a file or a stream without toolkit.escape, with the reason
    "bytes or numbers": {
        "toolkit_interop/gguf/export_gguf.py content", "data/text/prepare_text.py digest.hexdigest().encode()",
        "toolkit_report/plot.py _draw(title, ylabel, *lines.values())", "checkpoints/remote/remote_run.py content",
        "data/streamed/open_chunks.py content", "training/callbacks/profile.py table",
    },
    "JSON": {"checkpoints/manifest.py f'{text}\\n'.encode()"},
    "names that were checked, or are toolkit's": {
        "checkpoints/hf/sums.py ''.join((f'{sums[name]}  {name}\\n' for name in names))",
        "ui/loggers.py b''.join([(','.join(self.columns) + '\\n').encode(), *resumed])",
        "ui/loggers.py self._logger.version.encode()",
    },
    "the renderers that are tested above": {
        "toolkit_launch/command.py text", "toolkit_report/command.py content.encode()",
    },
    "read back as an error, in one line": {"data/streamed/tokenize_worker.py f'{path}{error}'"},
    "what the user's own command prints": {"toolkit_metric/process.py chunk.decode(errors='replace')"},
    "after stdout or a prompt of toolkit": {
        "commands/chat.py '>>> '", "distributed/ranks.py ' '.join([f'[rank {here}]', *map(str, message)]) + '\\n'"
    },
}  # fmt: skip
CALLS = {
    "quote", "join", "escape", "writer", "DictWriter", "dump", "dump_all", "safe_dump", "safe_dump_all", "system",
    "popen", "run", "Popen", "call", "check_call", "check_output", "print", "write", "write_text",
    "writelines", "write_atomic",
}  # fmt: skip
ESCAPES = re.compile(
    r"shlex\.(quote|join)|html\.escape|csv\.(writer|DictWriter)|yaml\.(safe_)?dump(_all)?|(rich\.)?markup\.escape"
)
SAFE = re.compile(r"json\.dumps\(|\b(one_line|printable|visible|to_yaml|markdown_text|render_page)\(")


def ungated(source: str, file: str) -> set[str]:
    """Return the calls of a module that escape text, start a shell, or write text that nothing has escaped."""
    found = set()
    for node in nodes_of(source):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{file} {name}" for n in node.names if ESCAPES.fullmatch(name := f"{node.module}.{n.name}")}
        if not isinstance(node, ast.Call) or getattr(node.func, "attr", getattr(node.func, "id", None)) not in CALLS:
            continue
        called, keywords = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
        if ESCAPES.fullmatch(called) or called in ("os.system", "os.popen") or keywords.get("shell") == "True":
            found.add(f"{file} {called}")
        is_stream = called.endswith(("stderr.write", "stdout.write")) or (called == "print" and "file" in keywords)
        if is_stream or called.endswith((".write_text", ".writelines", "write_atomic")):
            written = ast.unparse(node.args[called == "write_atomic"])
            found |= set() if SAFE.search(written) else {f"{file} {written}"}
    return found


def test_no_module_writes_or_escapes_foreign_text_without_the_gate():
    files = [file for file in FILES if file_name(file) != "escape.py"]
    found = set().union(*(ungated(f.read_text(encoding="utf-8"), file_name(f)) for f in files))
    assert found == set().union(*WRITTEN.values()), "use toolkit.escape (notice for stderr), or give a reason here"


def test_rogue_writer_is_named():
    calls = (
        'path.write_text(f"# {run.name}")', 'write_atomic(path, run.name.encode())', "print(name, file=sys.stderr)",
        "sys.stderr.write(name)", "shlex.quote(name)", "html.escape(name)", "csv.writer(file)",
        "yaml.safe_dump(values)", "os.system(name)", "subprocess.run(name, shell=True)",
    )  # fmt: skip
    for call in calls:
        assert ungated(f"def write(run):\n    {call}", "rogue.py"), call
    assert ungated("from html import escape", "rogue.py") == {"rogue.py html.escape"}
    assert not ungated("path.write_text(json.dumps(name)); print(one_line(name), file=sys.stderr)", "")


def test_light_modules_import_no_torch():
    """In one process for all: imports before a command runs must take less than a second."""
    code = (
        "import importlib, sys\n"
        f"for name in {LIGHT}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = {HEAVY} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
