"""Every family end to end: import from Hugging Face, one step of full and LoRA finetuning, export, learning to stop."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.cases import slow_except
from helpers.chatml import CHATML
from helpers.tiny_configs import HF_CONFIGS
from helpers.tiny_models import relative_error
from tokenizers import Tokenizer as Core
from torch.nn import functional as F

from toolkit.checkpoints.folder import load_model
from toolkit.cli import main
from toolkit.data.tokenizer import train_bpe
from toolkit.inference.chat import Conversation, find_template
from toolkit.inference.load import load_checkpoint
from toolkit.inference.sampling import GREEDY
from toolkit.models.families import FAMILIES

transformers = pytest.importorskip("transformers")

# one configuration per family, by default the first
NAMED = {"mistral": "mistral-window", "smollm3": "smollm3-windows", "phi3": "phi3-window", "falcon": "falcon-groups",
         "stablelm": "stablelm-12b", "phi": "phi-norms"}  # fmt: skip
OF_TYPE = NAMED | {
    kind: name for name, make in reversed(HF_CONFIGS.items()) if (kind := make().model_type) not in NAMED
}
FAST = ("gemma3_text", "qwen3_moe")  # the others with the slow tests; test_parity.py has all
CLOSE = 2e-5  # fp32, relative to the largest logit
PARTS = ("query", "key", "value", "projection", "head")
EXPERTS = {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite",
           "olmoe", "ernie4_5_moe", "granitemoe", "qwen3_next", "qwen3_5_moe_text"}  # fmt: skip
LINEAR = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
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


@pytest.fixture(scope="module")
def hf_dir(family, tiny_models, tokenizer, tmp_path_factory) -> Path:
    """A random transformers model with a tokenizer, saved by transformers."""
    folder = tmp_path_factory.mktemp(family) / "hf"
    shutil.copytree(tiny_models[OF_TYPE[family]].hf, folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def base(hf_dir) -> Path:
    """Its checkpoint."""
    folder = hf_dir.with_name("base")
    assert main(["convert_from_hf", str(hf_dir), str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def hf_base_logits(hf_dir) -> torch.Tensor:
    return hf_logits(hf_dir)


def ids() -> torch.Tensor:
    return torch.randint(0, 300, (2, 48), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def toolkit_logits(folder: Path) -> torch.Tensor:
    """Return the logits of a toolkit checkpoint."""
    return load_model(folder).eval()(ids())


@torch.no_grad()
def hf_logits(folder: Path, adapters: Path | None = None) -> torch.Tensor:
    """Return the logits of a Hugging Face folder with transformers, or with peft."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    if adapters is not None:
        model = pytest.importorskip("peft").PeftModel.from_pretrained(model, adapters)
    return model.eval()(input_ids=ids()).logits


def test_all_families_are_tested():
    assert OF_TYPE.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", slow_except(FAST, OF_TYPE), scope="module")
def test_full_finetuning_and_export(family, base, hf_base_logits, rows, tmp_path):
    final, out = tmp_path / "run" / "final", tmp_path / "out"
    assert main(["finetune_full", str(base), "--data.json_path", str(rows), "--out_dir", str(final.parent), *RUN]) == 0
    assert main(["convert_to_hf", str(final), str(out), "--verify", "true"]) == 0
    expected = hf_logits(out)
    assert relative_error(toolkit_logits(final), expected) < CLOSE
    assert relative_error(hf_base_logits, expected) > 1e-2  # trained


