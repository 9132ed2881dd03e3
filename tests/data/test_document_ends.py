"""Where text begins with bos and ends with eos, in each way that it becomes tokens."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.cases import check_each

from toolkit.data import CharText, HuggingFaceText, Mixture, TextFiles
from toolkit.data.chat.template import ChatTemplate, encode_text
from toolkit.data.inspection import inspect_rows
from toolkit.data.loader import train_batches, val_batches
from toolkit.data.order import ShuffledOrder
from toolkit.data.sft.messages import EmptyAnswerError
from toolkit.data.sft.schemas import Record
from toolkit.data.sft.tokenize import tokenize_record
from toolkit.data.streamed import segments
from toolkit.data.streamed.source import TextSegments
from toolkit.data.streamed.stream import Stream
from toolkit.data.text import documents
from toolkit.data.tokenizer import ENDS_FILE, Tokenizer, train_bpe
from toolkit.errors import UserError
from toolkit.inference.text import encode_prompt
from toolkit.models.families import get_config

T = 4
TEXTS = ["the cat\nate the hat\n" * 5, "a", "that\nheat", " tea the\n\nhat "]


@pytest.fixture(scope="module")
def byte_level_dir(tmp_path_factory) -> Path:
    """A tokenizer like Llama 3's: byte-level, its own encoding adds bos. Long documents are cut into chunks."""
    from tokenizers import Tokenizer as Core
    from tokenizers.processors import TemplateProcessing

    folder = tmp_path_factory.mktemp("byte_level")
    core = Core.from_str(train_bpe(["x"], 257).files["tokenizer.json"].decode())
    core.add_special_tokens(["<s>", "</s>"])
    core.post_processor = TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", core.token_to_id("<s>"))])
    core.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def bos(byte_level_dir) -> Tokenizer:
    tokenizer = Tokenizer.load(byte_level_dir)
    assert tokenizer.adds_bos
    return tokenizer


@pytest.fixture
def without_bos(bos) -> Tokenizer:
    config = bos.settings("tokenizer_config.json") | {"add_bos_token": False}
    return bos.with_files({"tokenizer_config.json": json.dumps(config).encode()})


