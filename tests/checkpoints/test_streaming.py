"""M2 at size: 3 GB of weights go in and out within a fraction of that."""

import json
import subprocess
import sys

import pytest
import torch
from helpers.peak_memory import with_path
from safetensors import safe_open
from safetensors.torch import save_file

from toolkit.checkpoints.hf.export_hf import to_hf_names
from toolkit.models.config import ModelConfig
from toolkit.models.families import family_of
from toolkit.models.gpt import GPT

CONFIG = ModelConfig(
    name="wide", block_size=2048, vocab_size=32000, n_layer=15, n_head=32, n_query_groups=4, n_embd=2048,
    intermediate_size=5632,
)  # fmt: skip
GB = 1e9

# Prints GB by which anonymous memory rose, and seconds, on the way in and on the way out.
MEASURE = """
import sys, time, torch
from helpers.peak_memory import rise
from toolkit.checkpoints.hf.import_hf import import_hf
from toolkit.checkpoints.hf.export_hf import export_hf

torch.set_num_threads(1)
for convert, source, target in ((import_hf, "hf", "native"), (export_hf, "native", "out")):
    start = time.perf_counter()
    peak, _, _ = rise(convert, f"{sys.argv[1]}/{source}", f"{sys.argv[1]}/{target}")
    print(peak / 1e9, time.perf_counter() - start)
"""


def write_shards(folder) -> int:
    """Random fp32 weights of a Llama, a layer or so per file; return their bytes."""
    folder.mkdir()
    with torch.device("meta"):
        shapes = dict(to_hf_names(family_of(CONFIG).weight_map(CONFIG), GPT(CONFIG).state_dict()))
    (folder / "config.json").write_text(json.dumps(family_of(CONFIG).to_hf_config(CONFIG)))
    where, names, size = {}, list(shapes), 0
    for i in range(0, len(names), 12):
        file = f"model-{i:05d}.safetensors"
        tensors = {name: torch.empty(shapes[name].shape).uniform_(-0.1, 0.1) for name in names[i : i + 12]}
        size += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return size


def tensors_of(folder):
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


@pytest.mark.slow
def test_m2_three_gigabytes_in_and_out_within_a_half(tmp_path):
    assert write_shards(tmp_path / "hf") > 3 * GB
    command = [sys.executable, "-c", MEASURE, tmp_path]
    measured = subprocess.run(command, capture_output=True, text=True, check=True, env=with_path())
    (into, seconds_in), (out, seconds_out) = (map(float, line.split()) for line in measured.stdout.splitlines())
    print(f"in: {into:.2f} GB above, {seconds_in:.0f} s; out: {out:.2f} GB above, {seconds_out:.0f} s")
    assert into < 1.5 and out < 1.5
    before = {name: float(tensor.double().sum()) for name, tensor in tensors_of(tmp_path / "hf")}
    after = {name: float(tensor.double().sum()) for name, tensor in tensors_of(tmp_path / "out")}
    assert before == after
