"""Extensions: a module with one of everything, used through the command line as a package's user would."""

import importlib
import re
import sys
import textwrap

import pytest
import yaml

import toolkit.extension
from toolkit import extension
from toolkit.cli import main
from toolkit.data import SyntheticTokens
from toolkit.errors import UserError
from toolkit.models.families import FAMILIES, families, get_config
from toolkit.source_hash import hash_sources
from toolkit.ui.loggers import read_metrics

INSTALLED = extension._installed  # before conftest.py replaces it
FAMILY = """
from toolkit.models.families import llama
from toolkit.models.families.llama import from_hf_config, to_hf_config, weight_map
from toolkit.models.families.named import named

CONFIGS = [named("letter-llama", 1, 32, 2, 2, 48, block_size=32, family="letters", vocab_size=64)]
ALIASES = {}
"""
PARTS = '''
import csv
import torch
import toolkit
from lightning.fabric.strategies import DDPStrategy
from toolkit.data import SyntheticTokens
from toolkit.distributed.mesh import Layout
from toolkit.distributed.strategy import StrategyPlan


class Noise(SyntheticTokens):
    """Random tokens."""


class Descent(torch.optim.SGD):
    pass


class Halve(toolkit.Callback):
    columns = ("half_loss",)

    def on_log(self, trainer, metrics):
        metrics["half_loss"] = metrics["loss"] / 2


def compile_blocks(module, blocks, longest_ragged, groups):
    print(f"compiling {sum(isinstance(part, blocks) for part in module.modules())} blocks")


class Log:
    def log_hyperparams(self, values):
        print("extensions of the run:", values["extensions"])

    def log_metrics(self, metrics, step):
        print(f"point {step}: loss {metrics['loss']}")

    def finalize(self, status):
        pass


def start(folder, log_args, resume_step):
    return Log()


class Replicas:
    def plan(self, groups, *, devices, num_nodes, accelerator, precision):
        return StrategyPlan("ddp", None, Layout(replicate=devices * num_nodes), f"loud {groups['letters'].loud}")

    def build(self, plan, groups, *, precision, block_classes):
        return DDPStrategy, {}


class Order(toolkit.Callback):
    def __init__(self, place, checkpointer=None):
        self.place, self.columns = place, (f"{place}_rows",) * (place in ("before", "metrics"))
        print(f"{place}: built" + " with a model" * (checkpointer is not None))

    def on_log(self, trainer, metrics):
        with open(trainer.out_dir / "logs" / "metrics.csv") as file:
            rows = sum(1 for line in file)
        print(f"{self.place}: {sorted(metrics.keys() & {'half_loss', 'before_rows'})}, {rows} lines")
        metrics |= dict.fromkeys(self.columns, rows)


def before(launch, stack):
    stack.callback(print, "closed")
    return [Order("before")]


def metrics(launch, stack):
    return [lambda checkpointer: Order("metrics", checkpointer)]


def outputs(launch, stack):
    return print("already finished") if launch.is_finished else [Order("outputs")]


def after(launch, stack):
    return [Order("after")]


def check(args):
    if args.groups["letters"].loud and args.strategy != "replicas":
        raise toolkit.errors.UserError("--letters.loud true: has no effect without --strategy replicas")
'''
OPTIONS = '''
from dataclasses import dataclass


@dataclass(frozen=True)
class LettersArgs:
    """Letters.

    Args:
        loud: Say it loudly.
    """

    loud: bool = False
'''
INIT = """
from toolkit.extension import Extension

EXTENSION = Extension(
    families={"letters": "letters_family"},
    data={"Noise": "letters_parts.Noise"},
    compilers={"printing": "letters_parts.compile_blocks"},
    strategies={"replicas": "letters_parts.Replicas"},
    loggers={"points": "letters_parts.start"},
    callbacks={"Halve": "letters_parts.Halve"},
    optimizers={"Descent": "letters_parts.Descent"},
    option_groups={"letters": "letters_options.LettersArgs"},
    check="letters_parts.check",
)
"""
LONG = '''
from dataclasses import dataclass
from toolkit.data import DataModule, PreparedData
from toolkit.extension import Extension

EXTENSION = Extension(data={"Long": "long.Long", "Wrong": "long.Wrong", "Broken": "long.Missing"})


class Wrong:
    pass


@dataclass
class Long(DataModule):
    """Rows of one length."""

    length: int = 1

    def prepare(self, *, tokenizer, max_seq_length, report=print):
        rows = [{"input_ids": list(range(self.length)), "labels": list(range(1, self.length + 1))}] * 64
        return PreparedData(rows, None, tokenizer, "key", "rows", vocab_size=512)
'''
RUN = ["--data", "Noise", "--data.vocab_size", "64", "--optimizer.name", "Descent", "--callbacks", "Halve"]
RUN += ["--compiler", "printing", "--logger_name", "points", "--train.max_steps", "2", "--devices", "1"]
RUN += ["--train.global_batch_size", "4", "--train.micro_batch_size", "2"]


