"""The table of every reader of foreign bytes."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults import fuzz_data, fuzz_http, fuzz_models
from tests.faults.states import shared, undisturbed
from toolkit.checkpoints.folder import read_model_config
from toolkit.checkpoints.run.sharded import read_sharded
from toolkit.errors import DataError, UserError


class Parser(NamedTuple):
    """A reader.

    Args:
        make: Writes valid files into a folder, and returns the names of those to damage.
        read: Reads the folder.
        refusals: Exceptions that its callers handle, other than those of the command line.
        max_seconds: Of an input, if not the usual.
        prepare: Makes what all batches share.
    """

    make: Callable[[Path], list[str]]
    read: Callable[[Path], Any]
    refusals: tuple[type[Exception], ...] = ()
    max_seconds: int = 0
    prepare: Callable[[], Any] = shared


def of_run(kind: str, names: list[str], read: Callable[[Path], Any]) -> Parser:
    """Return the reader of files of a finished run's model folder."""

    def make(folder: Path) -> list[str]:
        shutil.copytree(undisturbed(kind) / "final", folder, dirs_exist_ok=True)
        return names

    return Parser(make, read, prepare=lambda: undisturbed(kind))


RUN_FILES = ["trainer/meta.json", "adapter.yaml", "hyperparameters.yaml", "COMPLETE", "model_config.yaml"]
PICKLES = ["lit_model.pth.lora", "trainer/state.pth"]
SHARDS = [*["lit_model.pth/.metadata"] * 3, "lit_model.pth/__0_0.distcp"]
PARSERS: dict[str, Parser] = {
    "config.json": Parser(fuzz_models.make_hf_configs, fuzz_models.read_hf_configs),
    "model_config.yaml": of_run("ordinary", ["model_config.yaml"], read_model_config),
    "LitGPT model_config.yaml": Parser(fuzz_models.make_litgpt, read_model_config),
    "files of runs": of_run("adapters", RUN_FILES, fuzz_models.read_run_files),
    "safetensors": Parser(fuzz_models.make_safetensors, fuzz_models.read_safetensors),
    "pth": of_run("adapters", PICKLES, fuzz_models.read_pth),
    "shards": of_run("sharded", SHARDS, lambda folder: read_sharded(folder / "lit_model.pth")),
    "peft": Parser(fuzz_models.make_peft, fuzz_models.read_peft, prepare=lambda: undisturbed("adapters")),
    "tokenizer": Parser(fuzz_models.make_tokenizer, fuzz_models.read_tokenizer),
    "chat template": Parser(fuzz_models.make_template, fuzz_models.read_template, max_seconds=60),
    "sentencepiece": Parser(fuzz_models.make_sentencepiece, fuzz_models.read_sentencepiece, (ValueError,)),
    "options": Parser(fuzz_data.make_options, fuzz_data.read_options),
    "rows": Parser(fuzz_data.make_rows, fuzz_data.read_rows),
    "streamed text": Parser(fuzz_data.make_streamed, fuzz_data.read_streamed),
    "tokens": Parser(fuzz_data.make_tokens, fuzz_data.read_tokens, (UserError, DataError)),
    "report": Parser(fuzz_http.make_report, fuzz_http.read_report, prepare=lambda: undisturbed("ordinary")),
    "requests": Parser(fuzz_http.make_bodies, fuzz_http.send_bodies),
}
