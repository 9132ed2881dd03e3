"""Runs on a mixture of sources: validation and shares in the metrics, resumes, changed weights, ends of sources."""

import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from helpers.compare_runs import assert_same_weights, losses
from helpers.failing_data import Endless, EndlessRows
from helpers.groups import Case, run_group
from helpers.processes import finish, pretrain
from toolkit_metric.evaluate import data_of_run, evaluate
from toolkit_metric.options import EvaluateOptions

from tests.training.test_run import arguments, folders
from toolkit.cli import main
from toolkit.data import Mixture, SyntheticTokens, TextFiles
from toolkit.data.loader import train_batches
from toolkit.errors import DataError, UserError
from toolkit.training.checkpoint_meta import read_meta
from toolkit.training.engine import run_training
from toolkit.training.validate import rows_of_source
from toolkit.ui.loggers import read_metrics

WEIGHTS = {"web": 0.75, "code": 0.25}


def text_mixture(corpus, weights=WEIGHTS, max_epochs=None, **options) -> Mixture:
    """Two texts of different length, with one tokenizer."""
    files = sorted(corpus.iterdir())
    data = (TextFiles(str(corpus), vocab_size=300), TextFiles(str(files[0]), vocab_size=300, val_fraction=0.2))
    sources = zip(weights, weights.values(), data, strict=True)
    return Mixture(
        {name: {"weight": weight, "data": module, "max_epochs": max_epochs} for name, weight, module in sources},
        **options,
    )


def run(corpus, out, data, train=None, **options):
    constant = {"lr_schedule": "constant", "lr_warmup_steps": 1}
    run_training(replace(arguments(corpus, out, train=constant | (train or {}), **options), data=data))
    return read_metrics(out / "logs" / "metrics.csv")


def test_metrics_have_the_shares_and_the_loss_of_each_source(corpus, tmp_path, capsys):
    """N6: val_loss is the mean over the tokens of all sources."""
    out = tmp_path / "run"
    rows = run(corpus, out, text_mixture(corpus), train={"max_steps": 4}, evaluation={"interval": 0, "max_iters": None})
    assert {"share_web", "share_code", "val_loss_web", "val_loss_code"} <= rows[-1].keys()
    assert (rows[-1]["share_web"], rows[-1]["share_code"]) == (0.75, 0.25)
    prepared = text_mixture(corpus).prepare(tokenizer=None, max_seq_length=32, report=lambda line: None)
    sizes = {name: len(held_out) for name, held_out in prepared.val_sources.items()}
    mean = sum(rows[-1][f"val_loss_{name}"] * size for name, size in sizes.items()) / sum(sizes.values())
    assert rows[-1]["val_loss"] == pytest.approx(mean, rel=1e-6)
    assert rows[-1]["val_loss_web"] != rows[-1]["val_loss_code"]
    printed = capsys.readouterr().out
    n_rows = len(prepared.train.sources[1].rows)
    assert f"Source code: 25.00% of the tokens; {n_rows} rows of 32 tokens, {8 / n_rows:.4g} epochs in this" in printed
    assert f"source code: 25.000% of the tokens, weight 25.000%; read {8 / n_rows:.4g} times" in printed
    again = Mixture(**yaml.safe_load((out / "final/hyperparameters.yaml").read_text())["data"]["init_args"])
    assert again == text_mixture(corpus)


def test_limited_validation_leaves_no_source_out():
    for sizes, limit in (((900, 99, 1), 100), ((900, 99, 1), 3), ((5, 5), 100), ((7, 0), 5)):
        found = [rows_of_source(size, sum(sizes), limit) for size in sizes if size]
        assert all(1 <= n <= size for n, size in zip(found, sizes, strict=False))
        assert sum(found) < limit + len(found) and (sum(found) == sum(sizes)) == (limit >= sum(sizes))


def endless_mixture(**options) -> Mixture:
    """One source of unknown length, known only from where the run goes on."""
    sources = {"noise": SyntheticTokens(vocab_size=300, num_rows=11), "stream": Endless(vocab_size=300)}
    shares = {"noise": 0.4, "stream": 0.6} | options.pop("shares", {})
    return Mixture({name: {"weight": shares[name], "data": data} for name, data in sources.items()}, **options)


