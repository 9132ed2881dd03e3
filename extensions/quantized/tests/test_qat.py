"""--qat.weights in training: adapters, memory, what is saved, resumed and refused."""

import json
import math
import shutil
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers.compare_runs import losses, require_same, rows_of
from helpers.initialize import add_lora, initialize
from helpers.small_runs import text_data, write_base, write_rows
from safetensors.torch import load_file
from toolkit_metric.tasks import open_hf_folder
from toolkit_quantized import layers
from toolkit_quantized.numbers import dequantize, quantize
from toolkit_quantized.packing import pack_integers
from torch import nn
from torch.func import functional_call
from torchao.quantization.qat import IntxFakeQuantizeConfig, IntxFakeQuantizer

import toolkit
from toolkit.checkpoints.folder import load_model, read_model_config, write_model_config
from toolkit.checkpoints.weights import load_weights, save_weights
from toolkit.cli import main
from toolkit.errors import UserError
from toolkit.io.safe_parse import read_yaml, write_yaml
from toolkit.models.block import Block
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT, build_model
from toolkit.models.lora import is_adapter, without_adapters
from toolkit.models.lora_config import LoRAConfig
from toolkit.models.lora_layers import AdaptedLayer
from toolkit.models.quantize import quantized_layers
from toolkit.training.model_spec import compile_blocks

INT4 = {"weights": "int4", "group_size": 16, "dtype": "float32"}
SIZES = {"vocab_size": 128, "block_size": 32, "n_layer": 2, "n_embd": 64, "n_head": 4, "n_query_groups": 2}
EXPERTS = {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 32}
LORA = LoRAConfig(r=4, key=True, projection=True, mlp=True, experts=True)
ONE = "transformer.h.0.attn.qkv.weight"
IDS = torch.arange(48).view(2, 24) * 7 % 128


def build(qat: dict | None = INT4, lora: LoRAConfig | None = None, **sizes) -> GPT:
    """Return an initialized model, with biases and adapters that are not zero."""
    model = build_model(ModelConfig(**SIZES | sizes, qat=qat))
    initialize(model, seed=1)
    if lora is not None:
        add_lora(model, lora)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if is_adapter(name) or name.endswith(".bias"):
            parameter.data.normal_(0, 0.05, generator=generator)
    return model