@pytest.fixture
def prepare(tmp_path):
    """Return a function that prepares texts as files, or as a stream, and returns the data and its log lines."""

    def run(kind, texts, tokenizer, **options):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        lines, shared = [], options | {"cache_dir": str(tmp_path / "cache")}
        if kind is TextFiles:
            for i, text in enumerate(texts):
                (folder / f"{i}.txt").write_text(text, newline="")
            data = TextFiles(str(folder), **{"val_fraction": 0} | shared)
        else:
            (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
            data = HuggingFaceText(path=str(folder), **{"val_rows": 0} | shared)
        return data.prepare(tokenizer=tokenizer, max_seq_length=T, report=lines.append), lines

    return run


def documents_of(prepared) -> list[list[int]]:
    """Return the tokens of the documents, sorted; each ends with its last eos before the next text."""
    rows, end = prepared.train, prepared.tokenizer.eos_id
    store = rows.store if hasattr(rows, "store") else rows.segments.reader.stream.open(0)[0]
    found, document = [], []
    for token in store.tokens(0, store.n_tokens).tolist():
        if token != end and document[-1:] == [end]:
            found.append(document)
            document = []
        document.append(token)
    return sorted([*found, document])


KINDS = [TextFiles, HuggingFaceText]


def test_documents_are_what_transformers_makes_of_them(byte_level_dir, sentencepiece_dir, prepare, monkeypatch):
    """bos as ``tokenizer(text)`` adds it, then eos; documents that are cut into chunks have one of each."""
    from transformers import AutoTokenizer

    for name in ("CHUNK_CHARS", "BATCH"):
        monkeypatch.setattr(documents, name, 16)

    def check(kind, folder):
        hf = AutoTokenizer.from_pretrained(folder)
        prepared, _ = prepare(kind, TEXTS, Tokenizer.load(folder))
        assert documents_of(prepared) == sorted([*hf(text)["input_ids"], hf.eos_token_id] for text in TEXTS)

    check_each(check, [(kind, folder) for kind in KINDS for folder in (byte_level_dir, sentencepiece_dir)])


def test_bos_that_only_the_post_processor_names_is_found(byte_level_dir, tmp_path):
    """A folder with nothing but tokenizer.json, as the tokenizers library saves it."""
    shutil.copy(byte_level_dir / "tokenizer.json", tmp_path)
    alone, whole = Tokenizer.load(tmp_path), Tokenizer.load(byte_level_dir)
    assert alone.adds_bos and alone.bos_id == whole.bos_id and alone.encode("hat") == whole.encode("hat")


def test_neither_end_is_doubled(bos, without_bos, prepare):
    marked = [f"<s>{TEXTS[0]}</s>", f"{TEXTS[1]}</s>\n", *(f"{text}</s>" for text in TEXTS[2:])]

    def check(kind, tokenizer):
        texts = marked if tokenizer is bos else [text.removeprefix("<s>") for text in marked]
        assert documents_of(prepare(kind, texts, tokenizer)[0]) == documents_of(prepare(kind, TEXTS, tokenizer)[0])

    check_each(check, [(kind, tokenizer) for kind in KINDS for tokenizer in (bos, without_bos)])


def test_a_stream_doubles_no_end_of_a_document_that_it_has_not_seen(without_bos, prepare, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 100)
    monkeypatch.setattr("toolkit.data.streamed.open_text._FIRST_DOCUMENTS", 1)

    def texts_of(add_bos, texts, tokenizer=without_bos):
        """Return the text of all segments, prepared as by a worker."""
        stream = prepare(HuggingFaceText, texts, tokenizer, add_bos=add_bos)[0].train.segments.reader.stream
        worker, found = Stream.load(stream.folder), []
        for number in range(len(stream.source.segments)):
            n_tokens = worker.prepare(number).tokens
            store, _ = worker.open(number)
            found += [] if store is None else store.tokens(0, n_tokens).tolist()
        return worker.tokenizer.decode(found, False)

    plain = [f"document number {i}" for i in range(30)]
    mixed = plain[:5] + [f"{text}</s>\n" for text in plain[5:]]
    expected = "".join(f"{text}</s>" for text in plain)
    assert texts_of("auto", plain) == texts_of("auto", mixed) == expected
    assert texts_of(None, mixed).count("</s>") == 30 + 25
    trained = [text.replace("</s>", "<|endoftext|>") for text in mixed]
    assert texts_of("auto", trained, None) == expected.replace("</s>", "<|endoftext|>")


def test_s5_a_folder_of_a_stream_has_one_rule(without_bos, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))

    def folder_of(add_bos):
        data = HuggingFaceText(path=str(tmp_path / "a.jsonl"), add_bos=add_bos, val_rows=0, cache_dir=str(tmp_path))
        prepared = data.prepare(tokenizer=without_bos, max_seq_length=T, report=lambda line: None)
        keys.add(prepared.content_key)
        return prepared.train.segments.reader.stream.folder

    keys: set[str] = set()
    folder, other = folder_of("auto"), folder_of(None)
    assert folder != other and Stream.load(folder).source.ends == "later" and Stream.load(other).source.ends == ""
    old = json.loads((folder / "source.json").read_text())
    del old["ends"]  # as toolkit 0.1.0 wrote it
    (folder / "source.json").write_text(json.dumps(old))
    assert folder_of(None) == folder_of(None) == folder  # a run that is resumed finds its segments
    copy = Stream.load(folder).copy_of(0)
    assert folder_of("auto") == folder and Stream.load(folder).copy_of(0) == copy  # and so does a new run
    assert folder_of(None) == other and len(keys) == 1


