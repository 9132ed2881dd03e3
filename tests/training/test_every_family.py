"""Every family all the way: from a Hugging Face folder through a step of finetuning and back, whole and by adapters."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests.models.test_parity import HF_CONFIGS, randomize, relative_error
from toolkit.checkpoints.folder import load_model
from toolkit.cli import main
from toolkit.data.tokenizer import train_bpe
from toolkit.models.families import FAMILIES

transformers = pytest.importorskip("transformers")

# one configuration of each, the first one where none is named
NAMED = {"mistral": "mistral-window", "smollm3": "smollm3-windows", "phi3": "phi3-window", "falcon": "falcon-groups",
         "stablelm": "stablelm-12b", "phi": "phi-norms"}  # fmt: skip
OF_TYPE = NAMED | {
    kind: name for name, make in reversed(HF_CONFIGS.items()) if (kind := make().model_type) not in NAMED
}
CLOSE = 2e-5  # fp32, relative to the largest logit
PARTS = ("query", "key", "value", "projection", "mlp", "head")
# adapters go beside attention and head only
EXPERTS = {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"}
RUN = ["--data", "JSON", "--data.prompt_style", "plain", "--accelerator", "cpu", "--train.global_batch_size", "2",
       "--train.micro_batch_size", "2", "--train.max_steps", "1", "--train.learning_rate", "1e-2",
       "--train.lr_warmup_steps", "0", "--eval.final_validation", "false", "--eval.max_new_tokens", "8"]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return train_bpe([file.read_text() for file in sorted(corpus.iterdir())], 300)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = [{"prompt": f"the token {i}", "completion": "reads a line " * (1 + i % 5)} for i in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def hf_dir(request, tmp_path, tokenizer) -> Path:
    """A random model of transformers' with a tokenizer, saved by transformers."""
    config = HF_CONFIGS[OF_TYPE[request.node.callspec.params["family"]]]()
    config.vocab_size = 320
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model, seed=0)
    model.save_pretrained(tmp_path / "hf")
    tokenizer.save(tmp_path / "hf")
    return tmp_path / "hf"


def ids() -> torch.Tensor:
    return torch.randint(0, 300, (2, 48), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def ours(folder: Path) -> torch.Tensor:
    """The logits of a checkpoint of ours."""
    return load_model(folder).eval()(ids())


@torch.no_grad()
def theirs(folder: Path, adapters: Path | None = None) -> torch.Tensor:
    """The logits of a Hugging Face folder in transformers, or in peft."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    if adapters is not None:
        model = pytest.importorskip("peft").PeftModel.from_pretrained(model, adapters)
    return model.eval()(input_ids=ids()).logits


def test_all_families_are_tested():
    assert OF_TYPE.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", OF_TYPE)
def test_a_step_of_full_finetuning_and_an_export(family, hf_dir, rows, tmp_path):
    base, final, out = tmp_path / "base", tmp_path / "run" / "final", tmp_path / "out"
    assert main(["convert_from_hf", str(hf_dir), str(base)]) == 0
    assert main(["finetune_full", str(base), "--data.json_path", str(rows), "--out_dir", str(final.parent), *RUN]) == 0
    assert main(["convert_to_hf", str(final), str(out), "--verify", "true"]) == 0
    expected = theirs(out)
    assert relative_error(ours(final), expected) < CLOSE
    assert relative_error(theirs(hf_dir), expected) > 1e-2  # trained


@pytest.mark.parametrize("family", OF_TYPE)
def test_a_step_of_all_adapters_merged_and_in_peft(family, hf_dir, rows, tmp_path, recwarn):
    base, final, merged, out = (tmp_path / name for name in ("base", "run/final", "merged", "out"))
    assert main(["convert_from_hf", str(hf_dir), str(base)]) == 0
    parts = [part for part in PARTS if part != "mlp" or family not in EXPERTS]
    adapted = [word for part in parts for word in (f"--lora_{part}", "true")]
    words = ["--data.json_path", str(rows), "--out_dir", str(final.parent), "--lora_r", "4", *adapted, *RUN]
    assert main(["finetune_lora", str(base), *words]) == 0
    beside = ours(final)
    assert relative_error(ours(base), beside) > 1e-2  # trained
    assert main(["merge_lora", str(final), "--out_dir", str(merged)]) == 0
    assert relative_error(ours(merged), beside) < CLOSE
    assert main(["convert_to_hf", str(merged), str(out), "--verify", "true"]) == 0
    assert relative_error(theirs(out), beside) < CLOSE
    assert main(["convert_to_peft", str(final), str(tmp_path / "peft")]) == 0
    assert relative_error(theirs(hf_dir, tmp_path / "peft"), beside) < CLOSE
    assert not [w for w in recwarn if "missing adapter keys" in str(w.message)]


@pytest.mark.parametrize("family", ["gemma2", "mistral", "olmo3", "gpt_oss"])
def test_n9_with_windows_one_document_never_changes_another(family, hf_dir, tmp_path):
    """Documents of 30, 25 and 9 tokens and windows of 16: each has its logits and gradients whatever goes before."""
    assert main(["convert_from_hf", str(hf_dir), str(tmp_path / "base")]) == 0
    model, row = load_model(tmp_path / "base").train(), ids()[:1].repeat(2, 1)
    assert {model.config.window(i) for i in range(model.config.n_layer)} >= {16}
    row = torch.cat([row, row[:, :16]], dim=1)
    row[1, :30] = (row[1, :30] + 7) % 300  # another first document
    lengths = (30, 25, 9)
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).expand_as(row)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand_as(row)
    logits = model(row, positions=positions, documents=documents)
    assert torch.equal(logits[0, 30:], logits[1, 30:]) and not torch.equal(logits[0, :30], logits[1, :30])
    start, alone = 0, []
    for n in lengths:
        alone.append(model(row[:1, start : start + n]))
        start += n
    assert relative_error(logits[:1].detach(), torch.cat(alone, dim=1).detach()) < CLOSE

    gradients = []
    for one in logits:
        F.cross_entropy(one[30:-1], row[0, 31:]).backward(retain_graph=True)
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    # the embedding among them: the tokens of the first document get none from the others
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
