"""HarnessLM against lm-eval's wrapper of transformers, on the same exported random model."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from helpers.corpus import WORDS

from toolkit.checkpoints.folder import write_model_files
from toolkit.checkpoints.hf.export_hf import export_hf
from toolkit.data.chat.template import ChatTemplate
from toolkit.data.tokenizer import train_bpe
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT

lm_eval = pytest.importorskip("lm_eval")
harness = pytest.importorskip("toolkit.inference.harness")

BEGIN = "<|endoftext|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
CONTEXT = 96


def bpe(corpus):
    """A tokenizer that adds bos, as Llama's does, with a chat template that also contains it."""
    texts = [file.read_text() for file in sorted(corpus.iterdir())]
    plain = train_bpe(texts, 320)  # as large as the embedding, so that every sampled id is a token
    core = json.loads(plain.files["tokenizer.json"])
    begin, text = {"SpecialToken": {"id": BEGIN, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    core["post_processor"] = {
        "type": "TemplateProcessing", "single": [begin, text], "pair": [begin, text, begin, text],
        "special_tokens": {BEGIN: {"id": BEGIN, "ids": [0], "tokens": [BEGIN]}},
    }  # fmt: skip
    files = {"tokenizer.json": json.dumps(core).encode(), "chat_template.jinja": TEMPLATE.encode()}
    return plain.with_files(files)


@pytest.fixture(scope="module")
def wrappers(corpus, tmp_path_factory):
    """HarnessLM and the reference wrapper."""
    from lm_eval.models.huggingface import HFLM

    folder, tokenizer = tmp_path_factory.mktemp("harness"), bpe(corpus)
    torch.manual_seed(0)
    config = ModelConfig(
        name="small",
        block_size=CONTEXT,
        vocab_size=tokenizer.vocab_size,
        n_layer=2,
        n_head=4,
        n_query_groups=2,
        n_embd=64,
    )
    model = GPT(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    (folder / "native").mkdir()
    state = model.state_dict()
    write_model_files(folder / "native", state_dict=state, config=config, hyperparameters=None, tokenizer=tokenizer)
    export_hf(folder / "native", folder / "reference")
    template = ChatTemplate.from_tokenizer(tokenizer, None)
    native = harness.HarnessLM(model, tokenizer, batch_size=3, template=template, notice=lambda line: None)
    return native, HFLM(pretrained=str(folder / "reference"), device="cpu", dtype="float32", batch_size=2)


def text(n: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=n))


def requests(*arguments):
    return [SimpleNamespace(args=a) for a in arguments]


CHOICES = [
    *((text(n, n), f" {word}") for n in (1, 5, 9) for word in ("model", "token", "x")),  # some share the input
    ("", "the model"),  # empty context
    ("ends in a space ", "learns"),
    (text(200, 1), text(3, 2)),  # longer than the context
    (f"{BEGIN}[user] a line{BEGIN}[assistant] ", "of text"),
]


def assert_same(found, expected):
    for (actual, actual_greedy), (reference, expected_greedy) in zip(found, expected, strict=True):
        assert actual == pytest.approx(reference, rel=1e-5, abs=1e-5) and actual_greedy == expected_greedy


def test_log_likelihoods_match_lm_eval(wrappers):
    native, reference = wrappers
    expected = reference.loglikelihood(requests(*CHOICES), disable_tqdm=True)
    assert_same(native.loglikelihood(requests(*CHOICES)), expected)
    greedy = native.generate_until(requests(("the token", {"until": [], "max_gen_toks": 4})))[0]
    pair = requests(("the token", greedy))
    assert native.loglikelihood(pair)[0][1] == reference.loglikelihood(pair, disable_tqdm=True)[0][1]


def test_log_likelihoods_in_chunks_match(wrappers, monkeypatch):
    """Chunking bounds the memory of the logits without changing results."""
    native, _ = wrappers
    expected = native.loglikelihood(requests(*CHOICES))
    monkeypatch.setattr(harness, "PREFILL", 7)
    assert_same(native.loglikelihood(requests(*CHOICES)), expected)


def test_equal_inputs_share_a_forward_pass(wrappers):
    native, _ = wrappers
    rows = []
    hook = native._model.register_forward_pre_hook(lambda module, args: rows.extend(args[0].tolist()))
    letters = requests(*(("which one", letter) for letter in "1234"), ("which one", " a longer answer"))
    native.loglikelihood(letters)
    hook.remove()
    assert len(rows) == 2


def test_rolling_log_likelihoods_match_lm_eval(wrappers):
    native, reference = wrappers
    texts = requests(*((text(n, n),) for n in (1, 3, 70, 150)))
    expected = reference.loglikelihood_rolling(texts, disable_tqdm=True)
    assert native.loglikelihood_rolling(texts) == pytest.approx(expected, rel=1e-5)


def test_continuations_match_lm_eval(wrappers):
    """Prompts of unequal length, some too long, with and without stop strings."""
    native, reference = wrappers
    settings = [{"until": [], "max_gen_toks": 20}, {"until": ["e", "zz"], "max_gen_toks": 30, "do_sample": False}]
    asked = requests(*((text(n, n), dict(s)) for s in settings for n in (2, 30, 7, 1, 60)))
    expected = reference.generate_until(asked, disable_tqdm=True)
    found = native.generate_until(asked)
    assert found == expected and len(set(found)) > 3
    assert all("e" not in answer for answer in found[5:])


def test_chat_format_matches_lm_eval(wrappers):
    native, reference = wrappers
    chat = [{"role": "user", "content": "a line"}, {"role": "assistant", "content": "of text"}]
    question = [*chat, {"role": "user", "content": "next"}]
    assert native.apply_chat_template(question) == reference.apply_chat_template(question)
    begun = [*question, {"role": "assistant", "content": "The answer is"}]
    assert native.apply_chat_template(begun, False) == reference.apply_chat_template(begun, False)
    system = [{"role": "system", "content": "be brief"}, *question]  # not supported by this template
    assert native.apply_chat_template(system) == reference.apply_chat_template(system)
    prompt = native.apply_chat_template(question)
    assert native.tok_encode(prompt) == reference.tok_encode(prompt) and native.tok_encode(prompt)[:2].count(0) == 1
    assert native.tok_encode("a line") == reference.tok_encode("a line") == [0, *native.tok_encode("a line", False)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 4}, "--tasks: requests generation settings that are not supported: num_beams"),
        ({"max_gen_toks": CONTEXT}, f"--tasks: a task requests {CONTEXT} new tokens, but the model's context"),
    ],
)
def test_unsupported_task_settings_are_rejected(wrappers, settings, message):
    with pytest.raises(UserError, match=message):
        wrappers[0].generate_until(requests(("a", settings)))


