"""Damage valid files: bits, lengths and numbers of any format, values of JSON and YAML, and content that would run."""

import gzip
import io
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.hostile import ESCAPES, EXTREMES, MARKUP, SLOW_TEMPLATES, TAGS, VALUES, Runs, damage


def as_json(content: bytes, chance: random.Random) -> bytes:
    """Replace, remove, move, rename or repeat a value at random places."""
    try:
        values = json.loads(content)
    except ValueError:  # not of this form, such as one of several lines
        return damage(content, chance)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        values = _change_a_value(values, chance)
    text = json.dumps(values, ensure_ascii=chance.random() < 0.5)
    deep = chance.choice([10, 62, 66, 1000, 100_000])
    text = text.replace('"__DEEP__"', "[" * deep + "]" * deep, 1)
    if chance.random() < 0.05:
        text = text.replace(":", ":" + "9" * chance.choice([300, 5000]), 1)
    if chance.random() < 0.05 and text.startswith("{") and isinstance(values, dict) and values:
        name = json.dumps(chance.choice(list(values)))
        text = f"{{{name}: {json.dumps(chance.choice(VALUES[:20]))}, {text[1:]}"
    encoding = chance.choice(["utf-8"] * 20 + ["utf-16", "utf-8-sig", "latin-1"])
    return text.encode(encoding, chance.choice(["surrogatepass", "replace"]) if "utf" in encoding else "replace")


def _change_a_value(values: Any, chance: random.Random) -> Any:
    places = list(_places(values))
    if not places or chance.random() < 0.02:
        return chance.choice(VALUES)
    holder, key = chance.choice(places)
    way = chance.randrange(6)
    if way == 0:
        del holder[key]
    elif way == 1 and isinstance(holder, dict):
        holder[chance.choice([chance.choice(places)[1], "", "a" * 300, "\x1b", "é"])] = holder.pop(key)
    elif way == 2:
        other, name = chance.choice(places)
        holder[key] = json.loads(json.dumps(other[name]))
    elif way == 3 and type(holder[key]) in (int, float) and abs(holder[key]) < 1e300:
        holder[key] = chance.choice([-holder[key], holder[key] + 1, holder[key] * 2**20, holder[key] / 3, 0])
    else:
        hostile = MARKUP if isinstance(holder[key], str) and chance.random() < 0.5 else VALUES
        holder[key] = json.loads(json.dumps(chance.choice(hostile)))
    return values


def _places(value: Any) -> Any:
    """Yield (container, key) of each value inside."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def as_yaml(content: bytes, chance: random.Random) -> bytes:
    """As JSON, which is YAML; or with a tag instead of a value."""
    import yaml

    if chance.random() < 0.3:
        lines = content.decode().splitlines()
        number = chance.randrange(len(lines))
        name, colon, _ = lines[number].partition(":")
        lines[number] = f"{name}{colon} {chance.choice(TAGS)}"
        return "\n".join(lines).encode()
    return as_json(json.dumps(yaml.safe_load(content)).encode(), chance)


def as_lines(content: bytes, chance: random.Random) -> bytes:
    """Change one line, of JSON or of a table."""
    lines = content.splitlines()
    number = chance.randrange(len(lines))
    if lines[number].startswith(b"{"):
        lines[number] = as_json(lines[number], chance)
    else:
        cells = lines[number].split(b",")
        value = str(chance.choice(VALUES)).encode(errors="surrogatepass")
        cells[chance.randrange(len(cells))] = chance.choice(
            [value, b'"' + value, b"\r", b",", b"nan", b"1e999", b"\xff"]
        )
        lines[number] = b",".join(cells)
    return chance.choice([b"\n", b"\n", b"\r\n", b"\n\n"]).join(lines)


def as_template(content: bytes, chance: random.Random) -> bytes:
    text = content.decode()
    start = chance.randrange(len(text) + 1)
    hostile = chance.choice(SLOW_TEMPLATES if chance.random() < 0.02 else ESCAPES)
    part = chance.choice([hostile, "{% if %}", "{{", "%}", "{% endfor %}", "{#", "{{ eos_token }}", "{{ messages }}"])
    return (text[:start] + part + text[start + chance.choice([0, 0, 5]) :]).encode()


def as_safetensors(content: bytes, chance: random.Random) -> bytes:
    """Change the header's values, its length, or both."""
    (size,) = struct.unpack("<Q", content[:8])
    header = as_json(content[8 : 8 + size], chance)
    length = chance.choice([len(header)] * 8 + [size, *(value % 2**64 for value in EXTREMES)])
    return struct.pack("<Q", length) + header + content[8 + size :]


