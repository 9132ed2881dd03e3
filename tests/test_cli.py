"""The command line: fast help, exit codes, one-line messages. Options: tests/config/test_command.py."""

import ast
import io
import itertools
import os
import pty
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cases import check_each, slow_except

from tests.config.test_command import error_of, parse
from toolkit import cli
from toolkit.cli import parser
from toolkit.commands import GROUPS, all_commands, pretrain
from toolkit.config.command import CommandOptions
from toolkit.distributed.signals import restore_handlers_on_exit
from toolkit.errors import GuardError, StoppedBySignalError, UserError
from toolkit.extension import Command, Extension, registered
from toolkit.version import __version__


def toolkit(*argv: str, **kwargs) -> subprocess.CompletedProcess:
    """Run the command in a subprocess."""
    return subprocess.run([sys.executable, "-m", "toolkit", *argv], capture_output=True, text=True, **kwargs)


# ---- help


HELP = [[], ["--help"], *([name, "--help"] for name in all_commands())]


@pytest.mark.parametrize("argv", slow_except([[], ["pretrain", "--help"], ["evaluate", "--help"]], HELP), ids=" ".join)
def test_help_is_fast_and_does_not_import_torch(argv):
    code = (
        "import sys; from toolkit.cli import main\n"
        f"code = main({argv!r})\n"
        "print('torch' in sys.modules, 'jsonargparse' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    start = sum(os.times()[2:4])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    seconds = sum(os.times()[2:4]) - start  # CPU time of the child, whatever else the machine does
    assert done.returncode == 0
    assert done.stdout.startswith("usage: toolkit")
    assert done.stderr.split() == ["False", str(len(argv) == 2)]
    assert seconds < 5  # 0.3 s on an idle machine


def test_overview_lists_every_command():
    for columns in ("40", "140"):
        shown = toolkit("--help", env=os.environ | {"COLUMNS": columns}).stdout
        lines, words = shown.splitlines(), " ".join(shown.split())
        assert max(map(len, lines)) <= int(columns)
        assert all(f" {name} {command.help}" in words for name, command in all_commands().items())
        starts = {line.index(line[2:].split(maxsplit=1)[1], 2) for line in lines if line[:1] == " " != line[2:3]}
        assert len(starts) == 1  # the column of the texts
    assert [line for line in lines if line and line[0] != " "][1:] == list(GROUPS.values())


def test_a_command_of_an_extension_is_in_the_group_of_the_one_before(monkeypatch, capsys):
    commands = {"count": Command("count", "count words"), "sing": Command("sing", "sing a text", after="chat")}
    monkeypatch.setattr("toolkit.commands.all_extensions", lambda: [("mine", Extension(commands=commands))])
    all_commands.cache_clear()
    assert cli.main(["--help"]) == 0
    all_commands.cache_clear()
    groups = [group.splitlines() for group in capsys.readouterr().out.split("\n\n")]
    texts = {title: [line.split()[0] for line in lines] for title, *lines in groups}
    assert texts["Use a model"] == ["generate", "chat", "sing"] and texts["Extensions"] == ["count"]


def test_only_the_selected_command_is_imported():
    code = (
        "import sys; from toolkit.cli import main; main(['prepare_data', '--help'])\n"
        "print(sorted(m for m in sys.modules if m.startswith('toolkit.commands.')), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ast.literal_eval(done.stderr) == ["toolkit.commands.prepare_data"]


def test_version():
    assert toolkit("--version").stdout.split() == ["toolkit", __version__]


def test_help_shows_the_options_of_the_chosen_data(capsys):
    assert parse("--help") is None
    default = capsys.readouterr().out
    assert "--data.val_fraction" in default and "--data.train_data_path" not in default
    assert "PythonStdlib, RedPajama, SyntheticTokens" in " ".join(default.split())
    parse("--data", "TextFiles", "--help")
    assert "--data.train_data_path" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["pretrain", "finetune_full", "finetune_lora"])
def test_help_is_one_screen_that_names_the_rest(name, capsys):
    assert cli.main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n") <= 45
    for option in ("--config", "--data", "--train.learning_rate", "--train.max_steps", "--devices", "--out_dir"):
        assert f"  {option} " in shown
    assert f"\ntoolkit {name} " in shown  # an example to copy
    assert "--help all" in shown and "eval, optimizer, objective, fsdp, ddp, pipeline, log" in " ".join(shown.split())
    assert "--optimizer.eps" not in shown and "--fsdp" not in shown


def test_help_all_shows_every_option_in_the_order_of_use(capsys):
    parse("--help", "all")
    shown = capsys.readouterr().out
    flags = re.findall(r"^  --([\w.]+)", shown, re.MULTILINE)
    assert sorted({*flags, "model_name"}) == sorted(
        [*CommandOptions(pretrain.setup).options(), "data", "objective", "config", "extensions", "print_config"]
    )
    flags = [flag for flag in flags if flag not in ("data", "objective")]
    groups = [group for group, _ in itertools.groupby(flag.rpartition(".")[0] for flag in flags)]
    own = ["", "train", "data", "eval", "optimizer", "fsdp", "ddp", "pipeline", "log", "profiler", "model_config"]
    assert [group for group in groups if group not in registered("option_groups")] == own  # packages may be installed
    text = " ".join(shown.split())
    assert "(an integer or auto; default: auto)" in text and "one of cosine, linear, constant, wsd" in text
    assert not re.search("Union|Literal|Optional|NoneType|type:", text)


def test_help_of_a_group(capsys):
    parse("--help", "train")
    shown = capsys.readouterr().out
    assert "--train.lr_warmup_steps N" in shown and "--eval" not in shown and "--seed" not in shown
    assert error_of("--help", "trian").startswith("--help trian: must be one of all, train, ")


# ---- exit codes


def end_with(monkeypatch, error: BaseException) -> None:
    def setup(**kwargs):
        raise error

    monkeypatch.setattr(pretrain, "setup", setup)
    monkeypatch.setattr(parser, "parse", lambda *args: {})


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("--x 1:\n  no"), 2, "toolkit pretrain: --x 1: no\n"),
        (UserError("a file says \x1b[31mé\x07"), 2, "toolkit pretrain: a file says \\x1b[31mé\\x07\n"),
        (UserError("\x1b" * 2000 + " no"), 2, "toolkit pretrain: " + 375 * "\\x1b" + " ... " + 123 * "\\x1b" + " no\n"),
        (GuardError("the loss is nan"), 3, "toolkit pretrain: the loss is nan\n"),
        (StoppedBySignalError(15, "saved"), 143, "toolkit pretrain: saved\n"),
        (KeyboardInterrupt(), 130, "toolkit pretrain: interrupted\n"),
        (
            RuntimeError("operator torchvision::nms does not exist"),
            2,
            "toolkit pretrain: the installed torchvision breaks torch; run: pip uninstall -y torchvision\n",
        ),
    ],
)
def test_exit_codes_and_one_line_messages(monkeypatch, capsys, error, code, line):
    monkeypatch.delenv("TOOLKIT_TRACEBACK", raising=False)
    end_with(monkeypatch, error)
    assert cli.main(["pretrain"]) == code
    assert capsys.readouterr().err == line
    monkeypatch.setenv("TOOLKIT_TRACEBACK", "1")
    assert cli.main(["pretrain"]) == code
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback") and shown.endswith(line)


