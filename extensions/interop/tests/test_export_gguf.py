"""Out to GGUF: transformers' reader, and llama.cpp in slow tests, compute the same logits and token ids."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.cases import check_each, has_slow_tests
from helpers.optional import importorskip_later
from helpers.peak_memory import rise
from helpers.saving import write_checkpoint
from helpers.tiny_models import relative_error, token_ids
from toolkit_interop.gguf import export_gguf as export_module
from toolkit_interop.gguf.export_gguf import export_gguf

from tests.checkpoints.test_adapters import LLAMA, make, tokens
from toolkit.checkpoints.folder import load_model, read_model_config, write_model_config, write_model_files
from toolkit.checkpoints.weights import save_weights
from toolkit.cli import main
from toolkit.data.tokenizer import Tokenizer, collect_characters, train_bpe
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT

gguf = importorskip_later("gguf")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

# Models whose metadata transformers reads completely; of the others, it gets the configuration of the original.
COMPLETE = ["llama", "llama-grouped-tied", "llama-one-group-wide-heads", "mistral", "qwen2", "qwen2-tied",
            "falcon-one-group"]  # fmt: skip
# transformers has no metadata for these: windows, RoPE scaling, biases, widths.
PARTIAL = ["llama-biases", "llama-attention-biases", "llama3-rope", "llama-linear-rope", "llama-yarn", "qwen2-windows",
           "qwen3", "qwen3-tied", "qwen2-moe", "qwen3-moe", "gemma2", "gemma3", "phi3", "phi3-window",
           "phi3-long", "gpt2", "gpt2-untied", "stablelm", "starcoder2"]  # fmt: skip
FAST = ["llama3-rope", "qwen3-moe", "gemma3", "phi3-long", "gpt2"]
# Only llama.cpp reads these.
LLAMA_CPP = ["gemma", "falcon-groups", "falcon-groups-one-norm", "falcon-no-groups", "stablelm-12b", "mistral-window"]
REFUSED = {
    "olmo2": "'olmo2' is not", "granite": "'granite' is not", "gpt-oss": "'gpt_oss' is not", "smollm3": "'smollm3' is",
    "qwen2-moe-normed-windows-without-biases": "norm_topk_prob True is not",
    "qwen3-moe-not-normed-wide-heads-dense-first": "norm_topk_prob False", "qwen2-moe-dense-between": "moe_indices [0",
    "gemma2-without-caps": "attention_scores_scalar 256.0", "stablelm-parallel": "tie_embeddings True",
    "starcoder2-without-biases": "bias False", "glm4": "'glm4' is not", "cohere2": "'cohere2' is not",
    "seed-oss": "'seed_oss' is not", "olmoe": "'olmoe' is not", "ministral": "'ministral' is not",
    "hunyuan": "'hunyuan_v1_dense' is not", "exaone4": "'exaone4' is not", "ernie4.5": "'ernie4_5' is not",
    "apertus": "'apertus' is not", "granitemoe": "'granitemoe' is not", "gemma4": "'gemma4_text' is not",
}  # fmt: skip
QUANTIZED = ["Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "MXFP4"]
TEXTS = [
    "hello world", "The year 2024 wasn't 1999", "a 12345 b20242024", "$$ 100,000 == 3.14!!", "Größe naïve 日本語",
    "emoji 🙂 ok", "line\n\n  def f(x):\n    return", "two  spaces   three",
]  # fmt: skip
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SMALL = train_bpe(["the quick brown fox " * 20], 300)
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(name: str) -> Tokenizer:
    pre, regex = tokenizers.pre_tokenizers, {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}
    steps = {"smollm": [pre.Digits(individual_digits=True)], "falcon": [pre.Punctuation("contiguous")]}.get(name, [])
    if name in regex:
        steps = [pre.Split(tokenizers.Regex(WORDS + regex[name] + REST), "isolated")]
    steps.append(pre.ByteLevel(add_prefix_space=False, use_regex=name not in regex))
    if name == "falcon":
        steps += [pre.Digits(individual_digits=False), pre.Split(tokenizers.Regex("[0-9][0-9][0-9]"), "isolated")]
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer, core.decoder = pre.Sequence(steps), tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=322, special_tokens=special, initial_alphabet=pre.ByteLevel.alphabet()
    )
    core.train_from_iterator(TEXTS * 20, trainer)
    core.add_tokens([tokenizers.AddedToken("<think>", normalized=False, special=False)])
    return with_settings(core, eos_token="<|im_end|>", pad_token="<|endoftext|>", add_bos_token=False)


def sentencepiece(name: str) -> Tokenizer:
    core = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = tokenizers.normalizers
    prepend = [steps.Prepend("\u2581")] if name == "prepend" else []
    core.normalizer = steps.Sequence([*prepend, steps.Replace(" ", "\u2581")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=326, special_tokens=special)
    # few letters, so that the order of the merges counts
    core.train_from_iterator(
        ["bananab anab nana ban banan", "abana nab naban anaba bnanb", "hello world"] * 20, trainer
    )
    values = json.loads(core.to_str())
    values["added_tokens"] = values["added_tokens"][:3]
    if name == "first":
        scheme = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
        values |= {"normalizer": None, "pre_tokenizer": scheme}
    core = tokenizers.Tokenizer.from_str(json.dumps(values))
    return with_settings(core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True)


def with_settings(core, **settings) -> Tokenizer:
    files = {
        "tokenizer.json": core.to_str(),
        "tokenizer_config.json": json.dumps(settings),
        "chat_template.jinja": TEMPLATE,
    }
    return Tokenizer({name: text.encode() for name, text in files.items()}, "test")


def checkpoint(tiny_models, name: str, folder: Path, tokenizer: Tokenizer | None = None) -> Path:
    """Copy a tiny model and its tokenizer. Gemma 2 scales scores by head_dim, as the published models do."""
    shutil.copytree(
        tiny_models[name].native, folder, ignore=shutil.ignore_patterns("generation_config.json", "COMPLETE")
    )
    (tokenizer or SMALL).save(folder)
    if name == "gemma2":
        write_model_config(
            dataclasses.replace(read_model_config(folder), attention_scores_scalar=24.0), folder / "model_config.yaml"
        )
    return folder


@torch.no_grad()
def logits(model, ids=None) -> torch.Tensor:
    result = model.eval()(token_ids() if ids is None else ids)
    return getattr(result, "logits", result)


def read(file: Path, config=None):
    options = {"gguf_file": file.name, "dtype": torch.float32, "output_loading_info": True}
    options |= {} if config is None else {"config": config}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **options)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model


def test_transformers_computes_the_same_logits(tmp_path, tiny_models, request):
    def check(name):
        folder = checkpoint(tiny_models, name, tmp_path / name / "m")
        export_gguf(folder, tmp_path / name / "x.gguf", "F32")
        config = None
        if name in PARTIAL:
            config = transformers.AutoConfig.from_pretrained(tiny_models[name].hf)
            if name == "gemma2":
                config.query_pre_attn_scalar = 24
        model = read(tmp_path / name / "x.gguf", config)
        assert relative_error(logits(model), logits(load_model(folder))) < 1e-5

    check_each(check, [*COMPLETE, *PARTIAL] if has_slow_tests(request) else FAST)


def test_models_that_llama_cpp_computes_differently_are_refused(tmp_path, tiny_models, request):
    def check(name):
        folder = checkpoint(tiny_models, name, tmp_path / name)
        with pytest.raises(UserError) as caught:
            export_gguf(folder, tmp_path / "x.gguf")
        message = str(caught.value)
        assert message.startswith(f"checkpoint_dir {folder}: the model type ") and REFUSED[name] in message
        assert message.endswith("run toolkit convert_to_hf, then llama.cpp's convert_hf_to_gguf.py")
        assert [path.name for path in tmp_path.iterdir()] == [name]
        shutil.rmtree(folder)

    check_each(check, REFUSED if has_slow_tests(request) else list(REFUSED)[::3])


def read_tensors(file: Path) -> dict:
    """Return the type and the dequantized values of each tensor."""
    tensors = gguf.GGUFReader(file).tensors
    return {t.name: (t.tensor_type.name, gguf.dequantize(t.data, t.tensor_type)) for t in tensors}


@pytest.mark.parametrize("dtype", ["F16", "BF16", *QUANTIZED])
def test_matrices_are_rounded_once_and_norms_are_not(tmp_path, tiny_models, dtype):
    for name in ("qwen3-moe", "llama-grouped-tied"):
        folder, file = checkpoint(tiny_models, name, tmp_path / name / "m"), tmp_path / name / "x.gguf"
        export_gguf(folder, file, dtype)
        export_gguf(folder, tmp_path / name / "exact.gguf", "F32")
        exact = read_tensors(tmp_path / name / "exact.gguf")
        for tensor, (kind, values) in read_tensors(file).items():
            is_float32, is_embedding = "norm" in tensor or "gate_inp" in tensor, tensor[:6] in ("token_", "output")
            assert kind == ("F32" if is_float32 else "Q8_0" if is_embedding and dtype in QUANTIZED else dtype)
            qtype = gguf.GGMLQuantizationType[kind]
            assert (values == gguf.dequantize(gguf.quantize(exact[tensor][1], qtype), qtype)).all(), tensor
    # errors of single weights add up in the logits of random weights
    bound = {"F16": 0.005, "BF16": 0.03, "Q8_0": 0.1}.get(dtype, 0.8)
    assert 1e-4 < relative_error(logits(read(file)), logits(load_model(folder))) < bound
    file_type = gguf.LlamaFileType(gguf.GGUFReader(file).fields["general.file_type"].contents())
    assert file_type.name == ("MOSTLY_MXFP4_MOE" if dtype == "MXFP4" else f"MOSTLY_{dtype}")


def test_rows_that_are_no_multiple_of_32_are_f16_in_q8_0_and_else_refused(tmp_path, tiny_models):
    export_gguf(checkpoint(tiny_models, "llama-one-group-wide-heads", tmp_path / "m"), tmp_path / "x.gguf", "Q8_0")
    wide = ModelConfig(vocab_size=330, n_embd=72, n_head=6, intermediate_size=96)
    files = {"state_dict": GPT(wide).state_dict(), "config": wide, "hyperparameters": None, "tokenizer": SMALL}
    write_checkpoint(tmp_path / "n", lambda tmp: write_model_files(tmp, **files))
    export_gguf(tmp_path / "n", tmp_path / "y.gguf", "Q8_0")
    kinds = {name: kind for name, (kind, _) in read_tensors(tmp_path / "y.gguf").items()}
    assert kinds["blk.0.ffn_up.weight"] == "F16" and kinds["blk.0.ffn_down.weight"] == "Q8_0"
    message = "--dtype Q4_0: token_embd.weight has rows of 72, not a multiple of 32; use Q8_0"
    with pytest.raises(UserError, match=message):
        export_gguf(tmp_path / "n", tmp_path / "z.gguf", "Q4_0")
    assert not (tmp_path / "z.gguf").exists()


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2", "smollm", "first"])
def test_transformers_reads_the_same_tokenizer(tmp_path, tiny_models, name):
    """It has no regular expressions of some tokenizers, which the slow test of llama.cpp covers."""
    tokenizer = sentencepiece(name) if name == "first" else byte_level(name)
    end = "</s>" if name == "first" else "<|im_end|>"
    warnings = export_gguf(checkpoint(tiny_models, "llama", tmp_path / "m", tokenizer), tmp_path / "x.gguf")
    assert ["space to text after a special token" in line for line in warnings] == [True] * (name == "first")
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf")
    texts = [text for text in TEXTS if name != "smollm" or not any(map(str.isdigit, text))]
    for text in [*texts, "bananab nabanana abanan", f"x{end}y", "x<|im_start|>y", "<think>hm</think>"]:
        assert reader(text).input_ids == tokenizer.encode(text), text
    assert (reader.chat_template, reader.eos_token) == (TEMPLATE, end)
    assert (tmp_path / "Modelfile").read_text() == f'FROM ./x.gguf\nPARAMETER stop "{end}"\n'
    fields = {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / "x.gguf").fields.items()}
    model = tiny_models["llama"]
    rows = read_model_config(model.native).padded_vocab_size
    assert len(fields["tokenizer.ggml.tokens"]) == rows and fields["tokenizer.ggml.add_bos_token"] == (name == "first")
    if name != "first":
        assert fields["tokenizer.ggml.pre"] == name and fields["tokenizer.ggml.tokens"][-1] == f"[PAD{rows - 1}]"


def test_tokenizers_that_llama_cpp_lacks_are_refused(tmp_path, tiny_models):
    lower = json.loads(byte_level("gpt-2").files["tokenizer.json"])
    lower["normalizer"] = {"type": "Lowercase"}
    digits = json.loads(byte_level("smollm").files["tokenizer.json"])
    digits["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = False
    cases = {
        "this normalizer is not": byte_level("gpt-2").with_files({"tokenizer.json": json.dumps(lower).encode()}),
        "this pre_tokenizer is not": byte_level("gpt-2").with_files({"tokenizer.json": json.dumps(digits).encode()}),
        "a BPE without merges model is not supported in GGUF": collect_characters(["abc"]),
        "exceed the model's 330 embeddings": train_bpe([" ".join(str(i) for i in range(3000))], 400),
    }
    for message, tokenizer in cases.items():
        folder = checkpoint(tiny_models, "llama", tmp_path / "m", tokenizer)
        with pytest.raises(UserError, match=message):
            export_gguf(folder, tmp_path / "x.gguf")
        assert [path.name for path in tmp_path.iterdir()] == ["m"]
        shutil.rmtree(folder)


def test_command(tmp_path, tiny_models, capsys, refusal, monkeypatch):
    folder = str(checkpoint(tiny_models, "mistral-window", tmp_path / "m"))
    command = ["convert_to_gguf", folder, str(tmp_path / "out" / "a.gguf")]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert shown.out == f"wrote {tmp_path / 'out' / 'a.gguf'}\n"
    assert "the context is limited to the window, 16 of 64 tokens" in shown.err
    before = (tmp_path / "out" / "a.gguf").read_bytes()
    (tmp_path / "out" / "a.gguf").unlink()  # as if killed before the file had its name
    assert main(command) == 0 and "is kept" not in capsys.readouterr().err
    assert "already exists; give a new file" in refusal(*command)
    assert "must be a file that ends in .gguf" in refusal(*command[:2], tmp_path / "out")
    assert main([*command[:2], str(tmp_path / "out" / "b.gguf"), "--dtype", "Q8_0"]) == 0
    assert "Modelfile already exists and is kept; wrote " in capsys.readouterr().err
    assert "FROM ./b.gguf\n" in (tmp_path / "out" / "b.Modelfile").read_text()
    assert "FROM ./a.gguf\n" in (tmp_path / "out" / "Modelfile").read_text()
    assert (tmp_path / "out" / "a.gguf").read_bytes() == before
    (tmp_path / "other" / "Modelfile").mkdir(parents=True)
    assert main([*command[:2], str(tmp_path / "other" / "a.gguf")]) == 0
    assert "FROM ./a.gguf\n" in (tmp_path / "other" / "a.Modelfile").read_text()
    monkeypatch.setattr(export_module, "_convert", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_gguf(tmp_path / "m", tmp_path / "out" / "c.gguf")
    names = ["Modelfile", "a.gguf", "b.Modelfile", "b.gguf"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "convert_to_gguf: needs gguf; run: pip install 'gguf>=0.18'" in refusal(*command[:2], tmp_path / "d.gguf")


def with_qat(folder: Path, weights: str, dtype: str = "float32") -> Path:
    """Make a model as if it had been trained with --qat.weights."""
    qat = {"weights": weights, "group_size": 32, "dtype": dtype}
    write_model_config(dataclasses.replace(read_model_config(folder), qat=qat), folder / "model_config.yaml")
    return folder


@pytest.mark.parametrize("trained_in", ["float32", "bfloat16"])
def test_weights_of_quantization_aware_training_are_those_of_inference(trained_in, tmp_path, tiny_models):
    folder = with_qat(checkpoint(tiny_models, "llama", tmp_path / "m"), "int8-int4", trained_in)
    plain = checkpoint(tiny_models, "llama", tmp_path / "plain")
    trained = "note: int4 weights in groups of 32, as they were trained; inputs are not rounded"
    rounded = {"F32": "", "F16": "; rounded to F16", "BF16": "; rounded to BF16"}
    before = {dtype: export(plain, tmp_path / f"{dtype}-before", dtype)[1] for dtype in rounded}
    save_weights(load_model(folder).state_dict(), plain / "lit_model.pth")
    for dtype, suffix in rounded.items():
        (note,), tensors = export(folder, tmp_path / dtype, dtype)
        expected = export(plain, tmp_path / f"{dtype}-quantized", dtype)[1]
        assert note == trained + suffix
        assert tensors.keys() == expected.keys()
        assert all((tensors[name] == expected[name]).all() for name in tensors)
        assert any((tensors[name] != before[dtype][name]).any() for name in tensors)


@pytest.mark.parametrize(
    ("dtype", "weights", "reason"),
    [
        ("Q4_0", "int4", "training with int4 (signed maximum / -8 instead of largest magnitude / 7.5); toolkit"),
        ("Q4_0", "int8", "training with int8; toolkit"),
        ("Q8_0", "int4", "training with int4; toolkit"),
    ],
)
def test_types_that_round_weights_otherwise_say_so(dtype, weights, reason, tmp_path, tiny_models):
    folder = checkpoint(tiny_models, "llama", tmp_path / "m")
    plain = export(folder, tmp_path / "plain", dtype)[1]
    (note,), tensors = export(with_qat(folder, weights), tmp_path / "quantized", dtype)
    assert note == f"note: {dtype} rounds the weights otherwise than {reason} convert_to_hf writes the trained numbers"
    assert all((tensors[name] == plain[name]).all() for name in plain)


def export(folder: Path, out: Path, dtype: str):
    notes = export_gguf(folder, out / "x.gguf", dtype)
    return notes, {name: values for name, (_, values) in read_tensors(out / "x.gguf").items()}


def test_merge_true_exports_merged_weights(tmp_path, capsys, refusal):
    _, folder, model = make(tmp_path, dataclasses.replace(LLAMA, vocab_size=300, padded_vocab_size=320))
    SMALL.save(folder)
    rows = read_model_config(folder).padded_vocab_size
    command = [
        "convert_to_gguf",
        str(folder),
        str(tmp_path / "x.gguf"),
        "--dtype",
        "F32",
        "--verify_checkpoint",
        "false",
    ]
    assert "holds adapters and no merged weights; --merge true merges" in refusal(*command)
    assert main([*command, "--merge", "true"]) == 0, capsys.readouterr().err
    merged = read(tmp_path / "x.gguf")
    assert merged.get_input_embeddings().num_embeddings == rows
    assert relative_error(logits(merged, tokens()), logits(model.float(), tokens())) < 1e-5


def test_overflow_in_f16_is_reported(tmp_path, tiny_models, capsys):
    folder = checkpoint(tiny_models, "llama", tmp_path / "m")
    weights = load_model(folder).state_dict()
    weights["transformer.h.0.mlp.proj.weight"][0, 0] = 1e6
    files = {"config": read_model_config(folder), "hyperparameters": None, "tokenizer": Tokenizer.load(folder)}
    write_checkpoint(tmp_path / "n", lambda tmp: write_model_files(tmp, state_dict=weights, **files))
    assert not export_gguf(tmp_path / "n", tmp_path / "x.gguf")
    warning = capsys.readouterr().err
    assert "NaN or Inf in 1 tensor(s)" in warning and "blk.0.ffn_down.weight" in warning


@pytest.mark.slow
def test_m2_memory_is_a_few_weights(tmp_path):
    config = ModelConfig(vocab_size=32000, n_layer=40, n_embd=512, n_head=8, intermediate_size=2048)
    files = {"state_dict": GPT(config).state_dict(), "config": config, "hyperparameters": None, "tokenizer": SMALL}
    write_checkpoint(tmp_path / "m", lambda tmp: write_model_files(tmp, **files))
    largest = 4 * 32000 * 512
    peak, _, _ = rise(export_gguf, tmp_path / "m", tmp_path / "x.gguf", "F16")
    assert (tmp_path / "x.gguf").stat().st_size > 5 * largest and peak < 2 * largest


# Prints the log-probabilities of the token after each prompt of a file, by token id. The server's threads outlive it.
LLAMA_CPP_SCRIPT = """
import json, os, sys
import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_gpu_layers, params.warmup = sys.argv[1], 64, 0, False
params.cpuparams.n_threads = 1
server = xllamacpp.Server(params)
for line in open(sys.argv[2], encoding="utf-8"):
    request = {"prompt": json.loads(line), "max_tokens": 1, "temperature": -1.0, "logprobs": 400, "cache_prompt": False}
    answer = server.handle_completions(request)
    content = (answer["choices"][0].get("logprobs") or {}).get("content") or [{"top_logprobs": []}]
    found = {entry["id"]: entry["logprob"] for entry in content[0]["top_logprobs"]}
    print("ANSWER", json.dumps([answer["usage"]["prompt_tokens"], found]), flush=True)