def as_zip(content: bytes, chance: random.Random) -> bytes:
    """Change an entry of a zip file: its content, its name, or whether it is compressed."""
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(changed, "w") as target:
        entries = source.infolist()
        chosen = chance.choice([*entries, *[e for e in entries if e.filename.endswith(".pkl")] * 3])
        for entry in entries:
            data, name = source.read(entry), entry.filename
            way = chance.randrange(6) if entry is chosen else None
            if way == 0 and name.endswith(".pkl"):
                data = pickle.dumps({"a": Runs()}, protocol=chance.choice([0, 2, 4]))
            elif way == 1:
                name = chance.choice(["../a", "/etc/a", "", name + "x", entries[0].filename, "archive/constants.pkl"])
            elif way == 2:
                data = bytes(10_000_000)
            elif way is not None:
                data = damage(data, chance)
            packed = zipfile.ZIP_DEFLATED if way == 2 else zipfile.ZIP_STORED
            target.writestr(zipfile.ZipInfo(name or "a"), data, compress_type=packed)
    return changed.getvalue()


def as_pickle(content: bytes, chance: random.Random) -> bytes:
    """Replace the pickle by one that runs code, or its texts by others."""
    if chance.random() < 0.1:
        return pickle.dumps(chance.choice([Runs(), {"a": [Runs()]}, [1], None]), protocol=chance.choice([0, 2, 4]))
    old, new = (
        chance.choice([b"Metadata", b"storage_data", b"_StorageInfo", b"Size", b"torch", b"posix", b"offset"])
        for _ in "ab"
    )
    return damage(content.replace(old, new), chance) if chance.random() < 0.7 else content.replace(old, new)


def _packed(
    pack: Callable[[bytes], bytes], unpack: Callable[[bytes], bytes]
) -> Callable[[bytes, random.Random], bytes]:
    def change(content: bytes, chance: random.Random) -> bytes:
        if chance.random() < 0.01:  # a bomb: one line longer than the limit, of a few kB
            return pack(b'{"text": "' + b"a" * (70 << 20))
        changed = pack(as_lines(unpack(content), chance))
        return changed * chance.choice([1, 2]) + chance.choice([b"", b"rest"])

    return change


def zst(content: bytes) -> bytes:
    import pyarrow

    return pyarrow.Codec("zstd").compress(content, asbytes=True)


def _unzst(content: bytes) -> bytes:
    import pyarrow

    return pyarrow.CompressedInputStream(io.BytesIO(content), "zstd").read()


KINDS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".json": as_json, ".yaml": as_yaml, ".jsonl": as_lines, ".csv": as_lines, ".jinja": as_template,
    "COMPLETE": as_json, ".safetensors": as_safetensors, ".pth": as_zip, ".lora": as_zip, ".metadata": as_pickle,
    ".gz": _packed(gzip.compress, gzip.decompress), ".zst": _packed(zst, _unzst),
}  # fmt: skip


def mutate(name: str, content: bytes, chance: random.Random) -> bytes:
    """Return a damaged copy of a file's content; the format follows from its name."""
    change = next((KINDS[end] for end in KINDS if Path(name).name.endswith(end)), damage)
    if chance.random() < 0.6:
        content = change(content, chance)
        return content if chance.random() < 0.9 else damage(content, chance)
    return damage(content, chance)
