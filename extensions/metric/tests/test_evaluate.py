"""`toolkit evaluate`: tasks of lm-eval, the data of a run, adapters, and options that have no effect."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from helpers.cases import slow_except
from helpers.lm_eval_tasks import write_tasks
from helpers.sealing import seal
from helpers.small_runs import write_base
from helpers.talker import make_talker
from helpers.tiny_configs import PHI3, longrope
from toolkit_metric.evaluate import data_of_run
from toolkit_metric.tasks import load_lm, run_tasks

from toolkit.checkpoints.adapters import AdapterInfo, write_adapter_files
from toolkit.checkpoints.fingerprint import base_fingerprint
from toolkit.checkpoints.folder import load_model, write_model_files
from toolkit.checkpoints.hf.export_hf import export_hf
from toolkit.cli import main
from toolkit.data import PythonStdlib
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.models.lora import LoRAConfig, add_lora, is_adapter


@pytest.fixture(scope="module")
def talker(tmp_path_factory) -> Path:
    return make_talker(tmp_path_factory.mktemp("talker"), block_size=128)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A folder with a multiple-choice task and one that is answered in words."""
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path_factory):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


def results(capsys, *words) -> dict:
    assert main(["evaluate", *map(str, words), "--accelerator", "cpu", "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


SETTINGS = [{}, {"num_fewshot": 2}, {"apply_chat_template": False, "limit": 5}]


@pytest.mark.slow
@pytest.mark.parametrize("settings", slow_except([{}], SETTINGS))
def test_task_results_match_lm_eval_on_the_export(settings, talker, task, tmp_path, capsys):
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    export_hf(talker, tmp_path / "hf")
    reference = lm_eval.simple_evaluate(
        HFLM(pretrained=str(tmp_path / "hf"), device="cpu", dtype="float32"),
        tasks=["choose", "say"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(task), include_defaults=False),
        apply_chat_template=settings.get("apply_chat_template", True),
        fewshot_as_multiturn=settings.get("apply_chat_template", True),
        num_fewshot=settings.get("num_fewshot"),
        limit=settings.get("limit"),
    )
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value).lower())]
    capsys.readouterr()
    native = results(capsys, talker, "--tasks", "choose,say", "--include_path", task, *flags)
    names = {"choose": {"acc": True, "acc_norm": True}, "say": {"exact_match": True}}
    assert native["higher_is_better"] == reference["higher_is_better"] == names
    for name, metrics in (("choose", ("acc", "acc_norm", "acc_stderr")), ("say", ("exact_match",))):
        for metric in metrics:
            assert native["tasks"][name][metric] == pytest.approx(reference["results"][name][f"{metric},none"])
        assert native["tasks"][name]["samples"] == settings.get("limit", native["tasks"][name]["samples"])
        assert native["tasks"][name]["num_fewshot"] == settings.get("num_fewshot", 0)
    assert native["settings"]["apply_chat_template"] is settings.get("apply_chat_template", True)
    if not settings:  # it knows the three answers by heart
        assert 0 < native["tasks"]["say"]["exact_match"] < 1


def test_log_likelihoods_match_the_model(talker, tmp_path):
    """Also of an empty context, of a continuation with several tokens, and of a text longer than the context."""
    export_hf(talker, tmp_path / "hf")
    options = {"max_length": 128, "batch_size": 3, "device": torch.device("cpu"), "precision": "32-true"}
    lm = load_lm(tmp_path / "hf", tasks="t", tokenizer_dir=str(talker), tokenizer_name="t", **options)
    pairs = [("Q1A", "eins"), ("", "drei"), ("Q2A", "zwei 🎉"), ("Q3AdreiQ2A", "x"), ("Q1Aeins" * 30, "zwei")]
    model, tokenizer = load_model(talker), Tokenizer.load(talker)
    scores = lm.loglikelihood([SimpleNamespace(args=pair) for pair in pairs])
    for (context, answer), (score, is_greedy) in zip(pairs, scores, strict=True):
        ids = torch.tensor(tokenizer.encode(context + answer) if context else [0, *tokenizer.encode(answer)])[-129:]
        n = len(tokenizer.encode(answer))
        with torch.no_grad():
            log_probs = model(ids[None, :-1])[0, -n:].log_softmax(-1)
        assert score == pytest.approx(float(log_probs.gather(-1, ids[-n:, None]).sum()), abs=1e-4)
        assert is_greedy is bool((log_probs.argmax(-1) == ids[-n:]).all())


