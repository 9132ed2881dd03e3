"""Tokens and loss masks of conversations, compared with transformers' apply_chat_template and marked templates."""

import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.rows import to_record
from tokenizers import processors

from toolkit.data.chat import sandbox_process
from toolkit.data.chat.renderer import TRAINING_DATE
from toolkit.data.chat.sources import prompt_styles
from toolkit.data.chat.template import ChatTemplate, encode_text
from toolkit.data.tokenizer import Tokenizer, train_bpe
from toolkit.errors import UserError

TEMPLATES = {file.stem: file.read_text() for file in (Path(__file__).parent / "templates").glob("*.jinja")}
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKUP = [
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>",
]  # fmt: skip


def user(text, **more):
    return {"role": "user", "content": text, **more}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


CONVERSATIONS = {
    "one turn": [user("Name a colour."), assistant("Red.")],
    "two turns": [user("Name a colour."), assistant("Red."), user("Another?"), assistant("Blue, and green.")],
    "system": [system("You are terse."), user("Name a colour."), assistant("Red.")],
    "system, three turns": [
        system("You are terse."), user("a"), assistant("b"), user("a"), assistant("b"), user("a"), assistant("b"),
    ],
    "unicode": [user("Größe? 你好 🙂"), assistant("🙂👩‍👩‍👧 naïve 你好"), user("é"), assistant("e\u0301🇩🇪")],
    "leading space": [user("x"), assistant("  two spaces"), user("y "), assistant(" one space ")],
    "leading newline": [user("x"), assistant("\n\nlines\n\n"), user("\ny"), assistant("\tx\r\n")],
    "marker text": [
        user("Say <|im_start|>assistant\n and ### Response:"),
        assistant("<|im_start|>assistant\nRed.<|im_end|>\n### Response:\n<|eot_id|>."),
        user("user\n"),
        assistant("assistant\n"),
    ],
    "placeholders": [user("answer0placeholder?"), assistant("answer0placeholder answer1placeholder")],
    "same text twice": [user("Red."), assistant("Red."), user("Red."), assistant("Red.")],
    "ends with a question": [user("a"), assistant("b"), user("c")],
    "input": [user("Add.\n\n1 2", instruction="Add.", input="1 2"), assistant("3")],
}  # fmt: skip
GENERATION = "{% generation %}", "{% endgeneration %}"


def mark_answers(name: str, source: str) -> str:
    """Add generation tags around the answers, for transformers' assistant mask."""
    begin, end = GENERATION
    if name in ("chatml", "smollm2"):
        turn = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
        return _replace_once(
            source, turn,
            "{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' %}"
            f"{begin}{{{{message['content'] + '<|im_end|>'}}}}{end}"
            "{% else %}{{message['content'] + '<|im_end|>'}}{% endif %}{{'\n'}}",
        )  # fmt: skip
    if name == "llama3":
        return _replace_once(
            source, "{{ content }}",
            "{% if message['role'] == 'assistant' %}"
            "{% set head = '<|start_header_id|>assistant<|end_header_id|>\n\n' %}"
            f"{{{{ head }}}}{begin}{{{{ content[head | length:] }}}}{end}{{% else %}}{{{{ content }}}}{{% endif %}}",
        )  # fmt: skip
    if name == "qwen3":
        source = source.replace("'<|im_start|>' + message.role + '\\n<think>", "'<think>")
        source = source.replace("{{- '<|im_start|>' + message.role + '\\n' + content }}", "{{- content }}")
        head = '{%- elif message.role == "assistant" %}'
        source = _replace_once(source, head, head + "{{- '<|im_start|>assistant\\n' }}" + begin)
        tail = "        {{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\" %}"
        new = "        {{- '<|im_end|>' }}" + end + "{{- '\\n' }}\n    {%- elif message.role == \"tool\" %}"
        return _replace_once(source, tail, new)
    answer = "{{- message['content'] + eos_token }}"
    return _replace_once(source, answer, "{%- generation %}" + answer + "{%- endgeneration %}")


def _replace_once(source, old, new):
    assert source.count(old) == 1
    return source.replace(old, new)


@pytest.fixture(scope="module")
def make(corpus, tmp_path_factory):
    """Return a function that creates folders with a small tokenizer with the markup of many templates."""
    from tokenizers import Tokenizer as Core

    texts = [p.read_text() for p in sorted(corpus.iterdir())] + ["user\nassistant\nsystem\n\n### Response:\n"] * 9
    trained = train_bpe(texts, 400)

    def make(template=None, markup=MARKUP, files=None, change=None, **settings):
        folder = tmp_path_factory.mktemp("tokenizer")
        trained.save(folder)
        for name in ("special_tokens_map.json", "generation_config.json"):
            (folder / name).unlink()
        core = Core.from_file(str(folder / "tokenizer.json"))
        core.add_special_tokens(markup)
        if change:
            change(core)
        core.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", **settings}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        for name, content in ({"chat_template.jinja": template} if template is not None else files or {}).items():
            (folder / name).write_text(content)
        return folder

    return make


