"""The synthetic task of the paper: a run of a letter at a random position."""

import math

import pytest
import torch
from toolkit_free_transformer.letters import Letters, entropy_per_token

from toolkit.errors import UserError
from toolkit.models.families import get_config
from toolkit.models.gpt import build_model
from toolkit.models.init import Materializer, weight_initializer


def test_lines_have_a_run_of_their_letter_at_a_random_position():
    data = Letters(num_rows=200, val_rows=5).prepare(tokenizer=None, max_seq_length=41, report=print)
    starts, noise = set(), 0
    for i in range(200):
        row = data.train[i]
        text = data.tokenizer.decode([*row["input_ids"].tolist(), int(row["labels"][-1])])
        assert torch.equal(row["input_ids"][1:], row["labels"][:-1]) and len(row["labels"]) == 41
        assert text[1] == ">" and len(text) == 42 and set(text[2:]) <= {text[0], "_", "!"}
        at = [k for k, character in enumerate(text[2:]) if character == text[0]]
        assert at[-1] - at[0] < 8
        starts.add(at[0])
        noise += text.count("!")
    assert len(starts) > 25 and abs(noise / (200 * 40) - 1 / 16) < 0.01
    assert not torch.equal(data.val[0]["input_ids"], data.train[0]["input_ids"])
    assert entropy_per_token(40, 8, 0.0) == pytest.approx(math.log(33) / 41)
    with pytest.raises(UserError, match="data.run 8: does not fit into a line of 7 characters"):
        Letters().prepare(tokenizer=None, max_seq_length=8)


@pytest.mark.slow
def test_the_latent_learns_what_the_decoder_cannot_know():
    """First the loss of a decoder, the entropy of the position; then the latents carry a part of it."""
    data = Letters(run=4, noise=0.0).prepare(tokenizer=None, max_seq_length=17, report=print)
    model = build_model(get_config("free-transformer-tiny").with_vocab_size(257))
    materialize = Materializer(model, weight_initializer(model, 2), "cpu")  # with some seeds latents collapse
    for module in model.modules():
        materialize(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)

    def batch(rows, start: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = [rows[start + i] for i in range(n)]
        return tuple(torch.stack([row[name] for row in found]) for name in ("input_ids", "labels"))

    for step in range(500):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1, (step + 1) / 20)
        loss, n = model(*batch(data.train, 32 * step, 32), sample_keys=torch.arange(32 * step, 32 * step + 32))
        (loss / n).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    model.loss_part_sums = {}
    with torch.no_grad():
        _, n = model(*batch(data.val, 0, 256))
    ce, prior_ce = (float(model.loss_part_sums[name] / n) for name in ("ce", "prior_ce"))
    assert ce < 0.8 * entropy_per_token(16, 4, 0.0) < prior_ce
