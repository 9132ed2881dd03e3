"""Streamed text from the Hugging Face hub and from object storage, against local servers."""

import gzip
import hashlib
import io
import re
import threading
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import yaml
from data.test_streamed import T, documents, lines
from helpers.cases import check_each
from helpers.hub_stub import Hub
from helpers.processes import PRETRAIN, start
from pyarrow import parquet

from toolkit.data import HuggingFaceText, OpenWebText, RedPajama, TinyStories
from toolkit.data.base import sample_order
from toolkit.data.streamed import hub_files as hub_module
from toolkit.data.streamed import segments
from toolkit.data.streamed.open_chunks import find_folders
from toolkit.errors import UserError

REPO = "acme/text"
README = """---
license: mit
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample
  data_dir: sample
  data_files:
  - split: train
    path: "part-*.parquet"
  - split: test
    path: ["b.jsonl.gz"]
---
Text.
"""


def table(texts: list[str], **columns) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": texts} | columns), file, row_group_size=8)
    return file.getvalue()


FILES = {
    "README.md": README.encode(),
    "data/2024/a.parquet": table(documents(40, 0)),
    "data/2024/b.jsonl": lines(documents(40, 1)),
    "sample/part-0.parquet": table(documents(30, 2)),
    "sample/part-1.parquet": table(documents(30, 3)),
    "sample/b.jsonl.gz": gzip.compress(lines(documents(10, 4))),
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that this process's huggingface_hub uses, with a separate cache."""
    from huggingface_hub import HfFileSystem, constants

    with Hub() as server:
        server.commit = server.add(f"datasets/{REPO}", FILES)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        HfFileSystem.clear_instance_cache()
        yield server
        HfFileSystem.clear_instance_cache()


def opened(tmp_path: Path, report=lambda line: None, **options):
    data = HuggingFaceText(**({"cache_dir": str(tmp_path / "cache"), "vocab_size": 300} | options))
    return data, data.prepare(tokenizer=None, max_seq_length=T, report=report)


def names(prepared) -> list[str]:
    return [file.name for file in prepared.train.segments.reader.stream.source.files]


def test_subsets_and_splits_of_the_readme_and_of_names(hub, tmp_path):
    data, prepared = opened(tmp_path, repo_id=REPO)
    assert names(prepared) == ["data/2024/a.parquet", "data/2024/b.jsonl"] and data.revision == hub.commit
    data, prepared = opened(tmp_path, repo_id=REPO, subset="sample", val_split="test", val_rows=4)
    assert names(prepared) == ["sample/part-0.parquet", "sample/part-1.parquet"] and len(prepared.val) == 4
    by_name = dict.fromkeys(("data/train-0.parquet", "data/test-0.parquet", "x.csv"), FILES["sample/part-0.parquet"])
    hub.add("datasets/acme/names", by_name)
    assert names(opened(tmp_path, repo_id="acme/names")[1]) == ["data/train-0.parquet"]
    url = f"hf://datasets/{REPO}@{hub.commit}/sample/*.parquet"
    assert names(opened(tmp_path, path=url)[1]) == ["sample/part-0.parquet", "sample/part-1.parquet"]


def test_hub_text_equals_local_text_and_survives_cut_connections(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 3000)
    for name in ("part-0.parquet", "part-1.parquet"):
        (tmp_path / name).write_bytes(FILES[f"sample/{name}"])
    _, local = opened(tmp_path, path=str(tmp_path / "part-*.parquet"))
    monkeypatch.setattr("toolkit.io.storage.RETRY_DELAYS", (0, 0))
    hub.broken = {"sample/part-0.parquet": 2, "sample/part-1.parquet": 1}
    _, remote = opened(tmp_path, repo_id=REPO, subset="sample")
    found = []
    for prepared in (local, remote):
        stream = prepared.train.segments.reader.stream
        for number in range(len(stream.source.segments)):
            stream.prepare(number)
        ids = sample_order(prepared.train, 3, {}).ids(np.arange(60))
        found.append([prepared.train[int(i)]["input_ids"].tolist() for i in ids])
    assert found[0] == found[1] and not any(hub.broken.values())
    ranges = [asked for method, name, asked in hub.asked if method == "GET" and name.endswith(".parquet")]
    assert len(ranges) > 10 and None not in ranges  # parts of files, never all of one
    assert hub.tokens == {"Bearer hf_secret"}


def test_mistakes_are_one_line(hub, tmp_path, monkeypatch):
    hub.add("datasets/acme/gated", FILES)
    hub.gated.add("datasets/acme/gated")
    hub.add("datasets/acme/images", {"x.png": b"1"})
    hub.add(f"datasets/{REPO}", FILES, branch="v2")
    broken = b"---\nconfigs:\n- config_name: default\n  data_files:\n  - path: x\n---\n"
    hub.add("datasets/acme/broken", {"README.md": broken, "x.jsonl": b"{}"})
    cases = [
        ({"repo_id": REPO, "subset": "other"}, "--data.subset other: no such subset; acme/text has default, sample"),
        (
            {"repo_id": "acme/images"},
            "--data.split train: acme/images has no such split; it has no files of a supported",
        ),
        ({"repo_id": REPO, "split": "test"}, "--data.split test: acme/text has no such split; it has train"),
        (
            {"repo_id": REPO, "revision": "v9"},
            "--data.revision v9: no such branch, .* of acme/text; see http://.*/datasets/acme/text/tree/main",
        ),
        ({"repo_id": "acme/none"}, "--data.repo_id acme/none: no such dataset at"),
        ({"repo_id": "a/b/c"}, "--data.repo_id a/b/c: not a valid hub name"),
        ({"repo_id": "acme/gated"}, "--data.repo_id acme/gated: is gated; accept its license at .*hf auth login"),
        ({"repo_id": "acme/broken"}, "the data_files of its README are malformed"),
        ({"repo_id": REPO, "text_column": "content"}, "--data.text_column content: data/2024/a.parquet: has no column"),
        ({"path": "hf://acme/text/x.jsonl"}, "must be hf://datasets/"),
        ({"path": f"hf://datasets/{REPO}/none-*.jsonl"}, "no file matches"),
    ]

    def check(options, message):
        with pytest.raises(UserError, match=message) as error:
            opened(tmp_path, **options)
        assert "\n" not in str(error.value) and "secret" not in str(error.value)

    check_each(check, cases)


def test_hub_that_never_answers_is_an_error(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_module, "_LISTING_TIMEOUT", 0.1)
    answers = threading.Event()
    monkeypatch.setattr("huggingface_hub.HfFileSystem.glob", lambda *args, **options: answers.wait(60) and {})
    hub.add("datasets/acme/names", {"train.jsonl": lines(documents(2, 0))})
    with pytest.raises(UserError, match=r"^--data.repo_id acme/names: no download from .* \(no answer\)"):
        hub_module._find(hub_module.Repository("acme/names", "main", hub.commit), ["**"])
    answers.set()


def test_globs_match_and_files_keep_their_keys(hub):
    files = dict.fromkeys(("a.parquet", "x/a b.parquet", "x/y/c.parquet", "x/d.jsonl"), b"12")
    repository = hub_module.Repository("acme/globs", "main", hub.add("datasets/acme/globs", files))
    cases = [
        (["*.parquet"], ["a.parquet"]),
        (["**/*.parquet"], ["a.parquet", "x/a b.parquet", "x/y/c.parquet"]),
        (["x/**"], ["x/a b.parquet", "x/d.jsonl", "x/y/c.parquet"]),
        (["x/[!a].jsonl", "./a.parquet", "a*"], ["a.parquet", "x/d.jsonl"]),
        (["x/?.jsonl"], ["x/d.jsonl"]),
        (["x/[z-a].jsonl", "none/*", "none.jsonl"], []),
    ]

    def check(globs, expected):
        assert [file.name for file in hub_module._find(repository, globs)] == expected

    check_each(check, cases)
    for url in ("hf://datasets/acme/globs", "hf://datasets/acme/globs@main/x/"):  # folders of LitData chunks
        folder = url.removeprefix("hf://datasets/acme/globs").removeprefix("@main").rstrip("/")
        assert find_folders(url) == [f"hf://datasets/acme/globs@{repository.commit}{folder}"]
    (file,) = hub_module._find(repository, ["x/a*"])
    assert file.url == f"hf://datasets/acme/globs@{repository.commit}/x/a%20b.parquet"
    assert (file.name, file.size, file.version) == ("x/a b.parquet", 2, hashlib.sha1(b"12").hexdigest())


PRESETS = {  # the files of each dataset's repository, as far as they matter
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", ["sample/10BT/000_00000.parquet"], ["data/CC-MAIN-2024-10/a.parquet"]),
    "redpajama": ("togethercomputer/RedPajama-Data-1T-Sample", ["arxiv_sample.jsonl", "c4_sample.jsonl"], ["x.py"]),
    "openwebtext": ("Skylion007/openwebtext", ["plain_text/train-00000-of-00080.parquet"], ["openwebtext.py"]),
    "tinystories": (
        "roneneldan/TinyStories",
        ["data/train-0-of-4.parquet"],
        ["data/validation-0-of-1.parquet", "V2.txt"],
    ),
    "c4": ("allenai/c4", ["en/c4-train.00000-of-01024.json.gz"], ["en/c4-validation.00000-of-00008.json.gz"]),
    "the-stack": ("bigcode/the-stack-dedup", ["data/python/data-0.parquet"], ["data/java/data-0.parquet"]),
}
FINEWEB = b"""---
configs:
- config_name: default
  data_files: data/*/*
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
---
"""


def test_presets_find_their_files_and_columns(hub, tmp_path):
    def content(name: str, column: str) -> bytes:
        if name.endswith(".parquet"):
            file = io.BytesIO()
            parquet.write_table(pyarrow.table({column: documents(20, 1)}), file)
            return file.getvalue()
        return gzip.compress(lines(documents(20, 1))) if name.endswith(".gz") else lines(documents(20, 1))

    def check(preset):
        values = yaml.safe_load((Path(__file__).parents[2] / "config_hub/data" / f"{preset}.yaml").read_text())
        options = values["data"]["init_args"]
        repo_id, expected, others = PRESETS[preset]
        files = {name: content(name, options["text_column"]) for name in (*expected, *others)}
        files |= {"README.md": FINEWEB} if preset == "fineweb-edu" else {}
        commit = hub.add(f"datasets/{repo_id}", files)
        pinned = re.search(r"@([0-9a-f]{40})/", options.get("path", ""))
        if pinned:
            hub.commits[f"datasets/{repo_id}", pinned[1]] = hub.commits[f"datasets/{repo_id}", commit]
        _, prepared = opened(tmp_path, **options, vocab_size=257)
        assert [name.rpartition("/")[2] for name in names(prepared)] == [name.rpartition("/")[2] for name in expected]
        assert len(prepared.val) > 0

    check_each(check, PRESETS)


def test_named_streams_are_their_recipes():
    for name, preset in ((RedPajama, "redpajama"), (OpenWebText, "openwebtext"), (TinyStories, "tinystories")):
        recipe = yaml.safe_load((Path(__file__).parents[2] / "config_hub/data" / f"{preset}.yaml").read_text())
        assert vars(name()) == vars(HuggingFaceText(**recipe["data"]["init_args"]))


@pytest.mark.slow
def test_run_records_the_commit_and_no_token(hub, tmp_path):
    flags = ["--data", "HuggingFaceText", "--data.repo_id", REPO, "--data.vocab_size", "300", "--eval.interval", "0"]
    flags += ["--data.cache_dir", str(tmp_path / "cache"), "--train.max_seq_length", str(T), "--train.max_steps", "3"]
    flags += ["--train.global_batch_size", "8", "--out_dir", str(tmp_path / "run"), "--accelerator", "cpu"]
    cache = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "hf_secret"}
    process = start(*PRETRAIN, *flags, **cache)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    saved = yaml.safe_load((tmp_path / "run/final/hyperparameters.yaml").read_text())
    assert saved["data"]["init_args"]["revision"] == hub.commit and f"is commit {hub.commit}" in output
    written = [path for folder in ("run", "cache") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert not any(b"hf_secret" in path.read_bytes() for path in written) and "hf_secret" not in output + errors


@pytest.fixture
def bucket(monkeypatch):
    """The URL of a bucket on a local S3 server that checks nothing."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    boto3 = pytest.importorskip("botocore.session")
    s3fs = pytest.importorskip("s3fs")
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("ACCESS_KEY_ID", "id"), ("SECRET_ACCESS_KEY", "hush-secret"), ("DEFAULT_REGION", "us-east-1"),
        ("ENDPOINT_URL", f"http://{host}:{port}"), ("EC2_METADATA_DISABLED", "true"),
    ):  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)
    client = boto3.get_session().create_client("s3", endpoint_url=f"http://{host}:{port}")
    client.create_bucket(Bucket="texts")
    for name, content in FILES.items():
        client.put_object(Bucket="texts", Key=name, Body=content)
    s3fs.S3FileSystem.clear_instance_cache()
    yield "s3://texts"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.mark.slow
def test_text_in_object_storage_equals_local_text(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 3000)
    for name in ("part-0.parquet", "part-1.parquet", "b.jsonl.gz"):
        (tmp_path / name).write_bytes(FILES[f"sample/{name}"])
    found = []
    for path in (f"{tmp_path}/*.*[tz]", f"{bucket}/sample/"):
        _, prepared = opened(tmp_path, path=path)
        stream = prepared.train.segments.reader.stream
        tokens = [stream.prepare(number).tokens for number in range(len(stream.source.segments))]
        ids = sample_order(prepared.train, 3, {}).ids(np.arange(90))
        found.append((names(prepared), tokens, [prepared.train[int(i)]["input_ids"].tolist() for i in ids]))
    assert found[0] == found[1]
    for path, message in (
        (f"{bucket}/none*.parquet", "no file matches"),
        (f"{bucket}/sample/none.parquet", "no such file, folder or bucket"),
        ("s3://nobucket/x.parquet", r"no such bucket \(NoSuchBucket\); create it"),
    ):
        with pytest.raises(UserError, match=message):
            opened(tmp_path, path=path)
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{name}")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()
    with pytest.raises(UserError, match="s3://texts/sample/: no credentials .*AWS_ACCESS_KEY_ID"):
        opened(tmp_path, path=f"{bucket}/sample/")
