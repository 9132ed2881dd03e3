import pytest
import torch

from toolkit.errors import GuardError, UserError
from toolkit.inference.sampling import GREEDY, NONFINITE, Sampling, draw_uniforms, require_finite, sample

PROBABILITIES = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1])  # most likely first: 1, 3, 2, 4, 0
LOGITS = PROBABILITIES.log()[None]


def frequencies(draws: int = 40_000, vocab_size: int | None = None, **settings) -> torch.Tensor:
    uniform = torch.rand(draws, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids = sample(LOGITS.expand(draws, -1), Sampling(**settings), vocab_size=vocab_size, uniform=uniform)
    return torch.bincount(ids, minlength=5) / draws


def normalized(*kept: int, temperature: float = 1.0) -> torch.Tensor:
    weights = torch.zeros(5)
    weights[list(kept)] = PROBABILITIES[list(kept)] ** (1 / temperature)
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, normalized(0, 1, 2, 3, 4)),
        ({"temperature": 0.5}, normalized(0, 1, 2, 3, 4, temperature=0.5)),
        ({"temperature": 2.0}, normalized(0, 1, 2, 3, 4, temperature=2.0)),
        ({"top_k": 0}, normalized(0, 1, 2, 3, 4)),
        ({"top_k": None}, normalized(0, 1, 2, 3, 4)),
        ({"top_k": 2}, normalized(1, 3)),
        ({"top_k": 99}, normalized(0, 1, 2, 3, 4)),
        ({"top_p": 0.39}, normalized(1)),  # the most likely token alone reaches it
        ({"top_p": 0.41}, normalized(1, 3)),  # needs the second
        ({"top_p": 0.69}, normalized(1, 3)),
        ({"top_p": 0.71}, normalized(1, 3, 2)),
        ({"top_p": 1e-6}, normalized(1)),
        ({"top_k": 3, "top_p": 0.8}, normalized(1, 3)),  # two of the three have 0.82
        ({"top_k": 3, "top_p": 0.8, "temperature": 2.0}, normalized(1, 3, 2, temperature=2.0)),
        ({"vocab_size": 3}, normalized(0, 1, 2)),
        ({"vocab_size": 3, "top_k": 1}, normalized(1)),
    ],
)
def test_sample_frequencies_match_probabilities(settings, expected):
    found = frequencies(**settings)
    assert ((found == 0) == (expected == 0)).all()  # nothing outside the set, everything inside
    torch.testing.assert_close(found, expected, atol=0.01, rtol=0)  # four standard deviations


def test_temperature_zero_is_greedy_and_never_padding():
    logits = torch.tensor([[0.0, 2.0, 1.0, 9.0], [3.0, 2.0, 1.0, 9.0]])
    assert sample(logits, Sampling(0, 2, 0.5), vocab_size=3).tolist() == [1, 0]
    assert sample(logits.bfloat16(), GREEDY).tolist() == [3, 3]
    uniform = torch.tensor([0.3, 0.9])
    for tiny in (1e-30, 1e-40, 1e-300):  # no overflow close to 0
        assert sample(logits, Sampling(tiny), vocab_size=3, uniform=uniform).tolist() == [1, 0]


def test_top_k_keeps_exactly_k_with_ties():
    ids = sample(torch.zeros(2000, 6), Sampling(top_k=2), uniform=torch.rand(2000))
    assert len(set(ids.tolist())) == 2


def test_the_numbers_of_a_seed_do_not_depend_on_the_batch():
    alone, together = draw_uniforms([2], 5), draw_uniforms([1, 2, None, None], 5)
    assert torch.equal(alone[0], together[1]) and len(set(together.flatten().tolist())) == 20
    torch.manual_seed(0)
    again = draw_uniforms([None], 5)
    torch.manual_seed(0)
    assert torch.equal(draw_uniforms([None], 5), again)


def test_the_ends_of_the_uniform_numbers_select_possible_tokens():
    logits = torch.tensor([[0.0, -200.0, 0.0, -200.0]])  # two of probability 0 in fp32
    for settings in ({}, {"top_k": 3}, {"top_p": 0.9}):
        found = [int(sample(logits, Sampling(**settings), uniform=torch.tensor([u]))) for u in (0.0, 1.0)]
        assert found == [0, 2], settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "--temperature -0.1: must not be negative"),
        ({"temperature": float("nan")}, "--temperature nan: must not"),
        ({"top_k": -1}, "--top_k -1: must not be negative"),
        ({"top_p": -0.5}, "--top_p -0.5: must be greater than 0"),
        ({"top_p": 0.0}, "--top_p 0.0: must be greater than 0"),
        ({"top_p": 1.5}, "--top_p 1.5: must be"),
    ],
)
def test_settings_out_of_range_name_the_flag(settings, message):
    with pytest.raises(UserError, match=message):
        Sampling(**settings)


def test_nonfinite_logits_raise_guard_error():
    for bad in (float("nan"), float("inf"), float("-inf")):
        ids = sample(torch.tensor([[0.0, bad, 3.0], [0.0, 1.0, 0.0]]), GREEDY)
        assert ids.tolist() == [NONFINITE, 1]
        with pytest.raises(GuardError, match="not finite"):
            require_finite(ids.tolist())