def test_prompts_and_finetuning_text_have_one_of_each(bos):
    start, end, ids = bos.bos_id, bos.eos_id, bos.encode("hat", bos=False)
    completion = Record(None, "<s>hat</s>", "line 1", prompt_length=4)
    tokenized = tokenize_record(completion, SimpleNamespace(tokenizer=bos, template=None))
    assert tokenized.ids == [start, *ids, end] and tokenized.loss_mask == [False, False, True, True, True]
    labeled = Record(None, "hat", "line 1", has_eos=None)
    assert tokenize_record(labeled, SimpleNamespace(tokenizer=bos, template=None)).ids == [start, *ids]
    both = bos.with_files({ENDS_FILE: json.dumps({"before": [start], "after": [end]}).encode()})
    assert tokenize_record(labeled, SimpleNamespace(tokenizer=both, template=None)).ids == [start, *ids, end]
    assert encode_text(bos, "<s>hat</s>").ids == encode_text(bos, "hat").ids == [start, *ids, end]
    model = get_config("pico-llama").with_vocab_size(bos.vocab_size)
    assert encode_prompt(bos, "<s>hat", model) == encode_prompt(bos, "hat", model) == [start, *ids]


def test_an_answer_that_has_its_end_token_gets_no_second_one(tokenizer):
    template = ChatTemplate.from_tokenizer(tokenizer, None)

    def encode(answer):
        return template.encode([{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}], "answers")

    expected = encode("Hello")
    assert not template.notes
    assert encode("Hello<|im_end|>") == encode("Hello<|im_end|>\n") == encode("Hello<|endoftext|>") == expected
    (note,) = template.notes
    assert note.endswith("adds <|im_end|>; the end token that some answers have already is removed")
    assert encode("Hello <|im_end|> there") != encode("Hello  there")  # text in the middle stays
    with pytest.raises(EmptyAnswerError):
        encode("<|im_end|>")
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>"
    text = encode_text(tokenizer, rendered, template)
    assert text.ids == tokenizer.encode(rendered) != encode_text(tokenizer, rendered).ids


def test_option_chooses_another_rule_and_bos_is_said(bos, without_bos, prepare):
    line = "Data: each document begins with <s> and ends with </s> (--data.add_bos {})"

    def check(kind):
        def run(tokenizer, add_bos):
            prepared, lines = prepare(kind, TEXTS, tokenizer, add_bos=add_bos)
            return documents_of(prepared), [text for text in lines if "begin" in text], prepared.content_key

        with_bos, said, key = run(bos, "auto")
        assert said == [line.format("auto")]
        assert run(without_bos, True) == (with_bos, [line.format("true")], key)
        plain = [document[1:] for document in with_bos]
        for tokenizer, add_bos in ((bos, False), (without_bos, "auto"), (without_bos, False), (without_bos, None)):
            assert run(tokenizer, add_bos)[:2] == (plain, []), add_bos
        assert run(bos, None)[:2] == (
            plain, ["Data: documents begin without bos, as in toolkit 0.1.0 (--data.add_bos null)"]
        )  # fmt: skip
        with pytest.raises(UserError, match=r"^--data.add_bos true: .*no bos token"):
            files = {"tokenizer.json": train_bpe(["hat"], 300).files["tokenizer.json"]}
            run(Tokenizer(files, "without bos"), True)

    check_each(check, KINDS)


