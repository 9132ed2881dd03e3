"""Mixtures of data modules: options, mistakes, tokenizers; see test_interleave.py for the order of their rows."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from toolkit.cli.parser import dump, parse
from toolkit.commands.pretrain import setup
from toolkit.config.command import CommandOptions
from toolkit.data import LitData, Mixture, SyntheticTokens, TextFiles
from toolkit.errors import UserError


def text(path, **options) -> dict:
    return {"class_path": "TextFiles", "init_args": {"train_data_path": str(path), **options}}


def prepare(sources, tokenizer=None, max_seq_length=32):
    return Mixture(sources).prepare(tokenizer=tokenizer, max_seq_length=max_seq_length, report=lambda line: None)


def test_yaml_flags_and_python_give_the_same_mixture(tmp_path):
    sources = {
        "web": {"weight": 0.75, "data": text("web.txt")},
        "code": {"weight": 0.25, "max_epochs": 2, "data": {"class_path": "SyntheticTokens"}},
    }
    (tmp_path / "mix.yaml").write_text(
        yaml.safe_dump({"data": {"class_path": "Mixture", "init_args": {"sources": sources}}})
    )
    config = ["--config", str(tmp_path / "mix.yaml")]
    overrides = ["--data.sources.web.weight", "7e-1", "--data.sources.code.weight", "0.3"]
    overrides += ["--data.sources.web.data.text_fraction", "0.5", "--data.change_weights", "true"]
    expected = Mixture(
        {
            "web": {"weight": 0.7, "data": TextFiles("web.txt", text_fraction=0.5)},
            "code": {"weight": 0.3, "max_epochs": 2, "data": SyntheticTokens()},
        },
        change_weights=True,
    )
    for words in ([*config, *overrides], [*overrides, *config]):  # flags override files wherever they stand
        found = parse("pretrain", words)["options"].data
        assert found == expected and found.sources_by_name == expected.sources_by_name
    written = tmp_path / "again.yaml"
    command = CommandOptions(setup)
    command.update(command.flatten({"data": {"class_path": "Mixture", "init_args": asdict(expected)}}, "x"))
    written.write_text(dump(command, command.resolve(), []))
    again = parse("pretrain", ["--config", str(written)])["options"].data
    assert again == expected and again.sources_by_name == expected.sources_by_name


def test_page_shows_a_mixture():
    page = (Path(__file__).parents[2] / "tutorials" / "streaming.md").read_text()
    shown = yaml.safe_load(re.search(r"```yaml\n(data:.*?)```", page, re.S)[1])["data"]
    assert shown["class_path"] == "Mixture" and Mixture(**shown["init_args"]).sources_by_name.keys() == {"web", "code"}


MISTAKES = {
    "{}": r"--data.sources {}: must map at least one name",
    "{a: {weight: 1, data: TextFile}}": r"--data.sources.a.data TextFile: no such class; did you mean 'TextFiles'",
    "{a: {weight: 1, data: {class_path: TextFiles}}}": r"--data.sources.a.data.train_data_path: must be given",
    "{a: {weight: 1, data: {init_args: {seed: 1}}}}": r"--data.sources.a.data null: no such class; known are ",
    "{a: {weight: 1, data: {class_path: SyntheticTokens, init_args: {sed: 1}}}}": r"--data.sources.a.data.sed: no such",
    "{a: {weight: 1, data: {class_path: SyntheticTokens, seed: x}}}": r"--data.sources.a.data.seed x: must be an int",
    "{a: {weight: 1, data: {class_path: SyntheticTokens, seed: -1}}}": r"--data.sources.a.data.seed -1: must not be n",
    "{a: {weight: 1, data: {class_path: SyntheticTokens, num_workers: 1}}}": r"a.data.num_workers 1: has no effect; us",
    "{a: {weight: 1, data: {class_path: Mixture, sources: {b: {weight: 1, data: SyntheticTokens}}}}}": r"data Mixture",
    "{a: {weight: 0.5, data: SyntheticTokens}, b: {weight: 0.6, data: SyntheticTokens}}": r"1.1; .* such as a 0.45",
    "{a: {weight: 0, data: SyntheticTokens}}": r"the weights sum to 0; they must sum to 1, such as a 1",
    "{a: {weight: -1, data: SyntheticTokens}}": r"--data.sources.a.weight -1: must be a number from 0 to 1",
    "{a: {weight: .nan, data: SyntheticTokens}}": r"--data.sources.a.weight NaN: must be",
    "{a: {weight: yes, data: SyntheticTokens}}": r"--data.sources.a.weight true: must be|weight True: must be",
    "{a: {data: SyntheticTokens}}": r"--data.sources.a.weight: must be given",
    "{a: {weight: 1}}": r"--data.sources.a.data null: no such class; known are ",
    "{a: {weigth: 1, data: SyntheticTokens}}": r"a.weigth: no such option; did you mean --data.sources.a.weight",
    "{a: {weight: 1, max_epochs: 0, data: SyntheticTokens}}": r"--data.sources.a.max_epochs 0: must be",
    "{a.b: {weight: 1, data: SyntheticTokens}}": r"--data.sources 'a.b': a name must consist of letters",
    "{'a,b': {weight: 1, data: SyntheticTokens}}": r"--data.sources 'a,b': a name must",
}


def test_every_mistake_is_one_line_that_names_the_option(refusal):
    for sources, message in MISTAKES.items():
        with pytest.raises(UserError, match=message):
            Mixture(yaml.safe_load(sources))
    entry = {"weight": 1, "data": {"class_path": "SyntheticTokens"}}
    flags = ["--data", "Mixture", "--data.sources", yaml.safe_dump({"web": entry}, default_flow_style=True).strip()]
    for further, message in (
        (["--data.sources.wbe.weight", "1"], "--data.sources.wbe.weight 1: no entry 'wbe'; did you mean 'web'?"),
        (["--data.sources.web.weight.x", "1"], "--data.sources.web.weight.x 1: weight is 1 and has no options"),
        (["--data.sources.web.weight"], "--data.sources.web.weight: needs a value"),
    ):
        assert refusal("pretrain", *flags, *further) == f"toolkit pretrain: {message}\n"


def test_all_sources_use_one_tokenizer(corpus, tmp_path):
    """That of the run, or of the first source; tokens of an unknown one cannot be mixed with text."""
    files = sorted(corpus.iterdir())
    sources = {
        "one": {"weight": 0.5, "data": text(files[0], vocab_size=300)},
        "two": {"weight": 0.5, "data": text(files[1], vocab_size=400)},
    }
    prepared = prepare(sources)
    assert prepared.tokenizer.vocab_size == 300 and prepared.vocab_size is None
    alone = TextFiles(str(files[1])).prepare(tokenizer=prepared.tokenizer, max_seq_length=32, report=lambda line: None)
    assert prepared.train.sources[1].rows[0]["input_ids"].tolist() == alone.train[0]["input_ids"].tolist()
    assert prepared.val_sources.keys() == {"one", "two"} and len(prepared.val) == sum(
        map(len, prepared.val_sources.values())
    )
    noise = {"weight": 0.5, "data": SyntheticTokens(vocab_size=500)}
    for names in (("noise", "one"), ("one", "noise")):
        both = {name: {"noise": noise, "one": sources["one"]}[name] for name in names}
        with pytest.raises(UserError, match=r"sources.noise: was tokenized with a different tokenizer than .*on one;"):
            prepare(both)
    mixed = prepare({"noise": noise, "one": sources["one"]}, tokenizer=prepared.tokenizer)
    assert mixed.val_sources.keys() == {"one"}
    assert prepare({"a": noise, "b": noise}).vocab_size == 500
    TextFiles(str(files[0]), vocab_size=300, cache_dir=str(tmp_path)).prepare(tokenizer=None, max_seq_length=32)
    tokens = {"weight": 0.5, "data": LitData(str(next(tmp_path.glob("text_files-*"))))}
    for other in (tokens, sources["two"]):  # the tokenizer that prepare_data has written
        assert prepare({"tokens": tokens, "other": other}).tokenizer.files == prepared.tokenizer.files


def test_content_key_is_of_the_sources_and_not_of_the_weights(corpus):
    def key(names="ab", weight=0.5, seed=0, **options):
        data = [{"class_path": "SyntheticTokens", "init_args": {"num_rows": 50, "seed": i * seed}} for i in (1, 2)]
        shares = (weight, 1 - weight)
        return prepare(
            {name: {"weight": w, "data": d, **options} for name, w, d in zip(names, shares, data, strict=True)}
        ).content_key

    assert key() == key(weight=0.75) == key(max_epochs=3)
    assert len({key(), key(names="ac"), key(seed=1)}) == 3


def test_mistakes_of_a_source_name_it(corpus, tmp_path):
    for data, message in (
        (text("missing.txt"), r"^--data.sources.web.data.train_data_path missing.txt: no such file"),
        (
            text(sorted(corpus.iterdir())[0], val_fraction=0.999),
            r"^--data.sources.web.data.\w+.*training tokens, but one",
        ),
    ):
        with pytest.raises(UserError, match=message):
            prepare({"web": {"weight": 1, "data": data}})