def fake_quantized(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight with torchao's int4 values; autograd knows its gradient."""
    quantizer = IntxFakeQuantizer(IntxFakeQuantizeConfig(torch.int4, group_size=16, is_symmetric=True))
    return quantizer(weight.flatten(0, -2)).view_as(weight)


def merged(layer: nn.Module, adapters_on: bool = True) -> torch.Tensor:
    """Return W + scaling B A, with the rows of each adapter."""
    weight = layer.weight
    if not isinstance(layer, AdaptedLayer) or not adapters_on:
        return weight
    rows = list(weight.split(1, dim=-2))
    for adapter in layer.adapters:
        product = layer.scaling * adapter.B @ adapter.A
        for i, row in zip(adapter.rows, product.split(1, dim=-2), strict=True):
            rows[i] = rows[i] + row
    return torch.cat(rows, dim=-2)


@pytest.mark.parametrize("sizes", [{"bias": True}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_model_computes_as_a_plain_one_of_torchaos_weights(lora, sizes):
    """Loss, and gradients of everything that is trained; fused query, key and value with two adapters."""
    model, plain = build(lora=lora, **sizes), build(None, **sizes)
    quantized = [name for name, layer in model.named_modules() if hasattr(layer, "weight_fake_quantizer")]
    assert len(quantized) == 2 * 5

    def expected(adapters_on: bool = True) -> torch.Tensor:
        weights = {n: p for n, p in model.named_parameters() if not is_adapter(n)}
        weights |= {f"{n}.weight": fake_quantized(merged(model.get_submodule(n), adapters_on)) for n in quantized}
        return functional_call(plain, weights, (IDS, IDS))[0]

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert (lora is not None) == all(is_adapter(name) for name in trained)
    reference = expected()
    gradients = torch.autograd.grad(reference, list(trained.values()))
    loss = model(IDS, IDS)[0]
    loss.backward()
    assert loss.item() == pytest.approx(reference.item(), rel=1e-6)
    for (name, parameter), gradient in zip(trained.items(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6 * gradient.abs().max(), msg=name)
    if lora is not None:
        with torch.no_grad(), without_adapters(model):
            assert model(IDS, IDS)[0].item() == pytest.approx(expected(adapters_on=False).item(), rel=1e-6)
            assert abs(model(IDS, IDS)[0] - loss) > 1e-3


@pytest.mark.parametrize("kind", ["int4", "int8-int4"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_layer_saves_its_input_and_its_parameters(lora, kind):
    """No copy of the weight, in bf16 autocast as well."""
    model = build(INT4 | {"weights": kind, "dtype": "bfloat16"}, lora, **EXPERTS)
    x, ends = torch.randn(24, 64, requires_grad=True), torch.tensor([8, 9, 20, 24], dtype=torch.int32)
    block = model.transformer.h[0]
    for layer, arguments in ((block.attn.proj, ()), (block.mlp.experts.fc_1, (ends,))):
        saved: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor, saved=saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu"):
            layer(x, *arguments)
        own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
        nbytes = sum(tensor.nbytes for address, tensor in saved.items() if address not in own)
        assert nbytes == x.numel() * 2 + sum(argument.nbytes for argument in arguments), (layer, lora)


BASIC = [
    "--accelerator", "cpu", "--train.global_batch_size", "4", "--train.micro_batch_size", "2", "--train.max_seq_length",
    "24", "--train.max_steps", "4", "--train.save_interval", "2", "--train.learning_rate", "1e-2", "--train.keep_last",
    "0", "--eval.max_new_tokens", "0", "--eval.max_iters", "2", "--eval.interval", "4",
]  # fmt: skip
QUANTIZED = ["--qat.weights", "int4", "--qat.group_size", "16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, corpus) -> Path:
    """A base model of one block in fp32, and rows."""
    folder = tmp_path_factory.mktemp("qat")
    (folder / "base").mkdir()
    (folder / "corpus").symlink_to(corpus)
    base = write_base(folder / "base", corpus, n_layer=1)
    halves = {name: weight.bfloat16() for name, weight in load_weights(base).items()}
    save_weights(halves, shutil.copytree(base, folder / "base-bf16") / "lit_model.pth")
    write_rows(folder)
    return folder


def words(folder: Path, command: str, *own: str) -> list[str]:
    """Return a command line; ``command`` may have a model folder, ``own`` options replace the basic ones."""
    command, model = f"{command} base".split()[:2]
    rows = ["--data", "JSON", "--data.json_path", str(folder / "rows.jsonl"), "--data.prompt_style", "plain"]
    data = ["pico-llama", *text_data(folder / "corpus")] if command == "pretrain" else [str(folder / model), *rows]
    pairs = dict(zip(BASIC[::2], BASIC[1::2], strict=True)) | dict(zip(own[::2], own[1::2], strict=True))
    return [command, *data, *chain(*pairs.items())]


def train(folder: Path, out: str, command: str, *own: str) -> Path:
    assert main(words(folder, command, *own, "--out_dir", str(folder / out))) == 0
    return folder / out


def train_and_record(folder: Path, out: str, command: str, *own: str) -> tuple[Path, list[tuple]]:
    """Also return the integers and scales of the last forward pass by layer, which is the final validation's."""
    computed: list[tuple] = []

    def quantize_and_keep(weight, quantizer):
        computed.append(quantize(weight, quantizer))
        return computed[-1]

    with mock.patch.object(layers, "quantize", quantize_and_keep):
        run = train(folder, out, command, *own)
    n_layers = 5 * read_model_config(run / "final").n_layer
    return run, [(values, scale) for values, scale, _ in computed[-n_layers:]]


@pytest.fixture(scope="module")
def recorded(folder) -> tuple[Path, list[tuple]]:
    return train_and_record(folder, "mixed", "pretrain", "--precision", "bf16-mixed", *QUANTIZED)


@pytest.fixture(scope="module")
def mixed(recorded) -> Path:
    return recorded[0]


def assert_computed(model: GPT, computed: list[tuple]) -> None:
    """Compare a loaded model's weights with integers and scales of training bit for bit."""
    for (name, layer), (values, scale) in zip(quantized_layers(model), computed, strict=True):
        assert torch.equal(layer.weight, dequantize(values, scale)), name


def test_integers_of_training_are_those_of_inference_and_of_the_export(recorded, tmp_path):
    """Trained in bf16-mixed, saved in fp32."""
    mixed, computed = recorded
    model = load_model(mixed / "final")
    assert model.config.qat is None and load_weights(mixed / "final")[ONE].dtype == torch.float32
    assert_computed(model, computed)
    assert main(["convert_to_hf", str(mixed / "final"), str(tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    for i, (values, scale) in enumerate(computed):
        layer, (attention, mlp) = i // 5, ("self_attn", "mlp")
        parts = {0: [f"{attention}.{p}_proj" for p in "qkv"], 1: [f"{attention}.o_proj"]}
        parts |= {2 + j: [f"{mlp}.{part}_proj"] for j, part in enumerate(("gate", "up", "down"))}
        names = [f"model.layers.{layer}.{part}" for part in parts[i % 5]]
        packed, scales = (torch.cat([exported[f"{n}.weight_{kind}"] for n in names]) for kind in ("packed", "scale"))
        assert torch.equal(packed, pack_integers(values, 7)) and torch.equal(scales.float(), scale), names


def test_without_it_a_checkpoint_has_no_trace_of_it(folder):
    """Other files have times, or this option."""
    plain, none = train(folder, "plain", "pretrain"), train(folder, "none", "pretrain", "--qat.weights", "none")
    files = sorted(path.relative_to(plain) for path in (plain / "final").iterdir() if path.is_file())
    different = {"hyperparameters.yaml", "COMPLETE", "state.pth"}
    for file in files:
        if file.name not in different:
            assert (plain / file).read_bytes() == (none / file).read_bytes(), file
    config = (plain / "final" / "model_config.yaml").read_text()
    assert "qat" not in config and Path("final/lit_model.pth") in files


@pytest.mark.parametrize(
    ("base", "precision"),
    [("base", "bf16-true"), ("base-bf16", "32-true"), pytest.param("base", "32-true", marks=pytest.mark.slow)],
)
def test_merged_adapters_load_as_unmerged_ones_and_as_trained_bit_for_bit(folder, base, precision):
    """Whatever the dtypes of the base's file and of the run."""
    adapted = ["--lora_mlp", "true", "--lora_projection", "true", "--lora_key", "true", "--precision", precision]
    run, computed = train_and_record(folder, f"lora-{base}-{precision}", f"finetune_lora {base}", *adapted, *QUANTIZED)
    unmerged = load_model(run / "final")
    if precision == "32-true":
        assert_computed(unmerged, computed)
    assert main(["merge_lora", str(run / "final")]) == 0
    assert read_model_config(run / "final").qat["dtype"] == ("float32" if precision == "32-true" else "bfloat16")
    assert not torch.equal(load_weights(run / "final")[ONE].float(), load_weights(folder / base)[ONE].float())
    merged_weights = load_model(run / "final").state_dict()
    assert merged_weights.keys() == unmerged.state_dict().keys()
    for name, weight in merged_weights.items():
        assert torch.equal(weight, unmerged.state_dict()[name]), name


def test_s2_a_killed_run_continues_bit_for_bit_with_the_same_numbers_only(folder, mixed, refusal):
    resumed = shutil.copytree(mixed, folder / "resumed")
    shutil.rmtree(resumed / "final")
    command = words(folder, "pretrain", "--precision", "bf16-mixed", "--resume", "auto", "--out_dir", str(resumed))
    trained = f"{resumed}/step-00000002 was trained with"
    others = {
        f"--qat.weights int8: {trained} --qat.weights int4; ": ["--qat.weights", "int8", "--qat.group_size", "16"],
        f"--qat.group_size 32: {trained} --qat.group_size 16; ": ["--qat.weights", "int4"],
        f"--qat.weights: {trained} --qat.weights int4; ": ["--qat.weights", "none"],
        f"--qat.weights: {trained} --qat.weights int4;": [],
    }
    for message, options in others.items():
        line = refusal(*command, *options)
        assert message in line, line
    assert main([*command, *QUANTIZED]) == 0
    require_same(resumed, mixed)


def test_a_run_from_a_quantized_checkpoint_continues_to_quantize(folder, mixed):
    """--qat.weights none stops it; the first validation is that of the weights before. Another format changes it."""
    options = ["--train.max_steps", "1", "--eval.initial_validation", "true"]
    plain = shutil.copytree(mixed / "final", folder / "unquantized")
    (plain / "COMPLETE").unlink()
    config = read_model_config(plain)
    write_model_config(replace(config, qat=None), plain / "model_config.yaml")
    starts = {"continued": ["mixed/final"], "stopped": ["mixed/final", "--qat.weights", "none"], "plain": [plain.name]}
    starts["int8"] = ["mixed/final", "--qat.weights", "int8"]
    trained = {"continued": config.qat | {"dtype": "float32"}, "int8": INT4 | {"weights": "int8"}}
    first = {}
    for name, (start, *own) in starts.items():
        run = train(folder, f"from-{name}", f"finetune_full {start}", *options, *own)
        first[name] = float(rows_of(run)[0]["val_loss"])
        assert read_model_config(run / "final").qat == trained.get(name)  # with the group size of the checkpoint
    assert first["stopped"] == first["plain"] != first["continued"]


MISTAKES = {
    "--quantize bnb.nf4": ["finetune_lora", "--quantize", "bnb.nf4"],
    "--lora_dora true": ["finetune_lora", "--lora_dora", "true"],
    "--lora_dropout 0.1": ["finetune_lora", "--lora_dropout", "0.1"],
    "--train.fp8 tensorwise": ["pretrain", "--train.fp8", "tensorwise", "--precision", "bf16-mixed"],
    "--tensor_parallel_size 2": ["pretrain", "--tensor_parallel_size", "2", "--devices", "2"],
}


def test_mistakes_are_one_line_before_data_is_read(folder, tmp_path, refusal, capsys, monkeypatch):
    for text, (command, *options) in MISTAKES.items():
        line = refusal(*words(folder, command, *options, *QUANTIZED, "--data.cache_dir", str(tmp_path / "cache")))
        assert line.endswith(f"--qat.weights int4: is not supported with {text}; remove one of them\n"), line
    cache = ["--data.cache_dir", str(tmp_path / "cache")]
    line = refusal(*words(folder, "pretrain", *cache, "--qat.weights", "int8", "--qat.group_size", "24"))
    assert (
        "--qat.group_size 24: transformer.h.0.attn.qkv has 64 input features, which these groups do not divide; use 32"
        in line
    )
    line = refusal(*words(folder, "pretrain", *cache, "--qat.group_size", "16"))
    assert line == "toolkit pretrain: --qat.group_size 16: needs --qat.weights; add it\n"
    monkeypatch.setitem(sys.modules, "torchao", None)
    for name in [name for name in sys.modules if name.startswith("toolkit_quantized.")]:
        monkeypatch.delitem(sys.modules, name)
    line = refusal(*words(folder, "pretrain", *cache, *QUANTIZED))
    assert line == "toolkit pretrain: --qat.weights: needs torchao; run: pip install 'torchao>=0.18'\n"
    assert not (tmp_path / "cache").exists() and not Path("out").exists()


def test_a_module_from_python_is_refused(pico, tmp_path):
    rows = [torch.arange(9) % 100 for _ in range(8)]
    for module in (pico, nn.Embedding(100, 100)):
        with pytest.raises(UserError, match="qat.weights int4: is not supported with a model from Python; remove one"):
            toolkit.train(module, rows, qat={"weights": "int4"}, train={"max_steps": 1}, out_dir=str(tmp_path / "out"))


def test_weights_are_not_quantized_twice(folder, mixed, refusal):
    line = refusal("evaluate", mixed / "final", "--quantize", "bnb.nf4", "--trust_checkpoint_data", "true")
    assert "--quantize bnb.nf4: linear layers compute with int4 weights in groups of 16, as they were trained" in line
    with pytest.raises(UserError, match="quantize bnb.nf4: the model was trained with --qat.weights"):
        with open_hf_folder(mixed / "final", tasks="t", base_checkpoint_dir=None, quantize="bnb.nf4"):
            pass
    line = refusal(*words(folder, "finetune_lora mixed/final", "--quantize", "bnb.nf4"))
    assert line.endswith("bnb.nf4; remove it, or set --qat.weights none: the checkpoint has this format\n"), line


@pytest.mark.parametrize(
    "qat",
    [5, [], {"weights": "int4"}, INT4 | {"dtype": "load"}, INT4 | {"weights": "int3"}, INT4 | {"weights": None},
     INT4 | {"group_size": 0}, INT4 | {"group_size": "16"}, INT4 | {"group_size": None}],
)  # fmt: skip
def test_an_edited_format_is_refused(qat, mixed, tmp_path):
    shutil.copytree(mixed / "final", tmp_path / "m")
    values = read_yaml(tmp_path / "m" / "model_config.yaml") | {"qat": qat}
    write_yaml(tmp_path / "m" / "model_config.yaml", values)
    with pytest.raises(UserError, match="qat"):
        load_model(tmp_path / "m")


SHORT = ["--train.max_steps", "2", "--precision", "bf16-mixed"]


@pytest.mark.slow
def test_objectives_compute_with_quantized_weights(folder, mixed, tmp_path):
    """The reference of DPO, a teacher and a model with a score layer; text is sampled during training."""
    rows = [{"prompt": f"number {i}", "chosen": "nice " * (1 + i % 3), "rejected": f"bad {i}"} for i in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = ["--data", "Preference", "--data.json_path", str(tmp_path / "pairs.jsonl"), "--data.prompt_style", "plain"]
    preference = ["finetune_lora", str(mixed / "final"), *pairs, *BASIC, *SHORT, "--train.max_seq_length", "64"]
    assert main([*preference, "--objective", "DPO", "--out_dir", str(folder / "dpo")]) == 0
    full = ["finetune_full", str(folder / "base"), *preference[2:], *QUANTIZED, "--precision", "32-true", "--objective"]
    assert main([*full, "DPO", "--out_dir", str(folder / "dpo-full")]) == 0
    for run in ("dpo", "dpo-full"):
        assert losses(folder / run)[0] == pytest.approx(math.log(2), rel=1e-6)  # the model is its reference
    rated = [{"prompt": row["prompt"], "completion": row["chosen"], "label": i % 2 == 0} for i, row in enumerate(rows)]
    (tmp_path / "rated.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rated))
    kto = [*full, "KTO", "--data.json_path", str(tmp_path / "rated.jsonl")]
    same = ["--objective.reference_dir", str(shutil.copytree(folder / "base", folder / "copy"))]
    for run, own in {"kto": [], "kto-named": same}.items():
        assert main([*kto, *own, "--out_dir", str(folder / run)]) == 0
        assert losses(folder / run)[0] == pytest.approx(0.5, rel=1e-6)
    teacher = train(folder, "teacher", "pretrain", *QUANTIZED, "--train.max_steps", "1") / "final"
    distill = ["--objective", "Distillation", "--objective.teacher_dir", str(teacher), "--eval.max_new_tokens"]
    divergences = [
        float(
            rows_of(train(folder, f"distill-{kind}", "finetune_full teacher/final", *distill, "2", *own))[0][
                "divergence"
            ]
        )
        for kind, own in (("int4", QUANTIZED), ("none", ["--qat.weights", "none"]))
    ]
    assert divergences[0] < divergences[1]  # not zero: the student's padded vocabulary counts
    texts = [{"text": f"{'good' if i % 2 else 'bad'} {i}", "label": i % 2} for i in range(20)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    data = ["--data", "Classification", "--data.path", str(tmp_path / "texts.jsonl"), "--head", "classification"]
    classify = ["finetune_lora", str(mixed / "final"), *data, *BASIC, *SHORT]
    assert main([*classify, "--out_dir", str(folder / "head")]) == 0
    assert read_model_config(folder / "head" / "final").qat["weights"] == "int4"
    assert main(["classify", str(folder / "head" / "final"), "--texts", str(tmp_path / "texts.jsonl")]) == 0


def test_only_quantized_models_compile_with_exact_rounding():
    with mock.patch.object(nn.Module, "compile"):
        for qat in (INT4, None):
            compile_blocks(build(qat), (Block,), longest_ragged=0)
            inductor = torch._inductor.config
            assert inductor.emulate_precision_casts == (qat is not None) == inductor.eager_numerics.division_rounding


@pytest.mark.slow
def test_a_compiled_run_validates_as_an_uncompiled_one(folder):
    """By Inductor, in bf16: without exact rounding the losses differ by 1e-4."""
    mixed = [*QUANTIZED, "--precision", "bf16-mixed", "--eval.max_iters", "20"]
    compiled = train(folder, "compiled", "pretrain", *mixed, "--train.max_steps", "20", "--compiler", "torch")
    start = ["--initial_checkpoint_dir", str(compiled / "final"), "--eval.initial_validation", "true"]
    command, _, *options = words(folder, "pretrain", *mixed, *start, "--train.max_steps", "1")
    assert main([command, *options, "--out_dir", str(folder / "uncompiled")]) == 0
    first, last = rows_of(folder / "uncompiled")[0], rows_of(compiled)[-1]
    assert float(first["val_loss"]) == pytest.approx(float(last["val_loss"]), abs=1e-5)


def test_validation_computes_with_the_quantized_average(folder):
    run, computed = train_and_record(folder, "average", "pretrain", "--train.ema", "0.5", *QUANTIZED)
    assert_computed(load_model(run / "final"), computed)


def test_what_is_said_and_written_by_commands_after_training(folder, mixed, capsys):
    final, out = str(mixed / "final"), folder / "after"
    note = "note: linear layers compute with int4 weights in groups of 16, as they were trained"
    assert main(["generate", final, "--prompt", "a", "--max_new_tokens", "4", "--temperature", "0"]) == 0
    shown = capsys.readouterr()
    assert note in shown.err
    (text,) = toolkit.generate(final, "a", max_new_tokens=4, temperature=0)
    assert text.strip() in shown.out
    capsys.readouterr()
    assert main(["average", str(out / "mean"), "--checkpoint_dirs", f"{final},{mixed / 'step-00000002'}"]) == 0
    assert read_model_config(out / "mean").qat == read_model_config(mixed / "final").qat
    assert main(["convert_to_litgpt", final, str(out / "litgpt")]) == 0
    assert capsys.readouterr().err == "note: int4 weights in groups of 16, as they were trained\n"
    assert "qat" not in (out / "litgpt" / "model_config.yaml").read_text()
    plain, quantized = load_model(out / "litgpt").state_dict(), load_model(mixed / "final").state_dict()
    for name, weight in quantized.items():
        assert torch.equal(plain[name], weight), name


@pytest.mark.slow
def test_a_loaded_model_trains_on_without_quantization(folder, mixed, tmp_path):
    model = toolkit.load(mixed / "final")
    rows = [torch.arange(9) + i for i in range(8)]
    result = toolkit.train(model, rows, train={"max_steps": 1, "global_batch_size": 2}, out_dir=str(tmp_path / "out"))
    assert read_model_config(result.checkpoint).qat is None