def with_bos(token="<|begin_of_text|>"):
    def change(core):
        single, special = f"{token} $A", [(token, core.token_to_id(token))]
        core.post_processor = processors.TemplateProcessing(single, f"{single} $B", special)

    return {"bos_token": token, "change": change}


@pytest.fixture(scope="module")
def templates(make):
    """Return name -> (ChatTemplate, transformers' tokenizer, source) of published templates and the alpaca style."""
    from transformers import AutoTokenizer

    found = {}
    for name, settings in {
        "llama3": {"bos_token": "<|begin_of_text|>"},
        "qwen3": {"eos_token": "<|im_end|>"},
        "smollm2": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        "chatml": {},
        "alpaca": with_bos(),
    }.items():
        folder = make({**TEMPLATES, "chatml": CHATML}.get(name), **settings)
        template = ChatTemplate.from_tokenizer(Tokenizer.load(folder), "alpaca" if name == "alpaca" else None)
        found[name] = template, AutoTokenizer.from_pretrained(folder), template.source
    return found


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", ["llama3", "qwen3", "smollm2", "chatml", "alpaca"])
def test_tokens_and_labels_equal_transformers(templates, name, conversation):
    template, hf, source = templates[name]
    messages = CONVERSATIONS[conversation]
    encoded = template.encode(messages, "answers")
    assert encoded.ids == hf.apply_chat_template(messages, chat_template=source)["input_ids"]
    expected = hf.apply_chat_template(
        messages, chat_template=mark_answers(name, source), return_dict=True, return_assistant_tokens_mask=True
    )
    assert encoded.ids == expected["input_ids"]
    assert encoded.loss_mask == [bool(m) for m in expected["assistant_masks"]]
    assert any(encoded.loss_mask)
    prompt = hf.apply_chat_template(messages[:-1], chat_template=source, add_generation_prompt=True)
    assert template.encode_prompt(messages[:-1]) == prompt["input_ids"]


def answers_of(messages):
    return [m["content"] for m in messages if m["role"] == "assistant"]


def parts(template, messages, train_on="answers"):
    """Return the text of every run of tokens with loss."""
    encoded = template.encode(messages, train_on)
    assert len(encoded.ids) == len(encoded.loss_mask)
    runs, before = [], False
    for id_, trained in zip(encoded.ids, encoded.loss_mask, strict=True):
        if trained:
            runs = [*runs[:-1], [*runs[-1], id_]] if before else [*runs, [id_]]
        before = trained
    return [template._tokenizer.decode(run, skip_special_tokens=False) for run in runs]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3", ["Red.<|eot_id|>", "Blue, and green.<|eot_id|>"]),
        ("qwen3", ["Red.<|im_end|>", "<think>\n\n</think>\n\nBlue, and green.<|im_end|>"]),
        ("smollm2", ["Red.<|im_end|>", "Blue, and green.<|im_end|>"]),
        ("chatml", ["Red.<|im_end|>", "Blue, and green.<|im_end|>"]),
        ("alpaca", ["Red.<|endoftext|>", "Blue, and green.<|endoftext|>"]),
    ],
)
def test_loss_mask_ends_with_the_end_of_turn_token(templates, name, expected):
    template = templates[name][0]
    messages = CONVERSATIONS["two turns"]
    assert parts(template, messages) == expected
    assert parts(template, messages, "last_answer") == expected[-1:]
    assert template.end_of_turn == expected[0].removeprefix("Red.")
    everything = template.encode(messages, "all")
    assert everything.ids == template.encode(messages, "answers").ids and all(everything.loss_mask)


def test_real_smollm2_ids_and_loss_mask():
    """Compare with the ids of transformers reading the GGUF file directly."""
    from helpers.smollm2 import smollm2_folder

    folder = smollm2_folder()
    template = ChatTemplate.from_tokenizer(Tokenizer.load(folder), None)
    assert template.source == TEMPLATES["smollm2"]
    messages = [user("Name 12 colours."), assistant(" Größe 🙂"), user("No"), assistant("\nBlue.")]
    encoded = template.encode(messages, "answers")
    system_ids = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712]
    system_ids += [8182, 2, 198]
    question, answer = [1, 4093, 198, 5820, 216, 33, 34, 14797, 30, 2, 198], [9171, 7466, 34878, 85, 47526, 2]
    header, second = [1, 520, 9531, 198], [1, 4093, 198, 5230, 2, 198]
    expected = [(system_ids + question + header, False), (answer, True), ([198], False)]
    expected += [(second + header, False), ([198, 23390, 30, 2], True), ([198], False)]
    assert encoded.ids == [i for ids, _ in expected for i in ids]
    assert encoded.loss_mask == [trained for ids, trained in expected for _ in ids]
    generation = json.loads(template.export_tokenizer().files["generation_config.json"])
    assert generation["eos_token_id"] == [2] and template.end_of_turn == "<|im_end|>"


