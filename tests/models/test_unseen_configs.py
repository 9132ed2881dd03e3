"""Twelve random configurations of each model type of helpers/unseen.py against transformers; three without slow tests.

Logits, export, gradients, greedy text, rows of different lengths, packed documents, bf16, and the losses of a run.
"""

from copy import deepcopy

import pytest
import torch
from helpers.cases import slow_except
from helpers.tiny_models import relative_error
from helpers.unseen import MODEL_TYPES, SEEDS, TOKENS, make_pair, product_per_row
from safetensors.torch import load_file
from torch.nn import functional as F

import toolkit
from toolkit.checkpoints.folder import load_model
from toolkit.checkpoints.hf.export_hf import export_hf, to_hf_names
from toolkit.inference import decode
from toolkit.inference.generate import complete, generate
from toolkit.inference.sampling import GREEDY
from toolkit.models import moe
from toolkit.models.families import family_of
from toolkit.ui.loggers import read_metrics

CASES = [(name, seed) for name in MODEL_TYPES for seed in SEEDS]
FAST = [(name, seed) for name, kind in MODEL_TYPES.items() for seed in kind.fast_seeds]
CURVES = [(name, seed) for name, kind in MODEL_TYPES.items() for seed in kind.curve_seeds]


@pytest.fixture(scope="module", params=slow_except(FAST, CASES), ids=lambda case: f"{case[0]}-{case[1]}")
def pair(request, tmp_path_factory):
    return make_pair(*request.param, tmp_path_factory.mktemp("pair"))


def random_ids(*size: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, TOKENS, size, generator=torch.Generator().manual_seed(seed))


TRAINED = random_ids(80, 33, seed=3) % 8


