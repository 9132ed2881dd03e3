"""Labels from files: names of features, weights of the trained rows, options without effect."""

import json

import numpy as np
import pytest

from toolkit.data import Classification
from toolkit.errors import UserError


@pytest.fixture
def prepare(tokenizer, tmp_path):
    def run(rows=None, **options):
        if rows is not None:
            (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            options["path"] = str(tmp_path / "rows.jsonl")
        lines = []
        data = Classification(cache_dir=str(tmp_path / "cache"), **options)
        return data.prepare(tokenizer=tokenizer, max_seq_length=100, report=lines.append), lines

    return run


def test_weights_and_counts_are_of_the_trained_rows(prepare):
    rows = [{"text": f"text {i}", "label": "rare" if i % 9 == 0 else "usual"} for i in range(40)]
    data, lines = prepare([*rows, {"text": "x" * 200, "label": "rare"}], class_weights="balanced",
                          val_split_fraction=0.4, on_long="drop")  # fmt: skip
    targets = np.concatenate([data.train[i]["targets"] for i in range(len(data.train))])
    counts = np.bincount(targets[:, 0].astype(int))
    assert targets[:, 1] == pytest.approx((24 / (2 * counts))[targets[:, 0].astype(int)])
    assert any(f"2 labels: rare {counts[0]}, usual {counts[1]} (" in line for line in lines) and counts.sum() == 24


def test_labels_have_the_names_of_the_features(prepare, tmp_path):
    import datasets

    names, values = ["no", "maybe", "yes"], {"text": ["a", "b", "c"], "label": [2, 0, 2], "tags": [[1], [], [0, 2]]}
    label = datasets.ClassLabel(names=names)
    features = datasets.Features({"text": datasets.Value("string"), "label": label, "tags": [label]})
    table = datasets.Dataset.from_dict(values, features)
    table.save_to_disk(tmp_path / "disk")
    table.to_parquet(tmp_path / "table.parquet")
    for source in ({"repo_id": str(tmp_path / "disk")}, {"path": str(tmp_path / "table.parquet")}):
        data, _ = prepare(**source, val_split_fraction=0.0)
        assert data.labels.names == names
        assert [data.train[i]["targets"][0, 0].item() for i in range(3)] == [2, 0, 2]
        data, _ = prepare(**source, val_split_fraction=0.0, label_column="tags")
        assert data.labels == (names, "multi_label_classification")
        assert [data.train[i]["targets"][0].tolist() for i in range(3)] == [[0, 1, 0, 1], [0, 0, 0, 1], [1, 0, 1, 1]]


def test_options_and_labels_without_a_use_are_said(prepare):
    texts = [{"text": f"t{i}", "id": i, "label": i % 2} for i in range(6)]
    with pytest.raises(UserError, match="--data.prompt_style chatml: has no effect on texts, only on messages"):
        prepare(texts, prompt_style="chatml")
    chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}]}
    _, lines = prepare([chat | row for row in [{"label": "a"}, {"label": "b", "system": "s"}]], prompt_style="chatml")
    assert "Data: not read in training: weight of messages" in lines
    _, lines = prepare(texts, label_column="id", val_split_fraction=0.0)
    assert any(
        "6 labels" in line and "every text has a different label: see --data.label_column id" in line for line in lines
    )