# The published format of each style; <e> is eos, <b> is bos.
STYLES = {
    "alpaca": (
        "<b>Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nq\n\n### Response:\na<e>\n\n### Instruction:\nr\n\n### Response:\nb<e>"
    ),
    "chatml": (
        "<b><|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    ),
    "gemma": (
        "<b><start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\na<end_of_turn>\n"
        "<start_of_turn>user\nr<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n"
    ),
    "llama2": "<b>[INST] q [/INST] a <e><b>[INST] r [/INST] b <e>",
    "llama3": (
        "<b><|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        "a<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nr<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|>"
    ),
    "phi3": "<b><|user|>\nq<|end|>\n<|assistant|>\na<|end|>\n<|user|>\nr<|end|>\n<|assistant|>\nb<|end|>\n",
    "plain": "<b>qa<e>rb<e>",
    "vicuna": (
        "<b>A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. USER: q ASSISTANT: a<e>USER: r ASSISTANT: b<e>"
    ),
    "zephyr": "<b><|user|>\nq<e>\n<|assistant|>\na<e>\n<|user|>\nr<e>\n<|assistant|>\nb<e>\n",
}
STYLES["hermes"] = STYLES["chatml"]
TWO = [user("q"), assistant("a"), user("r"), assistant("b")]


def test_all_prompt_styles_are_listed():
    assert prompt_styles() == sorted(STYLES)


@pytest.mark.parametrize("style", STYLES)
def test_prompt_styles_render_their_published_format(make, style):
    tokenizer = Tokenizer.load(make(**with_bos()))
    template = ChatTemplate.from_tokenizer(tokenizer, style)
    expected = STYLES[style].replace("<b>", "<|begin_of_text|>").replace("<e>", "<|endoftext|>")
    assert template.render(TWO) == expected
    for i in (1, 3):  # inference prompts are prefixes of the training text
        assert expected.startswith(template.render(TWO[:i], add_generation_prompt=True))
    assert template.notes == []
    answers = parts(template, TWO)
    assert [a.strip() for a in answers] == [
        " ".join(filter(None, [text, template.end_of_turn])).replace(" ", "" if style != "llama2" else " ")
        for text in "ab"
    ]
    ids = template.encode(TWO, "answers").ids
    assert ids[0] == tokenizer.bos_id and ids.count(tokenizer.bos_id) == STYLES[style].count("<b>")


@pytest.mark.parametrize("style", STYLES)
def test_styles_start_with_bos_only_if_the_tokenizer_adds_it(make, style):
    without = ChatTemplate.from_tokenizer(Tokenizer.load(make()), style)
    not_added = ChatTemplate.from_tokenizer(
        Tokenizer.load(make(bos_token="<|begin_of_text|>", add_bos_token=False)), style
    )
    expected = STYLES[style].replace("<b>", "").replace("<e>", "<|endoftext|>")
    assert without.render(TWO) == not_added.render(TWO) == expected


def test_alpaca_with_input_and_system(make):
    template = ChatTemplate.from_tokenizer(Tokenizer.load(make()), "alpaca")
    assert template.render(CONVERSATIONS["input"]) == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n"
        "### Response:\n3<|endoftext|>"
    )
    text = template.render(CONVERSATIONS["system"])
    assert text.startswith("You are terse.\n\n### Instruction:\nName a colour.\n\n### Response:\nRed.")


def test_llama2_with_system_and_vicuna_with_system(make):
    tokenizer = Tokenizer.load(make())
    text = ChatTemplate.from_tokenizer(tokenizer, "llama2").render(CONVERSATIONS["system"])
    assert text == "[INST] <<SYS>>\nYou are terse.\n<</SYS>>\n\nName a colour. [/INST] Red. <|endoftext|>"
    text = ChatTemplate.from_tokenizer(tokenizer, "vicuna").render(CONVERSATIONS["system"])
    assert text == "You are terse. USER: Name a colour. ASSISTANT: Red.<|endoftext|>"


def test_style_tokens_missing_from_the_vocabulary_fall_back_to_eos_with_a_note(make):
    tokenizer = Tokenizer.load(make(markup=[]))
    template = ChatTemplate.from_tokenizer(tokenizer, "chatml")
    assert template.end_of_turn == "<|endoftext|>"
    assert parts(template, TWO) == ["a<|endoftext|>", "b<|endoftext|>"]
    assert len(template.notes) == 2
    assert "<|im_end|> is not in the vocabulary" in template.notes[0] and "<|im_start|>" in template.notes[1]
    assert template.export_tokenizer().vocab_size == tokenizer.vocab_size


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # eos only between the turns: the last answer gets one, too
        ("{% for m in messages %}{{ m.role + ':' + m.content }}{% if m.role == 'assistant' and not loop.last %}"
         "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
         ["a<|endoftext|>", "b<|endoftext|>"]),
        # no end-of-turn token
        ("{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
         "{% if add_generation_prompt %}assistant:{% endif %}", ["a<|endoftext|>", "b<|endoftext|>"]),
        # a newline and two special tokens after the answer, the second is eos: both end it
        ("{% for m in messages %}{{ '<|im_start|>' + m.content + '\n<|im_end|><|endoftext|>' }}{% endfor %}"
         "{% if add_generation_prompt %}<|im_start|>{% endif %}",
         ["a\n<|im_end|><|endoftext|>", "b\n<|im_end|><|endoftext|>"]),
        # add_generation_prompt has no effect: the header is part of the answer
        ("{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}",
         ["assistant:a<|endoftext|>", "assistant:b<|endoftext|>"]),
        # the generation prompt is not a prefix of the complete text
        ("{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
         "{% if add_generation_prompt %}assistant:<think>{% endif %}", ["a<|endoftext|>", "b<|endoftext|>"]),
        # the system message is in the last question
        ("{% for m in messages %}{{ ('SYSTEM ' if loop.index0 == messages | length - 2) ~ m.role + ':' + m.content + "
         "eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
         ["a<|endoftext|>", "b<|endoftext|>"]),
        # generation tags
        ("{% for m in messages %}{{ m.role + ':' }}{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
         "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}", ["a<|endoftext|>", "b<|endoftext|>"]),
    ],
)  # fmt: skip
def test_unusual_templates_have_correct_loss_masks(make, source, expected):
    assert parts(ChatTemplate.from_tokenizer(Tokenizer.load(make(source)), None), TWO) == expected


