"""Two lm-eval tasks on local files: a multiple choice, and one that is answered in words."""

import json
from pathlib import Path

import yaml

from helpers.corpus import WORDS

METRICS = ("acc", "acc_norm")


def write_tasks(folder: Path) -> Path:
    """Write the tasks ``choose`` and ``say`` and their rows, rows.jsonl, into a folder."""
    rows = [
        {"n": n, "choices": list(c), "label": 1 + n % 2} for n, c in enumerate(zip(*[iter(WORDS)] * 3, strict=False))
    ]
    rows += [{"n": n, "choices": ["drei", "eins", "zwei 🎉"], "label": n % 3} for n in (1, 2, 3)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row | {"n": str(row["n"])}) + "\n" for row in rows))
    shared = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test", "fewshot_split": "test", "doc_to_text": "{{n}}", "target_delimiter": "",
    }  # fmt: skip
    choose = {
        "task": "choose", "output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "label",
        "doc_to_text": "{{n}}?",
        "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in METRICS],
    }  # fmt: skip
    say = {
        "task": "say", "output_type": "generate_until", "doc_to_target": "{{choices[label]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    for one in (choose, say):
        (folder / f"{one['task']}.yaml").write_text(yaml.safe_dump(shared | one))
    return folder
