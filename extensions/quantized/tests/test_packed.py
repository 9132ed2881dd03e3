"""Exports with quantized weights: transformers computes what the run validated, from the same integers."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from helpers.cases import slow_except
from helpers.saving import write_checkpoint
from helpers.sealing import seal
from helpers.small_runs import write_base, write_rows
from helpers.tiny_configs import HF_CONFIGS
from helpers.tiny_models import randomize, relative_error, token_ids
from safetensors.torch import load_file
from toolkit_metric.tasks import open_hf_folder
from toolkit_quantized import layers, packing
from toolkit_quantized.packing import Packing, pack_integers
from torch.nn import functional as F

from toolkit.checkpoints.folder import load_model, read_model_config, write_model_config, write_model_files
from toolkit.checkpoints.hf import export_hf as export_module
from toolkit.checkpoints.hf.export_hf import export_hf, to_hf_names, verify_hf
from toolkit.checkpoints.weights import load_weights
from toolkit.cli import main
from toolkit.commands.convert_to_hf import MAX_LINEAR_DIFFERENCE
from toolkit.io.atomic import link_or_copy
from toolkit.io.safe_parse import read_json_object
from toolkit.models.families import family_of
from toolkit.models.gpt import build_model
from toolkit.objectives import NextToken
from toolkit.training import engine  # noqa: F401 (the runs draw no plots)
from toolkit.ui.loggers import read_metrics

transformers = pytest.importorskip("transformers")
pack_to_int32 = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers").pack_to_int32
compressed_tensors = pytest.importorskip("compressed_tensors.compressors.format")
quantization = pytest.importorskip("compressed_tensors.quantization")

RUN = ["--accelerator", "cpu", "--train.max_steps", "12", "--train.save_interval", "12", "--eval.interval", "12",
       "--train.global_batch_size", "4", "--train.micro_batch_size", "4", "--train.learning_rate", "0.03", "--data",
       "JSON", "--data.prompt_style", "plain", "--data.val_split_fraction", "0.3",
       "--eval.max_new_tokens", "0"]  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory, corpus):
    return write_base(tmp_path_factory.mktemp("base"), corpus)


def train(base, out, *flags, command="finetune_full"):
    """Train, and return the last validation's loss and batches."""
    batches, sums = [], NextToken.sums

    def record(objective, model, batch, device):
        if not torch.is_grad_enabled():
            batches.append(batch)
        return sums(objective, model, batch, device)

    rows = ["--data.json_path", str(write_rows(out.parent)), "--out_dir", str(out)]
    with mock.patch.object(NextToken, "sums", record):
        assert main([command, str(base), *RUN, *rows, *flags]) == 0
    return read_metrics(out / "logs" / "metrics.csv")[-1]["val_loss"], batches


@torch.no_grad()
def loss_in_transformers(folder, batches):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    sums = [F.cross_entropy(model(b.input_ids).logits.flatten(0, 1), b.labels.flatten(), reduction="sum")
            for b in batches]  # fmt: skip
    return float(sum(sums) / sum((b.labels >= 0).sum() for b in batches))


def without_quantizer(weight, a, b, scaling, quantizer):
    return (weight if a is None else weight + scaling * b @ a), None


CASES = [("int4", "finetune_full"), ("int8", "finetune_full"), ("int4", "finetune_lora")]


@pytest.mark.parametrize("case", slow_except(CASES[:1], CASES))
def test_transformers_loss_is_that_of_the_last_validation(base, tmp_path, case, monkeypatch):
    """And is not without training, or without the quantizer in the forward pass."""
    weights, command = case

    def difference(name, *flags):
        expected, batches = train(base, tmp_path / name, *flags, command=command)
        final, folder = tmp_path / name / "final", tmp_path / f"{name}-hf"
        export_hf(final, folder, merge=command == "finetune_lora", quantize=weights)
        assert read_json_object(folder / "config.json")["quantization_config"]["format"] == "pack-quantized"
        if flags and case != CASES[0]:  # lm-eval reads the same values
            with open_hf_folder(final, tasks="t", base_checkpoint_dir=None, quantize=None) as (dense, _):
                assert abs(loss_in_transformers(dense, batches) - loss_in_transformers(folder, batches)) < 1e-6
        return abs(loss_in_transformers(folder, batches) - expected)

    assert difference("trained", "--qat.weights", weights) < 1e-5
    assert difference("plain") > 1e-5  # 1e-3 with int4, and about 1e-4 with int8
    monkeypatch.setattr(layers, "_quantized", without_quantizer)
    assert difference("disabled", "--qat.weights", weights) > 1e-5