def test_template_without_end_of_turn_gets_eos_and_is_exported(make, tmp_path):
    from transformers import AutoTokenizer

    source = "{% for m in messages %}\n{{ m.role + ':' + m.content | trim }}\n{% endfor %}"
    template = ChatTemplate.from_tokenizer(Tokenizer.load(make("\n" + source)), None)
    assert "no end-of-turn token" in template.notes[0]
    assert template.render(TWO) == "\nuser:q\nassistant:a<|endoftext|>\nuser:r\nassistant:b<|endoftext|>\n"
    template.export_tokenizer().save(tmp_path)
    hf = AutoTokenizer.from_pretrained(tmp_path)
    assert hf.apply_chat_template(TWO)["input_ids"] == template.encode(TWO, "answers").ids


def test_template_with_eos_only_at_the_end_rejects_several_answers(make):
    source = "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}{{ eos_token }}"
    template = ChatTemplate.from_tokenizer(Tokenizer.load(make(source)), None)
    assert parts(template, TWO[:2]) == ["a<|endoftext|>"]
    with pytest.raises(UserError, match="message 2.* has no end-of-turn token"):
        template.encode(TWO, "answers")


def test_dropped_thinking_is_noted(templates):
    template = templates["qwen3"][0]
    messages = [user("q"), assistant("<think>\nhm\n</think>\n\na"), user("r"), assistant("<think>\nso\n</think>\n\nb")]
    assert parts(template, messages) == ["a<|im_end|>", "<think>\nso\n</think>\n\nb<|im_end|>"]
    assert len([n for n in template.notes if "modifies some answers" in n]) == 1


def test_trimmed_offsets_do_not_change_the_loss_mask(make):
    from tokenizers import processors

    def trim(core):
        core.post_processor = processors.ByteLevel(trim_offsets=True)

    trimmed, full = (ChatTemplate.from_tokenizer(Tokenizer.load(make(CHATML, change=c)), None) for c in (trim, None))
    for messages in CONVERSATIONS.values():
        assert trimmed.encode(messages, "answers") == full.encode(messages, "answers")
    spaces = [user("x"), assistant(" \n  a")]
    assert parts(trimmed, spaces) == [" \n  a<|im_end|>"]


def test_sentencepiece_like_tokenizer_equals_transformers(sentencepiece_dir):
    """The tokenizer adds a space before every text between special tokens; unknown characters become bytes."""
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.load(sentencepiece_dir)
    hf = AutoTokenizer.from_pretrained(sentencepiece_dir)
    for style in ("llama2", "alpaca", "plain"):
        template = ChatTemplate.from_tokenizer(tokenizer, style)
        for conversation in ("two turns", "unicode", "leading space", "leading newline"):
            messages = CONVERSATIONS[conversation]
            expected = hf.apply_chat_template(messages, chat_template=template.source)["input_ids"]
            encoded = template.encode(messages, "answers")
            assert encoded.ids == expected
            assert encoded.ids.count(tokenizer.bos_id) == (2 if style == "llama2" else 1)
            for part, text in zip(parts(template, messages), answers_of(messages), strict=True):
                assert part.replace("</s>", "").strip() == text.strip() and part.endswith("</s>")


def test_token_across_the_prompt_border_belongs_to_the_answer(make):
    template = ChatTemplate.from_tokenizer(Tokenizer.load(make()), "plain")
    (answer,) = parts(template, [user("the mo"), assistant("del reads")])
    assert answer == " model reads<|endoftext|>"


@pytest.fixture(scope="module")
def joins_newlines():
    """A tokenizer with one token for newlines at the end of a text, but two in front of a letter."""
    tokenizer = train_bpe(["question\n\n", "answer\n\n"] * 9, 300)
    assert [len(tokenizer.encode(text)) for text in ("\n\n", "\n\na")] == [1, 3]
    return tokenizer