def test_s2_a_mixture_goes_on_where_it_was_and_changes_weights_only_if_told_to(corpus, tmp_path):
    run(corpus, tmp_path / "whole", endless_mixture(), train={"max_steps": 6})
    out, other = tmp_path / "parts", {"noise": 0.5, "stream": 0.5}
    run(corpus, out, endless_mixture(), train={"max_steps": 4})
    assert read_meta(out / "final")["data"]["sources"]["stream"]["order"] == {"position": 19}  # of 32 rows
    with pytest.raises(UserError, match=r"weights are noise 0.5, stream 0.5, but noise 0.4, stream 0.6 in the check"):
        run(corpus, out, endless_mixture(shares=other), resume="auto")
    run(corpus, out, endless_mixture(), train={"max_steps": 6}, resume="auto")
    assert losses(out) == losses(tmp_path / "whole")
    assert_same_weights(out / "final", tmp_path / "whole" / "final")
    changed = endless_mixture(shares=other, change_weights=True)
    rows = run(corpus, out, changed, train={"max_steps": 10}, resume="auto")
    assert rows[-1]["share_noise"] == 0.5 and rows[5]["share_noise"] == pytest.approx(0.4, abs=0.02)
    with pytest.raises(UserError, match="--train.epochs 1: the number of rows of this data is unknown"):
        run(corpus, tmp_path / "epochs", endless_mixture(), train={"max_steps": None, "epochs": 1})


def test_n3_ranks_read_the_same_rows_together(corpus):
    prepared = text_mixture(corpus).prepare(tokenizer=None, max_seq_length=32, report=lambda line: None)
    seen = []
    for world in (1, 2, 4):
        ranks = [
            train_batches(
                prepared.train, prepared.train.order(3, {}), start_position=16, total_positions=None,
                global_batch_size=8, micro_batch_size=2, rank=rank, world_size=world, num_workers=0,
            )
            for rank in range(world)
        ]  # fmt: skip
        steps = [[next(rank) for rank in ranks] for _ in range(3)]
        seen.append([[i for a in range(len(step[0])) for rank in step for i in rank[a].ids] for step in steps])
    assert seen[0] == seen[1] == seen[2] and len({i for step in seen[0] for i in step}) == 24


