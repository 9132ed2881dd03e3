"""`toolkit merge_lora`: what comes along into a separate folder, and a merge that was killed."""

from pathlib import Path

from helpers.sealing import seal

from tests.checkpoints.test_adapters import make
from toolkit.checkpoints.manifest import read_manifest, write_manifest
from toolkit.checkpoints.store import WEIGHTS
from toolkit.cli import main


def add_companions(folder: Path) -> list[str]:
    """Add all companion files to a folder; return the names of all that belong to its tokenizer."""
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "padding_side": "left"}')
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    (folder / "added_tokens.json").write_text('{"<|endoftext|>": 0}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    return [
        "tokenizer.json", "generation_config.json", "chat_template.jinja", "tokenizer_config.json",
        "special_tokens_map.json", "added_tokens.json", "additional_chat_templates/tool_use.jinja",
    ]  # fmt: skip


def test_all_tokenizer_files_are_copied(tmp_path):
    _, folder, _ = make(tmp_path)
    companions = add_companions(folder)
    (folder / "config.json").write_text('{"_name_or_path": "org/base"}')
    seal(folder)
    assert main(["merge_lora", str(folder), "--out_dir", str(tmp_path / "merged")]) == 0
    assert not (tmp_path / "merged" / "config.json").exists()  # another model's: convert_to_hf writes its own
    for name in companions:
        assert (tmp_path / "merged" / name).read_bytes() == (folder / name).read_bytes(), name


def test_merge_in_place_that_was_killed_before_it_wrote_the_checksum_can_be_repeated(tmp_path, refusal):
    _, folder, _ = make(tmp_path)
    seal(folder)
    assert main(["merge_lora", str(folder)]) == 0
    files = read_manifest(folder)
    write_manifest(folder, {name: checksum for name, checksum in files.items() if name != WEIGHTS})
    assert main(["merge_lora", str(folder)]) == 0
    assert read_manifest(folder) == files
    assert "already holds merged weights" in refusal("merge_lora", folder)
