"""What rows and messages say is honored, refused or named once (see also test_schemas)."""

import json
from pathlib import Path

import pytest
from helpers.cases import check_each
from helpers.chatml import CHATML
from helpers.rows import to_record

from toolkit.data import JSON, Preference
from toolkit.data.chat.template import ChatTemplate
from toolkit.errors import UserError

PUBLISHED = Path(__file__).parent / "templates"


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def encode(template, row, train_on="answers"):
    record = to_record(row, "file line 1")
    return template.encode(record.messages, train_on, record.tools)


@pytest.fixture(scope="module")
def template(tokenizer):
    return ChatTemplate.from_tokenizer(tokenizer, None)


@pytest.fixture
def prepare(tokenizer, tmp_path):
    """Return a function that prepares rows and returns the log and the text with loss."""

    def run(rows, module=JSON, template=CHATML, **options):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = module(str(tmp_path / "rows.jsonl"), val_split_fraction=0.0, cache_dir=str(tmp_path))
        if module is Preference:
            data = module(json_path=str(tmp_path / "rows.jsonl"), val_split_fraction=0.0, cache_dir=str(tmp_path))
        lines, used = [], tokenizer.with_files({"chat_template.jinja": template.encode()})
        data = data.prepare(tokenizer=used, max_seq_length=500, report=lines.append, **options)
        return lines, data

    return run


# ---- tool calls

CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{% set f = call.function or call %}CALL{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# How published templates write a call: Llama 3.1 and Qwen 2.5; Qwen 3; Qwen3-Coder and GLM-4.5; DeepSeek; `~`.
OBJECTS = {
    "tojson": '{{ \'{"name": "\' + f.name + \'", "arguments": \' }}{{ f.arguments | tojson }}{{ "}" }}',
    "either": "{{ f.name }}{{ f.arguments if f.arguments is string else f.arguments | tojson }}",
    "parameters": "{{ f.name }}{% for k, v in f.arguments.items() %}{{ '<' + k + '>' + v }}{% endfor %}",
}
TEXTS = {"plus": "{{ f.name + f.arguments }}", "tilde": "{{ f.name ~ '\n' ~ f.arguments }}"}
ARGUMENTS = {"city": "Zürich", "days": '{"x": 1}'}


def test_forms_of_a_tool_call_have_one_rendering(tokenizer, tmp_path):
    """The oracle is transformers, with the form of the arguments that the template is made for."""
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path)
    hf = AutoTokenizer.from_pretrained(tmp_path)

    def turns(call, **fields):
        fields = fields or {"tool_calls": [{"type": "function", "function": call}]}
        return [user("q"), {"role": "assistant", "content": None, **fields}, {"role": "tool", "content": "r"}]

    text = json.dumps(ARGUMENTS, ensure_ascii=False)
    as_object, as_text = ({"name": "weather", "arguments": form} for form in (ARGUMENTS, text))
    compact = {**as_text, "arguments": json.dumps(ARGUMENTS, separators=(",", ":"))}
    whole = json.dumps([{"type": "function", "function": compact}])
    sharegpt = [("human", "q"), ("function_call", json.dumps(compact)), ("observation", "r")]
    forms = {name: {"messages": turns(call)} for name, call in (("object", as_object), ("text", as_text))}
    forms["compact"], forms["older"] = {"messages": turns(compact)}, {"messages": turns(None, function_call=compact)}
    forms["whole"] = {"messages": turns(None, tool_calls=whole)}
    forms["ShareGPT"] = {"conversations": [{"from": role, "value": value} for role, value in sharegpt]}

    def check(style, form):
        source = CALLS.replace("CALL", (OBJECTS | TEXTS)[style])
        expected = [{**m, "content": m["content"] or ""} for m in turns(as_text if style in TEXTS else as_object)]
        encoded = encode(ChatTemplate(tokenizer, source, "t"), forms[form])
        assert encoded.ids == hf.apply_chat_template(expected, chat_template=source)["input_ids"]
        assert "weather" in tokenizer.decode([i for i, m in zip(*encoded, strict=True) if m], False)

    check_each(check, [(style, form) for style in OBJECTS | TEXTS for form in forms])
    for arguments in ("Paris", "{"):
        with pytest.raises(UserError, match=r"line 1: .*message 2 \(assistant\): tool_calls: arguments .* not JSON"):
            to_record({"messages": turns({"name": "weather", "arguments": arguments})}, "file line 1")