def test_unexpected_exception_shows_its_traceback(monkeypatch, capsys):
    end_with(monkeypatch, ZeroDivisionError("oh"))
    assert cli.main(["pretrain"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_user_errors_in_a_real_process():
    done = toolkit("pretrain", "--train.micro_batchsize", "4")
    expected = "toolkit pretrain: --train.micro_batchsize: no such option; did you mean --train.micro_batch_size?\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)
    assert "trian: no such command; use finetune_full or finetune_lora; pretrain for" in toolkit("trian").stderr
    done = toolkit("pretrian")
    assert (done.returncode, done.stderr) == (2, "toolkit: pretrian: no such command; did you mean 'pretrain'?\n")


def test_names_of_other_tools_get_a_hint(refusal):
    cases = [
        (["quantize"], ["quantize: no such command; see toolkit --help"]),
        (["train_dpo"], ["train_dpo: no such command; use finetune_lora or finetune_full with --objective DPO"]),
        (["finetune_lora", "--lora_plus", "2"], ["did you mean --loraplus_lr_ratio?"]),
        (["convert_from_litgpt", "x"], ["convert_from_litgpt: no such command;", "convert_to_litgpt"]),
        (["finetune_lora", "x", "--lora_target_modules", "[q_proj]"], ["choose the layers with --lora_query"]),
        (["pretrain", "--gpus", "2"], ["did you mean --devices?"]),
        (["pretrain", "--fp16", "true"], ["did you mean --precision 16-mixed?"]),
        (["pretrain", "--wandb", "true"], ["did you mean --logger_name wandb?"]),
        (["pretrain", "--save_steps", "2"], ["did you mean --train.save_interval?"]),
        (["pretrain", "--eval_steps", "2"], ["did you mean --eval.interval?"]),
        (["pretrain", "--max_iters", "2"], ["did you mean --train.max_steps?"]),
        (["pretrain", "--resume_from_checkpoint", "x"], ["did you mean --resume?"]),
        (["pretrain", "--optim", "adamw"], ["did you mean --optimizer.name?"]),
        (["pretrain", "--deepspeed", "x"], ["did you mean --strategy fsdp?", "ZeRO 2"]),
        (["pretrain", "--flash_attention", "x"], ["no such option; attention needs no option"]),
        (["pretrain", "--attn_implementation", "x"], ["no such option; attention needs no option"]),
        (["finetune_lora", "x", "--dataset_name", "x"], ["did you mean --data HuggingFace?"]),
        (["pretrain", "--data.help"], ["--data NAME --help"]),
        (["pretrain", "--num_train_epochs", "2"], ["did you mean --train.epochs?"]),
        (["pretrain", "--gradient_accumulation_steps", "2"], ["did you mean --train.global_batch_size?"]),
        (["pretrain", "--report_to", "wandb"], ["did you mean --logger_name?"]),
        (["pretrain", "--logging_steps", "2"], ["did you mean --train.log_interval?"]),
        (["pretrain", "--save_total_limit", "2"], ["did you mean --train.keep_last?"]),
        (["finetune_lora", "x", "--load_in_4bit", "true"], ["did you mean --quantize bnb.nf4?"]),
        (["finetune_full", "x", "--load_in_4bit", "true"], ["finetune_lora --quantize bnb.nf4"]),
        (["finetune_lora", "x", "--assistant_only_loss", "true"], ["did you mean --data.train_on?"]),
        (["pretrain", "--neftune_noise_alpha", "5"], ["--train.neftune_alpha"]),
        (["pretrain", "--use-fsdp"], ["did you mean --strategy fsdp?"]),
        (["pretrain", "--parallelism.tensor_parallel_degree", "2"], ["did you mean --tensor_parallel_size?"]),
        (["pretrain", "--expert_parallel_size", "2"], ["no such option; experts are sharded"]),
        (["pretrain", "pico-llama", "--objective", "PPO"], ["no such class; use GRPO, of an extension"]),
        (
            ["convert_to_gguf", "x", "y", "--quantize", "q4"],
            ["no such option; the types are those of --dtype", "llama-q"],
        ),
        (["pretrain", "--fsdp.state_dict_type", "local_state_dict"], ["use sharded"]),
        (["upload", "x"], ["--push_to_hub"]),
        (["finetune_lora", "x", "--push_to_hub", "true"], ["after training, run toolkit convert_to_hf DIR OUT_DIR"]),
        (["convert_to_hf", "x", "y", "--hub_model_id", "me/x"], ["did you mean --push_to_hub?"]),
        (["export", "x"], ["convert_to_gguf"]),
        (["sft", "x"], ["finetune_lora"]),
        (["dpo", "x"], ["--objective DPO"]),
        (["upload", "x"], ["vllm serve"]),
        (["env"], ["use doctor"]),
        (["list"], ["toolkit pretrain list"]),
        (["webui"], ["use chat"]),
        (["download", "list"], ["repo_id list:", "`toolkit pretrain list`"]),
        (["finetune_lora", "org/Model-1B", "--data", "Alpaca"], ["`toolkit download org/Model-1B`"]),
    ]
    for argv, texts in cases:
        error = refusal(*argv)
        assert all(text in error for text in texts), error


def test_simple_mistakes_are_reported_without_importing_torch(tmp_path):
    """Torch and Lightning take seconds to import. All in one process, because none of them may import them."""
    base, used = tmp_path / "base", tmp_path / "used"
    tuned = tmp_path / "tuned"
    for folder in (base, tuned):
        folder.mkdir()
        (folder / "model_config.yaml").write_text("")
    (tuned / "lit_model.pth.lora").write_text("")
    (tmp_path / "empty.txt").write_text("")
    (base / "model_config.yaml").write_text("")
    (used / "logs").mkdir(parents=True)
    (used / "logs" / "metrics.csv").write_text("")
    (tmp_path / "faq.csv").write_text("question,reply\nx,y\n")
    (tmp_path / "semi.csv").write_text("q;a\n1;2\n")
    (tmp_path / "tickets.csv").write_text("body,category\nb,billing\nc,shipping\n")
    tickets = f"finetune_full {base} --head classification --data Classification --data.path tickets.csv"
    columns = "--data.text_column body --data.label_column category"
    sizes = "--train.global_batch_size 7 --train.micro_batch_size 2 --devices"
    cases = {
        "pretrain nosuchmodel": "model_name 'nosuchmodel': no such configuration",
        "pretrain --model_config.n_layer 0": "--model_config.n_layer 0: ",
        "pretrain --config no.yaml": "--config no.yaml: No such file or directory",
        "pretrain --data TextFiles --data.train_data_path no": "--data.train_data_path no: no such file or folder",
        f"pretrain --out_dir {used}": "already used (logs/metrics.csv exists)",
        f"pretrain --accelerator cpu {sizes} 2": "--train.global_batch_size 7: ",
        f"pretrain --accelerator cpu {sizes[:-10]}": "--train.global_batch_size 7: ",
        "pretrain --resume nowhere": "--resume nowhere: ",
        f"finetune_lora {base} --data Alpaca --data.prompt_style alpacca": "--data.prompt_style alpacca: must be",
        "pretrain --data TextFiles --data.train_data_path empty.txt": "--data.train_data_path empty.txt: the file is",
        "pretrain --data TextFiles --data.train_data_path no/*.txt": "--data.train_data_path no/*.txt: no file matches",
        "pretrain --data HuggingFaceText --data.path x --train.epochs 1": "--train.epochs 1: the number of rows",
        "pretrain --num_nodes 2": "--num_nodes 2: NODE_RANK is not set",
        "pretrain --callbacks no_such_module.Callback": "--callbacks no_such_module.Callback: no such class",
        "pretrain --optimizer.name AdanW": "--optimizer.name AdanW: no such optimizer; did you mean",
        "pretrain --optimizer.name pytorch_optimizer.Nope": "no such optimizer; a class of another package is given in",
        f"finetune_full {tuned} --data Alpaca": "holds adapters, not a model; run `toolkit merge_lora",
        "plan pretrain --speed H900": "--speed H900: unknown GPU",
        "pretrain --logger_name tensorbord": "did you mean 'tensorboard'?",
        "pretrain --initial_checkpoint_dir no": "checkpoint_dir no: no such folder",
        "finetune_lora no --data Alpaca": "checkpoint_dir no: no such folder",
        "finetune_lora Org/Model": "run `toolkit download Org/Model`",
        f"finetune_lora {base}": f"--data.json_path: must be set: `toolkit finetune_lora {base} --data JSON --data.",
        f"finetune_lora {base} --data Alpaca --lora_r 0": "--lora_r 0: must be greater than zero",
        "pretrain --optimizer.in_backward true": "--optimizer.in_backward true is not supported with",
        "pretrain --fsdp.state_dict_type local": "one of full, sharded; use sharded",
        "pretrain --fsdp.auto_wrap class": "--fsdp.auto_wrap class: name the classes",
        "pretrain --optimizer.name AdamW8bit": "--optimizer.name AdamW8bit: needs bitsandbytes; run: pip install",
        f"generate {base} --quantize bnb.nf4": "--quantize bnb.nf4: needs bitsandbytes; run: pip install",
        f"evaluate {base} --data JSON --data.json_path no.json": "--data.json_path no.json: no such file or folder",
        f"finetune_full {base} --data CSV --data.csv_path faq.csv": "--data.columns",
        f"finetune_full {base} --data CSV --data.csv_path semi.csv": "columns are separated by ';'",
        f"finetune_full {base} --data.json_path faq.csv": "ndjson; use --data CSV --data.csv_path faq.csv",
        f"finetune_full {base} --data.json_path *.jsonl": "must be a file, or a folder with train and val; not a",
        f"{tickets} --data.text_column body --data.label_column nope": "nope",
        f"{tickets} --data.text_column no --data.label_column category": "no column no (--data.text_column); it has",
        f"{tickets} {columns} --data.class_weights {{'bill':2}}": "--data.class_weights bill: no such label; the",
        f"{tickets} {columns} --data.problem_type regression": "must be numbers",
        "generate no": "checkpoint_dir no: no such folder",
        "convert_to_hf no out": "checkpoint_dir no: no such folder",
        f"finetune_full {base} --data.json_path no.json": "--data.json_path no.json: no such file or folder",
    }
    torchrun = (
        "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 GROUP_WORLD_SIZE=1 TORCHELASTIC_RUN_ID=x"
    )
    slurm = "SLURM_JOB_ID=1 SLURM_NTASKS=2 SLURM_NNODES=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0"
    cases |= {  # with environment variables
        f"pretrain --devices 3 {torchrun}": "--devices 3: ",
        f"pretrain --devices 3 {slurm}": "--devices 3: ",
        "pretrain --num_nodes 2 --devices 1 NODE_RANK=2 MASTER_ADDR=x MASTER_PORT=1": "NODE_RANK=2: must be less than",
    }
    code = (
        "import contextlib, io, os, sys; from toolkit.cli import main; from toolkit.distributed import rendezvous\n"
        "rendezvous._locate_this_process = lambda: None  # other ranks are told with torch's store\n"
        "sys.modules['bitsandbytes'] = None  # not installed\n"
        f"for argv in {list(cases)}:\n"
        "    variables = [word for word in argv.split() if '=' in word]\n"
        "    os.environ.update(word.split('=') for word in variables)\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as shown:\n"
        "        assert main([word for word in argv.split() if word not in variables]) == 2, argv\n"
        "    for word in variables:\n"
        "        del os.environ[word.partition('=')[0]]\n"
        "    assert not {'torch', 'lightning.fabric'} & sys.modules.keys(), argv\n"
        "    print(shown.getvalue().strip())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for line, (argv, message) in zip(done.stdout.splitlines(), cases.items(), strict=True):
        assert line.startswith(f"toolkit {argv.split()[0]}: ") and message in line, line
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "base", "empty.txt", "faq.csv", "semi.csv", "tickets.csv", "tuned", "used"
    ]  # fmt: skip


def test_text_that_the_encoding_of_stdout_lacks_is_escaped(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO(), encoding="ascii"))
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # main() replaces it
    monkeypatch.setattr("toolkit.cli.dispatch.dispatch", lambda argv: print("é🎉") or 0)
    with restore_handlers_on_exit():
        assert cli.main() == 0
    assert written.getvalue() == b"\\xe9\\U0001f389\n"


def test_s3_signals_do_not_change_the_exit_code_of_a_command_that_is_done():
    code = (
        "import atexit, os, sys; from toolkit.cli import main; from toolkit.distributed.signals import SIGNALS\n"
        "atexit.register(lambda: [os.kill(os.getpid(), number) for number in SIGNALS])\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("number", "code", "line"), [("SIGTERM", 143, "stopped by SIGTERM"), ("SIGINT", 130, "interr")]
)
def test_s3_signals_in_the_first_moments_are_reported(number, code, line):
    """The other nodes of a run would wait for a process that ends without a message."""
    send = (
        "import os, signal, sys, toolkit.cli\n"
        "class Send:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == 'toolkit.cli.dispatch': os.kill(os.getpid(), signal.{number})\n"
        "sys.meta_path.insert(0, Send())\n"
        "sys.exit(toolkit.cli.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", send, "pretrain"], capture_output=True, text=True)
    assert done.returncode == code and done.stderr.startswith(f"toolkit pretrain: {line}"), done.stderr
    assert done.stderr.count("\n") == 1


