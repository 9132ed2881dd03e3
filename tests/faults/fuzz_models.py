"""Foreign model folders and tokenizers: valid files to damage, and their readers."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from toolkit_interop.export_litgpt import export_litgpt
from toolkit_interop.peft.export_peft import export_peft
from toolkit_interop.peft.import_peft import check_base, import_peft
from toolkit_metric.evaluate import data_of_run

from tests.faults.states import shared, undisturbed
from toolkit.checkpoints.adapters import read_adapter_info
from toolkit.checkpoints.folder import find_model, read_model_config
from toolkit.checkpoints.hf.files import close
from toolkit.checkpoints.hf.import_hf import convert_sentencepiece, read_hf_config
from toolkit.checkpoints.hf.reader import find_weights
from toolkit.checkpoints.hf.sums import find_changed, write_sums
from toolkit.checkpoints.run.host_copy import named_tensors
from toolkit.checkpoints.weights import load_state
from toolkit.data.chat.template import ChatTemplate
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.models.families import family_of, get_config, list_names_by_family
from toolkit.training.checkpoint_meta import read_callback_states, read_meta

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def changed(folder: Path, valid: dict[str, bytes]) -> list[str]:
    """Return the names of the files that are not as they were."""
    return [name for name in valid if (folder / name).read_bytes() != valid[name]]


@cache
def hf_configs() -> dict[str, dict[str, Any]]:
    configs = (get_config(names[0]).with_vocab_size(1000) for names in list_names_by_family().values())
    return {config.family: family_of(config).to_hf_config(config) for config in configs}


def make_hf_configs(folder: Path) -> list[str]:
    for family, values in hf_configs().items():
        (folder / family).mkdir()
        (folder / family / "config.json").write_text(json.dumps(values))
    return [f"{family}/config.json" for family in hf_configs()]


def read_hf_configs(folder: Path) -> None:
    texts = {f"{family}/config.json": json.dumps(values).encode() for family, values in hf_configs().items()}
    for name in changed(folder, texts):
        read_hf_config((folder / name).parent, "x")


def make_safetensors(folder: Path) -> list[str]:
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3, 4), "b.attn": torch.zeros(7, dtype=torch.bfloat16)}, folder / "one.safetensors")
    save_file({"c": torch.ones(2, dtype=torch.float64)}, folder / "two.safetensors")
    index = {"metadata": {"total_size": 78}, "weight_map": {"a": "one.safetensors", "c": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    write_sums(folder)
    return ["one.safetensors", "two.safetensors", "model.safetensors.index.json", "config.json", "SHA256SUMS"]


def read_safetensors(folder: Path) -> None:
    for read in (find_changed, lambda folder: [weight.read().sum() for weight in find_weights(folder).values()]):
        try:
            read(folder)
        except UserError:
            continue
        finally:
            close()


def read_pth(folder: Path) -> None:
    for path in (folder / "lit_model.pth.lora", folder / "trainer" / "state.pth"):
        for _, tensor in named_tensors(load_state(path)):
            tensor.double().sum()


def make_peft(folder: Path) -> list[str]:
    shutil.rmtree(folder)
    export_peft(undisturbed("adapters") / "final", folder)
    return ["adapter_config.json", "adapter_model.safetensors"]


def read_peft(folder: Path) -> None:
    import_peft(folder, read_model_config(shared()["base"]))
    check_base(folder, shared()["base"])


def read_run_files(folder: Path) -> None:
    for read in (read_meta, read_callback_states, read_adapter_info, lambda f: data_of_run(f, trust=True)):
        try:
            read(folder)
        except UserError:
            continue
    find_model(folder)


def make_litgpt(folder: Path) -> list[str]:
    shutil.rmtree(folder)
    export_litgpt(shared()["base"], folder)
    return ["model_config.yaml"]


def make_tokenizer(folder: Path) -> list[str]:
    from helpers.talker import TEMPLATE

    files = Tokenizer.load(shared()["base"]).with_files({"chat_template.jinja": TEMPLATE.encode()}).files
    files["special_tokens_map.json"] = b'{"eos_token": "<|endoftext|>", "bos_token": {"content": "<|endoftext|>"}}'
    files["generation_config.json"] = b'{"eos_token_id": [0], "bos_token_id": 0}'
    files.setdefault("tokenizer_config.json", b'{"eos_token": "<|endoftext|>", "chat_template": null}')
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return list(files)


def read_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    tokenizer.decode(tokenizer.encode("two words, é \U0001f600\n <|endoftext|>", eos=True))


def make_template(folder: Path) -> list[str]:
    make_tokenizer(folder)
    return ["chat_template.jinja"]


def read_template(folder: Path) -> None:
    template = ChatTemplate.from_tokenizer(Tokenizer.load(folder), None)
    template.encode(MESSAGES, "answers")
    template.encode_prompt(MESSAGES[:1])


def make_sentencepiece(folder: Path) -> list[str]:
    import sentencepiece

    text = folder / "text"
    text.write_text("".join(f"the model reads line {i} of words é\n" for i in range(300)))
    options = {"vocab_size": 300, "model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False}
    options |= {"unk_id": 0, "bos_id": 1, "eos_id": 2, "normalization_rule_name": "identity", "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(input=str(text), model_prefix=str(folder / "tokenizer"), **options)
    (folder / "tokenizer.vocab").unlink()
    text.unlink()
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}'
    )
    return ["tokenizer.model", "tokenizer.model", "tokenizer_config.json"]


def read_sentencepiece(folder: Path) -> None:
    convert_sentencepiece(folder / "tokenizer.model")