def test_parameters_as_json_text_are_objects():
    function = {"name": "f", "parameters": {"type": "object"}}
    as_text = {**function, "parameters": json.dumps(function["parameters"])}
    for tools in ([as_text], json.dumps([as_text]), [function]):
        assert to_record({"prompt": "q", "completion": "a", "tools": tools}, "x").tools == [function]
    assert to_record({"prompt": "q", "completion": "a", "functions": [as_text]}, "x", {"tools": "functions"}).tools == [
        function
    ]


# ---- the loss weight and earlier turns


def test_other_names_of_the_loss_weight(template):
    rows = [assistant("BAD", **{name: False}) for name in ("train", "training", "trainable", "loss_mask")]
    rows += [assistant("BAD", masked=True), assistant("BAD", loss_mask=0, weight=0)]
    expected = encode(template, {"messages": [user("q"), assistant("BAD", weight=0), user("r"), assistant("b")]})
    for message in rows:
        row = {"messages": [{**user("q"), "train": False}, message, user("r"), assistant("b", train=True)]}
        assert encode(template, row) == expected and any(expected.loss_mask)
    for fields, message in (
        ({"train": "no"}, "train 'no': must be 0 or false"),
        ({"train": True, "masked": 1}, "must .* agree"),
    ):
        with pytest.raises(UserError, match=f"message 2: .*{message}"):
            to_record({"messages": [user("q"), assistant("a", **fields)]}, "x")
    for name, value in (("train", True), ("masked", False), ("weight", 1)):  # the error has the row's name
        with pytest.raises(UserError, match=rf"message 1 \(user\): {name} {value}: .*; remove the {name}$"):
            encode(template, {"messages": [{**user("q"), name: value}, assistant("a")]})


def test_history_is_earlier_turns(prepare, tokenizer):
    row = {"instruction": "third", "output": "three", "history": [["first", "one"], ["second", "two"]]}
    roles_and_texts = [(m["role"], m["content"]) for m in to_record(row, "x").messages]
    texts = ["first", "one", "second", "two", "third", "three"]
    assert roles_and_texts == list(zip(["user", "assistant"] * 3, texts, strict=True))
    (rated,) = prepare([{**row, "label": True}], Preference, kind="rated")[1].train
    trained = tokenizer.decode([label for label in rated["labels"].tolist() if label >= 0], False)
    assert trained == "three<|im_end|>"


# ---- what the template or the schema does not read


def test_columns_and_fields_that_are_not_read_are_named_once(prepare):
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    rows = [
        {"prompt": "q", "completion": "a", "id": 0, "source": "web", "text": "all", "empty": ""},
        {"messages": [{**user("q"), "id": 7}, assistant("a", id=8, refusal=None, name="x")], "source": "web"},
        {"text": "only", "system": None},
        {"messages": [user("q"), {**assistant("", tool_calls=[call]), "id": 1}], "history": [["a", "b"]]},
        {"text": "only", "tools": [{"name": "f"}]},
        {"prompt": [user("q")], "completion": "a", "input": "not in a message"},
    ]
    shows_names = CALLS.replace("CALL", "{{ f.name }}").replace("m.role +", "m.role ~ m.name +")
    lines, _ = prepare(rows, template=shows_names)
    assert [line for line in lines if "not read" in line] == [
        "Data: not read in training: history, id, input, source, text, tools, id of messages"
    ]
    assert prepare(rows, template=shows_names)[0][-2].endswith("id of messages")  # from the cache
    assert not any("not read" in line for line in prepare(rows[2:3])[0])


def test_fields_of_a_tool_call_are_rendered_named_or_refused(prepare):
    function = {"name": "f", "arguments": {"x": 1}, "strict": False}
    call = {"id": "call_0", "type": "function", "function": function, "index": 0, "extra": {"y": [1]}, "note": None}
    flat = {"name": "f", "arguments": {"x": 1}, "call_id": "call_0"}
    named = ["call_id", "extra", "id", "index", "strict"]

    def check(source, expected):
        rows = [{"messages": [user("q"), assistant("", tool_calls=[part])]} for part in (call, {**call, "id": 7}, flat)]
        lines = [line for line in prepare(rows, template=CALLS.replace("CALL", source))[0] if "not read" in line]
        names = ", ".join(f"tool_calls.{name} of messages" for name in expected)
        assert lines == ([f"Data: not read in training: {names}"] if expected else [])

    reads_id = OBJECTS["tojson"] + "{{ call.id }}"
    needs_id = OBJECTS["tojson"] + "{% if not (call.id or call.call_id) %}{{ raise_exception('no id') }}{% endif %}"
    check_each(check, [
        (OBJECTS["tojson"], named),
        (reads_id, [name for name in named if name != "id"]),
        (needs_id, [name for name in named if not name.endswith("id")]),
        ("{{ call | tojson }}", []),
    ])  # fmt: skip
    with pytest.raises(UserError, match=r"does not render the tool_calls.arguments of message 2 \(assistant\)"):
        check("{{ f.name }}", [])


