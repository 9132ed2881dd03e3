"""Out to Hugging Face: what transformers loads computes the same (all three styles), and M2."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from helpers.cases import slow_except
from helpers.peak_memory import with_path
from helpers.saving import write_checkpoint
from safetensors import safe_open
from tokenizers import Tokenizer as Core

from toolkit.checkpoints.folder import load_model, write_model_files
from toolkit.checkpoints.hf import export_hf as export_module
from toolkit.checkpoints.hf.export_hf import export_hf, verify_hf
from toolkit.data.tokenizer import Tokenizer, train_bpe
from toolkit.errors import GuardError, UserError
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT

transformers = pytest.importorskip("transformers")

LLAMA = ModelConfig(name="small", vocab_size=300, n_query_groups=2, intermediate_size=96, block_size=32)
NEOX = ModelConfig(
    family="gpt_neox", vocab_size=300, parallel_residual=True, bias=True, rotary_percentage=0.25, block_size=32,
    norm_class_name="LayerNorm", mlp_class_name="GptNeoxMLP",
)  # fmt: skip
GPT2 = dataclasses.replace(
    NEOX, family="gpt2", parallel_residual=False, position_embedding="learned", gelu_approximate="tanh",
    rotary_percentage=1.0, tie_embeddings=True,
)  # fmt: skip
TIED = dataclasses.replace(LLAMA, tie_embeddings=True)
STYLES = {"llama": LLAMA, "llama tied": TIED, "neox": NEOX, "gpt2": GPT2}
TOKENS = torch.randint(300, (2, 20), generator=torch.Generator().manual_seed(1))


def save(folder, config, dtype=torch.float32, tokenizer=None):
    torch.manual_seed(0)
    model = GPT(config).to(dtype)
    for name, parameter in model.named_parameters():  # biases and norms must count
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=float("norm" in name or "ln_f.weight" in name), std=0.3)
    files = {"state_dict": model.state_dict(), "config": config, "hyperparameters": None, "tokenizer": tokenizer}
    write_checkpoint(folder, lambda tmp: write_model_files(tmp, **files))
    return model


def load_hf(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(str(folder), **options).eval()


def difference(a, b):
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("style", STYLES)
def test_transformers_computes_the_same_logits(tmp_path, style):
    model = save(tmp_path / "m", STYLES[style])
    export_hf(tmp_path / "m", tmp_path / "hf")
    with torch.no_grad():
        assert difference(model(TOKENS), load_hf(tmp_path / "hf")(TOKENS).logits) < 1e-5
    assert verify_hf(tmp_path / "m", tmp_path / "hf") < 1e-5


@pytest.mark.parametrize("style", STYLES)
def test_several_files_with_an_index(tmp_path, monkeypatch, style):
    model = save(tmp_path / "m", STYLES[style])
    monkeypatch.setattr(export_module, "MAX_SHARD_BYTES", 100_000)
    export_hf(tmp_path / "m", tmp_path / "hf")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    for file in files:
        content = (tmp_path / "hf" / file).read_bytes()
        assert len(content) < 110_000
        assert int.from_bytes(content[:8], "little") % 8 == 0, "the tensors begin aligned"
        with safe_open(tmp_path / "hf" / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert {index["weight_map"][name] for name in opened.keys()} == {file}  # noqa: SIM118 (not a dictionary)
    with torch.no_grad():
        assert difference(model(TOKENS), load_hf(tmp_path / "hf")(TOKENS).logits) < 1e-5


@pytest.mark.parametrize("style", STYLES)
def test_export_in_bfloat16(tmp_path, style):
    save(tmp_path / "m", STYLES[style])
    export_hf(tmp_path / "m", tmp_path / "hf", dtype=torch.bfloat16)
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as opened:
        assert {opened.get_tensor(name).dtype for name in opened.keys()} == {torch.bfloat16}  # noqa: SIM118
    reference = load_hf(tmp_path / "hf", dtype="auto")
    assert reference.dtype == torch.bfloat16
    native = load_model(tmp_path / "m", dtype=torch.bfloat16).float()
    with torch.no_grad():
        assert difference(native(TOKENS), reference.float()(TOKENS).logits) < 1e-5
    assert verify_hf(tmp_path / "m", tmp_path / "hf") < 1e-5


def test_a_bfloat16_checkpoint_stays_bfloat16(tmp_path):
    save(tmp_path / "m", NEOX, dtype=torch.bfloat16)
    export_hf(tmp_path / "m", tmp_path / "hf")
    assert load_hf(tmp_path / "hf", dtype="auto").dtype == torch.bfloat16
    assert verify_hf(tmp_path / "m", tmp_path / "hf") < 1e-5


def test_verify_detects_a_wrong_weight(tmp_path):
    save(tmp_path / "m", LLAMA)
    export_hf(tmp_path / "m", tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-40:] = bytes(40)
    file.write_bytes(content)
    assert verify_hf(tmp_path / "m", tmp_path / "hf") > 1e-3


def test_n10_a_tied_head_is_not_exported_twice(tmp_path):
    save(tmp_path / "m", TIED)
    export_hf(tmp_path / "m", tmp_path / "hf")
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as opened:
        assert "lm_head.weight" not in opened.keys()  # noqa: SIM118 (not a dictionary)
    reference = load_hf(tmp_path / "hf")
    assert reference.lm_head.weight is reference.model.embed_tokens.weight


def test_export_contains_all_files(tmp_path):
    tokenizer = train_bpe(["the text of the tokenizer"], 280)
    save(tmp_path / "m", LLAMA, tokenizer=tokenizer)
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages }}")
    export_hf(tmp_path / "m", tmp_path / "hf")
    assert {p.name for p in (tmp_path / "hf").iterdir()} == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
        "SHA256SUMS",
    }  # fmt: skip
    reference = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "hf"))
    assert reference("text of the day")["input_ids"] == tokenizer.encode("text of the day")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["eos_token_id"] == reference.eos_token_id == tokenizer.eos_id
    generation = transformers.GenerationConfig.from_pretrained(str(tmp_path / "hf"))
    assert generation.eos_token_id == tokenizer.eos_id
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "# small" in card and "import AutoModelForCausalLM, AutoTokenizer\n" in card
    (tmp_path / "m" / "tokenizer.json").unlink()
    export_hf(tmp_path / "m", tmp_path / "without")
    card = (tmp_path / "without" / "README.md").read_text()
    assert "import AutoModelForCausalLM\n" in card and "okenizer" not in card


def came(folder, config=None, generation=None):
    """Files that an import leaves next to the weights."""
    for name, values in (("config.json", config), ("generation_config.json", generation)):
        if values is not None:
            (folder / name).write_text(json.dumps(values))


def exported_ids(folder):
    values = json.loads((folder / "config.json").read_text())
    return {name.removesuffix("_token_id"): i for name, i in values.items() if name.endswith("_token_id")}


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (None, None, {"bos": None, "eos": None, "pad": None}),
        ({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}, None, {"bos": 1, "eos": 2, "pad": 3}),
        (None, {"bos_token_id": 1, "eos_token_id": [2, 4]}, {"bos": 1, "eos": [2, 4], "pad": None}),
        ({"eos_token_id": 2, "pad_token_id": 0}, {"eos_token_id": [2, 4]}, {"bos": None, "eos": [2, 4], "pad": 0}),
        ({"bos_token_id": 1, "pad_token_id": 320}, None, {"bos": 1, "eos": None, "pad": None}),
        ({"bos_token_id": 1, "pad_token_id": -1}, None, {"bos": 1, "eos": None, "pad": None}),
        ({"text_config": {"eos_token_id": 5, "pad_token_id": 6}}, None, {"bos": None, "eos": 5, "pad": 6}),
    ],
)
@pytest.mark.parametrize("style", slow_except(["llama"], ["llama", "gpt2"]))
def test_token_ids_without_tokenizer_come_from_original_config(tmp_path, style, config, generation, expected):
    save(tmp_path / "m", STYLES[style])
    came(tmp_path / "m", config, generation)
    (tmp_path / "m" / "tokenizer.model").write_bytes(b"sentences")
    export_hf(tmp_path / "m", tmp_path / "hf")
    assert exported_ids(tmp_path / "hf") == expected
    known = {f"{name}_token_id": i for name, i in expected.items() if i is not None}
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text()) == (generation or known)
    assert (tmp_path / "hf" / "tokenizer.model").read_bytes() == b"sentences"
    assert load_hf(tmp_path / "hf").generation_config.eos_token_id == expected["eos"]


@pytest.mark.parametrize(
    ("config", "pad", "expected"),
    [
        (None, None, {"bos": 0, "eos": 0, "pad": None}),
        (None, "<|endoftext|>", {"bos": 0, "eos": 0, "pad": 0}),
        ({"bos_token_id": 7, "eos_token_id": 8, "pad_token_id": 9}, "<|endoftext|>", {"bos": 0, "eos": 0, "pad": 9}),
        ({"pad_token_id": None, "eos_token_id": 8}, "<|endoftext|>", {"bos": 0, "eos": 0, "pad": None}),
    ],
)
def test_pad_id_comes_from_original_config_or_tokenizer(tmp_path, config, pad, expected):
    tokenizer = train_bpe(["the text of the tokenizer"], 280)
    settings = tokenizer.settings("tokenizer_config.json") | ({"pad_token": pad} if pad else {})
    tokenizer = tokenizer.with_files({"tokenizer_config.json": json.dumps(settings).encode()})
    save(tmp_path / "m", LLAMA, tokenizer=tokenizer)
    came(tmp_path / "m", config)
    export_hf(tmp_path / "m", tmp_path / "hf")
    assert exported_ids(tmp_path / "hf") == expected
    assert load_hf(tmp_path / "hf").config.pad_token_id == expected["pad"]


@pytest.mark.parametrize("pad", ["<pad>", "the"])
def test_a_head_is_padded_with_a_token_that_the_model_embeds(tmp_path, pad):
    """<pad>, which only a setting names, has the first id that the model lacks."""
    tokenizer = train_bpe(["the text of the tokenizer"], 280)
    core = Core.from_str(tokenizer.files["tokenizer.json"].decode())
    core.add_tokens(
        [f"<{i}>" for i in range(LLAMA.padded_vocab_size - tokenizer.vocab_size)] if pad == "<pad>" else ["the"]
    )
    settings = tokenizer.settings("tokenizer_config.json") | {"pad_token": pad}
    files = {"tokenizer.json": core.to_str().encode(), "tokenizer_config.json": json.dumps(settings).encode()}
    tokenizer = Tokenizer(tokenizer.files | files, "the tokenizer", is_foreign=True)
    labels = {"head": "classification", "labels": ["a", "b"], "problem_type": "single_label_classification"}
    save(tmp_path / "m", dataclasses.replace(LLAMA, **labels, tie_embeddings=False), tokenizer=tokenizer)
    export_hf(tmp_path / "m", tmp_path / "hf")
    hf = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert hf.pad_token_id == exported_ids(tmp_path / "hf")["pad"] == (0 if pad == "<pad>" else tokenizer.pad_id)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    assert model(**hf(["the text", "the"], padding=True, return_tensors="pt")).logits.shape == (2, 2)


@pytest.mark.parametrize(
    ("eos", "expected"),
    [([0, 320, 5], [0, 5]), ([-1, "5", True], None), (320, None), ("5", None), ({"id": 5}, None), (5, 5)],
)
def test_eos_ids_that_the_model_does_not_embed_are_left_out(tmp_path, eos, expected):
    files = train_bpe(["the text of the tokenizer"], 280).files
    files["generation_config.json"] = json.dumps({"eos_token_id": eos}).encode()
    save(tmp_path / "m", LLAMA, tokenizer=Tokenizer(files, "it"))
    export_hf(tmp_path / "m", tmp_path / "hf")
    assert exported_ids(tmp_path / "hf")["eos"] == expected


def test_malformed_original_config_is_a_one_line_error(tmp_path):
    save(tmp_path / "m", LLAMA)
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(UserError, match="m/config.json: not JSON"):
        export_hf(tmp_path / "m", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


END = 259  # the first id after the vocabulary
TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '<|end|>' }}{% endfor %}"


@pytest.mark.parametrize(
    ("given", "template", "expected"),
    [
        (None, None, {"bos_token_id": 0, "eos_token_id": 0}),
        (None, TURNS, {"bos_token_id": 0, "eos_token_id": [0, END]}),
        (None, "{{ broken", {"bos_token_id": 0, "eos_token_id": 0}),
        ({}, TURNS, {"bos_token_id": 0, "eos_token_id": [0, END]}),
        ({"temperature": 0.5}, None, {"temperature": 0.5, "bos_token_id": 0, "eos_token_id": 0}),
        ({"eos_token_id": [7, 8], "top_p": 0.9}, TURNS, {"eos_token_id": [7, 8], "top_p": 0.9}),
    ],
)
def test_eos_ids_include_end_of_turn(tmp_path, given, template, expected):
    """What generation_config.json says is kept; what ends a text is found where it says nothing."""
    files = train_bpe(["the text of the tokenizer"], END).files
    del files["generation_config.json"]
    added = json.loads(files["tokenizer.json"])
    added["added_tokens"].append({**added["added_tokens"][0], "id": END, "content": "<|end|>"})
    files["tokenizer.json"] = json.dumps(added).encode()
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    if given is not None:
        files["generation_config.json"] = json.dumps(given).encode()
    save(tmp_path / "m", LLAMA, tokenizer=Tokenizer(files, "it"))
    export_hf(tmp_path / "m", tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text()) == expected
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["eos_token_id"] == expected["eos_token_id"]
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == expected["eos_token_id"]


def test_transformers_generates_the_same_greedy_text(tmp_path):
    save(tmp_path / "m", LLAMA)  # without a tokenizer: generation_config.json is generated
    export_hf(tmp_path / "m", tmp_path / "hf")
    reference = load_hf(tmp_path / "hf")
    text = reference.generate(TOKENS[:1, :4], max_new_tokens=5, do_sample=False, pad_token_id=0)
    native, model = TOKENS[:1, :4], load_model(tmp_path / "m")
    for _ in range(5):
        native = torch.cat([native, model(native)[:, -1:].argmax(-1)], dim=1)
    assert text.tolist() == native.tolist()


def test_nonempty_out_dir_is_rejected_and_empty_one_accepted(tmp_path):
    save(tmp_path / "m", LLAMA)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="out_dir .*used: already exists and is not empty; give a new folder"):
        export_hf(tmp_path / "m", tmp_path / "used")
    export_hf(tmp_path / "m", tmp_path / "empty")
    assert verify_hf(tmp_path / "m", tmp_path / "empty") < 1e-5


def test_verify_reports_models_that_transformers_cannot_load(tmp_path):
    save(tmp_path / "m", LLAMA)
    export_hf(tmp_path / "m", tmp_path / "hf")
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "of_tomorrow"}))
    with pytest.raises(GuardError, match=f"^transformers {transformers.__version__} cannot load the export: .*of_t"):
        verify_hf(tmp_path / "m", tmp_path / "hf")


@pytest.mark.parametrize(("version", "name"), [(None, "dtype"), ("4.56.0", "dtype"), ("4.55.4", "torch_dtype")])
def test_verify_passes_dtype_by_transformers_version(tmp_path, monkeypatch, version, name):
    """By the other one, the library prints that it is deprecated, or refuses it."""
    save(tmp_path / "m", LLAMA)
    export_hf(tmp_path / "m", tmp_path / "hf")
    reference, given = load_hf(tmp_path / "hf"), []
    load = lambda folder, **options: given.append(options) or reference  # noqa: E731
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    if version:
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    assert verify_hf(tmp_path / "m", tmp_path / "hf") < 1e-5
    assert given == [{name: torch.float32, "local_files_only": True}]


def test_s1_failed_export_leaves_no_files(tmp_path):
    save(tmp_path / "m", dataclasses.replace(LLAMA, parallel_residual=True))
    with pytest.raises(UserError, match="parallel_residual"):
        export_hf(tmp_path / "m", tmp_path / "hf")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_s1_full_disk_during_an_export_names_out_dir(tmp_path, small_disk):
    disk = small_disk("200k")
    save(tmp_path / "m", LLAMA)
    with pytest.raises(UserError, match="^out_dir .*/disk/hf: No space left on device: .* free some space"):
        export_hf(tmp_path / "m", disk / "hf")
    assert not list(disk.iterdir())


# Prints for each model by how much the peak of anonymous memory rose during its export, in units of its largest weight.
PEAK = """
import sys, torch
from pathlib import Path
from helpers.peak_memory import rise
from toolkit.checkpoints.hf.export_hf import export_hf
from toolkit.checkpoints.weights import load_weights

