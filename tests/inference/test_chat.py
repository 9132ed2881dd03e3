"""Conversations: KV cache reuse, history, and stopping."""

from contextlib import closing

import pytest
from helpers.cases import slow_except
from helpers.talker import ANSWERS, make_talker

from tests.inference.conftest import STYLES
from toolkit.data.chat.template import ChatTemplate
from toolkit.data.tokenizer import train_bpe
from toolkit.errors import UserError
from toolkit.inference.chat import Conversation, find_template
from toolkit.inference.load import load_checkpoint
from toolkit.inference.sampling import GREEDY, Sampling


@pytest.fixture(scope="module", params=slow_except(["llama"], ["llama", "qwen3_5"]))
def talker(request, tmp_path_factory):
    style = STYLES[request.param] | {"padded_vocab_size": None}
    folder = make_talker(tmp_path_factory.mktemp("models") / "talker", **style)
    return load_checkpoint(str(folder), base_checkpoint_dir=None, accelerator="cpu", precision=None)


def begin(talker, template=None, **changed) -> Conversation:
    template = template or find_template(talker.tokenizer, None)
    settings = {"system": None, "max_new_tokens": 20, "sampling": GREEDY, "seed": 0, "notice": lambda line: None}
    return Conversation(talker.model, talker.tokenizer, template, **(settings | changed))


def ask(conversation, question) -> str:
    return "".join(conversation.ask(question))


@pytest.fixture
def computed(talker):
    """Record the tokens of every forward pass."""
    found = []
    hook = talker.model.register_forward_pre_hook(lambda module, args: found.append(args[0][0].tolist()))
    yield found
    hook.remove()


def test_answer_stops_at_end_of_turn_and_keeps_characters_intact(talker):
    conversation = begin(talker)
    pieces = list(conversation.ask("2"))
    assert "".join(pieces) == ANSWERS["2"] and "\ufffd" not in pieces and conversation.new_tokens == 9
    assert ask(conversation, "1") == ANSWERS["1"]
    assert [m["content"] for m in conversation.messages] == ["2", ANSWERS["2"], "1", ANSWERS["1"]]


def test_next_turn_computes_only_new_tokens(talker, computed):
    conversation, encode = begin(talker), talker.tokenizer.encode
    ask(conversation, "1")
    computed.clear()
    ask(conversation, "3")
    # the end of the first answer was sampled but not cached; then the question
    assert sum(computed, []) == [0, *encode("Q3A"), *encode(ANSWERS["3"])]


def test_template_that_rewrites_history_is_recomputed(talker, computed):
    source = find_template(talker.tokenizer, None).source
    changing = source.replace(
        "{{ m['content'] }}{{ eos_token }}", "{{ m['content'] | replace('in', 'IN') }}{{ eos_token }}"
    )
    conversation = begin(talker, ChatTemplate(talker.tokenizer, changing, "changing"))
    ask(conversation, "1")
    computed.clear()
    answer = ask(conversation, "2")
    prompt = talker.tokenizer.encode("Q1AeINs") + [0] + talker.tokenizer.encode("Q2A")
    n_cached = 0 if talker.model.config.linear_attention else 4  # "Q1Ae"; a recurrent state cannot be cut back to it
    assert sum(computed, [])[: len(prompt) - n_cached] == prompt[n_cached:]
    fresh = begin(talker, ChatTemplate(talker.tokenizer, changing, "changing"))
    fresh.messages = conversation.messages[:2]
    assert ask(fresh, "2") == answer


def test_turns_are_equal_with_and_without_cache(talker):
    """With random sampling, so that answers also contain unlearned text."""
    sampling = Sampling(2.0)
    conversation = begin(talker, sampling=sampling, max_new_tokens=8)
    for turn, question in enumerate("1232"):
        before = list(conversation.messages)
        answer = ask(conversation, question)
        fresh = begin(talker, sampling=sampling, max_new_tokens=8, seed=turn)
        fresh.messages = before
        assert ask(fresh, question) == answer