@pytest.mark.slow
def test_epoch_has_the_rows_of_all_sources_and_a_source_may_end(corpus, tmp_path):
    data = text_mixture(corpus)
    train = data.prepare(tokenizer=None, max_seq_length=32, report=lambda line: None).train
    n_rows = sum(len(source.rows) for source in train.sources)
    rows = run(corpus, tmp_path / "a", data, train={"max_steps": None, "epochs": 0.05})
    assert rows[-1]["tokens"] == -(-n_rows // 20) * 32
    out = tmp_path / "b"
    limited = text_mixture(corpus, max_epochs=1)
    with pytest.raises(UserError, match=r"sources.code.max_epochs 1: the source has [\d,]+ tokens and this run would"):
        run(corpus, out, limited, train={"max_steps": 30})
    assert not out.exists()
    # max_time does not say how many rows a run will read
    with pytest.raises(
        DataError,
        match=r"sources.code.max_epochs 1: the 41 rows of the source have been read .* is saved; resume with --resume",
    ):
        run(corpus, out, limited, train={"max_steps": None, "max_time": 10})
    (last,) = (folder for folder in folders(out))
    assert read_meta(out / last)["data"]["sources"]["code"]["position"] <= len(train.sources[1].rows)


def words_of(corpus, folder) -> list[str]:
    """Return the options of a small run on three texts, of which two are validated in part."""
    files = sorted(corpus.iterdir())
    shares = {"web": (0.6, corpus, None), "code": (0.25, files[0], 0.2), "rest": (0.15, files[1], 0.0)}
    sources = {
        name: {
            "weight": weight,
            "data": {
                "class_path": "TextFiles",
                "init_args": {"train_data_path": str(path), "vocab_size": 300, "val_fraction": held_out},
            },
        }
        for name, (weight, path, held_out) in shares.items()
    }
    (folder / "mix.yaml").write_text(json.dumps({"data": {"class_path": "Mixture", "init_args": {"sources": sources}}}))
    return [
        "--config", str(folder / "mix.yaml"), "--train.global_batch_size", "8", "--train.micro_batch_size", "1",
        "--train.max_seq_length", "32", "--train.learning_rate", "1e-3", "--eval.max_iters", "2",
    ]  # fmt: skip


def test_evaluating_rows_that_are_numbered_with_gaps_is_refused(monkeypatch):
    monkeypatch.setattr(EndlessRows, "__len__", lambda rows: len(rows.rows), raising=False)
    data = Mixture({"a": {"weight": 0.5, "data": SyntheticTokens(10)}, "b": {"weight": 0.5, "data": Endless(10)}})
    model = SimpleNamespace(config=SimpleNamespace(block_size=16, head=None))
    options = EvaluateOptions("", data, "train")
    checkpoint = SimpleNamespace(folder=Path(), load_model=lambda: model, tokenizer=None, options=options)
    with pytest.raises(UserError, match="--split train: is not supported with data that defines its sample order; use"):
        evaluate(checkpoint)


def test_s4_evaluating_a_checkpoint_imports_no_class_that_its_mixture_names(tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for path in ("evil.Data", "Mixture", "os.system"):
        sources = {"web": {"weight": 1.0, "data": {"class_path": path, "init_args": {}}}}
        data = {"class_path": "Mixture", "init_args": {"sources": sources}}
        (tmp_path / "hyperparameters.yaml").write_text(yaml.safe_dump({"data": data, "train": {"max_seq_length": 8}}))
        with pytest.raises(UserError, match=rf"data.sources.web: {path} is not a data module of toolkit; give --data"):
            data_of_run(tmp_path, trust=True)


@pytest.mark.slow
def test_the_example_of_config_hub_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parents[2])
    words = ["pico-llama", "--config", "config_hub/pretrain/mixture.yaml", "--train.max_seq_length", "32"]
    assert main(["pretrain", *words, "--train.max_tokens", "20000", "--out_dir", str(tmp_path / "out")]) == 0
    assert "source pages: 10.0" in capsys.readouterr().out


@pytest.mark.slow
def test_n6_sharded_ranks_validate_the_sources_together(corpus, tmp_path):
    words = ["pico-llama", "--accelerator", "cpu", *words_of(corpus, tmp_path)]
    words += ["--train.max_steps", "6", "--eval.interval", "3"]
    sharded = ["--strategy", "fsdp", "--fsdp.sharding_strategy", "FULL_SHARD"]
    for size, flags in ((1, []), (2, sharded), (4, sharded)):
        run_group(tmp_path, size, [Case(f"on-{size}", flags)], words)
    one, *others = (read_metrics(tmp_path / f"on-{size}" / "logs" / "metrics.csv")[-1] for size in (1, 2, 4))
    names = ["loss", "val_loss", "val_loss_web", "val_loss_code", "share_web", "share_code", "share_rest"]
    assert "val_loss_rest" not in one and one["share_rest"] == pytest.approx(0.15, abs=0.02)
    for name in names:
        assert [other[name] for other in others] == pytest.approx([one[name]] * 2, rel=1e-5), name


KILLS = int(os.environ.get("TOOLKIT_TEST_KILLS", "4"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_s2_run_killed_at_random_instants_is_bit_equal(corpus, tmp_path, ranks):
    words = [*words_of(corpus, tmp_path), "--devices", str(ranks), "--train.max_steps", "60", "--resume", "auto"]
    words += ["--train.save_interval", "3", "--eval.interval", "7"]
    chance = random.Random(ranks)
    finish(pretrain(*words, "--out_dir", str(tmp_path / "undisturbed")))
    out, kills = tmp_path / "killed", 0
    while not (out / "final").exists():
        process = pretrain(*words, "--out_dir", str(out))
        lines = chance.randint(1, 30) if kills < KILLS else 10**9
        while lines and process.stdout.readline():
            lines -= 1
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        finish(process)
    print(f"{ranks} ranks: {kills} kills")
    assert losses(out) == losses(tmp_path / "undisturbed")
    assert_same_weights(out / "final", tmp_path / "undisturbed" / "final")
