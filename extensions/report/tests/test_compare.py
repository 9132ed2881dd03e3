"""Runs are compared where they are equal, with the error over seeds."""

import json
import math
from pathlib import Path
from statistics import mean, stdev

import pytest
from helpers.optional import importorskip_later
from toolkit_report.compare import compare, estimate
from toolkit_report.page import _charts, render_page
from toolkit_report.run import Checkpoint, read_runs
from toolkit_report.text import _estimate, _side_by_side, figures

from toolkit.cli import main
from toolkit.ui.events import write_event
from toolkit.ui.progress import capitalized

HEADER = "step,tokens,seconds,loss,val_loss,val_accuracy,val_accuracy_stderr,tokens_per_sec"

stats = importorskip_later("scipy.stats")


def write(folder, ends, seed, **settings):
    """A run that logs four rows up to ``ends`` (steps, tokens, seconds), with a loss that depends on step and seed."""
    (folder / "logs").mkdir(parents=True)
    rows = [[end * i / 4 for end in ends] for i in range(1, 5)]
    lines = [f"{row[0]:.0f},{row[1]:.0f},{row[2]},{9 / row[0]},{8 / row[0] + seed / 100},0.5,0.1,100" for row in rows]
    (folder / "logs" / "metrics.csv").write_text("\n".join([HEADER, *lines]) + "\n")
    write_event(
        folder, "launch", settings={"model_name": "pico-llama", "seed": seed, "out_dir": str(folder)} | settings
    )
    return str(folder)


@pytest.fixture
def places(tmp_path):
    """Two seeds of a baseline, and of an idea that reads twice the tokens in the same time."""
    base = [write(tmp_path / f"base-{seed}", (40, 4000, 60.0 + seed), seed) for seed in (0, 1)]
    idea = {"train": {"learning_rate": 0.1}}
    return base + [write(tmp_path / f"idea-{seed}", (80, 8000, 60.5), seed, **idea) for seed in (0, 1)]