def test_s5_only_text_that_gets_other_tokens_has_another_key(bos, without_bos, prepare, tmp_path):
    """The hashes are those of 7341057d."""
    assert TextSegments([], "text", 1000, "identity").key(["trained", 300]).startswith("7fdbf935eb69cfc4")
    (tmp_path / "text").mkdir()
    for i in range(3):
        (tmp_path / "text" / f"{i}.txt").write_text(f"document number {i}\n" * 40)
    data = TextFiles(str(tmp_path / "text"), vocab_size=300, cache_dir=str(tmp_path / "cache"))
    data.prepare(tokenizer=None, max_seq_length=T, report=lambda line: None)
    assert (tmp_path / "cache" / "text_files-f65146a721b196c5").is_dir()

    def check(kind):
        def keys(tokenizer, add_bos, texts=TEXTS):
            return prepare(kind, texts, tokenizer, add_bos=add_bos)[0].content_key

        if kind is TextFiles:  # the content key of a stream has the modification times
            assert keys(without_bos, "auto") == keys(bos, None) == keys(bos, False) != keys(bos, "auto")
        ended = [f"{text}</s>" for text in TEXTS]
        (a, _), (b, _) = (prepare(kind, ended, without_bos, add_bos=add_bos) for add_bos in ("auto", None))
        assert len(documents_of(a)[0]) == len(documents_of(b)[0]) - 1  # eos twice, as it was

    check_each(check, KINDS)


def test_workers_of_a_stream_know_the_rule(bos, prepare):
    prepared, _ = prepare(HuggingFaceText, TEXTS, bos)
    folder = prepared.train.segments.reader.stream.folder
    assert Stream.load(folder).source.ends == "bos"
    old = json.loads((folder / "source.json").read_text())
    del old["ends"]  # as an older version wrote it
    (folder / "source.json").write_text(json.dumps(old))
    assert Stream.load(folder).source.ends == ""


def test_n6_validation_leaves_out_the_loss_of_bos_alone(bos, tmp_path):
    (tmp_path / "val").mkdir()
    for i in range(20):
        (tmp_path / "val" / f"{i}.txt").write_text(f"{i}")
    data = TextFiles(str(tmp_path / "val"), val_fraction=0.5, cache_dir=str(tmp_path / "cache"))
    prepared = Mixture({"a": {"weight": 1, "data": data}}).prepare(
        tokenizer=bos, max_seq_length=T, report=lambda line: None
    )
    shape = {"micro_batch_size": 1, "rank": 0, "world_size": 1}
    full, masked = (
        list(val_batches(prepared.val, max_rows=None, added_bos=added, **shape)) for added in (None, prepared.added_bos)
    )
    n_bos = sum(int((batch.labels == bos.bos_id).sum()) for batch in full)
    assert n_bos and sum(b.n_tokens for b in full) - sum(b.n_tokens for b in masked) == n_bos
    for before, after in zip(full, masked, strict=True):
        assert torch.equal(before.input_ids, after.input_ids)
        assert torch.equal(after.labels, before.labels.masked_fill(before.labels == bos.bos_id, -100))
    order = ShuffledOrder(len(prepared.val), 0)
    steps = train_batches(
        prepared.val, order, start_position=0, total_positions=len(prepared.val), global_batch_size=1, num_workers=0,
        **shape,
    )  # fmt: skip
    assert sum(int((batch.labels == bos.bos_id).sum()) for step in steps for batch in step) == n_bos  # trained


def test_inspection_shows_bos(bos, prepare):
    (sample,) = inspect_rows(prepare(TextFiles, TEXTS, bos)[0], 1)["samples"]
    assert sample["tokens"][0]["text"] == "<s>"


def test_a_character_tokenizer_with_bos_begins_text_with_it(bos, tmp_path):
    (tmp_path / "a.txt").write_text("the hat")
    from toolkit.data.tokenizer import collect_characters

    plain = collect_characters(["the hat"])
    files = {"tokenizer_config.json": json.dumps({"bos_token": "<|unknown|>", "add_bos_token": True}).encode()}
    tokenizer = plain.with_files(files)
    data = CharText(str(tmp_path / "a.txt"), train_split=1.0, cache_dir=str(tmp_path / "cache"))
    prepared = data.prepare(tokenizer=tokenizer, max_seq_length=T, report=lambda line: None)
    assert prepared.train[0]["input_ids"].tolist() == tokenizer.encode("the")