def test_stops_at_eos_list_of_generation_config(talker, monkeypatch):
    z = talker.tokenizer.encode("z")[0]
    monkeypatch.setitem(talker.tokenizer._settings, "generation_config.json", {"eos_token_id": [0, z]})
    assert ask(begin(talker), "2") == ""
    # end-of-turn stops even if missing from the list
    monkeypatch.setitem(talker.tokenizer._settings, "generation_config.json", {"eos_token_id": [z]})
    assert ask(begin(talker), "1") == ANSWERS["1"]


def test_stops_at_each_token_that_ends_an_answer_in_training(talker):
    template = find_template(talker.tokenizer, None)
    template.stop_ids = [0, *talker.tokenizer.encode("z")]
    assert [ask(begin(talker, template), question) for question in "12"] == [ANSWERS["1"].partition("z")[0], ""]


def test_the_system_message_comes_first(talker, computed):
    conversation = begin(talker, system="be brief")
    ask(conversation, "1")
    text = talker.tokenizer.decode(sum(computed, []), skip_special_tokens=False)
    assert text.startswith("Sbe briefQ1A")


def test_full_context_is_an_error_and_keeps_the_conversation(talker):
    notes = []
    conversation = begin(talker, notice=notes.append, max_new_tokens=100)
    with pytest.raises(UserError, match="conversation has 64 tokens, but must have fewer than 64"):
        ask(conversation, "x" * 62)
    assert conversation.messages == []
    conversation._eos_ids = set()
    answer = ask(conversation, "x" * 55)  # 57 tokens: 7 are left
    assert conversation.new_tokens == 7 and notes == [
        "stopped after 7 new tokens: the model's context of 64 tokens is full"
    ]
    with pytest.raises(UserError, match="start a new chat"):
        ask(conversation, "1")
    assert conversation.messages[-1]["content"] == answer


def test_max_new_tokens_is_reported(talker):
    notes = []
    conversation = begin(talker, notice=notes.append, max_new_tokens=3)
    assert ask(conversation, "1") == "ein"
    assert notes == ["stopped after 3 tokens: --max_new_tokens reached"]
    notes.clear()
    assert ask(begin(talker, notice=notes.append, max_new_tokens=5), "1") == "eins" and not notes


def test_closed_answer_keeps_partial_text(talker):
    conversation = begin(talker)
    with closing(conversation.ask("1")) as pieces:
        assert [next(pieces), next(pieces)] == ["e", "i"]
    assert [m["content"] for m in conversation.messages] == ["1", "ei"]
    with closing(conversation.ask("2")):
        pass  # before the first text: the question is dropped
    assert [m["content"] for m in conversation.messages] == ["1", "ei"]
    fresh = begin(talker)
    fresh.messages = list(conversation.messages)
    assert ask(conversation, "3") == ask(fresh, "3")


def test_interrupted_forward_pass_keeps_cache_consistent(talker):
    """As with Ctrl-C: some layers have cached the token, others have not."""
    conversation, passes = begin(talker), iter(range(100))

    def interrupt(module, args):
        if next(passes) == 4:
            raise KeyboardInterrupt

    hook = talker.model.transformer.h[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        ask(conversation, "1")
    hook.remove()
    fresh = begin(talker)
    fresh.messages = list(conversation.messages)
    assert len(fresh.messages) == 2
    assert ask(conversation, "3") == ask(fresh, "3")


def test_template_errors_name_the_flag_of_the_command(talker):
    bare = train_bpe(["abc"], vocab_size=257)
    with pytest.raises(UserError, match="^--prompt_style: the trained tokenizer has no chat template"):
        find_template(bare, None)
    with pytest.raises(UserError, match="^--prompt_style alpaka: must be one of"):
        find_template(bare, "alpaka")
    assert find_template(bare, "alpaca").end_of_turn == "<|endoftext|>"
    with pytest.raises(UserError, match="the template rejects the messages"):
        begin(talker, find_template(talker.tokenizer, "gemma"), system="be brief")