def test_the_last_step_of_a_budget_counts_as_at_its_end(tmp_path, capsys):
    places = [
        write(tmp_path / name, (40, 4000, end), 0, train={"max_time": 1, "learning_rate": rate})
        for name, end, rate in (("a", 60.0, 0.1), ("b", 66.0, 0.2))
    ]
    assert main(["report", *places, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["axis"], found["end"], found["is_equal"]) == ("seconds", 60.0, True)  # steps are equal, too
    places[1] = write(tmp_path / "c", (20, 2000, 66.0), 0, train={"max_time": 1, "learning_rate": 0.2})
    assert main(["report", *places, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["axis"], found["end"], found["is_equal"]) == ("seconds", 60.0, True)
    assert found["groups"][1]["metrics"]["val_loss"]["mean"] == 8 / 20  # of its last row


def test_differences_and_standard_errors_over_seeds(places, capsys):
    assert main(["report", *places, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["axis"], found["end"], found["is_equal"]) == ("seconds", 60.0, True)
    assert [[run["name"] for run in group["runs"]] for group in found["groups"]] == [
        ["base-0", "base-1"],
        ["idea-0", "idea-1"],
    ]
    assert [group["settings"] for group in found["groups"]] == [
        {"train.learning_rate": None}, {"train.learning_rate": 0.1},
    ]  # fmt: skip
    base, idea = ([8 / steps, 8 / steps + 0.01] for steps in (40, 80))
    loss = found["groups"][1]["metrics"]["val_loss"]
    assert loss["mean"] == pytest.approx(mean(idea)) and loss["difference"] == pytest.approx(mean(idea) - mean(base))
    assert loss["stderr"] == pytest.approx(stats.sem(idea))
    assert loss["difference_stderr"] == pytest.approx(math.hypot(stats.sem(idea), stats.sem(base)))
    assert found["groups"][0]["metrics"]["val_loss"]["difference"] is None
    run = found["groups"][1]["runs"][1]
    assert run["metrics"]["val_loss"] == pytest.approx(idea[1]) and run["seed"] == 1
    metrics = {"step", "tokens", "seconds", "loss", "val_loss", "val_accuracy", "tokens_per_sec"}
    assert set(found["groups"][1]["metrics"]) == metrics
    assert main(["report", *places, "--format", "md"]) == 0
    text = capsys.readouterr().out
    assert "### Comparison at equal seconds of training" in text and "base-0 (2 runs)" in text
    assert f"| validation loss | {mean(base):.6g} ± 0.005 | {mean(idea):.6g} ± 0.005 (-0.1 ± 0.0071) |" in text
    assert "--seed 1, 2" not in text


def test_the_axis_is_what_was_equal(tmp_path):
    cases = {
        "step": [(40, 4000, 60.0), (40, 4000, 90.0)],
        "tokens": [(40, 4000, 60.0), (20, 4000, 90.0)],
        "seconds": [(40, 4000, 60.0), (20, 3000, 60.4)],
    }
    for axis, ends in cases.items():
        places = [write(tmp_path / f"{axis}-{i}", end, 0, seed_of=i) for i, end in enumerate(ends)]
        runs = read_runs(places)
        found = compare(runs)
        assert (found["axis"], found["is_equal"]) == (axis, True), axis
        assert f'"axis":{["step", "tokens", "seconds"].index(axis)}' in render_page(runs)
    short, long = write(tmp_path / "short", (20, 2000, 30.0), 0), write(tmp_path / "long", (40, 4000, 62.0), 0, n=1)
    found = compare(read_runs([short, long]))
    assert (found["axis"], found["end"], found["is_equal"]) == ("step", 20, False)
    assert found["groups"][1]["runs"][0]["metrics"]["val_loss"] == pytest.approx(8 / 20)  # where the short one ends


def test_one_seed_each_is_said(tmp_path, capsys):
    a, b = (
        write(tmp_path / name, (40, 4000, 60.0), 0, train={"learning_rate": rate})
        for name, rate in (("a", 1), ("b", 2))
    )
    assert main(["report", a, b, "--format", "md"]) == 0
    assert "repeat each with --seed 1, 2, ... for standard errors" in capsys.readouterr().out


def test_estimates():
    values, baseline = [1.0, 2.0, 4.0], [3.0, 3.5]
    found = estimate(values, baseline)
    assert found["stderr"] == pytest.approx(stdev(values) / math.sqrt(3))
    assert found["difference"] == pytest.approx(mean(values) - mean(baseline))
    welch = stats.ttest_ind(values, baseline, equal_var=False)
    assert found["difference"] / found["difference_stderr"] == pytest.approx(welch.statistic)
    assert list(estimate([1.0], baseline).values()) == [1.0, None, -2.25, None]
    tokens = {"mean": 1.31e9, "stderr": 9216.0, "difference": -2.4e8, "difference_stderr": None}
    assert _estimate(tokens) == "1,310,000,000 ± 9,216 (-240,000,000)"


def test_json_of_runs_without_an_axis_and_of_one_run(tmp_path, capsys):
    one = write(tmp_path / "one", (40, 4000, 60.0), 0)
    (tmp_path / "none" / "logs").mkdir(parents=True)
    (tmp_path / "none" / "logs" / "metrics.csv").write_text("loss\n1\n")
    for words, end, n_groups in (([one], 40, 1), ([one, str(tmp_path / "none")], None, 2)):
        assert main(["report", *words, "--format", "json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["end"], len(found["groups"])) == (end, n_groups)
    out = str(tmp_path / "report.json")
    assert [main(["report", one, "--format", "json", "--out_path", out]) for _ in range(2)] == [0, 0]


def test_the_tile_has_the_metric_that_decides(tmp_path):
    folder = Path(write(tmp_path / "run", (40, 4000, 60.0), 0, eval={"best_by": "accuracy"}))
    (run,) = read_runs([str(folder)])
    run.checkpoints = [Checkpoint("best", 20, 0, ""), Checkpoint("final", 40, 0, "")]
    tiles = list(figures(run).items())
    assert tiles[:2] == [("best accuracy", "0.5 ± 0.1 at step 20"), ("accuracy", "0.5 ± 0.1")]
    assert "lowest validation loss" not in dict(tiles)
    run.settings["eval.best_by"] = "auto"
    assert next(iter(figures(run))) == "accuracy"


def test_what_a_run_was_for_is_first(tmp_path):
    """Scores are before losses in tiles, charts and the comparison; the score of --eval.best_by is the first one."""
    names = ["accuracy", "sft_loss", "val_accuracy", "val_sft_loss", "val_f1", "val_f1_stderr", "val_rouge_l"]
    header = ",".join(["step,tokens,loss,learning_rate,val_loss", *names])

    def charts(name: str, **settings) -> list[str]:
        folder = Path(write(tmp_path / name, (1, 1, 1.0), 0, **settings))
        (folder / "logs" / "metrics.csv").write_text(header + "\n" + ",".join(map(str, range(1, 13))) + "\n")
        (run,) = read_runs([str(folder)])
        titles = [title for title, *_ in _charts([run])["charts"]]
        assert list(map(capitalized, figures(run)))[:3] == [title for title in titles if title != "Loss"][:3]
        return titles

    rest = ["Loss", "SFT loss", "Learning rate"]
    assert charts("a") == ["F1", "ROUGE-L", "Accuracy", *rest]
    assert charts("b", eval={"best_by": "rouge_l"}) == ["ROUGE-L", "F1", "Accuracy", *rest]
    assert charts("c", eval={"best_by": "val_loss"})[0] == "Loss"
    rows = _side_by_side(
        [{"F1": "1", "loss": "2", "steps": "3"}, {"loss": "2", "lowest": "1", "steps": "3"}, {"match": "1"}]
    )
    assert [row[0] for row in rows] == ["F1", "match", "loss", "lowest", "steps"]
