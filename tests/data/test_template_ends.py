"""How published templates end turns and begin answers: tokens compared with transformers, and what has loss."""

import json
import re
from pathlib import Path

import pytest
from helpers.cases import check_each

from toolkit.data.chat.template import ChatTemplate, eos_tokens
from toolkit.data.tokenizer import Tokenizer, train_bpe
from toolkit.errors import UserError

TEMPLATES = Path(__file__).parent / "templates"
# The tokens of a template are those that it contains; eos, and the list of generation_config.json.
EOS = {
    "command_r7b": ("<|END_OF_TURN_TOKEN|>", ["<|END_OF_TURN_TOKEN|>"]),
    "glm4_5": ("<|endoftext|>", ["<|endoftext|>", "<|user|>", "<|observation|>"]),
    "gpt_oss": ("<|return|>", ["<|return|>", "<|endoftext|>", "<|call|>"]),
    "qwen3_5": ("<|im_end|>", ["<|im_end|>", "<|endoftext|>"]),
    "r1_distill": ("<｜end▁of▁sentence｜>", None),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def said(role, text, **more):
    return {"role": role, "content": text, **more}


def call(text="", arguments=None):
    function = {"name": "weather", "arguments": {"city": "Rome"} if arguments is None else arguments}
    return said("assistant", text, tool_calls=[{"type": "function", "function": function}])


TWO = [said("user", "q"), said("assistant", "a"), said("user", "r"), said("assistant", "b")]
CALL = [said("user", "q"), call(), said("tool", "rain"), said("assistant", "a"), *TWO[2:]]


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Return a function that writes a folder with a small tokenizer with the tokens of a template, and loads it."""
    from tokenizers import Tokenizer as Core

    def load(name, source=None, **files):
        source = (TEMPLATES / f"{name}.jinja").read_text() if source is None else source
        eos, listed = EOS[name]
        core = Core.from_str(train_bpe(["a b question answer"], 280).files["tokenizer.json"].decode())
        texts = re.findall(r"<[|｜][\w▁]+[|｜]>|\[gMASK\]|<sop>|</?think>", source)
        core.add_special_tokens(list(dict.fromkeys([*texts, eos, *(listed or [])])))
        folder = tmp_path_factory.mktemp(name)
        core.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "bos_token": "<|endoftext|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        if listed:
            ids = [core.token_to_id(token) for token in listed]
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        (folder / "chat_template.jinja").write_text(source)
        return ChatTemplate.from_tokenizer(Tokenizer.load(folder), None), folder

    return load


@pytest.fixture(scope="module")
def templates(load):
    """Return name -> (template, transformers' tokenizer)."""
    from transformers import AutoTokenizer

    loaded = {name: load(name) for name in EOS}
    return {name: (template, AutoTokenizer.from_pretrained(folder)) for name, (template, folder) in loaded.items()}


def trained(template, messages, tools=None):
    """Return the text of every run of tokens with loss."""
    encoded = template.encode(messages, "answers", tools)
    runs, before = [], False
    for id_, has_loss in zip(encoded.ids, encoded.loss_mask, strict=True):
        if has_loss:
            runs = [*runs[:-1], [*runs[-1], id_]] if before else [*runs, [id_]]
        before = has_loss
    return [template._tokenizer.decode(run, skip_special_tokens=False) for run in runs]


HEAD = "<|channel|>final<|message|>"
GLM_CALL = "\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
OSS_CALL = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
RESPONSE_END = "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
COMMAND_CALL = (
    '<|START_THINKING|><|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", '
    '"parameters": {"city": "Rome"}}\n]<|END_ACTION|><|END_OF_TURN_TOKEN|>'
)


@pytest.mark.parametrize(
    ("name", "messages", "tools", "expected"),
    [
        ("command_r7b", TWO, None, [f"<|START_RESPONSE|>{text}{RESPONSE_END}" for text in "ab"]),
        ("command_r7b", CALL, TOOLS, [COMMAND_CALL, *(f"<|START_RESPONSE|>{text}{RESPONSE_END}" for text in "ab")]),
        ("glm4_5", TWO, None, [f"\n<think></think>\n{text}<|user|>" for text in "ab"]),
        (
            "glm4_5",
            CALL,
            TOOLS,
            [f"{GLM_CALL}<|observation|>", *(f"\n<think></think>\n{text}<|user|>" for text in "ab")],
        ),
        ("glm4_5", CALL[:2], TOOLS, [f"{GLM_CALL}<|observation|>"]),
        # <|end|> also ends the thought before an answer, so a chat does not stop at it.
        ("gpt_oss", TWO, None, [f"{HEAD}a", f"{HEAD}b<|return|>"]),
        ("gpt_oss", CALL, TOOLS, [OSS_CALL, f"{HEAD}a", f"{HEAD}b<|return|>"]),
        ("gpt_oss", CALL[:2], TOOLS, [OSS_CALL]),
        ("gpt_oss", CALL[:4], TOOLS, [OSS_CALL, f"{HEAD}a<|return|>"]),
        (
            "gpt_oss",
            [said("user", "q"), said("assistant", "a", thinking="hm")],
            None,
            [f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{HEAD}a<|return|>"],
        ),
        ("r1_distill", TWO, None, ["a<｜end▁of▁sentence｜>", "b<｜end▁of▁sentence｜>"]),
        ("qwen3_5", TWO[:2], None, ["a<|im_end|>"]),
        ("qwen3_5", [said("user", "q"), said("assistant", "<think>\nhm\n</think>\n\na")], None,
         ["hm\n</think>\n\na<|im_end|>"]),
    ],
)  # fmt: skip
def test_answers_have_loss_through_the_token_that_ends_a_chat(templates, name, messages, tools, expected):
    template, hf = templates[name]
    assert trained(template, messages, tools) == expected
    ids = template.encode(messages, "answers", tools).ids
    rendered = hf.apply_chat_template(messages, tools)["input_ids"]
    added = ids[len(rendered) :]  # a last answer of GLM-4.5 ends as one before the next message
    assert ids[: len(rendered)] == rendered and len(added) == (name == "glm4_5")
    assert ids[-1] in template.stop_ids or (name == "qwen3_5" and ids[-2] in template.stop_ids)


def test_inference_stops_at_each_token_that_ends_a_trained_answer(templates):
    for name, (template, _) in templates.items():
        texts = {i: text for text, i in template._tokenizer.added_tokens.items()}
        stops = [texts[i] for i in template.stop_ids]
        eos, listed = EOS[name]
        assert stops == [*(listed or [eos]), *(["<|END_RESPONSE|>"] if name == "command_r7b" else [])]
        exported = template.export_tokenizer()
        assert json.loads(exported.files["generation_config.json"])["eos_token_id"] == template.stop_ids
        without = exported.with_files({"generation_config.json": b"{}"})
        expected = ChatTemplate.from_tokenizer(without, None).stop_ids
        assert eos_tokens(without) == (expected if len(expected) > 1 else expected[0])


def notes(template, messages):
    before = list(template.notes)
    template.encode(messages, "answers")
    return [note for note in template.notes if note not in before]


THOUGHT = said("assistant", "<think>\nhm\n</think>\n\na")


def test_prompts_unlike_the_training_text_are_noted(load):
    r1, qwen, oss = (load(name)[0] for name in ("r1_distill", "qwen3_5", "gpt_oss"))
    (note,) = notes(r1, TWO)
    assert "chat prompts end with '<｜Assistant｜><think>\\n', which" in note and "--data.chat_template" in note
    (note,) = notes(r1, [TWO[0], THOUGHT])
    assert "changes the last answer too, such as dropping its reasoning" in note and "--data.chat_template" in note
    assert notes(qwen, TWO[:2]) == []
    (note,) = notes(qwen, [TWO[0], THOUGHT])
    assert "chat prompts end with '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n', which" in note
    qwen3 = load("qwen3_5", (TEMPLATES / "qwen3.jinja").read_text())[0]
    assert notes(qwen3, TWO[:2]) == []
    (note,) = notes(qwen3, TWO)
    assert (
        "writes '<think>\\n\\n</think>\\n\\n' before some answers only, such as the last; see --data.train_on" in note
    )
    (note,) = notes(oss, TWO)
    assert "<|end|> follows some answers, but does not end a chat, so it is not trained on" in note


def test_a_call_without_a_known_end_names_generation_config(load):
    source = (TEMPLATES / "gpt_oss.jinja").read_text().replace("<|call|>", "<|go|>")
    with pytest.raises(UserError, match="tool calls of message 2 end with none of .*eos_token_id in generation_config"):
        load("gpt_oss", source)[0].encode(CALL, "answers", TOOLS)


QUOTES = """\
{%- for message in messages %}
{{- '<|turn|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{{ SEEN }}{% endif %}
{{- message.content + '<|end_turn|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}
"""


def make(load, monkeypatch, source, *listed):
    monkeypatch.setitem(EOS, "small", ("<|end_turn|>", ["<|end_turn|>", *listed] if listed else None))
    return load("small", source)


def test_a_tool_answer_in_the_turn_of_its_call_has_no_loss(load, monkeypatch):
    """It is refused if nothing says what ends a call, and else has the mask of the template's generation tags."""
    from transformers import AutoTokenizer

    source = (TEMPLATES / "diffusion_gemma.jinja").read_text()
    template, _ = make(load, monkeypatch, source)
    with pytest.raises(UserError, match="tool calls of message 2 end with none of .*eos_token_id in generation_config"):
        template.encode(CALL, "answers")
    template, folder = make(load, monkeypatch, source, "<|end_call|>")
    hf = AutoTokenizer.from_pretrained(folder)

    def check(messages):
        encoded = template.encode(messages, "answers")
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        expected = hf.apply_chat_template(messages, **options)
        assert encoded.ids == expected["input_ids"]
        assert encoded.loss_mask == [bool(mask) for mask in expected["assistant_masks"]]

    check_each(check, [TWO, CALL, CALL[:4], [said("system", "rain"), *TWO]])
    assert trained(template, CALL)[0] == '<|call|>weather{"city": "Rome"}<|end_call|>'


def test_a_template_that_repeats_text_in_an_answer_is_refused(load, monkeypatch):
    template, _ = make(load, monkeypatch, QUOTES.replace("SEEN", "'Re: ' + messages[loop.index0 - 1].content + ': '"))
    with pytest.raises(
        UserError, match=r"the text of message 1 \(user\) is in an answer, where it would be trained on"
    ):
        template.encode(TWO, "answers")
    reads = "'<think></think>' if '/no_think' in messages[loop.index0 - 1].content else ''"
    template, _ = make(load, monkeypatch, QUOTES.replace("SEEN", reads))
    rows = [said("user", "q /no_think"), said("assistant", "q /no_think a"), *TWO]
    answers = ["<think></think>q /no_think a<|end_turn|>", "a<|end_turn|>", "b<|end_turn|>"]
    assert trained(template, rows) == answers