def load_tensors(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@torch.no_grad()
def test_logits_equal_those_of_transformers(pair):
    kind, ids = pair.kind, random_ids(2, 48)
    native = pair.native_in(kind.dtype).eval()
    with kind.exactly():
        expected, logits = pair.hf_in(kind.dtype)(ids).logits, native(ids)
    assert ((logits - expected).abs().max() / expected.abs().max()).item() < kind.logits
    if kind.second_form is not None:
        forms = [pair.hf(ids).logits]
        with kind.second_form():
            forms.append(pair.hf(ids).logits)
        assert not torch.equal(*forms)
        ours, *theirs = (rms_errors(logits, expected).norm() for logits in (pair.native.eval()(ids), *forms))
        assert ours <= 2 * max(theirs)


@torch.no_grad()
def test_export_has_the_same_tensors_and_model(pair, tmp_path):
    export_hf(pair.native_dir, tmp_path / "out")
    before, after = load_tensors(pair.hf_dir), load_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    exported, ids = pair.kind.from_pretrained(tmp_path / "out", dtype=torch.float32).eval(), random_ids(2, 48)
    exported = deepcopy(exported)  # weights mapped from a file are not aligned, and their products round differently
    assert torch.equal(exported(ids).logits, pair.hf(ids).logits)  # config.json too


def test_gradients_of_each_tensor_equal_those_of_transformers(pair, tmp_path):
    """Compared under the names on disk: transformers fuses the experts' tensors in memory."""
    kind, ids = pair.kind, random_ids(2, 49)
    native = pair.native_in(kind.dtype).train()
    with kind.exactly():
        hf = pair.hf_in(kind.dtype)
        loss = F.cross_entropy(hf(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
        hf.save_pretrained(tmp_path, state_dict=gradients_of(loss, hf))
        loss, n_tokens = native(ids[:, :-1], ids[:, 1:])
        gradients = gradients_of(loss / n_tokens, native)
    expected = load_tensors(tmp_path)
    actual = dict(to_hf_names(family_of(native.config).weight_map(native.config), gradients))
    assert actual.keys() == expected.keys()
    assert sum(gradient.any().item() for gradient in actual.values()) > 0.5 * len(actual)  # experts may be unused
    errors = {name: (actual[name] - gradient).norm().item() for name, gradient in expected.items()}
    norms = {name: gradient.norm().item() for name, gradient in expected.items()}
    rounding = 1e-7 * max(norms.values())  # the gradient of a router of one expert per token is zero
    assert not {name: error for name, error in errors.items() if error > kind.gradients * norms[name] + rounding}


def gradients_of(loss: torch.Tensor, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradient of each tensor of the state dict; zeros for buffers and unused parameters."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    by_name = {name: grad for name, grad in zip(weights, found, strict=True) if grad is not None}
    return {name: by_name.get(name, torch.zeros_like(tensor)) for name, tensor in model.state_dict().items()}


@torch.no_grad()
def test_greedy_text_is_equal_with_cache_without_and_in_transformers(pair, monkeypatch):
    """The prompt is read in chunks of 7 tokens."""
    monkeypatch.setattr(decode, "PREFILL", 7)
    native, prompt = pair.native.eval(), random_ids(20, seed=6)
    text = list(generate(native, prompt, max_new_tokens=10, sampling=GREEDY))
    row = torch.cat([prompt, torch.tensor(text)])[None]
    without_cache, of_hf = (logits[0, 19:-1].argmax(-1).tolist() for logits in (native(row), pair.hf(row).logits))
    assert text == without_cache == of_hf
    cache, ids = native.make_cache(2, 33), random_ids(2, 33)  # greedy text may repeat itself
    cached = torch.cat([native(piece, kv_cache=cache) for piece in ids.split([7, 20] + [1] * 6, dim=1)], dim=1)
    assert relative_error(cached, native(ids)) < pair.kind.parts


@torch.no_grad()
def test_rows_of_different_lengths_continue_as_each_alone(pair):
    native, ids = pair.native.eval(), random_ids(2, 20, seed=7)
    prompts = [ids[0, :5], ids[1]]
    together = complete(native, prompts, max_new_tokens=6, sampling=GREEDY)
    assert together == [complete(native, [prompt], max_new_tokens=6, sampling=GREEDY)[0] for prompt in prompts]


def test_n9_packed_documents_are_isolated(pair, monkeypatch):
    """Another first document moves neither logits nor gradients of the others, not by one bit."""
    # matrix products of other sizes round differently: compute each token's experts alone
    monkeypatch.setattr(moe, "grouped_product", product_per_row)
    native, row, lengths = pair.native.train(), random_ids(1, 64), (27, 24, 13)
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    other = torch.where(documents == 0, (row + 7) % TOKENS, row)
    labels = torch.where(documents == 0, -100, row.roll(-1, 1))[0, :-1]
    logits = [native(ids, positions=positions, documents=documents)[0] for ids in (row, other)]
    gradients = [gradients_of(F.cross_entropy(one[:-1], labels), native) for one in logits]
    assert torch.equal(logits[0][27:], logits[1][27:]) and not torch.equal(logits[0][:27], logits[1][:27])
    assert [name for name, gradient in gradients[0].items() if not torch.equal(gradient, gradients[1][name])] == []
    alone = torch.cat([native(document)[0] for document in row.split(lengths, dim=1)])
    assert relative_error(logits[0].detach(), alone.detach()) < pair.kind.parts


@torch.no_grad()
def test_bf16_is_as_close_to_fp32_as_transformers(pair):
    ids = random_ids(2, 48)
    exact, native = pair.hf(ids).logits, pair.native_in(torch.bfloat16)
    # rounding routes tokens to other experts, in both models: compare tokens whose experts it leaves alone
    part = 0.25 if native.config.n_expert else 0.5
    logits = native(ids), pair.hf_in(torch.bfloat16)(ids).logits
    ours, theirs = (rms_errors(one, exact).quantile(part) for one in logits)
    assert ours <= pair.kind.bf16 * theirs


def rms_errors(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the error of each token."""
    return (actual.float() - expected).pow(2).mean(-1).sqrt().flatten()


class Rows(torch.utils.data.IterableDataset):
    """The rows in order."""

    def __iter__(self):
        yield from TRAINED


@pytest.mark.slow
@pytest.mark.parametrize("pair", CURVES, indirect=True, ids=lambda case: f"{case[0]}-{case[1]}")
def test_losses_of_a_run_equal_those_of_a_plain_loop(pair, tmp_path):
    """20 steps of AdamW over transformers' model, and over toolkit's in two micro-batches."""
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}
    hf, expected = pair.kind.from_pretrained(pair.hf_dir, dtype=torch.float32), []
    optimizer = torch.optim.AdamW(hf.parameters(), **options)
    for batch in TRAINED.split(4):
        loss = F.cross_entropy(hf(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    native = load_model(pair.native_dir)
    toolkit.train(
        native, Rows(), out_dir=tmp_path / "run", accelerator="cpu", devices=1, precision="32-true",
        train={"global_batch_size": 4, "micro_batch_size": 2, "max_steps": 20, "learning_rate": 1e-3, "max_norm": 0,
               "lr_schedule": "constant", "lr_warmup_steps": 0, "save_interval": 0},
        optimizer={"name": "AdamW", "betas": options["betas"], "weight_decay": 0.0},
    )  # fmt: skip
    losses = [row["loss"] for row in read_metrics(tmp_path / "run" / "logs" / "metrics.csv")]
    sure = 3 if native.config.n_expert else 20  # after that, rounding may route a token to another expert
    assert losses[:sure] == pytest.approx(expected[:sure], rel=pair.kind.curve)
    assert losses == pytest.approx(expected, rel=5e-3) and expected[-1] < 0.9 * expected[0]