@pytest.mark.parametrize("train_on", ["answers", "last_answer", "all"])
def test_inference_prompts_are_prefixes_of_the_training_tokens(joins_newlines, train_on):
    messages = [user("q"), assistant("It."), user("r"), assistant("No.\n\nYes"), user("s"), assistant("b")]
    for style in prompt_styles():
        template = ChatTemplate.from_tokenizer(joins_newlines, style)
        again = ChatTemplate.from_tokenizer(template.export_tokenizer(), None)
        ids = template.encode(messages, train_on).ids
        assert joins_newlines.decode(ids, False) == template.render(messages)
        for i in (1, 3, 5):
            prompt = template.encode_prompt(messages[:i])
            assert ids[: len(prompt)] == prompt == again.encode_prompt(messages[:i])
        assert any("tokenized separately" in note for note in template.notes) == (style == "llama3")
    answers = ["It.<|endoftext|>", "No.\n\nYes<|endoftext|>", "b<|endoftext|>"]
    assert parts(ChatTemplate.from_tokenizer(joins_newlines, "llama3"), messages) == answers


def test_prompts_are_not_split_if_that_would_change_the_text(sentencepiece_dir):
    """This tokenizer adds a space to every text, so a separate answer would get one more."""
    source = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    source += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    tokenizer = Tokenizer.load(sentencepiece_dir).with_files({"chat_template.jinja": source.encode()})
    template = ChatTemplate.from_tokenizer(tokenizer, None)
    assert [note.partition(": ")[2].partition(": ")[2] for note in template.notes] == [
        "prompts tokenize differently at inference (without the answer) than in training"
    ]
    assert template.encode(TWO, "answers").ids == tokenizer.encode_with_offsets(template.render(TWO))[0]


def test_template_file_overrides_config_and_lists_use_their_default(make):
    def source(config, **files):
        return ChatTemplate.from_tokenizer(Tokenizer.load(make(files=files, chat_template=config)), None).source

    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    assert source("x", **{"chat_template.jinja": CHATML}) == source(CHATML) == source(named) == CHATML


@pytest.mark.parametrize(
    ("settings", "style", "message"),
    [
        ({}, None, "--data.prompt_style: .*has no chat template.*alpaca, chatml"),
        ({}, "chatlm", "--data.prompt_style chatlm: must be one of .*did you mean 'chatml'"),
        ({"chat_template": [{"name": "rag", "template": "x"}]}, None, "has no chat template"),
        (
            {"template": "{% for m in messages %}"},
            None,
            "chat_template.jinja: the template has a syntax error in line 1",
        ),
        ({"template": "{{ nothing.at.all }}"}, None, "fails to render the messages: UndefinedError"),
        ({"template": "{{ range(10**9) | list }}"}, None, "fails to render the messages: OverflowError"),
        ({"template": "{{ ''.__class__.__mro__ }}"}, None, "fails to render the messages: SecurityError"),
        ({"template": "{{ namespace(_x=1) }}"}, None, "fails to render the messages: SecurityError"),
        ({"template": "{{ messages.append(1) }}"}, None, "fails to render the messages: SecurityError"),
        ({"template": "{% for m in messages %}{{ m.role }}{% endfor %}"}, None, "renders message 2 not at all"),
        ({"template": "{{ messages[-1].content * 2 }}"}, None, "renders message 2 more than once"),
        ({"eos_token": None}, "plain", "tokenizer has no eos token"),
        ({"eos_token": "q"}, "alpaca", "eos q, but it is an ordinary vocabulary entry; make it an added"),
    ],
)
def test_invalid_templates_raise_one_line_errors(make, settings, style, message):
    with pytest.raises(UserError, match=message) as error:
        ChatTemplate.from_tokenizer(Tokenizer.load(make(**settings), is_own=True), style)
    assert "\n" not in str(error.value)


GROWS = "{% set n = namespace(x=START) %}{% for i in range(60) %}{% set n.x = NEXT %}{% endfor %}{{ n.x SHOWN }}"


def grows(start, following, turn=""):
    return GROWS.replace("START", start).replace("NEXT", following).replace("SHOWN", turn)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'a' * 10**10 }}", "too much memory"),
        ("{{ messages[0].role * 10**10 }}", "too much memory"),
        (grows("'aa'", "n.x + n.x"), "too much memory|more than 1 s"),
        (grows("'aa'", "n.x ~ n.x"), "too much memory|more than 1 s"),
        pytest.param(grows("[1]", "[n.x, n.x]", "| tojson"), "too much memory|more than 1 s", marks=pytest.mark.slow),
        ("{{ ('a' * 10**5) | replace('a', 'a' * 10**5) }}", "too much memory"),
        ("{{ '%9999999999d' | format(1) }}", "too much memory|OverflowError|ValueError"),
        ("{{ 'a' * (2 * 10**7) }}", "OverflowError: the text has 20,000,000 characters"),
        pytest.param(
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "more than 1 s",
            marks=pytest.mark.slow,
        ),
        pytest.param("{{ 7 ** (7 ** 11) }}", "more than 1 s|too much memory", marks=pytest.mark.slow),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ raise_exception('a' * 10**6) }}", "rejects the messages: a{400}"),
    ],
)
def test_template_time_and_memory_are_limited(make, monkeypatch, template, message):
    monkeypatch.setattr(sandbox_process, "CPU_SECONDS", 1)
    monkeypatch.setattr(sandbox_process, "MEMORY", 1 << 29)
    tokenizer = Tokenizer.load(make(template))
    with pytest.raises(UserError, match=f"chat_template.jinja: .*({message})") as error:
        ChatTemplate.from_tokenizer(tokenizer, None)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    assert ChatTemplate.from_tokenizer(tokenizer, "chatml").render(TWO).startswith("<|im_start|>user")