@pytest.fixture(autouse=True)
def letters(tmp_path, monkeypatch):
    """An extension in the current folder; none is known before and after the test."""
    files = {"letters": INIT, "letters_family": FAMILY, "letters_parts": PARTS, "letters_options": OPTIONS}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(extension, "_module_extensions", {})
    yield
    for name in files:
        sys.modules.pop(name, None)


def test_run_with_one_of_everything_is_recorded_and_repeats(tmp_path, capsys):
    assert main(["pretrain", "letter-llama", "--extensions", "letters", *RUN, "--out_dir", "a"]) == 0
    shown = capsys.readouterr()
    assert "compiling 1 blocks" in shown.out and "point 2: loss 4." in shown.out
    assert "Compiler: printing\n" in shown.out and "extensions of the run: ['letters']" in shown.out
    rows = read_metrics("a/logs/metrics.csv")
    assert all(row["half_loss"] == row["loss"] / 2 for row in rows)
    final = tmp_path / "a" / "final"
    assert yaml.safe_load((final / "model_config.yaml").read_text())["extension"] == "letters"
    # the recorded options name the extension themselves
    extension._module_extensions.clear()
    assert main(["pretrain", "--config", str(final / "hyperparameters.yaml"), "--out_dir", "b"]) == 0
    assert (tmp_path / "b/final/lit_model.pth").read_bytes() == (final / "lit_model.pth").read_bytes()


def test_callbacks_of_every_run_have_their_places(tmp_path, capsys):
    paths = {place: f"letters_parts.{place}" for place in extension.PLACES}
    (tmp_path / "letters.py").write_text(INIT.replace("    check=", f"    run_callbacks={paths},\n    check="))
    words = ["pretrain", "letter-llama", "--extensions", "letters", *RUN, "--train.log_interval", "2", "--out_dir", "a"]
    words += ["--eval.interval", "0", "--eval.final_validation", "false"]
    places = "(?:before|metrics|outputs|after|closed|already)"
    assert main([*words, "--dry_run", "true"]) == 0
    lines = re.findall(rf"^{places}.*", capsys.readouterr().out, re.M)
    assert lines == ["before: built", "outputs: built", "after: built", "closed"]
    assert main(words) == 0
    assert re.findall(rf"^{places}.*", capsys.readouterr().out, re.M) == [
        "before: built", "outputs: built", "after: built", "metrics: built with a model",
        "before: [], 1 lines", "metrics: ['before_rows', 'half_loss'], 1 lines",
        "outputs: ['before_rows', 'half_loss'], 2 lines", "after: ['before_rows', 'half_loss'], 2 lines", "closed",
    ]  # fmt: skip
    header = (tmp_path / "a/logs/metrics.csv").read_text().splitlines()[0]
    assert re.search(r"before_rows,half_loss,metrics_rows", header), header
    assert main([*words, "--resume", "auto"]) == 0
    shown = capsys.readouterr().out
    assert "already finished" in shown and "built" not in shown and "closed" not in shown


def test_checkpoint_without_its_extension_names_what_is_missing(tmp_path, capsys, refusal):
    assert main(["pretrain", "letter-llama", "--extensions", "letters", *RUN, "--out_dir", "a"]) == 0
    extension._module_extensions.clear()
    capsys.readouterr()
    assert main(["verify", "a/final"]) == 0  # needs no model
    assert "family letters: needs the extension letters: add --extensions letters" in refusal(
        "convert_to_hf", "a/final", "hf"
    )
    assert main(["convert_to_hf", "a/final", "hf", "--extensions", "letters"]) == 0
    capsys.readouterr()
    extension._module_extensions.clear()
    config = tmp_path / "a/final/model_config.yaml"
    text = config.read_text()
    config.write_text(text.replace("family: letters", "family: llama"))  # now only its data is an extension's
    assert "data Noise: needs the extension letters" in refusal("evaluate", "a/final", "--verify_checkpoint", "false")
    config.write_text(text)
    for name, fix in (
        ("toolkit-letters", "install it if you trust"),
        ("a; rm -rf b", "which is not installed"),
    ):
        config.write_text(config.read_text().replace("extension: letters", f"extension: {name}"))
        extension._module_extensions.clear()
        assert fix in refusal("convert_to_hf", "a/final", "hf2", "--verify_checkpoint", "false")
        config.write_text(config.read_text().replace(f"extension: {name}", "extension: letters"))