os._exit(0)
"""


def ask_llama_cpp(file: Path, prompts: list) -> list[tuple[int, dict[int, float]]]:
    """Return each prompt's number of tokens, and the next token's log-probabilities (none if it ends the answer)."""
    questions = file.with_suffix(".jsonl")
    questions.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
    command = [sys.executable, "-c", LLAMA_CPP_SCRIPT, file, questions]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    answers = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(answers) == len(prompts), done.stdout[-500:] + done.stderr[-500:]
    return [(n, {int(i): value for i, value in found.items()}) for n, found in answers]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["F32", *QUANTIZED])
def test_llama_cpp_computes_the_same_logits(tmp_path, tiny_models, dtype):
    """Of quantized files as transformers, which does not quantize the activations; llama.cpp does, to 8 bits."""
    pytest.importorskip("xllamacpp")
    names = [*COMPLETE, *PARTIAL, *LLAMA_CPP] if dtype == "F32" else ["llama-grouped-tied", "qwen3-moe"]

    def check(name):
        folder = checkpoint(tiny_models, name, tmp_path / name / "m")
        export_gguf(folder, tmp_path / name / "x.gguf", dtype)
        model = load_model(folder)
        if dtype != "F32":
            model = read(tmp_path / name / "x.gguf", transformers.AutoConfig.from_pretrained(tiny_models[name].hf))
        expected, ids = logits(model)[0].log_softmax(-1), token_ids()[0].tolist()
        window = "window" in name or name == "starcoder2"
        lengths = range(3, 16 if window else 48, 3 if window else 4)
        answers = ask_llama_cpp(tmp_path / name / "x.gguf", [ids[:n] for n in lengths])
        spread = (expected.max() - expected.min()).item()
        worst, compared = 0.0, 0
        for n, (_, found) in zip(lengths, answers, strict=True):
            compared += bool(found)
            worst = max([worst, *(abs(value - expected[n - 1, i].item()) for i, value in found.items())])
        assert compared >= 2 and worst < (0.01 if dtype == "F32" else 0.05) * spread, (worst, spread, compared)

    check_each(check, names)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2", "smollm", "falcon", "prepend", "replace"])
def test_llama_cpp_reads_the_same_tokenizer(tmp_path, tiny_models, name):
    pytest.importorskip("xllamacpp")
    tokenizer = sentencepiece(name) if name in ("prepend", "replace") else byte_level(name)
    export_gguf(checkpoint(tiny_models, "llama", tmp_path / "m", tokenizer), tmp_path / "x.gguf", "F32")
    texts = [*TEXTS, "bananab nabanana abanan", "x<|im_end|>y", "x</s>y", "<think>hm</think>"]
    prompts = [prompt for text in texts for prompt in (text, tokenizer.encode(text))]
    answers = ask_llama_cpp(tmp_path / "x.gguf", prompts)
    for text, (n, found), (n_ids, from_ids) in zip(texts, answers[::2], answers[1::2], strict=True):
        assert n == n_ids and found.keys() == from_ids.keys(), text
        assert all(math.isclose(found[i], from_ids[i], abs_tol=1e-2) for i in found), text