def test_template_process_restarts_after_idling_and_in_a_fork(templates):
    template = templates["chatml"][0]
    expected = template.render(TWO)
    _, process = sandbox_process._running
    process.stdin.close()  # it exits in the same way when idle
    process.wait()
    assert template.render(TWO) == expected and sandbox_process._running[1] is not process
    _, process = sandbox_process._running
    sandbox_process._running = (0, process)  # as in a fork
    assert template.render(TWO) == expected and sandbox_process._running[1] is not process
    assert process.poll() is None


def test_interrupted_request_does_not_answer_the_next_one(templates, monkeypatch):
    template = templates["chatml"][0]
    first, second = template.render(TWO[:2]), template.render(TWO)

    def interrupt(limit):
        raise KeyboardInterrupt

    monkeypatch.setattr(sandbox_process._running[1], "stdout", SimpleNamespace(readline=interrupt))
    with pytest.raises(KeyboardInterrupt):
        template.render(TWO[:2])
    monkeypatch.undo()
    assert [template.render(TWO), template.render(TWO[:2])] == [second, first]


def test_rejected_role_order_is_an_error(make):
    template = ChatTemplate.from_tokenizer(Tokenizer.load(make()), "llama2")
    for messages in ([assistant("a")], [user("q"), user("q"), assistant("a")], [user("q"), system("s")]):
        with pytest.raises(UserError, match="rejects the messages: roles must be user, assistant"):
            template.encode(messages, "answers")


@pytest.mark.parametrize("answer", ["", " \n", None])
@pytest.mark.parametrize("train_on", ["answers", "last_answer", "all"])
def test_empty_answer_is_an_error(templates, answer, train_on):
    messages = [user("q"), assistant(answer), user("r"), assistant("b")]
    with pytest.raises(UserError, match="empty answer .message 2 of 4"):
        templates["chatml"][0].encode(messages, train_on)


def test_end_of_turn_merged_into_text_is_an_error(make):
    from tokenizers import AddedToken

    def change(core):  # matches only without adjacent letters
        core.add_special_tokens([AddedToken("</turn>", single_word=True)])

    source = "{% for m in messages %}{{ m.content + '</turn>' }}{% endfor %}"
    template = ChatTemplate.from_tokenizer(Tokenizer.load(make(source, change=change)), None)
    assert parts(template, [user("q."), assistant("a.")]) == ["a.</turn>"]
    with pytest.raises(UserError, match="answer 1 does not end with the end-of-turn token </turn>"):
        template.encode([user("q."), assistant("a")], "answers")


def test_conversation_without_answer_has_empty_loss_mask(templates):
    encoded = templates["chatml"][0].encode([user("q")], "answers")
    assert encoded.ids and not any(encoded.loss_mask)


def call(name, arguments, **more):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}], **more}


def tool(text):
    return {"role": "tool", "content": text}


CALLS = [user("Weather?"), call("weather", {"city": "Zürich <|im_end|>"}), tool("rain"), assistant("Rain.")]
LONG_CALLS = [
    *CALLS,
    user("And time?"),
    call("clock", '{"zone": 1}', content="Let me see."),
    tool("12"),
    assistant("Noon."),
]


@pytest.mark.parametrize("messages", [CALLS, CALLS[:2], LONG_CALLS, LONG_CALLS[:-2]])
def test_rendered_tool_calls_are_in_the_loss_mask(templates, messages):
    template, hf, source = templates["qwen3"]
    encoded = template.encode(messages, "answers")
    expected = hf.apply_chat_template(
        messages, chat_template=mark_answers("qwen3", source), return_dict=True, return_assistant_tokens_mask=True
    )
    assert encoded.ids == expected["input_ids"]
    assert encoded.loss_mask == [bool(m) for m in expected["assistant_masks"]]
    answer = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich <|im_end|>"}}\n</tool_call><|im_end|>'
    assert parts(template, messages)[0].removeprefix("<think>\n\n</think>\n\n") == answer


@pytest.mark.parametrize("content", ["", "Let me see."])
def test_tool_calls_missing_from_the_template_are_an_error(templates, content):
    messages = [user("Weather?"), call("weather", {}, content=content), tool("rain"), assistant("Rain.")]
    with pytest.raises(UserError, match="does not render all tool_calls of message 2 of 4, .* choose a template"):
        templates["chatml"][0].encode(messages, "answers")


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Größe <b> & "rain"',
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "default": None}}},
        },
    },
    {"type": "function", "function": {"name": "clock", "parameters": {}}},
]


