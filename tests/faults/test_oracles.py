"""The oracles of the ways see each kind of wrong result; the code is broken on purpose."""

import csv
import json
from random import Random

import pytest
import torch
from helpers.cases import check_each
from helpers.damage import flip
from helpers.saving import write_checkpoint
from helpers.small_runs import write_base
from toolkit_report import markdown, page

from tests.faults import corruption, fuzz_http, markup, readers, states
from tests.faults.hostile import MARKUP
from toolkit.checkpoints import folder as model_folder
from toolkit.checkpoints.weights import save_state
from toolkit.ui.events import write_event
from toolkit.ui.loggers import COLUMNS

ROW = dict.fromkeys(COLUMNS, 2.0) | {"val_loss": float("nan")}
META = {"step": 2, "tokens": 64, "seconds": 1.5, "schedule": {"peak": 0.1, "warmup_steps": 0}}
GROUP = {"lr": 0.1, "betas": (0.9, 0.95), "params": ["a"], "fused": None}


def write_run(out, row=(), meta=(), group=(), tensor=0.0, callbacks=None):
    """Write a finished run with these changes of its values."""

    def write(folder):
        (folder / "trainer").mkdir()
        save_state({"a": torch.ones(2)}, folder / "lit_model.pth")
        moments = {"exp_avg": torch.tensor([0.5, tensor])}
        save_state({"moments": moments, "groups": [GROUP | dict(group)]}, folder / "trainer" / "state.pth")
        save_state({"KeepBest": callbacks or {"val_loss": 1.0}}, folder / "trainer" / "callbacks.pth")
        (folder / "trainer" / "meta.json").write_text(json.dumps(META | dict(meta)))

    write_checkpoint(out / "final", write)
    (out / "logs").mkdir()
    with open(out / "logs" / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list((ROW | dict(row)).keys()))
        writer.writeheader()
        writer.writerows([ROW, ROW | dict(row)])


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setattr(states, "undisturbed", lambda kind: tmp_path / "expected")
    write_run(tmp_path / "expected")
    return tmp_path


def test_each_wrong_value_of_a_resumed_run_is_seen(runs):
    def check(where, changes):
        out = runs / where.replace(" ", "-")
        write_run(out, **changes)
        with pytest.raises(AssertionError, match=where):
            states.require_same_result("ordinary", out)

    check_each(
        check,
        [
            *((f"row 1, {name}", {"row": {name: 7}}) for name in ("val_loss", "grad_norm", "learning_rate", "tokens")),
            ("row 0, more", {"row": {"more": 7}}),
            ("groups 0 lr", {"group": {"lr": 0.2}}),
            ("groups 0 betas 1", {"group": {"betas": (0.9, 0.99)}}),
            ("groups 0 fused", {"group": {"fused": True}}),
            ("moments exp_avg", {"tensor": 1e-9}),
            ("KeepBest val_loss", {"callbacks": {"val_loss": 2.0}}),
            ("meta.json tokens", {"meta": {"tokens": 65}}),
            ("meta.json schedule peak", {"meta": {"schedule": {"peak": 0.2, "warmup_steps": 0}}}),
        ],
    )


def test_times_and_the_order_of_keys_do_not_matter(runs):
    turned = {"schedule": dict(reversed(META["schedule"].items()))}
    write_run(runs / "out", {"seconds": 3.0, "tokens_per_sec": 9}, {"seconds": 7.5} | turned, {"lr": 0.1})
    states.require_same_result("ordinary", runs / "out")


def test_a_command_that_reads_a_damaged_model_is_seen(tmp_path, corpus, monkeypatch):
    """Without verification: a flipped bit changes no greedy token of a random model."""
    names = ("generate", "convert_to_hf")
    monkeypatch.setattr(readers, "READERS", {name: readers.READERS[name] for name in names})
    monkeypatch.setattr(corruption, "run_forked", readers.run_here)
    checkpoint = tmp_path / "out" / "final"
    checkpoint.parent.mkdir()
    write_checkpoint(checkpoint, lambda tmp: write_base(tmp, corpus))
    weights = checkpoint / "lit_model.pth"
    flip(weights)
    corruption.require_refused(checkpoint, weights)
    monkeypatch.setattr(model_folder, "require_intact", lambda *args: None)
    with pytest.raises(AssertionError, match=r"generate reads a damaged lit_model.pth: code 0"):
        corruption.require_refused(checkpoint, weights)


@pytest.fixture
def report(tmp_path, monkeypatch):
    """A harmless run with all parts of a report; markup in each place that a run writes."""
    run = tmp_path / "undisturbed"
    write_run(run)
    write_event(run, "launch", settings={"model_name": "pico-llama"})
    monkeypatch.setattr(markup, "undisturbed", lambda kind: run)
    markup.harmless.cache_clear()
    yield run
    markup.harmless.cache_clear()


def test_a_report_that_does_not_escape_is_seen(report, tmp_path, monkeypatch):
    places = {
        "launch": {"settings": {"seed": 1, "out_dir": "TEXT"}},
        "sample": {"step": 1, "prompt": "a", "text": "TEXT"},
        "warning": {"text": "TEXT"},
    }

    def check(module, escape, kind, text):
        folder = tmp_path / str(Random(f"{module.__name__} {kind} {text}").random())
        write_run(folder)
        write_event(folder, kind, **json.loads(json.dumps(places[kind]).replace('"TEXT"', json.dumps(text))))
        read = lambda: markup.require_harmless_report(fuzz_http.read_runs([str(folder)]))  # noqa: E731
        read()
        with monkeypatch.context() as broken:
            broken.setattr(module, escape, lambda text, quote=True: str(text))
            with pytest.raises(AssertionError):
                read()

    writers = ((page, "html_text"), (markdown, "markdown_text"))
    check_each(check, [(*writer, kind, text) for writer in writers for kind in places for text in MARKUP])