def test_longrope_is_evaluated_row_by_row(talker, tmp_path):
    """Rows together would use the factors of the longest."""
    transformers = pytest.importorskip("transformers")
    transformers.Phi3ForCausalLM(transformers.Phi3Config(**PHI3, **longrope(16))).save_pretrained(tmp_path)
    options = {"max_length": None, "batch_size": 3, "device": torch.device("cpu"), "precision": "32-true"}
    lm = load_lm(tmp_path, tasks="t", tokenizer_dir=str(talker), tokenizer_name="t", **options)
    assert lm.batch_size == 1 and lm.max_length == 64


class StopError(Exception):
    pass


@pytest.fixture
def stopped_before_loading(monkeypatch, tmp_path):
    """Evaluate without loading the export: return a function that gives exit code, its folder and config.json."""
    folders: list[tuple[Path, dict]] = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()

    def evaluate(*words, error=StopError) -> tuple[int, Path, dict]:
        def stop(folder, **options):
            folders.append((folder, json.loads((folder / "config.json").read_text())))
            raise error

        monkeypatch.setattr("toolkit_metric.evaluate.load_lm", stop)
        return main(["evaluate", *map(str, words), "--accelerator", "cpu"]), *folders[-1]

    return evaluate


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (StopError, 1)])
def test_export_is_temporary(stopped_before_loading, talker, task, tmp_path, error, code, capsys):
    actual, folder, config = stopped_before_loading(talker, "--tasks", "say", "--include_path", task, error=error)
    assert actual == code and config["torch_dtype"] == "float32"
    assert folder.parent.parent == tmp_path / "tmp" and not list((tmp_path / "tmp").iterdir())
    assert "export" not in capsys.readouterr().err


def test_hugging_face_folder_is_used_directly(stopped_before_loading, talker, task, tmp_path, capsys, refusal):
    export_hf(talker, tmp_path / "hf")
    words = [tmp_path / "hf", "--tasks", "say", "--include_path", task]
    assert stopped_before_loading(*words)[:2] == (1, tmp_path / "hf")
    assert "--base_checkpoint_dir x: has no effect on a Hugging Face folder" in refusal(
        "evaluate", *map(str, words), "--base_checkpoint_dir", "x"
    )
    with open(tmp_path / "hf/model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert "model.safetensors: checksum mismatch" in refusal("evaluate", *map(str, words))
    assert main(["evaluate", str(tmp_path / "hf")]) == 2  # on text
    assert "toolkit convert_from_hf" in capsys.readouterr().err


def test_4_bits_and_adapters_are_exported_in_bf16(stopped_before_loading, talker, task, tmp_path, capsys):
    words = ["--tasks", "say", "--include_path", task]
    _, _, config = stopped_before_loading(talker, *words, "--quantize", "bnb.nf4")
    assert config["torch_dtype"] == "bfloat16"
    assert "--tasks: evaluates an export in bf16, not quantized to bnb.nf4" in capsys.readouterr().err
    model, lora = load_model(talker), LoRAConfig(r=4)
    add_lora(model, lora)
    values = {name: p for name, p in model.named_parameters() if is_adapter(name)}
    files = {"state_dict": None, "config": model.config, "hyperparameters": None, "tokenizer": Tokenizer.load(talker)}
    (tmp_path / "lora").mkdir()
    write_adapter_files(tmp_path / "lora", values, AdapterInfo(lora, talker, base_fingerprint(talker)))
    write_model_files(tmp_path / "lora", **files)
    _, _, config = stopped_before_loading(seal(tmp_path / "lora"), *words)
    assert config["torch_dtype"] == "bfloat16"
    assert "--tasks: evaluates an export with merged adapters in bf16\n" in capsys.readouterr().err


def test_tasks_need_transformers_and_a_family_that_it_has(talker, capsys, refusal, monkeypatch):
    words = ["evaluate", str(talker), "--tasks", "say", "--accelerator", "cpu"]
    monkeypatch.setattr("toolkit_metric.evaluate.find_tasks", lambda *_: None)
    monkeypatch.setattr("toolkit.models.families.Family.is_in_transformers", False)
    assert "--tasks say: transformers has no class for 'llama'; remove --tasks" in refusal(*words)
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("toolkit evaluate: --tasks say: ") and line.endswith("pip install 'lm-eval[hf]>=0.4.9.2'")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (AssertionError(), "an answer has no tokens, or more than the model's context length, 64"),
        (AssertionError("max tokens (96) must be less"), "max tokens (96) must be less"),
        (ConnectionError("offline"), "cannot load the dataset: offline"),
        (ValueError("this task is unsafe"), "executes code written by the model, which is not supported"),
    ],
)
def test_tasks_that_cannot_run(error, message, monkeypatch):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr("lm_eval.evaluator.simple_evaluate", fail)
    options = {"num_fewshot": None, "limit": None, "apply_chat_template": False}
    with pytest.raises(UserError) as info:
        run_tasks(SimpleNamespace(max_length=64), ["a", "b"], None, **options)
    assert str(info.value) == f"--tasks a,b: {message}"