def test_tools_are_rendered_and_masked_as_in_transformers(templates):
    """Of the published templates only Qwen3's renders tools; the second one follows Llama 3.1's."""
    template, hf, source = templates["qwen3"]
    in_first_question = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if loop.first and tools is not none %}{{ tools | tojson(indent=4) }}{% endif %}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    other = ChatTemplate(template._tokenizer, in_first_question, "other")
    cases = [
        (template, mark_answers("qwen3", source), m) for m in (CALLS, LONG_CALLS, [system("Be brief."), *CALLS], TWO)
    ]
    cases += [(other, in_first_question, m) for m in (TWO, [system("Be brief."), *TWO])]
    for template, source, messages in cases:
        for tools in (TOOLS, TOOLS[1:], None):
            encoded = template.encode(messages, "answers", tools)
            expected = hf.apply_chat_template(
                messages, tools, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
            )
            assert encoded.ids == expected["input_ids"]
            assert encoded.loss_mask == [bool(m) for m in expected["assistant_masks"]] and any(encoded.loss_mask)
            assert ("clock" in template._tokenizer.decode(encoded.ids)) == (tools is not None or messages is LONG_CALLS)


def test_hermes_renders_tools_as_qwen3(templates, make):
    tokenizer = Tokenizer.load(make())
    hermes = ChatTemplate.from_tokenizer(tokenizer, "hermes")
    assert hermes.notes == []
    qwen3 = templates["qwen3"][0]
    two_tools = [*CALLS[:2], *[tool("rain"), tool("sun")], *CALLS[3:]]
    for messages in (CALLS, LONG_CALLS, [system("Be brief."), *CALLS], two_tools):
        for tools in (TOOLS, None):
            expected = qwen3.render(messages, tools=tools).replace("<think>\n\n</think>\n\n", "")
            assert hermes.render(messages, tools=tools) == expected
            assert hermes.render(messages[:-1], True, tools) == qwen3.render(messages[:-1], True, tools)
    openai = [{**m, "role": m["role"].replace("tool", "function"), "content": m["content"] or None} for m in CALLS]
    values = {"messages": openai, "tools": TOOLS, **tokenizer.special_tokens}
    assert hermes._call_jinja(values, TRAINING_DATE) == hermes.render(CALLS, tools=TOOLS)  # as transformers renders
    assert "".join(parts(hermes, LONG_CALLS)) == "".join(parts(qwen3, LONG_CALLS)).replace(
        "<think>\n\n</think>\n\n", ""
    )


def test_tools_missing_from_the_template_are_an_error(templates, make):
    with pytest.raises(UserError, match="does not render the row's tools; .*hermes.* --data.chat_template"):
        templates["chatml"][0].encode(TWO, "answers", TOOLS)
    assert templates["chatml"][0].encode(TWO, "answers", []) == templates["chatml"][0].encode(TWO, "answers")
    named = [{"name": "tool_use", "template": CHATML}, {"name": "default", "template": "{{ tools }}" + CHATML}]
    for files, settings in (({"additional_chat_templates/tool_use.jinja": CHATML}, CHATML), ({}, named)):
        tokenizer = Tokenizer.load(make(chat_template=settings))
        template = ChatTemplate.from_tokenizer(
            tokenizer.with_files({name: text.encode() for name, text in files.items()}), None
        )
        with pytest.raises(UserError, match="tool_use.* --data.chat_template"):
            template.encode(TWO, "answers", TOOLS)


def test_weight_0_masks_an_answer(templates):
    for template, _, _ in templates.values():
        plain, masked = TWO, [TWO[0], {**TWO[1], "weight": 0}, {**TWO[2], "weight": 0}, {**TWO[3], "weight": 1.0}]
        assert template.encode(masked, "answers") == template.encode(plain, "last_answer")
        assert not any(template.encode([*TWO[:3], {**TWO[3], "weight": 0}], "last_answer").loss_mask)
        first, both = template.encode([*TWO[:3], {**TWO[3], "weight": 0}], "answers"), template.encode(plain, "answers")
        second = template.encode(plain, "last_answer").loss_mask
        assert first.ids == both.ids
        expected = [a and not b for a, b in zip(both.loss_mask, second, strict=True)]
        assert first.loss_mask == expected and any(expected)
        everything = template.encode([*TWO[:3], {**TWO[3], "weight": 0}], "all")
        assert everything.ids == both.ids and everything.loss_mask == [not trained for trained in second]


def test_other_weights_are_errors(templates):
    cases = [(3, weight, "answers", "message 4: weight .*: must be 0") for weight in (0.5, 2, -1, "0", [0])]
    cases += [(2, 1, "answers", r"message 3 \(user\): weight 1: "), (2, 0, "all", r"message 3 \(user\): weight 0: ")]
    for index, weight, train_on, expected in cases:
        messages = [dict(message) for message in TWO]
        messages[index]["weight"] = weight
        with pytest.raises(UserError, match=expected):
            templates["chatml"][0].encode(to_record({"messages": messages}, "x").messages, train_on)


def test_template_suffix_depending_on_the_answer_is_an_error(make):
    source = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}{{ messages[-1].content | length }}"
    template = ChatTemplate.from_tokenizer(Tokenizer.load(make(source)), None)
    with pytest.raises(UserError, match="after message 2 depends on that message"):
        template.encode([user("q"), assistant("a")], "answers")


