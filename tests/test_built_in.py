"""Without a built-in extension, what does not need it is bit-equal, and what needs it says in one line what to do."""

import importlib
import re
from pathlib import Path

import pytest
from helpers.blocked import Case, run_cases
from helpers.cases import check_each, slow_except
from helpers.compare_runs import assert_same_weights
from helpers.small_runs import text_data, write_rows

from toolkit.extension import BUILT_IN
from toolkit.ui.loggers import read_metrics

NONE, ALL = (), BUILT_IN
RUN = "--accelerator cpu --devices 1 --compiler none --train.max_seq_length 32 --train.micro_batch_size 4 "
RUN += "--train.global_batch_size 8 --train.lr_warmup_steps 0 --train.learning_rate 1e-3 --eval.max_new_tokens 0 "
RUN += "--eval.max_iters 1"
PRETRAIN = f"pretrain pico-llama {RUN} --out_dir out"
LORA = f"finetune_lora out/final {RUN} --data JSON --data.json_path rows.jsonl --data.prompt_style plain --out_dir lora"
EQUAL = [  # the first two also have the data's options
    f"{PRETRAIN} --train.max_steps 2",
    f"{PRETRAIN} --train.max_steps 3 --resume true",
    f"{LORA} --train.max_steps 2",
    "generate out/final --prompt token --max_new_tokens 4 --accelerator cpu",
    "convert_to_hf out/final hf",
]
FOREIGN = "distributed: {fsdp_sharding_strategy: full_shard}"
NEEDS = {  # values of options; a command of the extension needs no line here
    "toolkit_foreign": [f"{LORA} --config foreign.yaml"],
    "toolkit_interop": [f"{LORA} --from_peft hf"],
    "toolkit_metric": [f"{LORA} --eval.metric exact_match"],
    "toolkit_align": [f"{LORA} --objective DPO", f"{LORA} --head reward"],
    "toolkit_plan": [f"{LORA} --dry_run true", f"{LORA} --preset memory"],
}
ADVICE = "run pip install -e . again"


def needing(blocked: tuple[str, ...]) -> list[str]:
    """Return command lines that need one of the extensions."""
    commands = [name for module in blocked for name in importlib.import_module(module).EXTENSION.commands]
    return commands + [line for module in blocked for line in NEEDS.get(module, [])]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory, corpus):
    """Folder and results of the commands by the extensions that are blocked, for the selected tests."""
    selected = {item.callspec.params["blocked"] for item in request.session.items if item.path == request.path}
    cases = []
    for blocked in (NONE, *selected):
        folder = tmp_path_factory.mktemp("blocked")
        write_rows(folder)
        (folder / "foreign.yaml").write_text(FOREIGN)
        lines = [f"{EQUAL[0]} {{data}}", f"{EQUAL[1]} {{data}}", *EQUAL[2:], *needing(blocked)]
        data = text_data(corpus)
        commands = [[w for part in line.split() for w in (data if part == "{data}" else [part])] for line in lines]
        cases.append(Case(list(blocked), str(folder), commands))
    found = zip([NONE, *selected], cases, run_cases(cases), strict=True)
    return {blocked: (Path(case.folder), result) for blocked, case, result in found}


@pytest.mark.parametrize("blocked", slow_except([ALL], [ALL, *((name,) for name in BUILT_IN)]))
def test_what_does_not_need_it_is_bit_equal_and_the_rest_says_what_to_do(results, blocked):
    (expected, reference), (folder, result) = results[NONE], results[blocked]
    for line, (code, out, err), (code_before, out_before, err_before) in zip(EQUAL, result, reference, strict=False):
        assert (code, code_before) == (0, 0), f"{line}: {err}{err_before}"
        assert ADVICE not in err_before
        (warning,) = (text for text in err.splitlines() if ADVICE in text)
        assert warning.startswith("warning: not used: ") and all(name in warning for name in blocked)
        if line.startswith("generate"):
            assert out == out_before != ""
    assert_same_weights(folder / "out" / "final", expected / "out" / "final")
    for run in ("out", "lora"):
        rows, rows_before = (read_metrics(path / run / "logs" / "metrics.csv") for path in (folder, expected))
        assert [row["loss"] for row in rows] == [row["loss"] for row in rows_before] and len(rows) >= 2
        options = "final/hyperparameters.yaml"
        assert (folder / run / options).read_text() == (expected / run / options).read_text()
    for file in ("lora/final/lit_model.pth.lora", "hf/model.safetensors", "hf/config.json"):
        assert (folder / file).read_bytes() == (expected / file).read_bytes(), file

    def check(line: str, code: int, out: str, err: str) -> None:
        *notes, last = [text for text in err.splitlines() if not text.startswith("note: ")]
        assert code == 2 and re.match("toolkit: |toolkit finetune_lora: ", last), f"exit code {code}: {err}"
        assert ADVICE in err and len(notes) <= 1, err

    lines = needing(blocked)
    assert lines
    check_each(check, [(line, *result[len(EQUAL) + i]) for i, line in enumerate(lines)])
