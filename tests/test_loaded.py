"""A run loads what it uses: which modules of ours a small run has imported at its first update."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.sources import FILES, module_name, tokens_of

from toolkit.extension import BUILT_IN

MAX_MODULES, MAX_TOKENS = 225, 180_000

# Large modules that only some runs use, by what brings them. A run without it must not import them.
UNUSED = {
    "instruction data": ("data.sft", "data.chat.template", "data.chat.renderer"),
    "mixtures and streams": ("data.mixture", "data.interleave", "data.streamed"),
    "tokens on disk": ("data.tokens.token_store", "data.tokens.chunks", "data.tokens.lit_data", "data.tokens.iterable"),
    "generation": ("inference",),
    "conversion": ("checkpoints.hf.export_hf", "checkpoints.hf.import_hf", "checkpoints.merge"),
    "remote storage": ("checkpoints.remote.remote_run", "checkpoints.remote.download", "io.storage"),
    "own optimizers": ("optim.hybrid", "optim.muon", "optim.adafactor"),
    "adapters and experts": ("models.lora", "models.lora_layers", "models.moe", "models.quantize"),
    "other architectures": ("models.latent_attention", "models.families.qwen3", "models.families.gemma"),
    "parallelism": ("distributed.tensor_parallel", "distributed.pipeline"),
    "profiles": ("training.callbacks.profile",),
}
RUN = [
    "pretrain", "pico-llama", "--data", "SyntheticTokens", "--data.vocab_size", "64", "--train.max_seq_length", "16",
    "--train.max_steps", "1", "--train.global_batch_size", "2", "--train.micro_batch_size", "2",
    "--accelerator", "cpu", "--devices", "1", "--out_dir", "run",
]  # fmt: skip
CODE = """
import json
import sys
from toolkit import extension
from toolkit.cli import main
from toolkit.optim import update

extension._installed = dict  # other packages of this environment
apply = update.FusedUpdate.apply

def apply_and_list(*args):
    files = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] in OURS}
    others = {"lightning.pytorch", "torchmetrics.functional", "scipy", "transformers"} & sys.modules.keys()
    with open("loaded.json", "w") as file:
        json.dump({"ours": files, "others": list(others)}, file)
    return apply(*args)

update.FusedUpdate.apply = apply_and_list
sys.exit(main(RUN))
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The modules that a run has loaded at its first update: ours, and large ones of others that it must not need."""
    code = f"RUN, OURS = {RUN}, {['toolkit', *BUILT_IN]}\n{CODE}"
    folder = tmp_path_factory.mktemp("loaded")
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "loaded.json").read_text())


def test_a_run_loads_nothing_large_that_it_does_not_use(loaded):
    modules = loaded["ours"]
    unused = {
        reason: found
        for reason, names in UNUSED.items()
        if (found := [name for name in modules for part in names if f"{name}.".startswith(f"toolkit.{part}.")])
    }
    total = sum(tokens_of(Path(file)) for file in modules.values())
    size = f"{len(modules)} modules and {total:,} tokens are loaded at the first update"
    assert not unused, f"{size}; move what a run needs out of these, or import them where they are used"
    assert len(modules) <= MAX_MODULES and total <= MAX_TOKENS, f"{size}: {', '.join(sorted(modules))}"


def test_a_run_loads_no_trainer_of_lightning(loaded):
    assert not loaded["others"]


def test_the_list_of_unused_modules_names_modules():
    names = {module_name(file) for file in FILES}
    assert not {part for parts in UNUSED.values() for part in parts if f"toolkit.{part}" not in names}