def test_sources_include_modules_that_a_single_file_imports_from_its_folder(tmp_path, monkeypatch):
    (tmp_path / "one.py").write_text("import math, first_helper\nfrom helper_package.part import x\n")
    (tmp_path / "first_helper.py").write_text("from second_helper import (\n    y,\n)\nimport one")
    (tmp_path / "helper_package").mkdir()
    changed = ["one.py", "first_helper.py", "second_helper.py", "helper_package/__init__.py", "helper_package/part.py"]
    for name in [*changed[2:], "unrelated.py"]:
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    hashes = [hash_sources(["one"])]
    for name in [*changed, "unrelated.py"]:
        with open(tmp_path / name, "a") as file:
            file.write("# changed\n")
        hashes.append(hash_sources(["one"]))
    assert len(set(hashes)) == len(hashes) - 1 and hashes[-1] == hashes[-2]
    hashes = [hash_sources(["helper_package"])]
    (tmp_path / "helper_package" / "part.py").write_text("# changed again\n")
    assert hash_sources(["helper_package"]) not in hashes


def test_installed_package_that_exits_is_a_warning(tmp_path, capsys, monkeypatch):
    (tmp_path / "exiting.py").write_text("import sys; sys.exit(0)")
    (tmp_path / "exiting-1.0.dist-info").mkdir()
    (tmp_path / "exiting-1.0.dist-info" / "METADATA").write_text("Name: exiting\nVersion: 1.0\n")
    (tmp_path / "exiting-1.0.dist-info" / "entry_points.txt").write_text("[toolkit.extensions]\nx = exiting\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(extension, "_installed", INSTALLED.__wrapped__)
    assert main(["pretrain", "list"]) == 0
    out, err = capsys.readouterr()
    warning = "warning: not used: extension exiting: exiting calls sys.exit(0) when it is imported\n"
    assert "pico-llama" in out and err.replace(warning, "") == "" and warning in err


def test_metrics_need_the_built_in_extension(refusal, monkeypatch):
    loaded = {name: one for name, one in extension._built_in()[0].items() if name != "toolkit_metric"}
    monkeypatch.setattr(extension, "_built_in", lambda: (loaded, "run pip install -e . again"))
    for option, value in (("metric", "exact_match"), ("tasks", "arc_easy")):
        assert f"--eval.{option} {value}: run pip install -e . again" in refusal("pretrain", f"--eval.{option}", value)


def test_names_that_a_package_lacks():
    for package in ("toolkit.data", "toolkit.objectives", "toolkit_plan.planner"):
        assert not hasattr(importlib.import_module(package), "missing")


def test_mistakes_are_one_line(tmp_path, refusal):
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "broken.py").write_text("import not_a_module")
    (tmp_path / "leaves.py").write_text("import sys; sys.exit(0)")
    (tmp_path / "raising.py").write_text("raise GeneratorExit('x')")
    (tmp_path / "twice.py").write_text(INIT.replace('"letters": "letters_family"', '"llama": "letters_family"'))
    (tmp_path / "lost.py").write_text(INIT.replace("letters_options.LettersArgs", "letters_options.Missing"))
    (tmp_path / "again.py").write_text(INIT.replace('"letters_family"', '"again_family"'))
    (tmp_path / "again_family.py").write_text(FAMILY.replace("letter-llama", "pico-llama"))
    (tmp_path / "nameless.py").write_text(INIT.replace('"letters_family"', '"nameless_family"'))
    own_map = "\ndef weight_map(config):\n    return llama.weight_map(config)\n"
    (tmp_path / "nameless_family.py").write_text(FAMILY.replace('family="letters", ', "") + own_map)
    (tmp_path / "shapes.py").write_text(INIT.replace('"letters_family"', '"shapes_family"'))
    (tmp_path / "shapes_family.py").write_text(FAMILY.replace('family="letters", ', ""))
    (tmp_path / "modelled.py").write_text(INIT.replace('"letters_family"', '"modelled_family"'))
    modelled = FAMILY.replace('family="letters", ', "") + 'MODEL = "toolkit.models.gpt.GPT"\n'
    (tmp_path / "modelled_family.py").write_text(modelled)
    (tmp_path / "partly.py").write_text(INIT.replace('"letters_family"', '"letters_options"'))
    (tmp_path / "listed.py").write_text(INIT.replace('{"Noise": "letters_parts.Noise"}', '["letters_parts.Noise"]'))
    misplaced = INIT.replace("    check=", '    run_callbacks={"first": "letters_parts.Halve"},\n    check=')
    (tmp_path / "misplaced.py").write_text(misplaced)
    (tmp_path / "loose.py").write_text(INIT.replace("letters_options.LettersArgs", "letters_parts.Log"))
    (tmp_path / "long.py").write_text(LONG)
    cases = {
        "--extensions nothing-here": "nothing-here: No module named 'nothing-here'; install it, or start in its folder",
        "--extensions empty": "--extensions empty: has no EXTENSION",
        "--extensions broken": "--extensions broken: No module named 'not_a_module'",
        "--extensions raising": "--extensions raising: raising raises GeneratorExit when it is imported: x",
        "--extensions leaves": "--extensions leaves: leaves calls sys.exit(0) when it is imported",
        "--extensions twice": "extension twice: families llama: toolkit already defines this name; rename it",
        "--extensions lost": "extension lost: option_groups letters: letters_options.Missing",
        "--extensions again": "extension again: family letters: toolkit has a configuration pico-llama; rename it",
        "--extensions nameless": "family letters: letter-llama of nameless_family has family='llama'",
        "--extensions modelled": "family='llama', with other weight names or another model; add family='letters'",
        "--extensions shapes --data NoSuch": "--data NoSuch: no such class",  # configurations of llama only
        "--extensions partly": "extension partly: family letters: letters_options has no CONFIGS",
        "--extensions listed": "TypeError: data ['letters_parts.Noise']: must map names to dotted paths",
        "--extensions misplaced": "TypeError: run_callbacks first: must be one of before, metrics, outputs, after",
        "--extensions loose": "extension loose: option_groups letters: must be a dataclass with defaults",
        "--extensions long --data NoSuch": "--data NoSuch: no such class; known are",
        "--extensions long --data Broken": "extension long: data Broken: long.Missing: long has no Missing",
        "--extensions long --data Wrong": "--data Wrong: must be a class derived from DataModule",
        "--extensions long --data Long --data.length 200": "train[0]: has 200 input tokens, but sequences have at",
        "--extensions letters --letters.loud": "--letters.loud true: has no effect without --strategy replicas",
        "--extensions letters --letters.load 1": "--letters.load: no such option; did you mean --letters.loud",
        "--extensions letters --compiler printng": "printing; did you mean 'printing'",
        "--compiler printing": "--compiler printing: must be one of auto, none, torch",
        "--strategy replicas": "--strategy replicas: must be one of auto, single, ddp, fsdp",
        "--extensions letters --strategy replicas --ddp.bucket_cap_mb 3": "has no effect with",
    }
    for words, message in cases.items():
        extension._module_extensions.clear()
        assert message in refusal("pretrain", "pico-llama", "--train.max_steps", "1", *words.split())


def test_list_plan_help_and_python_know_it(capsys):
    assert main(["pretrain", "list", "--extensions", "letters"]) == 0
    shown = capsys.readouterr().out
    assert "letter-llama" in shown and "Extension letters (families: letters; data: Noise;" in shown
    assert main(["pretrain", "--extensions", "letters", "--help", "letters"]) == 0
    assert "Say it loudly" in capsys.readouterr().out
    words = ["--strategy", "replicas", "--letters.loud", "true", "--accelerator", "cpu", "--devices", "2"]
    assert main(["plan", "pretrain", "letter-llama", "--train.max_steps", "1", "--extensions", "letters", *words]) == 0
    assert "replicas, 2 devices (loud True)" in capsys.readouterr().out
    toolkit.extension.add_extensions(["letters"])
    assert set(families()) == {*FAMILIES, "letters"} and get_config("Letter-Llama").family == "letters"
    extension._module_extensions.clear()
    data = SyntheticTokens(vocab_size=64)
    done = toolkit.train("letter-llama", extensions=["letters"], train={"max_steps": 1}, data=data, out_dir="c")
    assert done.checkpoint.name == "final"
    extension._module_extensions.clear()
    with pytest.raises(UserError, match="no such configuration"):
        get_config("letter-llama")