torch.set_num_threads(1)
export_hf(sys.argv[1], sys.argv[1] + "-hf")  # imports and caches are not what is measured
for source, dtype in zip(sys.argv[2::2], sys.argv[3::2]):
    peak, _, _ = rise(export_hf, source, source + "-hf", dtype=getattr(torch, dtype))
    print(peak / max(t.nbytes for t in load_weights(Path(source)).values()))
"""


LARGE = [("llama", "float32"), ("neox", "bfloat16"), ("gpt2", "float32")]


@pytest.mark.slow
@pytest.mark.parametrize("large", [LARGE[1:2], pytest.param(LARGE, marks=pytest.mark.slow)])
def test_m2_export_holds_a_small_multiple_of_the_largest_weight(tmp_path, large):
    save(tmp_path / "small", LLAMA)
    command = [sys.executable, "-c", PEAK, tmp_path / "small"]
    for style, dtype in large:
        size = {"n_layer": 6, "n_embd": 512, "n_head": 8, "n_query_groups": 8, "head_size": 64}
        model = save(tmp_path / style, dataclasses.replace(STYLES[style], intermediate_size=2048, **size))
        weights = [p.nbytes for p in model.parameters()]
        assert sum(weights) > 15 * max(weights), "the model must be many times its largest weight"
        command += [tmp_path / style, dtype]
    measured = subprocess.run(command, capture_output=True, text=True, check=True, env=with_path())
    rises = [float(line) for line in measured.stdout.split()]
    assert len(rises) == len(large) and max(rises) < 4, rises