def test_limits_of_the_shell_are_one_line(monkeypatch, capsys):
    numpy = ImportError("numpy:\n\nOriginal error was: lib.so: failed to map segment from shared object\n")
    torch = RuntimeError("alloc_cpu.cpp:124: Error code 12 (Cannot allocate memory)")
    python = SystemError("error return without exception set")
    raise_limit, full = "raise the limit of this shell: ulimit -v (now 1048576)\n", "out of CPU memory; set TOOLKIT_"

    def check(error: Exception, max_bytes: int, code: int, line: str) -> None:
        def fail(*args):
            raise error

        monkeypatch.setattr("toolkit.cli.dispatch._check_before_torch", fail)
        monkeypatch.setattr("resource.getrlimit", lambda kind: (max_bytes, max_bytes))
        monkeypatch.setattr("sys.unraisablehook", sys.unraisablehook)
        assert cli.main(["pretrain"]) == code
        shown = capsys.readouterr().err
        assert line in shown and (shown.count("\n") == 1) == bool(line) and (line or "ulimit" not in shown), shown

    files = OSError(24, "Too many open files", "lib.py")
    cases = [(files, resource.RLIM_INFINITY, 2, "raise the limit of this shell: ulimit -n\n")]
    cases += [(error, 2**30, 2, raise_limit) for error in (MemoryError(), numpy, torch, python)]
    cases += [(error, resource.RLIM_INFINITY, 1, full) for error in (MemoryError(), torch)]
    cases += [(error, resource.RLIM_INFINITY, 1, "") for error in (numpy, python)]  # a traceback
    check_each(check, [*cases, (ValueError(), 2**30, 1, "")])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may not limit the address space")