def test_results_of_tasks_as_a_table(talker, task, capsys):
    assert (
        main(["evaluate", str(talker), "--tasks", "choose", "--include_path", str(task), "--accelerator", "cpu"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["task", "metric", "value", "stderr", "shots", "samples"]
    assert lines[1].split()[:2] == ["choose", "acc"] and float(lines[1].split()[2]) <= 1
    assert any(line.split() == ["apply_chat_template", "True"] for line in lines)


def test_missing_chat_template_is_reported(talker, tmp_path, capsys):
    shutil.copytree(talker, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    seal(tmp_path / "base")
    words = ["--tasks", "choose", "--apply_chat_template", "true", "--accelerator", "cpu"]
    assert main(["evaluate", str(tmp_path / "base"), *words]) == 2
    err = capsys.readouterr().err
    assert f"--apply_chat_template true: {tmp_path / 'base'} has no chat template; remove the option" in err
    assert "prompt_style" not in err


def finetune(command, base, out, corpus_rows, *flags):
    words = ["--data", "JSON", "--data.json_path", str(corpus_rows), "--data.val_split_fraction", "0.25"]
    sizes = ["--train.global_batch_size", "4", "--train.max_steps", "4", "--train.max_seq_length", "48"]
    assert main([command, str(base), *words, *sizes, "--out_dir", str(out), "--accelerator", "cpu", *flags]) == 0
    row = dict(zip(*((out / "logs/metrics.csv").read_text().splitlines()[i].split(",") for i in (0, -1)), strict=True))
    return float(row["val_loss"])


def test_adapters_on_the_data_of_their_run(talker, tmp_path, capsys):
    """Neither the data nor its options are given again; only the adapters differ between the runs."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": str(i), "completion": "zwei" * (1 + i % 3)}) + "\n" for i in range(24))
    )
    flags = ["--train.learning_rate", "0.01", "--precision", "32-true"]
    expected = finetune("finetune_lora", talker, tmp_path / "lora", rows, *flags)
    capsys.readouterr()
    found = results(capsys, tmp_path / "lora/final", "--trust_checkpoint_data", "true")
    assert found["data"] == "JSON, val" and found["loss"] == pytest.approx(expected, rel=1e-5)
    base = results(capsys, talker, "--data", "JSON", "--data.json_path", rows, "--data.val_split_fraction", "0.25",
                   "--max_seq_length", "48")  # fmt: skip
    assert base["sequences"] == found["sequences"] == 6 and base["loss"] > expected


def test_metrics_of_a_file_need_no_data_of_a_run(talker, tmp_path, capsys):
    """The talker's answers are known by heart."""
    (tmp_path / "asked.jsonl").write_text(
        "".join(json.dumps({"prompt": q, "completion": "zwei 🎉"}) + "\n" for q in "123")
    )
    found = results(
        capsys, talker, "--eval.metric", "exact_match,rouge_l", "--eval.metric_data", tmp_path / "asked.jsonl"
    )
    assert found["exact_match"] == found["rouge_l"] == pytest.approx(1 / 3)
    assert found["prompts"] == 3 and found["data"] == str(tmp_path / "asked.jsonl")


def test_a_head_writes_no_text(corpus, tmp_path, capsys):
    head = {"head": "reward", "labels": ["reward"], "tie_embeddings": False}
    folder = str(write_base(tmp_path, corpus, **head))
    for option in (["--tasks", "say"], ["--eval.metric", "json_valid"]):
        assert main(["evaluate", folder, *option, "--accelerator", "cpu"]) == 2
        assert (
            f"{' '.join(option)}: the model has a reward head and writes no text; remove it" in capsys.readouterr().err
        )


def test_checkpoint_without_recorded_data(talker, capsys):
    data, length = data_of_run(talker, trust=False)
    assert isinstance(data, PythonStdlib) and length is None
    assert "does not name the training data: using PythonStdlib" in capsys.readouterr().err


@pytest.mark.slow
def test_task_keeps_its_own_num_fewshot(talker, task, tmp_path, capsys):
    """lm-eval leaves a task with ``num_fewshot: 0`` as it is, whatever is asked for."""
    choose = yaml.safe_load((task / "choose.yaml").read_text())
    (tmp_path / "none.yaml").write_text(yaml.safe_dump(choose | {"task": "none", "num_fewshot": 0}))
    words = [str(talker), "--tasks", "none", "--include_path", str(tmp_path), "--num_fewshot", "2", "--limit", "2"]
    assert main(["evaluate", *words]) == 0
    assert "--num_fewshot 2: has no effect on task none, which uses 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(
            ["--tasks", "chose", "--include_path", "{task}"],
            "--tasks chose: no such task; did you mean 'choose'?",
            marks=pytest.mark.slow,  # lm-eval looks through its thousands of files
        ),
        (["--tasks", "choose", "--include_path", "nowhere"], "--include_path nowhere: no such folder"),
        (["--tasks", ","], "--tasks ',': must be task names"),
        (["--tasks", "choose", "--split", "train"], "--split train: has no effect with --tasks; remove it"),
        (["--tasks", "choose", "--data", "PythonStdlib"], "--data PythonStdlib: has no effect with --tasks"),
        (["--limit", "3"], "--limit 3.0: requires --tasks; remove it"),
        (
            ["--eval.metric", "rouge_l", "--tasks", "say"],
            "--eval.metric rouge_l: has no effect with --tasks",
        ),
        (
            ["--eval.metric", "rouge_l", "--split", "train"],
            "--split train: has no effect with --eval.metric",
        ),
        (["--eval.metric_rows", "3"], "--eval.metric_rows 3: has no effect without --eval.metric"),
        (["--data.columns", "x"], "--data.columns: no such option without --data; CSV, JSON"),
        (
            ["--eval.metric", "rouge_l", "--data", "PythonStdlib"],
            "is no instruction data; give --eval.metric_data",
        ),
        (["--eval.metric", "rouge"], "--eval.metric rouge: no such metric; did you mean 'rouge_l'?"),
        (["--tasks", "choose", "--limit", "-1"], "--limit -1.0: must be greater than zero"),
        (["--tasks", "choose", "--num_fewshot", "-1"], "--num_fewshot -1: must not be negative"),
        (["--micro_batch_size", "0"], "--micro_batch_size 0: must be greater than zero"),
    ],
)
def test_conflicting_options_are_rejected(words, message, talker, task, capsys):
    assert main(["evaluate", str(talker), *(word.format(task=task) for word in words)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert message in line
