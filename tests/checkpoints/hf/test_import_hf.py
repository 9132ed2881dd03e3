"""In from Hugging Face: everything comes along, nothing wrong gets in (S1, S4, N10), and M2."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from helpers.cases import slow_except
from helpers.damage import RunsCode, change_json
from helpers.peak_memory import with_path
from safetensors.torch import load_file, save_file
from tokenizers import processors

from tests.checkpoints.test_adapters import write_base
from tests.models.test_lora import base
from toolkit.checkpoints.folder import load_model, read_model_config
from toolkit.checkpoints.hf.export_hf import export_hf
from toolkit.checkpoints.hf.import_hf import import_hf
from toolkit.checkpoints.weights import load_weights
from toolkit.cli import main
from toolkit.data.tokenizer import Tokenizer, train_bpe
from toolkit.errors import UserError

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300,
    "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "llama": lambda **kw: transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **kw),
    "qwen2": lambda **kw: transformers.Qwen2Config(**SIZES, num_key_value_heads=2, **kw),
    "gpt_neox": lambda **kw: transformers.GPTNeoXConfig(**SIZES, **kw),
    "gpt2": lambda **kw: transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=300, n_positions=64, **kw),
}
TOKENS = torch.randint(300, (2, 20), generator=torch.Generator().manual_seed(1))


def save(folder, family="llama", dtype=torch.float32, max_shard_size="1GB", **options):
    """A random model as transformers writes it."""
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[family](**options)).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("norm" in name and name.endswith("weight")), 0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def change(folder, file="model.safetensors", add=(), drop=()):
    weights = load_file(folder / file)
    for name in drop:
        del weights[name]
    save_file(weights | dict(add), folder / file, metadata={"format": "pt"})


def same_logits(folder, reference):
    with torch.no_grad():
        expected = reference(TOKENS).logits
        return float((load_model(folder)(TOKENS) - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("family", MODELS)
def test_several_files_with_an_index(tmp_path, family):
    reference = save(tmp_path / "hf", family, max_shard_size="100KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    note = import_hf(tmp_path / "hf", tmp_path / "m")[-1]
    assert note.startswith(f"warning: {tmp_path / 'hf'} holds no tokenizer.json: copy one and its companion files")
    assert same_logits(tmp_path / "m", reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", slow_except(["gpt_neox"], MODELS))
def test_dtype_is_kept_or_converted(tmp_path, family, dtype):
    save(tmp_path / "hf", family, dtype)
    import_hf(tmp_path / "hf", tmp_path / "m")
    assert {t.dtype for t in load_weights(tmp_path / "m").values()} == {dtype}
    import_hf(tmp_path / "hf", tmp_path / "other", dtype=torch.float64)
    for name, tensor in load_weights(tmp_path / "other").items():
        assert torch.equal(tensor, load_weights(tmp_path / "m")[name].double())


def test_mixed_dtypes_are_promoted(tmp_path):
    save(tmp_path / "hf", dtype=torch.bfloat16)
    norm = torch.linspace(0, 1, 64)
    change(tmp_path / "hf", add={"model.norm.weight": norm})
    notes = import_hf(tmp_path / "hf", tmp_path / "m")
    assert "the weights have dtypes bfloat16 and float32: all are written as float32" in notes
    weights = load_weights(tmp_path / "m")
    assert {t.dtype for t in weights.values()} == {torch.float32} and torch.equal(
        weights["transformer.ln_f.weight"], norm
    )


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("stored", ["embedding", "head", "both"])
def test_n10_a_tied_head_is_one_tensor_whichever_is_stored(tmp_path, family, stored):
    reference = save(tmp_path / "hf", family, tie_word_embeddings=True)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    (embedding,) = [name for name, t in weights.items() if t.shape == (300, 64)]
    head = "embed_out.weight" if family == "gpt_neox" else "lm_head.weight"
    added = {} if stored == "embedding" else {head: weights[embedding].clone()}
    change(tmp_path / "hf", add=added, drop=[embedding] if stored == "head" else [])
    import_hf(tmp_path / "hf", tmp_path / "m")
    model = load_model(tmp_path / "m")
    assert model.lm_head.weight is model.transformer.wte.weight
    assert same_logits(tmp_path / "m", reference)
    size = sum(t.nbytes for t in weights.values())
    assert size < (tmp_path / "m" / "lit_model.pth").stat().st_size < size + 30_000, "stored once"


def test_differing_tied_head_is_untied_with_a_warning(tmp_path):
    save(tmp_path / "hf", tie_word_embeddings=True)
    change(tmp_path / "hf", add={"lm_head.weight": torch.randn(300, 64)})
    notes = import_hf(tmp_path / "hf", tmp_path / "m")
    assert any("lm_head.weight and model.embed_tokens.weight, but they differ: imported as untied" in n for n in notes)
    assert not read_model_config(tmp_path / "m").tie_embeddings
    if int(transformers.__version__.split(".")[0]) >= 5:
        assert same_logits(tmp_path / "m", transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf"))


def test_an_untied_head_that_is_missing_is_named(tmp_path):
    save(tmp_path / "hf")
    change(tmp_path / "hf", drop=["lm_head.weight"])
    with pytest.raises(UserError, match=re.escape("missing lm_head.weight (300, 64)")):
        import_hf(tmp_path / "hf", tmp_path / "m")


@pytest.mark.parametrize(
    ("family", "buffers"),
    [
        ("llama", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]),
        ("gpt_neox", ["gpt_neox.layers.1.attention.bias", "gpt_neox.layers.1.attention.masked_bias"]),
        ("gpt_neox", ["gpt_neox.layers.0.attention.rotary_emb.inv_freq"]),
        ("gpt2", ["transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"]),
    ],
)
def test_legacy_buffers_are_skipped(tmp_path, family, buffers):
    reference = save(tmp_path / "hf", family)
    change(tmp_path / "hf", add={name: torch.ones(1, 1, 8, 8, dtype=torch.uint8) for name in buffers})
    import_hf(tmp_path / "hf", tmp_path / "m")
    assert same_logits(tmp_path / "m", reference)


@pytest.mark.parametrize("family", MODELS)
def test_names_without_model_prefix(tmp_path, family):
    """As in openai-community/gpt2."""
    reference = save(tmp_path / "hf", family, tie_word_embeddings=True)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    bare = {name.partition(".")[2]: tensor for name, tensor in weights.items()}
    save_file(bare, tmp_path / "hf" / "model.safetensors")
    import_hf(tmp_path / "hf", tmp_path / "m")
    assert same_logits(tmp_path / "m", reference)


def with_tokenizer(folder):
    """Every kind of file that belongs to a tokenizer, next to a model."""
    train_bpe(["the text of the tokenizer"], 280).save(folder)
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}é{{ m.content }}{% endfor %}\r\n"
    )
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 5], "temperature": 0.6}')
    for name in ("tokenizer.model", "added_tokens.json", "merges.txt", "vocab.json"):
        (folder / name).write_text("{}")
    (folder / "README.md").write_text("about it")


TOKENIZER_FILES = [
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "additional_chat_templates/tools.jinja", "generation_config.json", "tokenizer.model", "added_tokens.json",
    "merges.txt", "vocab.json",
]  # fmt: skip


def test_tokenizer_and_template_files_round_trip(tmp_path):
    save(tmp_path / "hf")
    with_tokenizer(tmp_path / "hf")
    assert import_hf(tmp_path / "hf", tmp_path / "m") == []
    export_hf(tmp_path / "m", tmp_path / "back")
    for name in TOKENIZER_FILES:
        content = (tmp_path / "hf" / name).read_bytes()
        assert (tmp_path / "m" / name).read_bytes() == (tmp_path / "back" / name).read_bytes() == content
    assert (tmp_path / "m" / "config.json").read_bytes() == (tmp_path / "hf" / "config.json").read_bytes()
    native = {str(p.relative_to(tmp_path / "m")) for p in (tmp_path / "m").rglob("*") if p.is_file()}
    assert native == {
        "COMPLETE",
        "lit_model.pth",
        "model_config.yaml",
        "config.json",
        "download.yaml",
        *TOKENIZER_FILES,
    }
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == [0, 5]
    assert transformers.GenerationConfig.from_pretrained(str(tmp_path / "back")).eos_token_id == [0, 5]


def test_ids_of_transformers_stay_in_checkpoint_copies_and_export(tmp_path):
    """bos by setting alone, eos by tokenizer.json, and a token that tokenizer.json lacks."""
    save(tmp_path / "hf")
    trained = train_bpe(["the text of the tokenizer"], 280)
    core = trained._tokenizer
    end = trained.special_tokens["eos_token"]
    core.post_processor = processors.TemplateProcessing(f"$A {end}", f"$A {end} $B {end}", [(end, trained.eos_id)])
    config = trained.settings("tokenizer_config.json") | {"add_bos_token": True, "extra_special_tokens": ["<tool>"]}
    changed = {"tokenizer.json": core.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    trained.with_files(changed).save(tmp_path / "hf")
    text = "the <tool> text"
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")(text)["input_ids"]
    (note,) = import_hf(tmp_path / "hf", tmp_path / "m")
    assert note.endswith("texts have no bos token, as in transformers 5")
    assert main(["average", str(tmp_path / "average"), f"--checkpoint_dirs={tmp_path / 'm'},{tmp_path / 'm'}"]) == 0
    assert main(["convert_to_litgpt", str(tmp_path / "average"), str(tmp_path / "litgpt")]) == 0
    export_hf(tmp_path / "litgpt", tmp_path / "back")
    for name in ("m", "average", "litgpt", "back"):
        assert Tokenizer.load(tmp_path / name).encode(text, eos=None) == expected, name
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "back")(text)["input_ids"] == expected
    assert json.loads((tmp_path / "litgpt" / "tokenizer_config.json").read_text())["add_bos_token"] is False


def test_hub_cache_symlinks_are_followed(tmp_path):
    reference = save(tmp_path / "repo" / "blobs", max_shard_size="100KB")
    snapshot = tmp_path / "repo" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for file in (tmp_path / "repo" / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    import_hf(snapshot, tmp_path / "m")
    assert same_logits(tmp_path / "m", reference) and not (tmp_path / "m" / "config.json").is_symlink()


def test_warns_about_larger_tokenizer(tmp_path):
    save(tmp_path / "hf", "gpt2")
    train_bpe([" ".join(f"word{i}" for i in range(3000))], 400).save(tmp_path / "hf")
    note = import_hf(tmp_path / "hf", tmp_path / "m")[-1]
    assert re.match("warning: the tokenizer has (3[0-9]{2}|400) tokens, but the model embeds only 300", note)


def test_custom_code_warns_and_is_not_run(tmp_path):
    reference = save(tmp_path / "hf")
    (tmp_path / "hf" / "modeling_own.py").write_text("raise SystemExit")
    change_json(tmp_path / "hf" / "config.json", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    code, _ = import_hf(tmp_path / "hf", tmp_path / "m")
    assert code == (
        "warning: config.json names custom code (auto_map), which is not run; using the standard architecture of llama"
    )
    assert same_logits(tmp_path / "m", reference) and not (tmp_path / "m" / "modeling_own.py").exists()


def test_dropout_that_training_does_not_have_is_a_note(tmp_path):
    save(tmp_path / "hf")
    rates = {"attention_dropout": 0.0, "residual_dropout": 0.1, "attn_pdrop": 0.2, "summary_first_dropout": 0.1}
    change_json(tmp_path / "hf" / "config.json", **rates)
    note = import_hf(tmp_path / "hf", tmp_path / "m")[0]
    assert note == (
        "note: config.json has residual_dropout 0.1, attn_pdrop 0.2: training here has no dropout in these places"
    )


def test_the_model_is_named(tmp_path):
    save(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "My-Model")
    assert read_model_config(tmp_path / "My-Model").name == "My-Model"
    change_json(tmp_path / "hf" / "config.json", _name_or_path="org/Their-Model")
    import_hf(tmp_path / "hf", tmp_path / "m")
    assert read_model_config(tmp_path / "m").name == "Their-Model"


def lfs(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def cut(folder):
    os.truncate(folder / "model.safetensors", 9000)


def pickled(folder, **other):
    """Weights as torch.save writes them, and perhaps something else among them."""
    tensors = load_file(folder / "model.safetensors") | other
    if tensors.pop("numbered", False):
        tensors[3] = torch.zeros(1)
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def old_pickle(folder):
    torch.save(
        load_file(folder / "model.safetensors"), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False
    )
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("several", [False, True])
def test_pickles_without_code_are_read(tmp_path, several):
    """In one file, or several with an index; the weights are the safetensors'."""
    save(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "expected")
    pickled(tmp_path / "hf")
    if several:
        tensors = torch.load(tmp_path / "hf/pytorch_model.bin", weights_only=True)
        (tmp_path / "hf/pytorch_model.bin").unlink()
        where = {name: f"pytorch_model-{i % 2}.bin" for i, name in enumerate(tensors)}
        for file in set(where.values()):
            torch.save({n: t for n, t in tensors.items() if where[n] == file}, tmp_path / "hf" / file)
        (tmp_path / "hf/pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    import_hf(tmp_path / "hf", tmp_path / "m")
    found, expected = load_weights(tmp_path / "m"), load_weights(tmp_path / "expected")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def adapter(folder):
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


def fp8(folder):
    change(folder, add={"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)})


QKV = "model.layers.1.self_attn.k_proj.weight"
BAD = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds neither model.safetensors nor .*index.json"),
    "code": (lambda f: pickled(f, extra=RunsCode("ran")), "pytorch_model.bin: .*code"),
    "sparse": (lambda f: pickled(f, extra=torch.zeros(2).to_sparse()), "'extra' is not a plain tensor"),
    "meta": (lambda f: pickled(f, **{QKV: torch.zeros(32, 64, device="meta")}), "k_proj.weight' is not a plain tensor"),
    "number": (lambda f: pickled(f, numbered=True), "pytorch_model.bin: 3 is not a plain tensor"),
    "no tensor": (lambda f: pickled(f, epoch=3), "pytorch_model.bin: 'epoch' is not a plain tensor"),
    "old pickle": (old_pickle, "pytorch_model.bin: "),
    "checkpoint": (lambda f: (f / "model.safetensors").rename(f / "lit_model.pth"), "is already a checkpoint folder"),
    "adapter": (adapter, "holds an adapter"),
    "git-lfs": (lfs, "model.safetensors: is a Git LFS pointer, not the weights; run `git lfs pull`"),
    "cut short": (cut, "model.safetensors: the file is damaged or truncated"),
    "no config": (lambda f: (f / "config.json").unlink(), "holds no config.json; give a Hugging Face folder"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json: not JSON"),
    "deep JSON": (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json: not JSON"),
    "no object": (lambda f: (f / "config.json").write_text("[]"), "config.json: must hold a JSON object"),
    "architecture": (
        lambda f: change_json(f / "config.json", model_type="qwen"),
        "config.json: model_type 'qwen' is not supported; the closest that is: 'qwen3'",
    ),
    "size": (lambda f: change_json(f / "config.json", hidden_size="wide"), "config.json"),
    "negative": (lambda f: change_json(f / "config.json", num_hidden_layers=-1), "num_hidden_layers -1"),
    "quantized": (
        lambda f: change_json(f / "config.json", quantization_config={"quant_method": "gptq"}), "quantization_config"
    ),
    "type": (fp8, "model.norm.weight has unsupported dtype F8_E4M3"),
    "missing": (lambda f: change(f, drop=[QKV]), rf"missing {QKV} \(32, 64\)"),
    "extra": (lambda f: change(f, add={"score.weight": torch.ones(2, 64)}), r"unknown score.weight \(2, 64\)"),
    "misshapen": (lambda f: change(f, add={QKV: torch.ones(64, 64)}), rf"{QKV} is \(64, 64\), not \(32, 64\)"),
    "tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "hf_dir .*tokenizer.json cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_one_line_error_and_writes_nothing(tmp_path, capsys, case):
    save(tmp_path / "hf")
    spoil, message = BAD[case]
    spoil(tmp_path / "hf")
    assert main(["convert_from_hf", str(tmp_path / "hf"), str(tmp_path / "m")]) == 2
    shown = capsys.readouterr()
    assert re.search(message, shown.err) and shown.err.count("\n") == 1 and not shown.out
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("../secret.safetensors", "points to '../secret.safetensors', which is not a safetensors file next to it"),
        ("/etc/secret.safetensors", "points to '/etc/secret.safetensors'"),
        ("..\\secret.safetensors", "points to"),
        ("model.bin", "points to 'model.bin'"),
        ("none.safetensors", "none.safetensors: No such file or directory"),
        (7, "holds no weight_map"),
    ],
)
def test_s4_an_index_cannot_point_outside_its_folder(tmp_path, file, message):
    save(tmp_path / "hf", max_shard_size="100KB")
    save_file({QKV: torch.ones(32, 64)}, tmp_path / "secret.safetensors")
    index = tmp_path / "hf" / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    change_json(index, weight_map=where | {QKV: file})
    with pytest.raises(UserError, match=re.escape(message)):
        import_hf(tmp_path / "hf", tmp_path / "m")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[1]"])
def test_index_without_files_is_rejected(tmp_path, content):
    save(tmp_path / "hf", max_shard_size="100KB")
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError, match="index.json: (holds no weight_map|must hold a JSON object)"):
        import_hf(tmp_path / "hf", tmp_path / "m")


def test_s7_damage_after_the_export_is_found(tmp_path, capsys):
    """Config files may be edited: with a warning."""
    write_base(tmp_path / "native", base())
    export_hf(tmp_path / "native", tmp_path / "hf")
    whole = (tmp_path / "hf" / "model.safetensors").read_bytes()
    weights, config, sums = (tmp_path / "hf" / name for name in ("model.safetensors", "config.json", "SHA256SUMS"))

    def convert(name: str, *flags: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["convert_from_hf", str(tmp_path / "hf"), str(tmp_path / name), *flags])
        lines = capsys.readouterr().err.splitlines(keepends=True)
        return code, "".join(line for line in lines if "holds no tokenizer.json" not in line)

    assert convert("intact") == (0, "")
    config.write_text(config.read_text().replace('"initializer_range": 0.02', '"initializer_range": 0.01') + " ")
    code, lines = convert("edited")
    assert code == 0 and lines == f"warning: {config} does not match its checksum: it was edited or is damaged\n"
    for place in (9, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        code, line = convert("damaged")
        assert code == 2 and "model.safetensors: checksum mismatch" in line and line.count("\n") == 1
    assert convert("accepted", "--verify_checkpoint", "false")[0] == 0
    sums.write_text(sums.read_text().replace("  ", " ", 1))
    assert f"{sums}: line 1 is damaged" in convert("malformed")[1]
    os.truncate(sums, 2**27)  # sparse
    assert f"{sums}: SHA256SUMS: larger than " in convert("large")[1]


def test_nonempty_out_dir_and_wrong_hf_dir_are_rejected(tmp_path, capsys, refusal):
    save(tmp_path / "hf")
    assert main(["convert_from_hf", str(tmp_path / "hf"), str(tmp_path / "m"), "--dtype", "bfloat16"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"wrote {tmp_path / 'm'}\n" and shown.err.startswith("warning: ")
    assert {t.dtype for t in load_weights(tmp_path / "m").values()} == {torch.bfloat16}
    for source, target, message in [("hf", "m", "m: already exists"), ("none", "n", "none: no such folder")]:
        assert message in refusal("convert_from_hf", tmp_path / source, tmp_path / target)
    (tmp_path / "m" / "config.json").unlink()
    with pytest.raises(UserError, match="it is already a checkpoint folder"):
        import_hf(tmp_path / "m", tmp_path / "n")


def test_s1_full_disk_leaves_no_files(tmp_path, small_disk):
    disk = small_disk("200k")
    save(tmp_path / "hf")
    with pytest.raises(UserError, match="^out_dir .*/disk/m: No space left on device: .* free some space"):
        import_hf(tmp_path / "hf", disk / "m")
    assert not list(disk.iterdir())


# Prints for each folder by how much the peak of anonymous memory rose during its import, in largest weights.
PEAK = """
import sys, torch
from pathlib import Path
from helpers.peak_memory import rise
from toolkit.checkpoints.hf.import_hf import import_hf
from toolkit.checkpoints.weights import load_weights

torch.set_num_threads(1)
import_hf(sys.argv[1], sys.argv[1] + "-in")  # imports and caches are not what is measured
for source, dtype in zip(sys.argv[2::2], sys.argv[3::2]):
    peak, _, _ = rise(import_hf, source, source + "-in", dtype=None if dtype == "kept" else getattr(torch, dtype))
    print(peak / max(t.nbytes for t in load_weights(Path(source + "-in")).values()))
"""


@pytest.mark.slow
def test_m2_import_holds_a_small_multiple_of_the_largest_weight(tmp_path, monkeypatch):
    save(tmp_path / "small")
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8}
    monkeypatch.setattr(sys.modules[__name__], "SIZES", SIZES | wide)
    wide_gpt2 = {"n_embd": 512, "n_layer": 6, "n_head": 8, "vocab_size": 300, "n_positions": 64}
    monkeypatch.setitem(MODELS, "gpt2", lambda: transformers.GPT2Config(**wide_gpt2))
    command = [sys.executable, "-c", PEAK, tmp_path / "small"]
    for family, dtype in [("llama", "kept"), ("gpt_neox", "float16"), ("gpt2", "kept")]:
        model = save(tmp_path / family, family)
        weights = [p.nbytes for p in model.parameters()]
        assert sum(weights) > 12 * max(weights), "the model must be many times its largest weight"
        command += [tmp_path / family, dtype]
    measured = subprocess.run(command, capture_output=True, text=True, check=True, env=with_path())
    rises = [float(line) for line in measured.stdout.split()]
    assert len(rises) == 3 and max(rises) < 4, rises