@pytest.mark.parametrize("size", slow_except([700_000], [500_000, 700_000, 850_000, 1_000_000]))
def test_little_address_space_is_one_line(size, tmp_path):
    words = f"ulimit -v {size}; exec {shlex.quote(sys.executable)} -m toolkit pretrain --train.max_steps 1"
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    line = f"toolkit pretrain: out of memory; raise the limit of this shell: ulimit -v (now {size})\n"
    assert (done.returncode, done.stderr) == (2, line)


OUTPUT = [["--help"], ["pretrain", "--help"], ["pretrain", "--print_config"]]


@pytest.mark.parametrize("argv", slow_except([["pretrain", "--help"]], OUTPUT), ids=" ".join)
def test_broken_pipe_exits_cleanly(argv):
    """Output smaller and larger than Python's buffer."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "toolkit", *argv]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def run_redirected(command: str, streams: str, folder: Path, **environ: str) -> tuple[int, str]:
    """Return the exit code and stderr of a command in a shell that redirects its standard streams."""
    words = f"exec {shlex.quote(sys.executable)} -m toolkit {command} {streams}"
    done = subprocess.run(["sh", "-c", words], stderr=subprocess.PIPE, text=True, cwd=folder, env=os.environ | environ)
    return done.returncode, done.stderr


def test_streams_that_are_closed_or_full_leave_the_exit_code(tmp_path):
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "metrics.csv").write_text("step,loss\n1,2\n")
    full = "toolkit: cannot write its output: No space left on device; free some space, or redirect it\n"

    def check(command: str, streams: str, code: int, shown: str) -> None:
        assert run_redirected(command, streams, tmp_path) == (code, shown)

    cases = [
        ("--version", ">&-", 0, ""),
        ("report run --format md", ">/dev/full", 2, full),
        ("schema pretrain", ">/dev/full", 2, full),  # longer than Python's buffer
        ("report run", "<&- >&- 2>&-", 0, ""),
        ("report none", "2>/dev/full", 2, ""),
    ]
    check_each(check, cases)
    assert b"Report: run" in (tmp_path / "run" / "report.html").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["<&- >&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
def test_run_without_standard_streams_trains(streams, corpus, tmp_path):
    words = f"pretrain pico-llama --accelerator cpu --data TextFiles --data.train_data_path {corpus} --out_dir run"
    words += " --data.vocab_size 300 --train.max_steps 2 --train.global_batch_size 2 --train.micro_batch_size 2"
    assert run_redirected(words, streams, tmp_path) == (0, "")
    assert (tmp_path / "run" / "final" / "COMPLETE").exists() and (tmp_path / "run" / "report.html").exists()


def test_import_of_torch_is_said_on_a_terminal(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import torch.stop")
    (tmp_path / "torch" / "stop.py").write_text("raise KeyboardInterrupt")
    words = [sys.executable, "-m", "toolkit", "pretrain", "pico-llama", "--train.max_steps", "1"]
    parent, child = pty.openpty()
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    assert subprocess.run(words, stderr=child, cwd=tmp_path, env=env).returncode == 130
    assert os.read(parent, 1000) == b"loading PyTorch\r\ntoolkit pretrain: interrupted\r\n"
    os.close(child), os.close(parent)


def test_output_on_a_terminal_cannot_control_it():
    code = "import sys, toolkit; toolkit.__version__ = 'a\\x1b[2J\\rb'; sys.argv[1:] = ['--version']; "
    code += "from toolkit.cli import main; main()"
    parent, child = pty.openpty()
    assert subprocess.run([sys.executable, "-c", code], stdout=child).returncode == 0
    assert os.read(parent, 1000) == rb"toolkit a\x1b[2J\rb" + b"\r\n"
    os.close(child), os.close(parent)


@pytest.mark.parametrize(
    "stray",
    [{"RANK": "5"}, {"SLURM_PROCID": "5"}, {"RANK": "5", "WORLD_SIZE": "8"}, {"RANK": "1", "SLURM_PROCID": "1"}],
    ids=" ".join,
)
def test_user_error_is_reported_despite_stray_launcher_variables(stray, monkeypatch, capsys):
    for name, value in stray.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["pretrain", "nosuchmodel"]) == 2
    assert capsys.readouterr().err.startswith("toolkit pretrain: ")


def test_mistake_in_a_command_of_one_process_reaches_out_to_no_other(monkeypatch, capsys):
    monkeypatch.setattr("toolkit.cli.dispatch.report_failure", lambda *_: pytest.fail("no process waits for it"))
    assert cli.main(["generate", "no/such"]) == 2
    assert capsys.readouterr().err.startswith("toolkit generate: checkpoint_dir no/such: ")
