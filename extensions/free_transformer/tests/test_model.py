"""The model: encoder, halves, loss, bounds, generation, options."""

import math
import queue
from dataclasses import replace

import pytest
import torch
from toolkit_free_transformer import FreeTransformer
from toolkit_free_transformer.iwae import iwae
from toolkit_free_transformer.latent import kl_divergence
from toolkit_serve.batcher import Batcher, Request
from torch.nn import functional as F

from toolkit.errors import UserError
from toolkit.inference.generate import generate
from toolkit.inference.sampling import Sampling
from toolkit.models.block import Block
from toolkit.models.config import ModelConfig
from toolkit.models.families import family_of, get_config
from toolkit.models.gpt import GPT, build_model
from toolkit.models.init import Materializer, weight_initializer
from toolkit.models.kv_cache import KVCache
from toolkit.models.lora import add_lora
from toolkit.models.lora_config import LoRAConfig

CONFIG = ModelConfig(
    family="free_transformer", block_size=32, vocab_size=60, n_layer=4, n_head=4, n_query_groups=2, n_embd=32,
    family_options={"latent_bits": 4},
)  # fmt: skip
IDS = torch.randint(60, (2, 12), generator=torch.Generator().manual_seed(0))
LABELS = IDS.roll(-1, 1)


def make(**options) -> FreeTransformer:
    model = build_model(replace(CONFIG, family_options={"latent_bits": 4} | options))
    materialize = Materializer(model, weight_initializer(model, 1), "cpu")
    for module in model.modules():
        materialize(module)
    with torch.no_grad():  # larger than the initial ones, so that everything matters
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model.eval()


