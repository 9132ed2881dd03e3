"""Options of a command: documented spellings, YAML files, one-line errors."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from helpers.cases import check_each
from jsonargparse.typing import NonNegativeFloat, PositiveInt, restricted_number_type

from toolkit.cli import parser as cli_parser
from toolkit.commands import all_commands, pretrain
from toolkit.config import EvalArgs, TrainArgs
from toolkit.config.classes import class_path, classes_of, parameters_of
from toolkit.config.command import CommandOptions
from toolkit.config.types import union_members
from toolkit.config.values import OptionValue
from toolkit.data import DataModule, LitData, Preference, PythonStdlib, SyntheticTokens, TextFiles
from toolkit.errors import UserError
from toolkit.extension import Command
from toolkit.models.lora_config import LoRAOptions
from toolkit.objectives import Objective


class LocalCommand(Command):
    def load(self):
        return self.module


def parse(*argv: str, setup=pretrain.setup, positionals=("model_name",)) -> dict:
    """Return the arguments, a training command's by option; None after printing."""
    found = cli_parser.parse("pretrain", list(argv), LocalCommand(setup, "", positionals))
    if found and "options" in found:
        found = dict(vars(found["options"]))
        found |= vars(found.pop("shared")) | found.pop("groups")
    return found


def error_of(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(*argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


Fraction = restricted_number_type("Fraction", float, [(">=", 0), ("<", 1)])


def test_restricted_numbers_are_described_in_help_and_errors(capsys):
    def setup(steps: PositiveInt | Literal["auto"] = 3, decay: NonNegativeFloat = 0.1, part: Fraction = 0.5) -> None:
        """Try."""

    parse("--help", setup=setup, positionals=())
    shown = " ".join(capsys.readouterr().out.split())
    for text in ("an integer or auto; greater than zero; default: 3", "at least zero", "at least 0 and less than 1"):
        assert text in shown
    found = parse("--steps", "1e3", "--decay", "0", setup=setup, positionals=())
    assert found == {"steps": 1000, "decay": 0.0, "part": 0.5}
    assert [type(value) for value in found.values()] == [int, float, float]
    for argv, message in (
        (("--steps", "0"), "--steps 0: must be greater than zero"),
        (("--steps", "-1e3"), "--steps -1000: must be greater than zero"),
        (("--steps", "x"), "--steps x: must be an integer or auto"),
        (("--decay", "-1"), "--decay -1.0: must not be negative"),
        (("--part", "1"), "--part 1.0: must be at least 0 and less than 1"),
    ):
        with pytest.raises(UserError) as caught:
            parse(*argv, setup=setup, positionals=())
        assert str(caught.value) == message


# ---- spellings

FAST = (
    "pico-llama", "--train.micro_batch_size=4", "--train.max_tokens 1.5e6", "--train.tie_embeddings null",
    '--train {"max_steps":3,"learning_rate":2e-3}', "--log.run 5", "--model_config.bias true",
    "--optimizer.betas [0.8,0.9]", "--optimizer.options.momentum 0.9",
    '--optimizer.options.b 2 --optimizer.options {"a":1e-1}', "--resume auto", "--out_dir=",
    "--data.train_data_path x --data TextFiles", '--data {"class_path":"LitData","init_args":{"data_path":"x"}}',
    "--data Preference --data.json_path x --data.repo_id null",
)  # fmt: skip


def one_of_each_kind_is_fast(cases: list[tuple]) -> list:
    return [pytest.param(*case, marks=[] if case[0] in FAST else [pytest.mark.slow]) for case in cases]


@pytest.mark.parametrize(
    ("argv", "path", "value"),
    one_of_each_kind_is_fast(
        [
            ("pico-llama", "model_name", "pico-llama"),
            ("--model_name pico-llama", "model_name", "pico-llama"),
            ("--train.micro_batch_size 4", "train.micro_batch_size", 4),
            ("--train.micro_batch_size=4", "train.micro_batch_size", 4),
            ("--train.max_tokens 1e6", "train.max_tokens", 1_000_000),
            ("--train.max_tokens 1.5e6", "train.max_tokens", 1_500_000),
            ("--train.max_tokens 1_000_000", "train.max_tokens", 1_000_000),
            ("--train.learning_rate 4e-4", "train.learning_rate", 4e-4),
            ("--train.epochs 1e1", "train.epochs", 10.0),
            ("--train.lr_schedule wsd", "train.lr_schedule", "wsd"),
            ("--train.tie_embeddings true", "train.tie_embeddings", True),
            ("--train.tie_embeddings null", "train.tie_embeddings", None),
            ('--train {"max_steps":3,"learning_rate":2e-3}', "train.max_steps", 3),
            ('--train {"max_steps":3,"learning_rate":2e-3}', "train.learning_rate", 2e-3),
            ("--eval.initial_validation true", "eval.initial_validation", True),
            ("--eval.final_validation false", "eval.final_validation", False),
            ("--eval.max_iters null", "eval.max_iters", None),
            ("--log.run 5", "log.run", "5"),
            ("--model_config.n_layer 2", "model_config.n_layer", 2),
            ("--model_config.bias true", "model_config.bias", True),
            ("--model_config.rope_base 5e5", "model_config.rope_base", 5e5),
            ("--optimizer.name SGD", "optimizer.name", "SGD"),
            ("--optimizer.betas [0.8,0.9]", "optimizer.betas", (0.8, 0.9)),
            ("--optimizer.weight_decay 0.1", "optimizer.weight_decay", 0.1),
            ('--optimizer.options {"momentum":0.9}', "optimizer.options", {"momentum": 0.9}),
            ("--optimizer.options.momentum 0.9", "optimizer.options", {"momentum": 0.9}),
            ('--optimizer.options.b 2 --optimizer.options {"a":1e-1}', "optimizer.options", {"a": 0.1, "b": 2}),
            ("--resume true", "resume", True),
            ("--resume false", "resume", False),
            ("--resume auto", "resume", "auto"),
            ("--resume out/run/step-00000010", "resume", "out/run/step-00000010"),
            ("--out_dir 7", "out_dir", "7"),
            ("--out_dir=", "out_dir", ""),
            ("--precision bf16-mixed", "precision", "bf16-mixed"),
            ("--initial_checkpoint_dir null", "initial_checkpoint_dir", None),
            ("--seed 7", "seed", 7),
            ("--data.vocab_size 512", "data", PythonStdlib(vocab_size=512)),
            ("--data PythonStdlib", "data", PythonStdlib()),
            ("--data TextFiles --data.train_data_path x", "data", TextFiles(train_data_path="x")),
            ("--data.train_data_path x --data TextFiles", "data", TextFiles(train_data_path="x")),
            ("--data toolkit.data.TextFiles --data.train_data_path x", "data", TextFiles(train_data_path="x")),
            ("--data SyntheticTokens --data.num_rows 1e3", "data", SyntheticTokens(num_rows=1000)),
            ('--data {"class_path":"LitData","init_args":{"data_path":"x"}}', "data", LitData(data_path="x")),
            ("--data Preference --data.json_path x --data.repo_id null", "data", Preference(json_path="x")),
        ]
    ),
)
def test_documented_spellings(argv, path, value):
    found = parse(*argv.split(" "))
    for name in path.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_defaults_are_those_of_the_signature():
    found = parse()
    assert found["train"] == TrainArgs() and found["eval"] == EvalArgs() and found["data"] == PythonStdlib()
    assert found["seed"] == 42 and found["resume"] is False and found["model_name"] is None


def test_string_values_are_not_converted():
    def setup(checkpoint_dir: str, prompt: str = "x", temperature: float = 1.0) -> None:
        """Try."""

    for prompt in ("-", "", " two words\n", "true", "null", "1e3", "{a: 1}", "a=b", "-1", "# no comment", "café"):
        assert parse("d", "--prompt", prompt, setup=setup, positionals=("checkpoint_dir",))["prompt"] == prompt
    given = parse("--prompt=--dashes", "d", "--temperature", "-1", setup=setup, positionals=("checkpoint_dir",))
    assert given == {"checkpoint_dir": "d", "prompt": "--dashes", "temperature": -1.0}


@dataclass
class Shared:
    """Shared.

    Args:
        seed: Seed of everything.
        betas: Two numbers.
    """

    seed: int = 42
    betas: tuple[float, float] = (0.9, 0.95)


def forwarding_setup(out_dir: str = "out", train: TrainArgs = TrainArgs(max_steps=4), **shared: Any) -> Shared:  # noqa: B008
    """Try.

    Args:
        out_dir: Folder.
        train: Training options.
        shared: Options of all commands.
    """
    return Shared(**shared)


def test_forwarded_keyword_arguments_are_options(capsys):
    found = parse("--seed", "1e3", "--out_dir", "x", setup=forwarding_setup, positionals=())
    assert found == {"out_dir": "x", "train": TrainArgs(max_steps=4), "seed": 1000, "betas": (0.9, 0.95)}
    assert forwarding_setup(**found) == Shared(seed=1000)
    parse("--help", setup=forwarding_setup, positionals=())
    assert "Seed of everything" in capsys.readouterr().out


# ---- YAML files


def test_null_in_a_yaml_file_means_the_default_where_the_type_does_not_take_it(tmp_path):
    file = tmp_path / "hyperparameters.yaml"
    file.write_text(
        "seed: null\nout_dir: null\nlogger_name: null\nmodel_name: null\n"
        "train: {log_interval: null, max_steps: null, lr_schedule: null, save_every_minutes: null}\n"
        "data: {class_path: SyntheticTokens, init_args: {seed: null, num_rows: 3}}\n"
        "model_config: {family_options: null}\n"
    )
    found = parse("--config", str(file))
    assert found == parse() | {"train": TrainArgs(save_every_minutes=None), "data": SyntheticTokens(num_rows=3)}
    assert parse("--config", str(file), "--out_dir", "null")["out_dir"] == "null"
    found = parse("--config", str(file), "--model_config.family_options.a", "2")
    assert found["model_config"].family_options == {"a": 2}


def test_yaml_file_sets_options_and_flags_override_it(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model_name: pico-llama\n"
        "data: {class_path: TextFiles, init_args: {train_data_path: x, vocab_size: 300}}\n"
        "train: {max_tokens: 1e6, learning_rate: 4e-4, micro_batch_size: 2}\n"
        "optimizer: {betas: [0.9, 0.95], options: {momentum: 1e-1}}\n"
        "resume: auto\n"
    )
    found = parse("--config", str(file))
    assert (found["model_name"], found["resume"]) == ("pico-llama", "auto")
    assert found["data"] == TextFiles(train_data_path="x", vocab_size=300)
    assert found["train"] == TrainArgs(max_tokens=1_000_000, learning_rate=4e-4, micro_batch_size=2)
    assert found["optimizer"].betas == (0.9, 0.95) and found["optimizer"].options == {"momentum": 0.1}
    found = parse("tiny", "--train.micro_batch_size", "8", "--data.vocab_size", "400", "--config", str(file))
    assert found["model_name"] == "tiny"
    assert found["train"] == TrainArgs(max_tokens=1_000_000, learning_rate=4e-4, micro_batch_size=8)
    assert found["data"] == TextFiles(train_data_path="x", vocab_size=400)


def test_changing_the_data_class_resets_its_options(tmp_path):
    """jsonargparse would keep options of the same name, here vocab_size 300."""
    file = tmp_path / "run.yaml"
    file.write_text("data: {class_path: TextFiles, init_args: {train_data_path: x, vocab_size: 300}}\n")
    found = parse("--config", str(file), "--data", "SyntheticTokens", "--data.seed", "3")
    assert found["data"] == SyntheticTokens(seed=3)


def test_later_yaml_files_override_earlier_ones(tmp_path):
    for name, text in (("a", "seed: 1\ntrain: {max_steps: 5, epochs: 2}\n"), ("b", "train: {max_steps: 6}\nlog:\n")):
        (tmp_path / name).write_text(text)
    found = parse("--config", str(tmp_path / "a"), "--config", str(tmp_path / "b"))
    assert found["seed"] == 1 and found["train"] == TrainArgs(max_steps=6, epochs=2)


@pytest.mark.parametrize(
    "argv",
    [
        "",
        pytest.param(
            "pico-llama --resume true --data TextFiles --data.train_data_path x --model_config.n_layer 3",
            marks=pytest.mark.slow,
        ),
        "--eval.max_iters null --optimizer.betas [0.8,0.9] --optimizer.options.foreach true --train.min_lr 1e-5",
        pytest.param(
            "--data LitData --data.data_path x --out_dir 5 --log.run null --train.max_tokens 3e9",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_print_config_round_trip(argv, tmp_path, capsys):
    assert parse(*argv.split(), "--print_config") is None
    printed = capsys.readouterr().out
    file = tmp_path / "hyperparameters.yaml"
    file.write_text(printed)
    assert parse("--config", str(file)) == parse(*argv.split())
    parse("--config", str(file), "--print_config")
    assert capsys.readouterr().out == printed
    assert list(yaml.safe_load(printed)) == list(parse())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {max_step: 3}", "FILE: train.max_step: no such option; did you mean train.max_steps?"),
        ("max_steps: 3", "FILE: max_steps: no such option; did you mean train.max_steps?"),
        ("data: {class_path: TextFile}", "FILE: data: TextFile: no such class; did you mean 'TextFiles'?"),
        ("data: {class_path: ..TextFile}", "FILE: data: ..TextFile: no such class; did you mean 'TextFiles'?"),
        (
            "data: {class_path: CSV, init_args: 5}",
            "FILE: data.init_args int: must be a group of options, as a dictionary such as {'name': value}",
        ),
        ("data: {vocabsize: 3}", "FILE: data.vocabsize: no such option; did you mean data.vocab_size?"),
        ("train: {max_steps: x}", "FILE: train.max_steps: x: must be an integer"),
        ("seed: [1]", "FILE: seed: [1]: must be an integer"),
        ("train: 3", "FILE: train: 3: must be a group of `name: value` pairs"),
        ("- 1", "--config FILE: must contain `name: value` pairs"),
        ("", "--config FILE: must contain `name: value` pairs"),
    ],
)
def test_errors_in_a_yaml_file(text, message, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert error_of("--config", str(file)) == message.replace("FILE", str(file))


def test_a_number_as_data_module_is_one_line(tmp_path):
    """Not a group of another tool, although one has this name."""
    file = tmp_path / "run.yaml"
    file.write_text("data: 5")
    assert error_of("--config", str(file)).startswith(f"{file}: data: 5: no such class; known are CSV, ")


def test_options_of_adapters_name_the_command_that_has_them(tmp_path):
    file, names = tmp_path / "lora.yaml", [*parameters_of(LoRAOptions)]
    file.write_text("".join(f"{name}: 1\n" for name in names))
    hint = "use `toolkit finetune_lora`, or lora=True in Python"
    assert error_of("--config", str(file)) == f"{file}: {', '.join(names)}: no such options; {hint}"
    assert error_of("--lora_r", "8") == f"--lora_r: no such option; {hint}"


def test_files_of_other_tools_are_answered_whole(tmp_path):
    litgpt = "optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.1}}\ndata: Deita\nprecision: bf16-true"
    axolotl = (
        "base_model: a/b\nsequence_len: 3\nnum_epochs: 2\ndatasets: [{path: x}]\nseed: 1\noptimizer: adamw_bnb_8bit"
    )
    file = tmp_path / "run.yaml"
    for text, keys in (
        (
            litgpt,
            [
                "data: Deita: no such class; use JSON with --data.json_path FILE",
                "optimizer.class_path",
                "optimizer.name?",
                "optimizer.init_args",
            ],
        ),
        (
            axolotl,
            [
                "mean initial_checkpoint_dir?",
                "train.max_seq_length?",
                "train.epochs?",
                "datasets",
                "as optimizer.name: adamw",
            ],
        ),
    ):
        file.write_text(text)
        message = error_of("--config", str(file))
        assert all(key in message for key in keys) and "\n" not in message and "seed" not in message, message


def test_repeated_keys_are_an_error_and_repeated_flags_a_line(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    for text, message in (
        (
            "seed: 1\ntrain: {max_steps: 3, max_steps: 4}",
            "--config FILE: not valid YAML: line 2: duplicate key max_steps",
        ),
        ("seed: 1\nseed: 1", "--config FILE: not valid YAML: line 2: duplicate key seed"),
        ("train: {max_steps: 3}\ntrain.max_steps: 4", "FILE: train.max_steps: given twice"),
    ):
        file.write_text(text)
        assert error_of("--config", str(file)) == message.replace("FILE", str(file)) + "; remove one"
    capsys.readouterr()
    parse("--seed", "1", "--seed", "2")
    assert capsys.readouterr().err == "--seed: given 2 times; using the last value\n"


def test_unreadable_yaml_files(tmp_path):
    assert error_of("--config", f"{tmp_path}/no.yaml") == f"--config {tmp_path}/no.yaml: No such file or directory"
    assert error_of("--config") == "--config: needs a value: the path of a YAML file"
    for name, content in (("broken", b"x: ["), ("code", b"x: !!python/object/apply:os.getcwd []"), ("bytes", b"\xff")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match="not valid YAML"):
            parse("--config", str(tmp_path / name))


NO_PATHS = {"eval.metric", "data.prompt_style", "prompt_style", "data.repo_id", "tasks", "push_to_hub"}
"""Text options whose help has such a word, and which do not take a path."""


def path_options() -> dict[str, Any]:
    """Return the types of the text options of all commands and classes whose help says that they take a path."""
    options = {}
    for subcommand in all_commands().values():
        command = CommandOptions(subcommand.load())
        options |= command.options()
        for group in command.class_options:
            for cls in command.choices(group).values():
                options |= {f"{group}.{name}": option for name, option in parameters_of(cls).items()}
    words = re.compile(r"(?i)\b(files?|folders?|checkpoints?|out_dir)\b(?!')")
    texts = {key: option for key, option in options.items() if str in union_members(option.kind)}
    return {key: option.kind for key, option in texts.items() if words.search(option.doc) and key not in NO_PATHS}


def test_home_folder_and_variables_in_every_path_option(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    command, kinds = CommandOptions(pretrain.setup), path_options()
    assert {"out_dir", "resume", "data.json_path", "checkpoint_dirs", "hf_dir", "objective.teacher_dir"} <= kinds.keys()
    for key, kind in kinds.items():
        for source in ("", None, "run.yaml"):
            command.values = {key: OptionValue(source, "~/a b")}
            assert command._convert(key, kind, "") == f"{tmp_path}/a b", key
        for text in ("${oc.env:HOME}/x", "$HOME/x", "~nobody-has-this-name/x"):
            command.values = {key: OptionValue("", text)}
            with pytest.raises(UserError, match=re.escape(f"--{key} {text}: ")):
                command._convert(key, kind, "")
    (tmp_path / "run.yaml").write_text(
        "out_dir: ~/y\ndata: {class_path: Mixture, init_args: {sources: {a: {weight: 1, data: "
        "{class_path: TextFiles, init_args: {train_data_path: ~/x}}}}}}\n"
    )
    found = parse("--config=~/run.yaml")
    assert found["out_dir"] == f"{tmp_path}/y"
    assert found["data"]._modules["a"].data.train_data_path == f"{tmp_path}/x"


# ---- errors


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--train.micro_batchsize 4", "--train.micro_batchsize: no such option; did you mean --train.micro_batch"),
        ("--micro_batch_size=4", "--micro_batch_size: no such option; did you mean --train.micro_batch_size?"),
        ("--micro-batch-size 4", "--micro-batch-size: no such option; did you mean --train.micro_batch_size?"),
        ("--resum true", "--resum: no such option; did you mean --resume?"),
        ("--training.max_steps 3", "--training.max_steps: no such option; did you mean --train.max_steps?"),
        ("--print_configs", "--print_configs: no such option; did you mean --print_config?"),
        ("--qqq 1", "--qqq: no such option; see --help"),
        ("--data.vocabsize 3", "--data.vocabsize: no such option; did you mean --data.vocab_size?"),
        ("--data.train_data_path x",
         "--data.train_data_path: no such option of --data PythonStdlib; add --data TextFiles"),
        ("--data.json_path x", "--data.json_path: no such option of --data PythonStdlib; JSON, Preference have it"),
        ("--optimizer AdamW",
         "--optimizer AdamW: optimizer is a group; set its options, did you mean --optimizer.name AdamW?"),
        ("--lr 1e-3", "--lr: no such option; did you mean --train.learning_rate?"),
        ("--optimizer.lr 1e-3", "--optimizer.lr: no such option; did you mean --train.learning_rate?"),
        ("--gradient_checkpointing true",
         "--gradient_checkpointing: no such option; did you mean --train.activation_checkpointing full?"),
        ("--data TextFile", "--data TextFile: no such class; did you mean 'TextFiles'?"),
        ("--data os.zzz", "--data os.zzz: no such class; known are CSV, JSON, LIMA"),
        ("--data TextFiles", "--data.train_data_path: must be given"),
        ("--data", "--data: needs a value: CSV, JSON, LIMA"),
        ("--seed", "--seed: needs a value: an integer"),
        ("--train.max_steps --seed 3", "--train.max_steps: needs a value: an integer"),
        ("--train.max_steps abc", "--train.max_steps abc: must be an integer"),
        ("--train.max_steps 1.5", "--train.max_steps 1.5: must be an integer"),
        ("--seed null", "--seed null: must be an integer"),
        ("--train.learning_rate 4e-4x", "--train.learning_rate 4e-4x: must be a number"),
        ("--train.learning_rate -1", "--train.learning_rate -1.0: must be greater than zero"),
        ("--eval.initial_validation maybe", "--eval.initial_validation maybe: must be true or false"),
        ("--accelerator gpu", "--accelerator gpu: must be one of auto, cpu, cuda, mps; use cuda"),
        ("--model_config.n_layer x", "--model_config.n_layer x: must be an integer"),
        ("--model_config.position_embedding learnt", "--model_config.position_embedding learnt: must be one of rope, "),
        ("--optimizer.betas 0.9", "--optimizer.betas 0.9: must be a list of 2 such as [0.9, 0.95]"),
        ("--optimizer.options 3", "--optimizer.options 3: must be a mapping such as "),
        ("--optimizer.options 3 --optimizer.options.a 1", "--optimizer.options 3: must be a mapping such as "),
        ("--optimizer.options.a", "--optimizer.options.a: needs a value"),
        ("--data Mixture --data.sources.web.weight 3", "--data.sources.web.weight 3: no entry 'web'"),
        ("--train 3", "--train 3: train is a group; set its options, for example --train.NAME VALUE"),
        ("pico-llama extra", "extra: unexpected word; options are given as --name value"),
        ("-x", "-x: unexpected word; options are given as --name value"),
    ],
)  # fmt: skip
def test_errors_name_flag_value_and_fix(argv, message):
    assert error_of(*argv.split()).startswith(message)


WORDS_OF_OTHER_TOOLS = {
    "pretrain --accelerator gpu": "use cuda",
    "pretrain --compiler inductor": "use torch",
    "pretrain --compiler true": "use torch",
    "finetune_full m --data Classification --data.problem_type multi_class": "use single_label_classification",
    "pretrain --head classification": "toolkit finetune_full CHECKPOINT --head classification",
    "finetune_full m --head regression": "use classification; numbers as labels",
    "finetune_full m --head none": "leave --head out",
    "finetune_full m --head.name classification": "did you mean --head?",
    "finetune_full m --num_labels 3": "--data.label_column",
    "finetune_full m --data Classification --data.labels a,b": "--data.label_column",
    "finetune_full m --data Classification --data.csv_path f.csv": "did you mean --data.path?",
    "pretrain --data TextFiles --data.data_path d": "did you mean --data.train_data_path?",
    "finetune_full m --data CSV --data.path d": "did you mean --data.csv_path?",
    "pretrain --data LitData --data.path d": "did you mean --data.data_path?",
    "finetune_full m --data.csv_path f.csv": "add --data CSV",
    "finetune_full m --data faq.csv": "--data CSV --data.csv_path FILE",
    "finetune_full m --data-json-path f": "did you mean --data.json_path?",
    "pretrain --data LitData --data.data_path d --data.split_names train": "such as [train, val]",
    "pretrain --model pico-llama": "the first word, as in `toolkit pretrain pico-llama`",
    "pretrain --precision fp8": "use --train.fp8 tensorwise",
    "pretrain --precision float16": "use 16-mixed",
    "finetune_lora m --precision int8": "--quantize bnb.nf4",
    "convert_to_gguf m f.gguf --dtype Q4_K_M": "llama-quantize makes it from a file of `toolkit convert_to_gguf",
    "pretrain --train.fp8 true": "use tensorwise or rowwise",
    "pretrain --optimizer.precondition_frequency 3": "set by --optimizer.options.precondition_frequency",
    "pretrain --train.max_tokens 1M": "a million as 1e6 (Stop at the step that reaches this many input tokens",
    "pretrain --train.max_time 5m": "write it without a unit, a million as 1e6 (As the only limit",
    "pretrain --fsdp.state_dict_type FULL_STATE_DICT": "use full",
    "classify m --output f": "toolkit classify ... > FILE",
    "classify m --data CSV": "give a file, as --texts FILE",
    "classify m --device cuda": "did you mean --accelerator?",
    "classify m --labels a,b": "the checkpoint has them",
    "pretrain --data LitData --data.data_path s3:/b/x": "is not a URL; write s3://b/x",
}


def test_words_of_other_tools_have_their_hint():
    def check(line: str, hint: str) -> None:
        name, *words = line.split()
        with pytest.raises(UserError) as caught:
            cli_parser.parse(name, words)
        assert hint in str(caught.value)

    check_each(check, WORDS_OF_OTHER_TOOLS.items())


def test_path_in_place_of_a_data_class_has_its_option(tmp_path):
    def check(file: str, hint: str) -> None:
        (folder := tmp_path / file.replace(".", "-")).mkdir()
        (folder / file).touch()
        for path in (folder, folder / file):
            with pytest.raises(UserError) as caught:
                cli_parser.parse("pretrain", ["--data", str(path)])
            assert hint.replace("PATH", str(path)) in str(caught.value)

    check_each(check, [
        ("a.txt", "no such class; use --data TextFiles --data.train_data_path PATH"),
        ("train.csv", "; use --data CSV --data.csv_path PATH"),
        ("val.jsonl", "; use --data JSON --data.json_path PATH"),
        ("train.bin", "; known are "),
    ])  # fmt: skip


def test_missing_positional_shows_the_usage():
    def setup(checkpoint_dir: str, out_dir: str, dtype: str | None = None) -> None:
        """Try."""

    with pytest.raises(UserError) as caught:
        parse("x", setup=setup, positionals=("checkpoint_dir", "out_dir"))
    usage = "toolkit pretrain CHECKPOINT_DIR OUT_DIR [--option value ...]"
    assert str(caught.value) == f"OUT_DIR: must be given; usage: {usage}"


def test_user_provided_data_class(tmp_path, monkeypatch, capsys):
    (tmp_path / "user_data.py").write_text(
        "from dataclasses import dataclass, field\nfrom toolkit.data import DataModule\n"
        "@dataclass\nclass Split:\n    seed: int = 1\n"
        "@dataclass\nclass UserData(DataModule):\n    size: int = 3\n    split: Split = field(default_factory=Split)\n"
        "    names: list[str] = field(default_factory=list)\n    def prepare(self, **kwargs): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    data = parse("--data", "user_data.UserData", "--data.size", "4")["data"]
    assert type(data).__name__ == "UserData" and (data.size, data.split.seed, data.names) == (4, 1, [])
    data = parse("--data", "user_data.UserData", "--data.split", '{"seed": 2}')["data"]
    assert data.split == type(type(data)().split)(2)
    parse("--data", "user_data.UserData", "--data.size", "4", "--print_config")
    assert yaml.safe_load(capsys.readouterr().out)["data"] == {
        "class_path": "user_data.UserData",
        "init_args": {"size": 4, "split": {"seed": 1}, "names": []},
    }


def test_every_typed_option_of_a_class_refuses_a_wrong_value(tmp_path, monkeypatch):
    """Also with postponed annotations in a class derived from a dataclass, which jsonargparse leaves as text."""
    (tmp_path / "user_objectives.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing import TYPE_CHECKING\n"
        "from toolkit.objectives import DPO, NextToken\nif TYPE_CHECKING:\n    from pathlib import Path\n"
        "class Weighted(NextToken):\n    def __init__(self, weight: float = 1.0): self.weight = weight\n"
        "@dataclass\nclass Pairs(DPO):\n    margin: float = 0.0\n"
        "class Unknown(NextToken):\n    def __init__(self, place: Path | None = None): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert parse("--objective", "user_objectives.Weighted", "--objective.weight", "2")["objective"].weight == 2.0
    user_classes = {f"user_objectives.{name}": key for name, key in (("Weighted", "weight"), ("Pairs", "margin"))}
    cases = [("objective", name, key, []) for name, key in user_classes.items()]
    for group, base in (("data", DataModule), ("objective", Objective)):
        for name, cls in classes_of(base).items():
            parameters = parameters_of(cls).items()
            required = [f"--{group}.{k}=x" for k, option in parameters if option.is_required]
            numbers = [k for k, option in parameters if union_members(option.kind)[0] in (int, float)]
            cases += [(group, name, key, required) for key in numbers]
    assert len(cases) > 20
    for group, name, key, required in cases:
        with pytest.raises(UserError, match=f"--{group}.{key} x: must be"):
            parse(f"--{group}", name, f"--{group}.{key}", "x", *required)
    with pytest.raises(UserError, match=r"Unknown: type Path \| None of place has no value; import it outside"):
        parse("--objective", "user_objectives.Unknown")


def test_own_classes_have_short_names():
    class Text(TextFiles):
        """Not exported, though derived from one that is."""

    assert class_path(TextFiles, DataModule) == "TextFiles"
    assert class_path(Text, DataModule).startswith(f"{__name__}.")
    moved = parse("--objective", "toolkit.objectives.preference.DPO")["objective"]  # the path of older versions
    assert class_path(type(moved), Objective) == "DPO"
    with pytest.raises(UserError, match=r"typo.DPO: no such class"):
        parse("--objective", "typo.DPO")
    assert "DataModule" not in classes_of(DataModule) and "PreparedData" not in classes_of(DataModule)


def test_options_extend_a_default_object(capsys):
    """The default of `data` may have options set."""

    def setup(data: DataModule = SyntheticTokens(seed=9)) -> None:  # noqa: B008
        """Try."""

    assert parse("--data.num_rows", "5", setup=setup, positionals=())["data"] == SyntheticTokens(num_rows=5, seed=9)


def test_each_data_module_of_litgpt_exists_or_names_what_replaces_it():
    data_modules = classes_of(DataModule)
    names = "Alpaca Alpaca2k AlpacaGPT4 Deita Dolly FLAN JSON LIMA LitData LongForm MicroLlama OpenWebText SlimPajama"
    for name in [*names.split(), "TextFiles", "TinyLlama", "TinyStories"]:
        if name in data_modules:
            continue
        shown = error_of("--data", name)
        assert shown.startswith(f"--data {name}: no such class; ") and "known are" not in shown and "\n" not in shown
        replacement = re.search(r"config_hub/\S+\.yaml|HuggingFace|JSON", shown)
        assert replacement, shown
        if "config_hub" in replacement[0]:
            assert (Path(__file__).parents[2] / replacement[0]).is_file()
