"""A tiny model that has memorized a few answers, as a folder with its own chat template."""

from pathlib import Path
from typing import Any

import torch

from helpers.sealing import seal
from toolkit.checkpoints.folder import write_model_files
from toolkit.data.chat.template import ChatTemplate
from toolkit.data.tokenizer import train_bpe
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT

ANSWERS = {"1": "eins", "2": "zwei 🎉", "3": "drei"}
STEPS = 90
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}Q{{ m['content'] }}A"
    "{% elif m['role'] == 'system' %}S{{ m['content'] }}{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)


def make_talker(folder: Path, block_size: int = 64, n_merges: int = 0, **changes: Any) -> Path:
    """Write the model; every byte is a token, and the commonest ``n_merges`` pairs of them. ``changes`` are of its
    config."""
    size = 257 + n_merges
    tokenizer = train_bpe(["abcabc"], vocab_size=size).with_files({"chat_template.jinja": TEMPLATE.encode()})
    template = ChatTemplate.from_tokenizer(tokenizer, None)
    torch.manual_seed(0)
    sizes = {"block_size": block_size, "vocab_size": size, "n_layer": 2, "n_head": 4, "n_embd": 64}
    config = ModelConfig(name="talker", **(sizes | changes))
    model = GPT(config)
    chats = []
    for first in ANSWERS:
        for second in ANSWERS:
            turns = [(role, text) for q in (first, second) for role, text in (("user", q), ("assistant", ANSWERS[q]))]
            chats.append(template.encode([{"role": r, "content": t} for r, t in turns], "all").ids)
    width = max(map(len, chats))
    ids = torch.tensor([chat + [0] * (width - len(chat)) for chat in chats])
    labels = torch.tensor([chat[1:] + [-100] * (width - len(chat)) for chat in chats])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)  # else rounding decides what is learned
    for _ in range(STEPS):
        loss, n_tokens = model(ids[:, :-1], labels)
        (loss / n_tokens).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    folder.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    write_model_files(folder, state_dict=state, config=config, hyperparameters=None, tokenizer=tokenizer)
    return seal(folder)