def test_columns_of_preferences_that_are_not_read_are_named(prepare):
    pair = {"prompt": "q", "chosen": "good", "rejected": "bad", "score": 3, "completion": "no"}
    assert "Data: not read in training: completion, score" in prepare([pair], Preference, kind="pairs")[0]


def test_text_that_the_template_drops_is_an_error(tokenizer):
    only_known = "{% for m in messages if m.role in ['user', 'assistant'] %}" + CHATML.partition("%}")[2]
    thought = assistant("4", reasoning_content="two and two")
    for source, messages, message in (
        (CHATML, [user("q"), thought], r"the reasoning_content of message 2 \(assistant\)"),
        (
            (PUBLISHED / "smollm2.jinja").read_text(),
            [user("q"), {**thought, "reasoning_content": None, "thinking": "t"}],
            "the thinking of",
        ),
        (only_known, [{"role": "developer", "content": "d"}, user("q"), assistant("a")], r"the content of message 1"),
    ):
        with pytest.raises(
            UserError, match=f"does not render {message}.*; provide one that does with --data.chat_template FILE, or"
        ):
            ChatTemplate(tokenizer, source, "t").encode(messages, "answers")
    template = ChatTemplate(tokenizer, (PUBLISHED / "qwen3.jinja").read_text(), "t")
    template.encode([user("q"), thought], "answers")
    assert not template.notes
    template.encode([user("q"), thought, user("r"), assistant("b")], "answers")  # dropped by design in earlier turns
    assert any("modifies some answers" in note for note in template.notes) and not template.unread_fields


def test_unknown_roles_are_noted(prepare):
    rows = [{"messages": [user("q"), {"role": role, "content": "a"}]} for role in ("model", "Assistant")]
    expected = ["role 'model' is not known", "role 'Assistant' is not known"]
    lines, _ = prepare([*rows, {"prompt": "q", "completion": "a"}])
    assert all(any(text in line for line in lines) for text in expected)
    with pytest.raises(UserError, match=f"2 without a trained token.*{expected[0]}.*{expected[1]}"):
        prepare(rows)


def test_rendered_rows_are_refused(prepare):
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    for row, module in (
        ({"prompt": rendered, "completion": "Hello"}, JSON),
        ({"prompt": rendered, "chosen": "Hello", "rejected": "No"}, Preference),
    ):
        kind = {} if module is JSON else {"kind": "pairs"}
        with pytest.raises(
            UserError,
            match=r"line 1: .*message 1 \(user\) begins with .*, '<\|im_start\|>user.* column text",
        ):
            prepare([row], module, **kind)
    mentions = "What does <|im_start|> mean, and <|im_end|>?"
    prepare([{"prompt": mentions, "completion": "<|im_start|> begins a message."}])


def test_columns_that_no_schema_has_are_refused_if_they_change_the_meaning():
    with pytest.raises(UserError, match=r"line 1: functions: provide tools, with --data.columns"):
        to_record({"prompt": "q", "completion": "a", "functions": [{"name": "f"}]}, "file line 1")
    for name in ("image", "images", "videos", "audios"):
        row = {"instruction": "<image>?", "output": "a", name: ["a.png"]}
        with pytest.raises(UserError, match=f"line 1: {name}: only text"):
            to_record(row, "file line 1")
        to_record({**row, name: []}, "file line 1")


def test_equal_labels_are_noted(prepare):
    rows = [{"prompt": f"q{i}", "completion": "a", "label": 1.0} for i in range(3)]
    assert any("all completions have the same label" in line for line in prepare(rows, Preference, kind="rated")[0])
    lines, _ = prepare([*rows, {"prompt": "q", "completion": "b", "label": 0.0}], Preference, kind="rated")
    assert not any("same label" in line for line in lines)
