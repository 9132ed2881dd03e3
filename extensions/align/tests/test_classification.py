"""Models with a head: from the command line to transformers and peft, metrics, labels, one curve."""

import csv
import json
import math
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.cases import check_each
from helpers.compare_runs import curve
from helpers.small_runs import write_base
from helpers.tiny_configs import HF_CONFIGS
from toolkit_align.labels import Labeling
from toolkit_align.reward import _load_scorer, reward
from toolkit_align.scoring import macro_f1, spearman

from toolkit import load
from toolkit.checkpoints.folder import read_model_config, write_model_files
from toolkit.checkpoints.hf.export_hf import export_hf, verify_hf
from toolkit.checkpoints.hf.import_hf import import_hf
from toolkit.cli import main
from toolkit.data import Classification, Preference
from toolkit.data.base import LabelSet
from toolkit.data.chat.template import Encoding
from toolkit.data.sft.tokenize import mark_scored
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.io.safe_parse import read_yaml, write_yaml
from toolkit.models.gpt import build_model
from toolkit.training.callbacks.console import texts_of

WORDS = {"good": ["fine", "great", "fun"], "bad": ["dull", "poor", "work"], "mixed": ["fine", "dull", "odd"]}
RUN = (
    "--data Classification --data.path reviews --data.cache_dir cache --accelerator cpu --train.global_batch_size 8 "
    "--train.max_steps 6 --train.lr_warmup_steps 0 --train.learning_rate 2e-3 --eval.interval 3"
)