def codes_of(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.randint(16, shape, generator=torch.Generator().manual_seed(seed))


def test_the_encoder_tells_positions_apart_and_sees_the_future():
    model = make()
    logits, z_logits = model(IDS, mode="training")
    assert logits.shape == (2, 12, 64) and z_logits.shape == (2, 12, 4)
    assert (z_logits[:, 1:] - z_logits[:, :-1]).abs().amax(2).min() > 1e-2  # one query: only its rotation differs
    changed = IDS.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 60
    assert (model(changed, mode="training")[1][:, 0] - z_logits[:, 0]).abs().max() > 1e-2


def test_without_latent_vectors_it_is_the_baseline():
    model = make()
    torch.nn.init.zeros_(model.latent.weight)
    baseline = GPT(replace(CONFIG, family="llama", family_options=None)).eval()
    shared = {k: v for k, v in model.state_dict().items() if not k.startswith(("encoder", "latent"))}
    baseline.load_state_dict(shared)
    expected = baseline(IDS)
    torch.testing.assert_close(model(IDS, mode="inference"), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(IDS, mode="training")[0], expected, rtol=1e-5, atol=1e-6)


def test_the_decoder_is_causal_given_the_latents():
    model, codes = make(), codes_of((2, 12))
    expected = model(IDS, codes=codes)
    ids, changed = IDS.clone(), codes.clone()
    ids[:, 7:], changed[:, 7:] = 3, 5
    torch.testing.assert_close(model(ids, codes=changed)[:, :7], expected[:, :7])
    changed = codes.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 16
    difference = (model(IDS, codes=changed) - expected).abs().amax(dim=(0, 2))
    assert difference[:7].max() == 0 and difference[7:].min() > 1e-5


def test_losses_are_what_the_equations_say():
    model = make(free_bits=0.25)
    keys, parts = torch.tensor([4, 9]), {}
    labels = LABELS.clone()
    labels[1, 6:] = -100  # padding
    for training in (True, False):
        model.train(training)
        model.execute_with(seed=0)
        model.loss_part_sums = {}
        with torch.no_grad():
            loss, n = model(IDS, labels, sample_keys=keys)
        parts[training] = {name: float(value) for name, value in model.loss_part_sums.items()}
        assert n == 18 and not any(value.requires_grad for value in model.loss_part_sums.values())
        ce, kl = parts[training]["ce"], parts[training]["kl"]
        if training:
            z_logits = torch.cat([model(IDS[:1], mode="training")[1][0], model(IDS[1:, :6], mode="training")[1][0]])
            per_token = kl_divergence(z_logits).detach()
            torch.testing.assert_close(float(per_token.sum()), kl, rtol=1e-4, atol=1e-5)
            paid = (per_token - 0.25 * math.log(2)).clamp(min=0).sum()
            torch.testing.assert_close(float(loss), ce + float(paid), rtol=1e-5, atol=1e-5)
        else:
            torch.testing.assert_close(float(loss), ce + kl, rtol=1e-6, atol=1e-6)
            first = model(IDS[:1], mode="training", sample_keys=keys[:1])[0]
            second = model(IDS[1:, :6], mode="training", sample_keys=keys[1:])[0]
            expected = F.cross_entropy(first[0], labels[0], reduction="sum")
            expected += F.cross_entropy(second[0], labels[1, :6], reduction="sum")
            torch.testing.assert_close(ce, float(expected), rtol=1e-5, atol=1e-4)
    assert "prior_ce" not in parts[True] and parts[False]["prior_ce"] > 0
    assert parts[False]["elbo"] == pytest.approx(parts[False]["ce"] + parts[False]["kl"])


def test_n9_packed_documents_have_latents_of_their_own():
    model = make()
    documents = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    packed = model(IDS[:1], mode="training", documents=documents, positions=positions)[1]
    torch.testing.assert_close(packed[:, :5], model(IDS[:1, :5], mode="training")[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed[:, 5:], model(IDS[:1, 5:], mode="training")[1], rtol=1e-5, atol=1e-5)
    labels = LABELS[:1].clone()
    labels[:, 3:5], labels[:, 9:] = -100, -100  # what comes after the last label of a document changes nothing
    model.loss_part_sums = {}
    assert torch.isfinite(model(IDS[:1], labels, documents=documents, positions=positions)[0])
    expected = sum(kl_divergence(model(IDS[:1, a:b], mode="training")[1]).sum() for a, b in ((0, 3), (5, 9)))
    torch.testing.assert_close(model.loss_part_sums["kl"], expected, rtol=1e-4, atol=1e-4)


def test_generation_draws_each_latent_once_and_the_cache_changes_nothing():
    model, cache = make(), KVCache(CONFIG, 1, 0)
    prompt, seen = IDS[0, :5], []
    forward = model._upper
    model._upper = lambda x, inputs, codes, z_logits=None: seen.append(codes) or forward(x, inputs, codes, z_logits)
    tokens = list(generate(model, prompt, max_new_tokens=6, seed=11, cache=cache))
    codes = torch.cat(seen, dim=1)
    assert codes.shape == (1, 10)  # one for each position, the last token is not read
    of_prompt = model._draw(model(prompt[None], mode="training")[1], torch.zeros(1, dtype=torch.long), 11)
    assert torch.equal(codes[:, :5], of_prompt)
    ids = torch.cat([prompt, torch.tensor(tokens)])[None, :10]
    uncached = model(ids, codes=codes)
    replay = KVCache(CONFIG, 1, 10)
    replay.prompt, replay.seed = prompt[None], 11
    cached = torch.cat([model(part, kv_cache=replay) for part in ids.split([3, 2, 1, 1, 1, 1, 1], dim=1)], dim=1)
    torch.testing.assert_close(cached, uncached, rtol=1e-5, atol=1e-5)
    again = list(generate(make(), prompt, max_new_tokens=6, seed=11))
    assert again == tokens
    other = torch.cat([c[:, :1] for c in seen[-4:]])
    assert len(set(other.flatten().tolist())) > 1  # positions differ


def test_served_answers_are_the_generated_ones():
    model, got = make(), queue.Queue()
    batcher = Batcher(model, 4, 32)
    assert batcher.n_rows == 1
    prompts = [IDS[0, :5].tolist(), IDS[1, :8].tolist()]
    for prompt in prompts:
        batcher.waiting.put(Request(prompt, 12, Sampling(1.0, None, 1.0), 11, (), None, got.put))
    batcher.start()
    answers = [[item.id for item in iter(lambda: got.get(timeout=60), "length")] for _ in prompts]
    batcher.stop()
    assert answers == [list(generate(make(), torch.tensor(p), max_new_tokens=12, seed=11)) for p in prompts]


def test_iwae_falls_with_k_from_the_elbo():
    model = make()
    model.loss_part_sums = {}
    elbo = sum(float(iwae(model, IDS, LABELS, 1, seed=seed).sum()) for seed in range(16)) / 16
    model(IDS, LABELS)
    assert float(model.loss_part_sums["elbo"]) == pytest.approx(elbo, rel=0.1)
    assert float(iwae(model, IDS, LABELS, 16).sum()) < elbo - 0.1
    nothing = make()
    torch.nn.init.zeros_(nothing.encoder.readout.weight)  # q is the prior, and without vectors all draws are equal
    torch.nn.init.zeros_(nothing.latent.weight)
    exact = F.cross_entropy(nothing(IDS).mT, LABELS, reduction="sum")
    torch.testing.assert_close(iwae(nothing, IDS, LABELS, 3).sum(), exact, rtol=1e-5, atol=1e-4)


def test_names_of_the_guide():
    from toolkit_free_transformer import DecoderBlock, ModelConfig

    assert DecoderBlock is Block
    with pytest.raises(UserError, match=r"ModelConfig: does not exist; use get_config\(.free-transformer-tiny"):
        ModelConfig(vocab_size=3, hidden_dim=4)


def test_options_are_checked():
    for key in ("latent_bits", "latent_dim"):
        with pytest.raises(UserError, match=r"latent_bits 64: 2\^64 codes.*1 to 16"):
            FreeTransformer(replace(CONFIG, family_options={key: 64}))
    for options, message in (
        ({"latent_bits": 4, "free_bits": 5}, "free_bits 5: must be from 0 to latent_bits 4"),
        ({"mapper": "other"}, "mapper other: must be exact or factored"),
        ({"encoder": 1}, "encoder 1: must be true or false"),
        ({"free_bit": 1}, "free_bit: no such option of this family; did you mean"),
    ):
        with pytest.raises(UserError, match=message):
            family_of(CONFIG).validate(replace(CONFIG, family_options=options))
    with pytest.raises(UserError, match="n_layer 1: must be at least 2"):
        FreeTransformer(replace(CONFIG, n_layer=1))
    with pytest.raises(UserError, match="model_config.norm_class_name LayerNorm"):
        FreeTransformer(replace(CONFIG, norm_class_name="LayerNorm"))
    assert get_config("free-transformer-tiny").family_options["latent_bits"] == 6
    without = make(encoder=False)
    assert without(IDS, LABELS)[0] > 0  # of the prior: also a bound
    with pytest.raises(UserError, match="cannot be trained without an encoder"):
        without.train()(IDS, LABELS)


def test_every_weight_is_trained_by_either_mapper_and_adapters_leave_the_latent_frozen():
    for mapper in ("exact", "factored"):
        model = make(mapper=mapper).train()
        model(IDS, LABELS)[0].backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters()), mapper
    add_lora(model, LoRAConfig(r=2))
    assert not any(p.requires_grad for n, p in model.named_parameters() if n.startswith(("encoder", "latent")))