def test_task_settings_enable_sampling(wrappers):
    drawing = {"do_sample": True, "temperature": 3.0, "max_gen_toks": 20, "until": None}
    answers = wrappers[0].generate_until(requests(("the", drawing), ("the", drawing)))
    assert answers[0] != answers[1]


def test_empty_or_too_long_continuation_is_rejected(wrappers):
    for continuation in ("", text(200, 1)):
        with pytest.raises(UserError, match=r"--tasks: a continuation has \d+ tokens; must have 1 to 96"):
            wrappers[0]._loglikelihood_tokens([(None, [1], wrappers[0].tok_encode(continuation, False))])


def test_rope_of_short_text_does_not_depend_on_long_text(corpus):
    """Longrope with an original context of 24 tokens: results match each text alone."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0 + i for i in range(8)], "original_max_seq_len": 24}
    tokenizer = bpe(corpus)
    model = GPT(
        ModelConfig(
            block_size=CONTEXT, vocab_size=tokenizer.vocab_size, n_embd=64, n_head=4,
            rope_adjustments=factors | {"attention_factor": 1.1},
        )
    ).eval()  # fmt: skip
    torch.nn.init.normal_(model.transformer.h[0].attn.qkv.weight, std=0.5)
    native = harness.HarnessLM(model, tokenizer, batch_size=3, notice=lambda line: None)
    pairs = [(text(30, 1), " token"), (text(2, 2), " token"), (text(3, 3), " model")]
    alone = [native.loglikelihood(requests(pair))[0] for pair in pairs]
    assert_same(native.loglikelihood(requests(*pairs)), alone)
    asked = [(context, {"until": [], "max_gen_toks": 24}) for context, _ in pairs]
    alone = [native.generate_until(requests(one))[0] for one in asked]
    assert native.generate_until(requests(*asked)) == alone