def write_reviews(path, n: int, seed: int) -> None:
    draw = random.Random(seed)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for i in range(n):
            label = draw.choice(list(WORDS))
            writer.writerow([f"film {i} is {' '.join(draw.choices(WORDS[label], k=draw.randint(1, 9)))}", label])


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A base model, and reviews with a label in the current folder."""
    monkeypatch.chdir(tmp_path)
    for folder in ("corpus", "base", "reviews"):
        Path(folder).mkdir()
    Path("corpus/a.txt").write_text("The film is a fine, great, odd, dull, poor work and fun. " * 20)
    write_reviews("reviews/train.csv", 50, 0)
    write_reviews("reviews/val.csv", 17, 1)
    return write_base(Path("base"), Path("corpus"), vocab_size=280, block_size=64)


def run(command: str, words: str) -> list[dict[str, float]]:
    assert main([command, "base", *RUN.split(), "--head", "classification", *words.split()]) == 0
    return curve(words.split()[-1])


def test_from_the_command_line_to_transformers(base, capsys, refusal):
    from sklearn.metrics import accuracy_score, f1_score
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    rows = run("finetune_full", "--out_dir out")
    assert rows[-1]["loss"] < rows[0]["loss"] == pytest.approx(np.log(3), rel=0.3)
    config = read_model_config(Path("out/final"))
    assert (config.labels, config.problem_type) == (["bad", "good", "mixed"], "single_label_classification")
    assert main(["convert_to_hf", "out/final", "hf", "--verify", "true"]) == 0

    model, tokenizer = AutoModelForSequenceClassification.from_pretrained("hf"), AutoTokenizer.from_pretrained("hf")
    assert model.config.id2label == {0: "bad", 1: "good", 2: "mixed"}
    assert tokenizer.model_max_length == config.block_size  # where classify cuts texts
    reviews = list(csv.DictReader(Path("reviews/val.csv").read_text().splitlines()))
    texts = tokenizer([row["text"] for row in reviews], padding=True, return_tensors="pt")
    logits = model(texts["input_ids"], texts["attention_mask"]).logits.detach()
    native = load("out/final").eval()
    for row, expected in zip(reviews, logits, strict=True):
        scores = native(torch.tensor([tokenizer(row["text"])["input_ids"]]))[0, -1]
        torch.testing.assert_close(scores.detach(), expected, atol=1e-5, rtol=1e-5)
    labels = [config.labels.index(row["label"]) for row in reviews]
    expected = model(texts["input_ids"], texts["attention_mask"], labels=torch.tensor(labels)).loss
    assert rows[-1]["val_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert rows[-1]["val_accuracy"] == pytest.approx(accuracy_score(labels, logits.argmax(1)))
    assert rows[-1]["val_f1"] == pytest.approx(f1_score(labels, logits.argmax(1), average="macro"))

    assert main(["classify", "out/final", "--texts", "reviews/val.csv"]) == 0
    printed = list(csv.DictReader(capsys.readouterr().out.partition("wrote hf\n")[2].splitlines()))
    assert [row["prediction"] for row in printed] == [config.labels[i] for i in logits.argmax(1)]
    shares = [[float(row[f"score_{label}"]) for label in config.labels] for row in printed]
    torch.testing.assert_close(torch.tensor(shares), logits.softmax(1), atol=1e-5, rtol=1e-5)
    evaluate = "evaluate out/final --format json --data Classification --data.path reviews --data.cache_dir cache"
    for words in ("", " --data.packing best_fit --micro_batch_size 2"):
        assert main([*evaluate.split(), *words.split()]) == 0
        result = json.loads(capsys.readouterr().out)
        for name in ("loss", "accuracy", "f1"):
            assert result[name] == pytest.approx(rows[-1][f"val_{name}"], rel=1e-5), words
    for words in (
        "generate out/final", "chat out/final", "convert_to_gguf out/final x.gguf", "convert_to_litgpt out/final x",
        "finetune_full out/final --data JSON --data.json_path rows.jsonl --out_dir x",
    ):  # fmt: skip
        Path("rows.jsonl").write_text('{"text": "a fine film"}\n')
        assert main(words.split()) == 2
        error = capsys.readouterr().err
        assert "classification head" in error and error.count("\n") == 1, error

    # columns that are not given are the run's
    table = Path("reviews/val.csv").read_text()
    Path("other").mkdir()
    Path("other/val.csv").write_text(
        re.sub(r"^film (\d+) (.*),", r"film \1 \2,x,", table.replace("text,label", "body,text,kind"), flags=re.M)
    )
    shutil.copy("other/val.csv", "other/train.csv")
    settings = Path("out/final/hyperparameters.yaml")
    settings.write_text(
        re.sub("text_column: null", "text_column: body", settings.read_text()).replace(
            "label_column: null", "label_column: kind"
        )
    )
    for words in ("", "--text_column body"):
        assert main(["classify", "out/final", "--texts", "other/val.csv", *words.split()]) == 0
        result = capsys.readouterr()
        again = list(csv.DictReader(result.out.splitlines()))
        assert [row["prediction"] for row in again] == [row["prediction"] for row in printed]
        assert ("columns as in the checkpoint's run: text_column body\n" in result.err) == (not words)
        assert "not read: kind, text\n" in result.err
    assert "line 2: has no column body (--text_column); it has text, label\n" in refusal(
        "classify", "out/final", "--texts", "reviews/val.csv"
    )
    assert main([*evaluate.replace("reviews", "other").split(), "--verify_checkpoint", "false"]) == 0
    assert json.loads(capsys.readouterr().out)["f1"] == pytest.approx(rows[-1]["val_f1"], rel=1e-5)
    settings.write_text(settings.read_text().replace("text_column: body", "text_column: null"))
    assert "--texts reviews: is a folder; give one of its files" in refusal(
        "classify", "out/final", "--texts", "reviews"
    )

    for content, message in (
        (table + " ,good\n", "has an empty text; fix or remove this row"),
        (table.replace("label", "prediction", 1), "has a column prediction, which classify adds; rename it"),
    ):
        Path("odd.csv").write_text(content)
        assert main(["classify", "out/final", "--texts", "odd.csv"]) == 2
        printed = capsys.readouterr()
        assert not printed.out and message in printed.err, printed

    # a score is read before the repetitions of pad_token_id at the end, whatever the tokenizer's settings are
    core = json.loads(Path("hf/tokenizer.json").read_text())
    pad = max(core["model"]["vocab"].values()) + 1
    core["added_tokens"].append({**core["added_tokens"][0], "id": pad, "content": "<pad>"})
    Path("hf/tokenizer.json").write_text(json.dumps(core))
    settings = json.loads(Path("hf/tokenizer_config.json").read_text())
    assert settings.pop("pad_token") == tokenizer.eos_token
    Path("hf/tokenizer_config.json").write_text(json.dumps(settings))
    Path("hf/config.json").write_text(
        json.dumps(json.loads(Path("hf/config.json").read_text()) | {"pad_token_id": pad})
    )
    assert main(["convert_from_hf", "hf", "padded", "--verify_checkpoint", "false"]) == 0
    Path("padded.csv").write_text("text\na film<pad><pad>\n")
    assert main(["classify", "padded", "--texts", "padded.csv"]) == 0
    (printed,) = csv.DictReader(capsys.readouterr().out.splitlines()[-2:])
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained("hf"), AutoTokenizer.from_pretrained("hf")
    ids = tokenizer("a film<pad><pad>", return_tensors="pt")["input_ids"]
    assert ids[0, -2:].tolist() == [pad] * 2
    (expected,) = model(ids).logits.detach().softmax(1).tolist()
    assert [float(printed[f"score_{label}"]) for label in config.labels] == pytest.approx(expected, abs=1e-5)

    assert main(["convert_from_hf", "hf", "again", "--verify_checkpoint", "false"]) == 0
    assert read_model_config(Path("again")).labels == config.labels
    assert torch.equal(load("again").score.weight, native.score.weight)
    fields = read_yaml("again/model_config.yaml")
    write_yaml(Path("again/model_config.yaml"), fields | {"labels": [f"\x1b]0;{name}\n" for name in config.labels]})
    capsys.readouterr()
    assert main(["classify", "again", "--texts", "reviews/val.csv", "--verify_checkpoint", "false"]) == 0
    printed = capsys.readouterr().out
    assert f"prediction,score_\\x1b]0;{config.labels[0]}\\n," in printed and "\x1b" not in printed


def test_metrics_are_those_of_scikit_learn_and_scipy():
    from scipy.stats import spearmanr
    from sklearn.metrics import f1_score

    draw = np.random.default_rng(0)
    for n in (1, 5, 200):
        predicted, actual = (draw.random((n, 4)) < 0.4 for _ in range(2))
        expected = f1_score(actual, predicted, average="macro", zero_division=0)
        assert macro_f1(predicted, actual) == pytest.approx(expected, abs=1e-12)
    for values in (draw.random((2, 50)), draw.integers(0, 4, (2, 50))):
        assert spearman(*values) == pytest.approx(spearmanr(*values).statistic, abs=1e-12)
    assert np.isnan(spearman(np.ones(3), np.arange(3)))


def encode(rows: list, class_names=None, **options) -> tuple:
    """Return names, problem type and targets of rows of which the first two thirds are in the training file."""
    labeling = Labeling(**options)
    named = {"label": class_names} if class_names else {}
    records = [labeling.parse({"text": "a", "label": value}, f"line {i}", named) for i, value in enumerate(rows, 1)]
    is_train = np.arange(len(rows)) < len(rows) * 2 / 3
    targets, (names, problem, _) = labeling.encode(records, is_train, is_train, class_names)
    return names, problem.partition("_")[0], targets.tolist()


def test_labels_decide_the_kind_of_problem():
    def check(rows, names, problem, targets):
        assert encode(rows) == (names, problem, targets)

    cases = [
        (["b", "a", "b"], ["a", "b"], "single", [[1, 1], [0, 1], [1, 1]]),
        ([10, 9, 10], ["9", "10"], "single", [[1, 1], [0, 1], [1, 1]]),
        (["10", "9", "10"], ["9", "10"], "single", [[1, 1], [0, 1], [1, 1]]),
        ([True, False, True], ["false", "true"], "single", [[1, 1], [0, 1], [1, 1]]),
        ([4.0, 1, 2], ["label"], "regression", [[4, 1], [1, 1], [2, 1]]),
        (["4.5", "1", "2"], ["label"], "regression", [[4.5, 1], [1, 1], [2, 1]]),
        (["5e-1", "1", "2"], ["label"], "regression", [[0.5, 1], [1, 1], [2, 1]]),
        (["b", "a ", " b"], ["a", "b"], "single", [[1, 1], [0, 1], [1, 1]]),
        ([["x"], ["y", "x"], []], ["x", "y"], "multi", [[1, 0, 1], [1, 1, 1], [0, 0, 1]]),
        (['["x"]', '["y", "x"]', "[]"], ["x", "y"], "multi", [[1, 0, 1], [1, 1, 1], [0, 0, 1]]),
        ([[1, 0, 1], [0, 0, 0], [0, 1, 1]], ["0", "1", "2"], "multi", [[1, 0, 1, 1], [0, 0, 0, 1], [0, 1, 1, 1]]),
        (["[1, 0]", "[0.0, 1.0]", "[1, 1]"], ["0", "1"], "multi", [[1, 0, 1], [0, 1, 1], [1, 1, 1]]),
        ([[True, False], [True, True], [False, True]], ["0", "1"], "multi", [[1, 0, 1], [1, 1, 1], [0, 1, 1]]),
        ([[3], [3, 5], []], ["3", "5"], "multi", [[1, 0, 1], [1, 1, 1], [0, 0, 1]]),
        ([[0.5, 2], [1, 1], [2, 4.0]], ["label_0", "label_1"], "regression", [[0.5, 2, 1], [1, 1, 1], [2, 4, 1]]),
        (["[0.5, 2]", "[1, 1]", "[2, 0]"], ["label_0", "label_1"], "regression", [[0.5, 2, 1], [1, 1, 1], [2, 0, 1]]),
    ]
    check_each(check, cases)
    assert encode([1, 2, 3], problem_type="regression")[1] == "regression"
    assert encode([1.5, 2.5, 1.5], problem_type="single_label_classification")[0] == ["1.5", "2.5"]
    weights = [line[1] for line in encode(["a", "b", "a", "b", "a", "a", "a"], class_weights="balanced")[2]]
    from sklearn.utils.class_weight import compute_class_weight

    expected = compute_class_weight("balanced", classes=np.array(["a", "b"]), y=list("ababa"))
    assert weights[:2] == pytest.approx(expected.tolist())
    assert [line[1] for line in encode(["a", "b", "a"], class_weights={"b": 3.0})[2]] == [1, 3, 1]
    single = {"problem_type": "single_label_classification"}
    assert encode([1, 2.0, 1.0], **single) == (["1", "2"], "single", [[0, 1], [1, 1], [0, 1]])
    old = LabelSet(["1.0", "2.0"], "single_label_classification")
    assert encode([1, 2.0, 2], model_labels=old)[2] == [[0, 1], [1, 1], [1, 1]]
    assert encode([2, 0, 2], ["no", "maybe", "yes"])[::2] == (["no", "maybe", "yes"], [[2, 1], [0, 1], [2, 1]])
    assert encode([[2, 0], [1], []], ["b", "a", "c"])[::2] == (
        ["b", "a", "c"],
        [[1, 0, 1, 1], [0, 1, 0, 1], [0] * 3 + [1]],
    )
    several = {"problem_type": "multi_label_classification"}
    of_model = LabelSet(["x", "y"], several["problem_type"])
    assert encode([[1, 1], [0, 1], [0, 0]], model_labels=of_model)[2] == [[1, 1, 1], [0, 1, 1], [0, 0, 1]]
    assert encode([[1, 5], [2, 2], [3, 1]], problem_type="regression")[2] == [[1, 5, 1], [2, 2, 1], [3, 1, 1]]
    labels = LabelSet(["b", "a", "c"], "single_label_classification")
    assert encode(["a", "b", "a"], model_labels=labels)[2] == [[1, 1], [0, 1], [1, 1]]


def test_mistakes_in_labels_are_one_line():
    def check(rows, options, message):
        with pytest.raises(UserError) as error:
            encode(rows, **options)
        assert message in str(error.value) and "\n" not in str(error.value)

    of_model = LabelSet(["a", "c"], "single_label_classification")
    check_each(check, [
        (["a", "a", "a"], {}, "all rows have the same label"),
        (["a", None, "b"], {}, "line 2: has an empty label"),
        (["a"], {"label_column": "kind"}, "line 1: has no column kind (--data.label_column); it has text, label"),
        (["a", float("nan"), "b"], {}, "line 2: label nan: is no finite number"),
        ([0.5, " NaN", 1.5], {}, "line 2: label ' NaN': is no finite number; give a label, or remove this row"),
        (["a", "-Infinity", "b"], {}, "line 2: label '-Infinity': is no finite number"),
        ([[0.5, float("nan")], [1, 1]], {}, "line 1: label nan: is no finite number"),
        (["a", "\x1b[2J", "b"], {}, r"line 2: label '\x1b[2J': has characters that cannot be printed"),
        ([["a", "b"], ["c", "c"], []], {}, "label ['c', 'c']: a label is there twice; several labels are names"),
        ([[1, 0, 0], [1, 1], []], {}, "line 1: label [1, 0, 0]: has another number of classes than other rows"),
        ([[0.5, 1], [1.0], [2, 2]], {}, "line 2: label [1.0]: must be numbers; the first row has 2 of them"),
        ([0.5], {"model_labels": LabelSet(["a", "b"], "regression")}, "must be numbers; the model has 2 of them"),
        ([[0.5, 0.1]], {"problem_type": "multi_label_classification"}, "0.5 is not a name; several labels are"),
        ([0, 3], {"class_names": ["a", "b"]}, "line 2: label 3: has no name in the data's features"),
        (["a", {}, "b"], {}, "line 2: label {}: must be"),
        (["a", "b", "c"], {}, "line 3: label 'c': the training data has only the labels a, b"),
        (["a", "b", "a"], {"model_labels": of_model}, "the model has only the"),
        ([1.5, 2, 3], {"model_labels": of_model}, "the model has only the"),
        (["a", ["b"], "a"], {}, "line 1: the label is no list"),
        (["a", "b", "a"], {"problem_type": "regression"}, "label 'a': must be numbers; the first row has 1 of them"),
        ([["a"], ["b"], ["a"]], {"problem_type": "single_label_classification"}, "line 1: label ['a']: is a list"),
        ([1.5, 2, 3], {"class_weights": "balanced"}, "--data.class_weights balanced: is only for one label per text"),
        (["a", "b", "a"], {"class_weights": {"c": 2.0}}, "--data.class_weights c: no such label"),
    ])  # fmt: skip


def test_the_score_is_read_before_padding():
    for ids, pad, expected in (([5, 6, 2, 2], 2, [5, 6, 0]), ([2, 2], 2, [2, 0]), ([5], None, [5, 0])):
        marked = mark_scored(Encoding(ids, [True] * len(ids)), pad, every_token=False)
        assert marked.ids == expected and marked.loss_mask == [False] * (len(expected) - 1) + [True]
    marked = mark_scored(Encoding([5, 6, 7, 2], [False, True, False, True]), 2, every_token=True)
    assert marked == Encoding([5, 6, 7, 2, 0], [False, False, True, False, True])


def test_the_next_step_of_a_run_names_its_file(tmp_path):
    (tmp_path / "my tickets.csv").write_text("body,kind\n")
    path = f"{tmp_path}/my tickets.csv"
    assert texts_of(Classification(path=path)) == f"'{path}'"
    assert texts_of(Classification(path=str(tmp_path))) == texts_of(Preference(json_path=path)) == "FILE"


def test_a_head_and_another_objective_are_one_line(base, refusal):
    for words in ("--head reward --objective Classification", "--head classification --objective DPO"):
        assert "not this head; remove one of them" in refusal(
            "finetune_full", "base", *RUN.split(), *words.split(), "--out_dir", "x"
        )


def write_labels(kind: str) -> None:
    """Replace the labels of the reviews by labels of another kind of problem."""
    for split in ("train", "val"):
        rows = list(csv.DictReader(Path("reviews", f"{split}.csv").read_text().splitlines()))
        Path("reviews", f"{split}.csv").unlink()
        with open(f"reviews/{split}.jsonl", "w") as file:
            for row in rows:
                words = row["text"].split()
                count = words.count("fun") / 4
                several = sorted({*words} & {"fun", "dull"})
                row["label"] = {"regression": count, "numbers": [count, len(words)]}.get(kind, several)
                print(json.dumps(row), file=file)


CASES = {
    "finetune_full": "", "finetune_lora": "--train.learning_rate 1e-2 --data.class_weights balanced",
    "regression": "", "multi": "", "packed": "--data.packing best_fit --train.global_batch_size 4",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_n2_one_curve_in_every_split_and_on_two_ranks_and_resumed_bit_equal(base, name):
    if name in ("regression", "multi"):
        write_labels(name)
    command = "finetune_lora" if name == "finetune_lora" else "finetune_full"
    whole = run(command, f"{CASES[name]} --train.micro_batch_size 4 --out_dir whole")
    assert whole[-1]["val_loss"] < whole[0]["loss"]
    words = f"{CASES[name]} --train.micro_batch_size 1 --train.save_interval 2 --out_dir split"
    split = run(command, words)
    for strategy in ("ddp", "fsdp"):
        two = f"{CASES[name]} --train.micro_batch_size 1 --devices 2 --strategy {strategy} --out_dir {strategy}"
        options = [command, "base", *RUN.split(), "--head", "classification", *two.split()]
        subprocess.run([sys.executable, "-m", "toolkit", *options], check=True)
    for rows in (split, curve("ddp"), curve("fsdp")):
        for row, expected in zip(rows, whole, strict=True):
            assert row == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True)
    shutil.rmtree("split/final")
    assert repr(run(command, f"--resume split/step-00000004 {words}")) == repr(split)


@pytest.mark.slow
def test_problems_are_those_of_transformers(base, capsys):
    from scipy.stats import spearmanr
    from sklearn.metrics import accuracy_score, f1_score
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    for kind in ("multi", "regression", "numbers"):
        shutil.copytree("reviews", "csv", dirs_exist_ok=True)
        write_labels(kind)
        last = run("finetune_full", f"--out_dir {kind}")[-1]
        assert main(["convert_to_hf", f"{kind}/final", f"{kind}-hf", "--verify", "true"]) == 0
        model = AutoModelForSequenceClassification.from_pretrained(f"{kind}-hf")
        tokenizer, labels = AutoTokenizer.from_pretrained(f"{kind}-hf"), list(model.config.id2label.values())
        tokenizer.pad_token = tokenizer.eos_token
        rows = [json.loads(line) for line in Path("reviews/val.jsonl").read_text().splitlines()]
        texts = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
        if kind == "multi":
            targets = torch.tensor([[float(label in row["label"]) for label in labels] for row in rows])
        else:
            targets = torch.tensor([row["label"] for row in rows])
        output = model(texts["input_ids"], texts["attention_mask"], labels=targets)
        scores = output.logits.detach()
        assert last["val_loss"] == pytest.approx(output.loss.item(), rel=1e-5)
        capsys.readouterr()
        assert main(["classify", f"{kind}/final", "--texts", "reviews/val.jsonl"]) == 0
        printed = list(csv.DictReader(capsys.readouterr().out.splitlines()))
        predictions = [json.loads(row["prediction"]) for row in printed]
        if kind == "multi":
            assert predictions == [[labels[i] for i in row.nonzero()[:, 0]] for row in scores > 0]
            shares = [[float(row[f"score_{label}"]) for label in labels] for row in printed]
            torch.testing.assert_close(torch.tensor(shares), scores.sigmoid(), atol=1e-5, rtol=1e-5)
            assert last["val_accuracy"] == pytest.approx(accuracy_score(targets, scores > 0))
            expected = f1_score(targets, scores > 0, average="macro", zero_division=0)
            assert last["val_f1"] == pytest.approx(expected)
        else:
            assert np.array(predictions) == pytest.approx(scores.squeeze(1).numpy(), abs=1e-4)
            pairs = zip(scores.T, targets.reshape(len(rows), -1).T, strict=True)
            assert last["val_spearman"] == pytest.approx(np.mean([spearmanr(*pair).statistic for pair in pairs]))
            assert main(["convert_from_hf", f"{kind}-hf", f"{kind}-again"]) == 0
            assert read_model_config(Path(f"{kind}-again")).labels == labels
        shutil.rmtree("reviews")
        shutil.move("csv", "reviews")


@pytest.mark.slow
def test_adapters_with_a_head_are_peft_s_and_merge(base, capsys):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    run("finetune_lora", "--lora_mlp true --train.learning_rate 1e-2 --out_dir out")
    assert main(["convert_to_hf", "base", "base-hf"]) == 0
    assert main(["convert_to_peft", "out/final", "peft", "--base_model", str(Path("base-hf").resolve())]) == 0
    model = AutoModelForSequenceClassification.from_pretrained("base-hf", num_labels=3)
    model = PeftModel.from_pretrained(model, "peft").eval()
    tokens = torch.randint(1, 200, (1, 20))
    expected = model(input_ids=tokens).logits[0].detach()
    for command in ("convert_to_gguf out/final x.gguf", "convert_to_litgpt out/final x"):  # not: add --merge true
        assert main(command.split()) == 2
        assert "classification head" in capsys.readouterr().err
    assert main(["merge_lora", "out/final", "--out_dir", "merged"]) == 0
    assert main(["convert_to_hf", "out/final", "hf", "--merge", "true", "--verify", "true"]) == 0
    for folder in ("out/final", "merged"):
        torch.testing.assert_close(load(folder).eval()(tokens)[0, -1].detach(), expected, atol=1e-5, rtol=1e-5)
    assert main(["convert_from_hf", "base-hf", "base-16", "--dtype", "bfloat16"]) == 0
    assert main(["finetune_lora", "base-16", *RUN.split(), "--head", "classification", "--out_dir", "out-16"]) == 0
    assert main(["convert_to_hf", "out-16/final", "hf-16", "--merge", "true", "--verify", "true"]) == 0
    # finetuning continues from the head
    assert main(["finetune_lora", "merged", *RUN.split(), "--head", "classification", "--out_dir", "more"]) == 0
    assert curve("more")[0]["loss"] < 0.8 * math.log(3)


def write_pairs() -> str:
    """Write pairs with margins, and return the options of a run on them."""
    with open("pairs.jsonl", "w") as file:
        for i in range(24):
            pair = {"chosen": "fine " * (1 + i % 3), "rejected": "poor work " * (1 + i % 2), "margin": i % 2}
            print(json.dumps({"prompt": f"film {i}"} | pair), file=file)
    options = RUN.replace("Classification --data.path reviews", "Preference --data.json_path pairs.jsonl")
    return f"{options} --data.prompt_style chatml --data.val_split_fraction 0.25"


@pytest.mark.slow
def test_adapters_of_a_token_reward_are_peft_s(base):
    from peft import AutoPeftModelForTokenClassification

    words = "--head token_reward --lora_mlp true --train.learning_rate 1e-2 --out_dir out"
    assert main(["finetune_lora", "base", *write_pairs().split(), *words.split()]) == 0
    assert main(["convert_to_hf", "base", "base-hf"]) == 0
    assert main(["convert_to_peft", "out/final", "peft", "--base_model", str(Path("base-hf").resolve())]) == 0
    model = AutoPeftModelForTokenClassification.from_pretrained("peft", num_labels=1).eval()
    tokens = torch.randint(1, 200, (2, 20))
    scores = load("out/final").eval()(tokens)
    torch.testing.assert_close(model(input_ids=tokens).logits, scores, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["reward", "token_reward"])
def test_rewards_are_bradley_terry_s_and_one_curve(base, head, capsys):
    import transformers

    is_token, kind = head == "token_reward", "compared_tokens" if head == "token_reward" else "compared"
    options = f"{write_pairs()} --head {head}"
    curves = {}
    for size in (8, 1):
        words = f"--train.micro_batch_size {size} --out_dir micro{size}"
        assert main(["finetune_full", "base", *options.split(), *words.split()]) == 0
        curves[size] = curve(f"micro{size}")
    printed = capsys.readouterr().out
    assert re.search(r"loss .* accuracy [\d.]+ \| margin", printed)
    assert re.search(r"validation loss .* accuracy [\d.]+.* reward margin [\d.]+\n", printed)
    words = "--train.micro_batch_size 1 --devices 2 --strategy fsdp --out_dir two"
    command = [sys.executable, "-m", "toolkit", "finetune_full", "base", *options.split(), *words.split()]
    subprocess.run(command, check=True)
    for rows in (curves[1], curve("two")):
        for row, expected in zip(rows, curves[8], strict=True):
            for name, value in row.items():  # mean rewards are near 0, as differences of large ones
                tolerance = 1e-4 if "reward" in name else 1e-5
                assert value == pytest.approx(expected[name], rel=1e-4, abs=tolerance, nan_ok=True), name
    last = curves[8][-1]
    assert last["val_reward_margin"] > 0 and last["val_accuracy"] > 0.5 and last["val_loss"] < curves[8][0]["loss"]

    assert main(["convert_to_hf", "micro8/final", "hf", "--verify", "true"]) == 0
    name = "AutoModelForTokenClassification" if is_token else "AutoModelForSequenceClassification"
    model = getattr(transformers, name).from_pretrained("hf")

    def score(row) -> float:
        scores = model(row["input_ids"][None]).logits
        return scores[0, row["labels"] >= 0].mean().item() if is_token else scores.item()

    data = Preference(json_path="pairs.jsonl", prompt_style="chatml", val_split_fraction=0.25, cache_dir="cache")
    prepared = data.prepare(tokenizer=Tokenizer.load("base"), max_seq_length=64, kind=kind)
    losses = []
    for i in range(len(prepared.val)):
        chosen, rejected = map(score, prepared.val[i])
        losses.append(math.log1p(math.exp(rejected - chosen + prepared.val[i][0]["targets"].item())))
    assert last["val_loss"] == pytest.approx(np.mean(losses), rel=1e-4)

    # the reward model as a metric of another run's answers
    rows = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
    asked = [{"role": "user", "content": row["prompt"]} for row in rows]
    prompts = [{"messages": [message], "tools": None, "where": ""} for message in asked]
    every = replace(data, val_split_fraction=0.0).prepare(
        tokenizer=Tokenizer.load("base"), max_seq_length=64, kind=kind
    )
    expected = [score(every.train[i][0]) for i in range(len(rows))]
    _load_scorer.cache_clear()  # of the other head, in another folder with this name
    scores = reward([row["chosen"] for row in rows], [None] * len(rows), prompts, "micro8/final")["reward"]
    assert scores == pytest.approx(expected, abs=1e-4)
    with open("answers.jsonl", "w") as file:
        for row in rows:
            print(json.dumps({"prompt": row["prompt"], "completion": row["chosen"]}), file=file)
    options = options.replace("Preference --data.json_path pairs", "JSON --data.json_path answers")
    options = options.replace(f"--head {head}", "--eval.metric reward:micro8/final --eval.metric_new_tokens 4")
    words = "--eval.best_by reward --train.keep_best true --out_dir rewarded"
    assert main(["finetune_full", "base", *options.split(), *words.split()]) == 0
    answers = [json.loads(line) for line in Path("rewarded/logs/answers.jsonl").read_text().splitlines()]
    assert curve("rewarded")[-1]["val_reward"] == pytest.approx(np.mean([line["reward"] for line in answers]))
    assert Path("rewarded/best/COMPLETE").exists()
    assert main(["classify", "micro8/final", "--texts", "pairs.jsonl"]) == 2
    error = capsys.readouterr().err
    assert "pairs.jsonl line 1: is a pair of answers" in error and "; give a text, messages, or a prompt" in error
    assert "--objective" not in error


WITHOUT = (
    "cohere2", "ernie4_5", "ernie4_5_moe", "gemma4_text", "glm4_moe", "glm4_moe_lite", "granite", "granitemoe", "olmoe",
    "qwen3_5_moe_text",
)  # fmt: skip
WITHOUT_TOKENS = (
    "deepseek_v2",
    "falcon",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "hunyuan_v1_dense",
    "olmo",
    "olmo2",
    "olmo3",
    "qwen3_5_text",
)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["classification", "token_reward"])
@pytest.mark.parametrize("name", HF_CONFIGS)
def test_every_family_exports_its_head(name, head, tiny_models, tmp_path):
    native = load(tiny_models[name].native)
    config = native.config.with_head(head)
    if head == "classification":
        config = replace(config, labels=["a", "b", "c"], problem_type="single_label_classification")
    model = build_model(config)
    model.load_state_dict({k: v for k, v in native.state_dict().items() if not k.startswith("lm_head")}, strict=False)
    torch.nn.init.normal_(model.score.weight)
    folder = tmp_path / "head"
    folder.mkdir()
    write_model_files(folder, state_dict=model.state_dict(), config=model.config, hyperparameters=None, tokenizer=None)
    if config.family in (*WITHOUT, *(WITHOUT_TOKENS if head == "token_reward" else ["apertus"])):
        with pytest.raises(UserError, match="transformers has no class For"):
            export_hf(folder, tmp_path / "hf")
        return
    export_hf(folder, tmp_path / "hf")
    assert verify_hf(folder, tmp_path / "hf") < 2e-5
    import_hf(tmp_path / "hf", tmp_path / "again")
    again = load(tmp_path / "again")
    assert again.config.labels == config.labels and again.config.head == head
    assert torch.equal(again.score.weight, model.score.weight)