def with_qat(folder, native, weights="int4", group_size=8, dtype="float32"):
    """Copy a model as if it had been trained with --qat.weights."""
    folder.mkdir()
    for file in native.iterdir():
        link_or_copy(file, folder / file.name)
    config, qat = read_model_config(native), {"weights": weights, "group_size": group_size, "dtype": dtype}
    (folder / "model_config.yaml").unlink()
    write_model_config(replace(config, qat=qat), folder / "model_config.yaml")
    return folder


def decompressed(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    model.hf_quantizer.compressor.decompress_model(model)
    return model


FAST = ["llama-grouped-tied", "qwen2", "neox", "gemma3", "qwen3-moe", "phi3"]
NOT_LINEAR = ("gpt2", "gpt-oss", "falcon", "granitemoe", "gemma4-moe")


@torch.no_grad()
@pytest.mark.parametrize("name", slow_except(FAST, [n for n in HF_CONFIGS if not n.startswith(NOT_LINEAR)]))
@pytest.mark.parametrize("dtype", slow_except(["float32"], ["float32", "bfloat16"]))
def test_transformers_loads_the_weights_that_inference_has(name, dtype, tiny_models, tmp_path):
    """Bit for bit; with biases, fused rows, experts, and layers that are not quantized."""
    group_size = 32 if name in FAST else 8
    folder, out = with_qat(tmp_path / "m", tiny_models[name].native, "int4", group_size, dtype), tmp_path / "hf"
    export_hf(folder, out, getattr(torch, dtype), check=lambda exported: assert_verified(folder, exported))
    ours, theirs = load_model(folder, dtype=getattr(torch, dtype)).eval(), decompressed(out)
    loaded = theirs.state_dict()
    weights = dict(to_hf_names(family_of(ours.config).weight_map(ours.config), ours.state_dict()))
    names = weights.keys() & loaded.keys()  # transformers stacks experts, and loads fp32 decays in the folder's dtype
    wrong = [name for name in names if not torch.equal(loaded[name], weights[name].to(loaded[name].dtype))]
    assert wrong == [] and len(names) > 8
    if dtype == "float32":
        limit = MAX_LINEAR_DIFFERENCE if "linear_attention" in str(theirs.config) else 1e-5
        assert relative_error(ours(token_ids()), theirs(token_ids()).logits) < limit


def assert_verified(folder, exported):
    assert verify_hf(folder, exported) < MAX_LINEAR_DIFFERENCE


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("gpt2", "transformer.h.0.attn.c_attn.weight"),
        ("gpt-oss", "model.layers.0.mlp.experts.gate_up_proj"),
        ("granitemoe", "model.layers.0.block_sparse_moe.input_linear.weight"),
        ("falcon-groups", "transformer.h.0.self_attention.query_key_value.weight"),
    ],
)
def test_layers_that_transformers_cannot_load_packed_are_exported_dense(name, tensor, tiny_models, tmp_path, refusal):
    folder, out = seal(with_qat(tmp_path / "m", tiny_models[name].native)), tmp_path / "hf"
    hint = "use dense after --qat.weights, or none"
    line = refusal("convert_to_hf", folder, out, "--quantize", "int4")
    assert f"--quantize int4: transformers has no quantized layer for {tensor}; {hint}" in line
    assert main(["convert_to_hf", str(folder), str(out), "--quantize", "dense", "--verify", "true"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert relative_error(load_model(folder)(token_ids()), theirs(token_ids()).logits) < 1e-5
    assert relative_error(tiny_models[name].logits, theirs(token_ids()).logits) > 1e-3


@pytest.fixture
def trained(tiny_models, tmp_path):
    return seal(with_qat(tmp_path / "m", tiny_models["llama-grouped-tied"].native, group_size=32))


def test_what_is_exported_is_said(trained, tiny_models, tmp_path, capsys):
    """In a line and in the model card."""
    untrained, notes = tiny_models["llama-grouped-tied"].native, []
    cases = [(trained, None), (trained, "int8"), (trained, "dense"), (trained, "none"), (untrained, "int4")]
    for i, (folder, kind) in enumerate(cases):
        export_hf(folder, tmp_path / str(i), quantize=kind)
        (line,) = capsys.readouterr().err.splitlines()
        quantization = line.removeprefix("note: ")
        assert f"| Quantization | {quantization} |" in (tmp_path / str(i) / "README.md").read_text()
        config = read_json_object(tmp_path / str(i) / "config.json").get("quantization_config")
        notes.append((quantization, config and config["config_groups"]["group_0"]["weights"]["num_bits"]))
    assert notes == [
        ("int4 weights in groups of 32, as they were trained", 4),
        ("int8 weights in groups of 32, without training: weights are rounded to nearest", 8),
        ("int4 weights in groups of 32, as they were trained", None),
        ("weights before quantization, of a model trained to compute with int4", None),
        ("int4 weights in groups of 32, without training: weights are rounded to nearest", 4),
    ]
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("3", "2"))
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(before[name], load_weights(trained)["transformer.h.0.mlp.proj.weight"])
    assert not torch.equal(before[name], after[name])


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("trained", ["--dtype", "bfloat16"], "--dtype bfloat16: would round the scales, which were trained in float32"),
        (
            "llama",
            ["--quantize", "dense"],
            "--quantize dense: the model was not trained with --qat.weights; use int4, int8 or none",
        ),
        (
            "qwen2-moe",
            ["--quantize", "int4"],
            "has 40 input features, which groups of 32 weights do not divide; remove it, or train with another",
        ),
    ],
)
def test_wrong_exports_are_refused(name, words, message, trained, tiny_models, tmp_path, refusal):
    folder = trained if name == "trained" else tiny_models[name].native
    assert message in refusal("convert_to_hf", folder, tmp_path / "hf", *words)
    assert not (tmp_path / "hf").exists()