@pytest.mark.parametrize("family", slow_except(FAST, OF_TYPE), scope="module")
def test_lora_finetuning_merge_and_peft_export(family, hf_dir, base, hf_base_logits, rows, tmp_path, recwarn):
    final, merged, out = (tmp_path / name for name in ("run/final", "merged", "out"))
    parts = (*PARTS, *(("experts", "router") if family in EXPERTS else ()))
    if family not in {"mixtral", "gpt_oss", "olmoe", "qwen3_moe", "granitemoe"}:  # whose MLPs are all experts
        parts += ("mlp",)
    parts += ("linear_attention",) if family in LINEAR else ()
    adapted = [word for part in parts for word in (f"--lora_{part}", "true")]
    words = ["--data.json_path", str(rows), "--out_dir", str(final.parent), "--lora_r", "4", *adapted, *RUN]
    assert main(["finetune_lora", str(base), *words]) == 0
    adapted_logits = toolkit_logits(final)
    assert relative_error(hf_base_logits, adapted_logits) > 1e-2  # trained
    assert main(["merge_lora", str(final), "--out_dir", str(merged)]) == 0
    assert relative_error(toolkit_logits(merged), adapted_logits) < CLOSE
    assert main(["convert_to_hf", str(merged), str(out), "--verify", "true"]) == 0
    assert relative_error(hf_logits(out), adapted_logits) < CLOSE
    assert main(["convert_to_peft", str(final), str(tmp_path / "peft")]) == 0
    assert relative_error(hf_logits(hf_dir, tmp_path / "peft"), adapted_logits) < CLOSE
    assert not [w for w in recwarn if "missing adapter keys" in str(w.message)]


@pytest.mark.parametrize("family", ["gemma2", "mistral", "olmo3", "gpt_oss", "cohere2"], scope="module")
def test_n9_documents_are_isolated_with_sliding_windows(family, base):
    """Documents of 30, 25 and 9 tokens, windows of 16: logits and gradients do not depend on earlier documents."""
    model, row = load_model(base).train(), ids()[:1].repeat(2, 1)
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
    # including the embedding: tokens of the first document get no gradient from the others
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


ANSWERS = {"one": "red", "two": "green and blue", "three": "yes"}
END = "<|im_end|>"  # eos is another token: a model that stops has learned the template's


@pytest.mark.parametrize("family", slow_except((), OF_TYPE), scope="module")
def test_end_of_turn_is_trained_and_generated(family, tiny_models, tokenizer, tmp_path):
    """Conversations learned by heart: greedy answers end with the end of the turn, here and in transformers."""
    base, rows, final, out = (tmp_path / name for name in ("base", "rows.jsonl", "run/final", "hf"))
    shutil.copytree(tiny_models[OF_TYPE[family]].native, base, ignore=shutil.ignore_patterns("COMPLETE"))
    core = Core.from_str(tokenizer.files["tokenizer.json"].decode())
    core.add_special_tokens(["<|im_start|>", END])
    files = {"tokenizer.json": core.to_str().encode(), "chat_template.jinja": CHATML.encode()}
    tokenizer.with_files(files).save(base)
    questions = {question: [{"role": "user", "content": question}] for question in ANSWERS}
    turns = [{"messages": [*asked, {"role": "assistant", "content": ANSWERS[q]}]} for q, asked in questions.items()]
    rows.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    size = ["--train.global_batch_size", "3", "--train.micro_batch_size", "3", "--train.max_steps", "60"]
    words = ["--data", "JSON", "--data.json_path", str(rows), "--data.val_split_fraction", "0", "--accelerator", "cpu"]
    rate = "2e-2" if family.startswith("granite") else "3e-3"  # granite divides logits by 8
    words += [*size, "--train.learning_rate", rate, "--eval.max_new_tokens", "0"]
    words += ["--train.save_interval", "0", "--out_dir", str(final.parent)]
    assert main(["finetune_full", str(base), *words]) == 0

    trained = load_checkpoint(str(final), base_checkpoint_dir=None, accelerator="cpu", precision=None)
    for question, expected in ANSWERS.items():
        chat = Conversation(
            trained.model, trained.tokenizer, find_template(trained.tokenizer),
            system=None, max_new_tokens=16, sampling=GREEDY, seed=0, notice=print,
        )  # fmt: skip
        assert "".join(chat.ask(question)) == expected and chat.new_tokens < 16

    assert main(["convert_to_hf", str(final), str(out)]) == 0
    model, reader = (
        transformers.AutoModelForCausalLM.from_pretrained(out),
        transformers.AutoTokenizer.from_pretrained(out),
    )
    for question, asked in questions.items():
        prompt = reader.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        tokens = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].size(1) :]
        assert reader.decode(tokens) == ANSWERS[question] + END