def test_date_is_today_in_a_chat_and_fixed_in_training(make, monkeypatch):
    today = SimpleNamespace(now=lambda: datetime(2031, 1, 31, 23, 59, 59))
    monkeypatch.setattr("toolkit.data.chat.template.datetime", today)
    template = ChatTemplate.from_tokenizer(Tokenizer.load(make("{{ strftime_now('%Y-%m-%d') }}" + CHATML)), None)
    assert template.render(TWO).startswith("2024-07-26<|im_start|>")
    prompt = template._tokenizer.decode(template.encode_prompt(TWO[:1]))
    assert prompt.startswith("2031-01-31")
    assert parts(template, TWO) == ["a<|im_end|>", "b<|im_end|>"] and "26 Jul 2024" in template.notes[0]


def test_tojson_is_not_escaped_and_none_is_omitted(make):
    source = "{{ messages[0] | tojson }}" + CHATML
    template = ChatTemplate.from_tokenizer(Tokenizer.load(make(source)), None)
    text = template.render([user("<ö>", name=None)])
    assert text.startswith('{"role": "user", "content": "<ö>"}<|im_start|>')


def test_overridden_template_is_exported(make, tmp_path):
    from transformers import AutoTokenizer

    for settings in ({"chat_template": "x"}, {"template": "x"}, {}):
        tokenizer = Tokenizer.load(make(**settings, **with_bos()))
        template = ChatTemplate.from_tokenizer(tokenizer, "chatml")
        assert any("overrides the checkpoint's own" in note for note in template.notes) == bool(settings)
        exported = template.export_tokenizer()
        exported.save(tmp_path)
        hf = AutoTokenizer.from_pretrained(tmp_path)
        assert hf.apply_chat_template(TWO)["input_ids"] == template.encode(TWO, "answers").ids
        again = ChatTemplate.from_tokenizer(Tokenizer.load(tmp_path), None)
        assert again.encode(TWO, "answers") == template.encode(TWO, "answers")
        setting = exported.settings("tokenizer_config.json").get("chat_template")
        assert setting == (template.source if "chat_template" in settings else None)
        assert exported.fingerprint == tokenizer.fingerprint


def test_template_file_is_used_and_exported(make, tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_bytes(b"\xef\xbb\xbfMine.\r\n" + CHATML.encode())
    for settings in ({"chat_template": "x"}, {"template": "x"}, {}):
        tokenizer = Tokenizer.load(make(**settings))
        template = ChatTemplate.from_tokenizer(tokenizer, None, str(file))
        assert template.render(TWO).startswith("Mine.\n<|im_start|>user")
        assert any("overrides the checkpoint's own" in note for note in template.notes) == bool(settings)
        again = ChatTemplate.from_tokenizer(template.export_tokenizer(), None)
        assert again.source == template.source == "Mine.\n" + CHATML
    (tmp_path / "binary").write_bytes(b"\xff")
    for name, message in (("none", "no such file"), (".", "not a regular file"), ("binary", "not UTF-8")):
        with pytest.raises(UserError, match=f"--data.chat_template .*{name}: .*{message}"):
            ChatTemplate.from_tokenizer(tokenizer, None, str(tmp_path / name))


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (None, ["<|endoftext|>", "<|im_end|>"]),
        ({"eos_token_id": "<|eot_id|>", "temperature": 0.6}, ["<|eot_id|>", "<|endoftext|>", "<|im_end|>"]),
        ({"eos_token_id": ["<|im_end|>", "<|endoftext|>"]}, ["<|im_end|>", "<|endoftext|>"]),
        ({"temperature": 0.6}, ["<|endoftext|>", "<|im_end|>"]),
    ],
)
def test_exported_generation_config_stops_at_the_end_of_turn(make, before, expected):
    tokenizer = Tokenizer.load(make(CHATML))
    ids = tokenizer.added_tokens
    if before is not None:
        setting = before.get("eos_token_id")
        if setting is not None:
            before = {
                **before,
                "eos_token_id": [ids[t] for t in setting] if isinstance(setting, list) else ids[setting],
            }
        tokenizer = tokenizer.with_files({"generation_config.json": json.dumps(before).encode()})
    exported = ChatTemplate.from_tokenizer(tokenizer, None).export_tokenizer()
    config = json.loads(exported.files["generation_config.json"])
    assert config["eos_token_id"] == [ids[t] for t in expected]
    assert config.get("temperature") == (before or {}).get("temperature")
    assert exported.files["chat_template.jinja"].decode() == CHATML
    assert exported.eos_id == tokenizer.eos_id


def test_plain_text_has_one_bos_and_an_eos(make):
    tokenizer = Tokenizer.load(make(**with_bos()))
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    encoded = encode_text(tokenizer, "the model")
    assert encoded.ids == [bos, *tokenizer.encode("the model", bos=False), eos] and all(encoded.loss_mask)
    assert encode_text(tokenizer, "<|begin_of_text|>the model") == encoded
    assert encode_text(Tokenizer.load(make()), "the model").ids == encoded.ids[1:]
    with pytest.raises(UserError, match="no eos"):
        encode_text(Tokenizer.load(make(eos_token=None)), "the model")