def flip_nibble(name, tensor):
    return tensor ^ 1 if name.endswith("layers.1.mlp.up_proj.weight_packed") else tensor


def double_scale(name, tensor):
    return tensor * 2 if name.endswith("layers.1.mlp.up_proj.weight_scale") else tensor


@pytest.mark.parametrize("damage", [flip_nibble, double_scale])
def test_a_wrong_integer_or_scale_is_found(damage, trained, tmp_path, monkeypatch, capsys):
    pack = Packing.pack
    monkeypatch.setattr(Packing, "pack", lambda self, tensors: ((n, damage(n, t)) for n, t in pack(self, tensors)))
    assert main(["convert_to_hf", str(trained), str(tmp_path / "hf"), "--verify", "true"]) == 3
    line = capsys.readouterr().err.splitlines()[-1]
    assert "transformers loads other weights" in line and line.endswith("model.layers.1.mlp.up_proj.weight")
    assert not (tmp_path / "hf").exists()


def test_other_logits_of_the_same_weights_are_found(trained, tmp_path, monkeypatch, capsys):
    load = packing.load_with_transformers

    def load_with_another_norm(*args):
        model = load(*args)
        model.model.norm.variance_epsilon *= 2
        return model

    monkeypatch.setattr(packing, "load_with_transformers", load_with_another_norm)
    assert main(["convert_to_hf", str(trained), str(tmp_path / "hf"), "--verify", "true"]) == 3
    assert "transformers computes other logits with the quantized weights: " in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [32, 33, 37, 6])
def test_integers_are_packed_as_by_compressed_tensors(bits, width):
    values = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, width), dtype=torch.int8)
    assert torch.equal(pack_integers(values, 2 ** (bits - 1) - 1), pack_to_int32(values, bits))


def test_a_mixed_run_has_the_same_integers_in_both_dtypes(tiny_models, tmp_path):
    """Its fp32 weights are rounded to the dtype of its matrix products first, and its scales have that dtype."""
    folder = with_qat(tmp_path / "m", tiny_models["qwen2"].native, dtype="bfloat16")
    files = {}
    for dtype in (torch.float32, torch.bfloat16):
        out = tmp_path / str(dtype)
        export_hf(folder, out, dtype, check=lambda exported: assert_verified(folder, exported))
        files[dtype] = load_file(out / "model.safetensors")
    single, half = files.values()
    for name, tensor in single.items():
        is_kept = name.endswith(("weight_packed", "weight_scale", "weight_shape"))
        assert torch.equal(tensor, half[name].to(tensor.dtype)) == is_kept or half[name].ndim == 1, name


@pytest.mark.parametrize("kind", ["int4", "int8", "int8-int4"])
def test_a_folder_has_the_format_that_compressed_tensors_infers(kind, tiny_models):
    """vLLM knows rounded inputs in this format only."""
    config = Packing(read_model_config(tiny_models["qwen2"].native), kind, torch.bfloat16).config
    group = config["config_groups"]["group_0"]
    inferred = compressed_tensors.infer_module_format(torch.nn.Linear, quantization.QuantizationScheme(**group))
    assert config["format"] == group["format"] == inferred.value


def test_several_files_and_sums(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "MAX_SHARD_BYTES", 20_000)
    export_hf(trained, tmp_path / "hf", check=lambda exported: assert_verified(trained, exported))
    files = read_json_object(tmp_path / "hf" / "model.safetensors.index.json")["weight_map"]
    assert len(set(files.values())) > 3 and any(name.endswith("weight_packed") for name in files)
    assert set(files.values()) < set((tmp_path / "hf" / "SHA256SUMS").read_text().split())


@torch.no_grad()
def test_a_classification_head_is_not_quantized(tmp_path, base):
    labels = {"head": "classification", "labels": ["a", "b"], "problem_type": "single_label_classification"}
    qat = {"weights": "int4", "group_size": 32, "dtype": "float32"}
    config = replace(read_model_config(base), **labels, tie_embeddings=False, qat=qat)
    model = build_model(config)
    randomize(model, seed=0)
    files = {"state_dict": model.state_dict(), "config": config, "hyperparameters": None, "tokenizer": None}
    write_checkpoint(tmp_path / "m", lambda tmp: write_model_files(tmp, **files))
    export_hf(tmp_path / "m", tmp_path / "hf", check=lambda exported: assert_verified(tmp_path / "m", exported))
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    expected = load_model(tmp_path / "m")(token_ids())[:, -1]
    assert relative_error(torch.cat([theirs(row[None]).logits for row in token_ids()]), expected) < 1e-5


@torch.no_grad()
def test_rounded_inputs_are_exported_and_only_weights_verified(tiny_models, tmp_path, capsys):
    """transformers rounds x / scale, torchao x * (1 / scale): a value that lies between two integers may differ."""
    folder = with_qat(tmp_path / "m", tiny_models["llama-grouped-tied"].native, "int8-int4", 32)
    export_hf(folder, tmp_path / "hf", check=lambda exported: assert_verified(folder, exported))
    notes = capsys.readouterr().err
    assert "note: rounded inputs change transformers' logits by " in notes
    assert "note: int4 weights in groups of 32 and inputs rounded to int8 per token, as they were trained\n" in notes
    export_hf(folder, tmp_path / "dense", quantize="dense")
    note = "note: int4 weights in groups of 32, as they were trained; inputs are not rounded\n"
    assert capsys.readouterr().err == note
    inputs = read_json_object(tmp_path / "hf" / "config.json")["quantization_config"]["config_groups"]["group_0"]
    assert inputs["input_activations"]["strategy"] == "token"
    ours, theirs = load_model(folder).eval()(token_ids()), decompressed(tmp_path / "hf")(token_ids()).logits
    exact = load_model(with_qat(tmp_path / "exact", folder, "int4", 32)).eval()(token_ids())
    error, rounding = relative_error(ours, theirs), relative_error(exact, theirs)
    print("ROUNDED", error, rounding, (ours - theirs).abs().median() / theirs.abs().max())
    assert error < rounding / 2


def test_a_packed_folder_is_imported_after_transformers_made_it_dense(trained, tmp_path, refusal):
    export_hf(trained, tmp_path / "hf")
    line = refusal("convert_from_hf", tmp_path / "hf", tmp_path / "again")
    assert "weights quantized by 'compressed-tensors' are not supported" in line and "CompressedTensorsConfig" in line
    assert refusal("evaluate", tmp_path / "hf").partition(": ")[2] == line.partition(": ")[2]
    dense = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", quantization_config=dense)
    model.save_pretrained(tmp_path / "dense")
    assert main(["convert_from_hf", str(tmp_path / "dense"), str(tmp_path / "again")]) == 0
    imported, ours = load_model(tmp_path / "again").state_dict(), load_model(trained).state_dict()
    assert all(torch.equal(imported[name], tensor) for name, tensor in ours.items())
