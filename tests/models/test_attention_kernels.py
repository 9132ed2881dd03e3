"""Attention kernels for CUDA against masks: the same calls on a CPU with flash attention in plain torch."""

import itertools
import warnings
from dataclasses import replace
from unittest import mock

import pytest
import torch
from helpers.cases import check_each, slow_except
from helpers.flash import kernels_on_cpu, newer_flash
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

from tests.models.test_gpt import small
from tests.models.test_masks import reference_mask
from toolkit.data.batch import NO_ROUNDING, collate
from toolkit.models import attention_dispatch, attention_kernels
from toolkit.models.activation_checkpointing import checkpoint_blocks
from toolkit.models.attention import attend
from toolkit.models.attention_dispatch import KernelCase, check_kernel, choose_kernel, kernel_of
from toolkit.models.attention_kernels import Documents, document_bounds, make_flash_mask, make_flex_mask
from toolkit.models.block import Block
from toolkit.models.gpt import GPT
from toolkit.models.masks import AttentionMask, KernelChoice
from toolkit.objectives.inputs import forward_inputs

CPU = torch.device("cpu")
WINDOWS = {"n_layer": 3, "sliding_window_size": 7, "sliding_window_indices": [1, 0, 1]}
SINKS = WINDOWS | {"attention_sinks": True}
SOFTCAP = WINDOWS | {"attention_logit_softcapping": 5.0}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 8}
MODELS = {
    "packed": {},
    "windows": WINDOWS | {"norm_qk": True},
    "sinks": SINKS,
    "softcap": SOFTCAP,
    "latent": {"latent_attention": LATENT, "n_query_groups": 4, "head_size": 24},
}


def packings(T: int) -> list[torch.Tensor]:
    """Return documents (2, T): random packings, with padding or without, and rows of one document."""
    generator = torch.Generator().manual_seed(T)
    cases = [torch.zeros(2, T, dtype=torch.int64)]
    for n in (1, 3, 8):
        ends = torch.randint(1, T, (2, n), generator=generator).sort(1).values
        cases.append((torch.arange(T) >= ends[..., None]).sum(1))
    cases[-1][1, T // 2 :] = -1
    return cases


def with_bounds(documents: torch.Tensor, device: torch.device = CPU) -> Documents:
    return Documents(documents.to(device), document_bounds(documents).to(device))


def test_n9_bounds_and_blocks_of_every_packing_rebuild_its_mask():
    for T in (9, 128, 300):
        for documents in packings(T):
            bounds = document_bounds(documents)
            assert bounds.cu_seqlens.dtype == torch.int32
            size = len(bounds.cu_seqlens) - 1
            assert size & (size - 1) == 0, "few different sizes"
            document = torch.bucketize(torch.arange(2 * T), bounds.cu_seqlens[1:].long(), right=True).view(2, T)
            for window in (None, 1, 5, 150):
                query, key = torch.arange(T)[:, None], torch.arange(T)
                causal = (key <= query) & (key > query - (window or T))
                expected = causal & (documents[:, :, None] == documents[:, None])
                assert torch.equal(expected[:, :9, :9], reference_mask(0, 9, window, documents[:, :9]))
                assert torch.equal(causal & (document[:, :, None] == document[:, None]), expected)
                assert make_flash_mask(window, bounds).window == (-1 if window is None else window - 1)
                assert torch.equal(mask_of_blocks(make_flex_mask((2, T), window, documents, CPU), T), expected)
            assert bounds.max_length >= max(len(row.unique_consecutive(return_counts=True)[1]) for row in documents)


def mask_of_blocks(mask: attention_kernels.FlexMask, T: int) -> torch.Tensor:
    """Return the mask as FlexAttention's forward pass computes it; its backward pass must see the same."""
    at, n = torch.arange(T), mask.kv[0].size(-1)
    partial = (at <= at[:, None]) & (at >= mask.first_key[:, :, None])
    both = []
    for seen, full in ((mask.kv, mask.full_kv), (mask.q, mask.full_q)):
        dense = [
            torch.zeros(2, n, n, dtype=torch.bool).scatter(2, indices[:, 0].long(), at[:n] < number[:, 0, :, None])
            for number, indices in ((number, indices) for number, indices in (seen, full))
        ]
        if seen is mask.q:
            dense = [blocks.mT for blocks in dense]
        wide = [b.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :T, :T] for b in dense]
        assert not (wide[0] & wide[1]).any()
        both.append((wide[0] & partial) | wide[1])
    assert torch.equal(*both)
    return both[0]


def cases() -> list[KernelCase]:
    kinds = [("flash", False, None), ("flash", True, None), ("flex", True, 20.0)]
    return [
        KernelCase(KernelChoice(name, always), CPU, torch.float64, (4, 2, 16), 0.2, softcap, True, *has)
        for name, always, softcap in kinds
        for has in itertools.product((False, True), (False, True))  # documents, context
    ]


@pytest.mark.parametrize("name", slow_except(["flash"], ["flash", "flex"]))
def test_kernels_and_their_gradients_match_masks(name):
    """The self-check in fp64; scores are soft-capped in fp32 with masks."""

    def check(case: KernelCase) -> None:
        with mock.patch.object(attention_dispatch, "TOLERANCE", 1e-13 if case.softcap is None else 1e-6):
            assert (found := check_kernel(case)) is None, found

    with kernels_on_cpu():
        check_each(check, ((case,) for case in cases() if case.kernel.name == name))


def loss_and_gradients(model: GPT, documents: torch.Tensor | None, dtype: torch.dtype) -> list[torch.Tensor]:
    ids = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(1))
    rows = None if documents is None else with_bounds(documents)
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        loss, _ = model(ids, ids, documents=rows)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("names", slow_except([("packed", "sinks")], [("packed", "sinks"), (*MODELS,)]))
def test_models_with_kernels_match_models_with_masks(names):
    for name in names:
        changes = MODELS[name]
        for documents in (None, packings(24)[3]):
            model = small("llama", **changes)
            expected = loss_and_gradients(model, documents, torch.float32)
            with kernels_on_cpu() as calls:
                found = loss_and_gradients(model, documents, torch.float32)
            n_layer, n_windows = (
                model.config.n_layer,
                sum(map(bool, map(model.config.window, range(model.config.n_layer)))),
            )
            n_flash = n_layer if documents is not None or name == "sinks" else n_windows
            n_checked = (1 + bool(n_windows)) * bool(n_flash)
            assert len(calls) == (0 if name == "softcap" else n_flash + n_checked), name
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@torch.no_grad()
@pytest.mark.parametrize("changes", slow_except([SINKS], [SINKS, SOFTCAP]), ids=["flash", "flex"])
def test_n9_kernels_see_one_document_only(changes):
    documents = packings(24)[2]
    ids = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(1))
    changed = torch.where(documents == documents[0, 0], (ids + 1) % 100, ids)
    others = documents != documents[0, 0]
    assert others.any()
    with kernels_on_cpu():
        model = small("llama", **changes)
        a, b = (model(x, documents=with_bounds(documents)) for x in (ids, changed))
        assert torch.equal(a[others], b[others]) and not torch.equal(a, b)


def test_autocast_computes_kernels_in_16_bits():
    """Also of queries and keys that QK-norm leaves in fp32, as on CUDA."""
    q, k, v = torch.randn(2, 4, 24, 16), torch.randn(2, 2, 24, 16), torch.randn(2, 2, 24, 16, dtype=torch.bfloat16)
    mask = AttentionMask(24, kernel_mask=make_flash_mask(7, None))
    with kernels_on_cpu() as calls, torch.autocast("cpu", torch.bfloat16):
        assert attend(q, k, v, mask, 0.25).dtype == torch.bfloat16
    assert calls == [torch.bfloat16]


def test_selective_checkpointing_keeps_what_flash_attention_returns():
    for mode, times in (("none", 1), ("selective", 1), ("full", 2)):
        model = small("llama")
        checkpoint_blocks(model, (Block,), mode)
        with kernels_on_cpu() as calls:
            loss_and_gradients(model, packings(24)[1], torch.float32)
            checks = len(calls) - model.config.n_layer * times
            assert checks == 1, mode  # the self-check's own call


def test_failed_self_check_uses_masks_with_one_warning():
    documents = packings(24)[1]
    model = small("llama")
    expected = loss_and_gradients(model, documents, torch.float32)

    def wrong(*args, **options):
        out, lse, *rest = forward(*args, **options)
        return out * 1.1, lse, *rest

    def broken(*args, **options):
        raise RuntimeError("no kernel image is available\nfor execution on the device")

    for kernel, text in ((wrong, "a relative error of 0.1"), (broken, "RuntimeError: no kernel image is available;")):
        with kernels_on_cpu(may_fail=True), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            forward = attention_kernels.FLASH_FORWARD
            with mock.patch.object(attention_kernels, "FLASH_FORWARD", kernel):
                for _ in range(2):
                    found = loss_and_gradients(model, documents, torch.float32)
        assert len(caught) == 1 and text in str(caught[0].message) and "masks are used" in str(caught[0].message)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_kernels_are_chosen_by_architecture():
    plain = small("llama").config
    flash, sinks, flex = KernelChoice("flash", False), KernelChoice("flash", True), KernelChoice("flex", True)
    for changes, unpacked, packed in (
        ({}, None, flash),
        (WINDOWS, flash, flash),
        (SINKS, sinks, sinks),
        (SOFTCAP, flex, flex),
        (SOFTCAP | {"head_size": 8}, None, None),
        ({"head_size": 264}, None, None),
        (WINDOWS | {"head_size": 20}, flash, flash),  # padded
    ):
        config = replace(plain, **changes)
        assert (kernel_of(config, False), kernel_of(config, True)) == (unpacked, packed), changes


def test_masks_without_bounds_or_with_a_cache():
    """A user who packs rows by hand gives no bounds; generation has a KV cache."""
    model, documents = small("llama", **WINDOWS), packings(24)[1]
    ids = torch.randint(0, 100, (2, 24))
    with kernels_on_cpu() as calls, torch.no_grad():
        model(ids, documents=documents)
        model.execute_with(uses_kernels=False)
        model(ids, documents=with_bounds(documents))
    assert not calls


def test_only_gpt_gets_document_bounds():
    class Own(nn.Module):
        def forward(self, input_ids, labels, positions, documents): ...

    class Derived(GPT):
        def forward(self, input_ids, labels=None, **options): ...

    rows = [{name: torch.arange(4) for name in ("input_ids", "labels", "positions", "documents")}]
    batch = collate(rows, [0], [0], 4, NO_ROUNDING)
    gpt = small("llama")
    inputs = [forward_inputs(model, batch, CPU) for model in (Own(), Derived(gpt.config), gpt)]
    assert all(set(one) == {"input_ids", "labels", "positions", "documents"} for one in inputs)
    assert [type(one["documents"]) for one in inputs] == [torch.Tensor, torch.Tensor, Documents]


def test_operators_have_the_shapes_of_aten_on_fake_cuda_tensors():
    """The schemas of torch's operators, and the shapes that torch.compile is told, on tensors without data."""
    forward, backward = attention_kernels._flash, attention_kernels._flash_backward_op
    for is_packed, has_sinks, T in itertools.product((False, True), (False, True), (64, 16)):
        with FakeTensorMode(allow_non_fake_inputs=True):
            q, k, v = torch.empty(2, 64, 8, 32, device="cuda", dtype=torch.bfloat16).split((4, 2, 2), dim=2)
            qkv = (q.split(T, dim=1)[-1], k, v)
            sinks = torch.empty(4, device="cuda") if has_sinks else None
            cu_seqlens = torch.empty(9, device="cuda", dtype=torch.int32) if is_packed else None
            cu_queries = cu_seqlens if T < 64 else None
            length = 64 if is_packed else None  # of a fake tensor, no number could be read
            bounds = (cu_seqlens, cu_queries, length, 15, 0.1)
            out, lse = forward._init_fn(*qkv, sinks, *bounds)
            arguments = (torch.empty_like(out), *qkv, out, lse, sinks, *bounds)
            gradients = backward._init_fn(*arguments)
            told = *forward._abstract_fn(*qkv, sinks, *bounds), *backward._abstract_fn(*arguments)
        for found, expected in zip((out, lse, *gradients), told, strict=True):
            assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)
            assert found.stride() == expected.stride()
        assert lse.shape == ((4, 2 * T) if is_packed else (2, 4, T))


def test_newer_flash_attention_is_used_where_it_is_installed_and_right(capsys):
    """In order: packages, capability, faults, rows; what is active then, the warnings, and what the user activated."""
    config = small("llama", attention_sinks=True).config

    def check(installed, capability, faults, rows, active, n_warnings, by_user=None):
        capsys.readouterr()
        with newer_flash(installed, capability, faults) as called, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if by_user is not None:
                activate_flash_attention_impl(by_user)
            for has_documents in rows:
                assert choose_kernel(config, torch.ones(1, 4, 32), has_documents, has_documents) is not None
            assert current_flash_attention_impl() == active and {(active, packed) for packed in rows} <= called
        texts = [str(w.message) for w in caught]
        assert sum(text.endswith("; it is not used") for text in texts) == n_warnings == len(texts)
        lines = capsys.readouterr().err.count("replaces torch's own")
        assert lines == (active not in (None, by_user)) + (faults.get("FA3") == "packed")

    check_each(
        check,
        [
            ("FA3 FA4", 9, {}, [False, True], "FA3", 0),
            ("FA3 FA4", 9, {"FA3": "all"}, [False], "FA4", 1),
            ("FA3 FA4", 9, {}, [False, True], "FA4", 0, "FA4"),
            ("FA3 FA4", 9, {"FA4": "all"}, [False, True], "FA3", 1, "FA4"),
            ("FA3", 9, {"FA3": "all"}, [False, True], None, 1),
            ("FA3", 9, {"FA3": "sdpa"}, [False], None, 1),
            ("FA3", 9, {"FA3": "decoding"}, [False], None, 1),
            ("FA3", 9, {"FA3": "import"}, [False], None, 1),
            ("FA3", 9, {"FA3": "packed"}, [False, True, False], None, 1),
            ("FA3", 8, {}, [False], None, 0),
            ("FA4", 10, {}, [False], "FA4", 0),
            ("", 9, {}, [False], None, 0),
        ],
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize(
    ("name", "always", "softcap", "heads"),
    [
        ("flash", False, None, (8, 2, 128)),
        ("flash", False, None, (4, 4, 96)),
        ("flash", True, None, (8, 1, 64)),
        ("flex", True, 50.0, (8, 4, 256)),
        ("flex", True, 50.0, (4, 2, 128)),
    ],
)
def test_kernels_match_masks_on_cuda(name, always, softcap, heads, has_documents):
    device = torch.device("cuda", torch.cuda.current_device())
    choice = KernelChoice(name, always)
    case = KernelCase(choice, device, torch.bfloat16, heads, heads[2] ** -0.5, softcap, True, has_documents)
    with mock.patch.object(attention_dispatch, "TOLERANCE", 0.01):
        assert check_kernel(case) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_models_with_kernels_match_models_with_masks_on_cuda(name, is_compiled):
    model = small("llama", **MODELS[name]).cuda()
    ids = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(1)).cuda()
    documents = with_bounds(packings(24)[3], ids.device)
    found = []
    with warnings.catch_warnings():
        for text in (".*attention masks are used instead", "Mismatch dtype"):  # the self-check; unfused RMSNorm
            warnings.filterwarnings("error", text)
        for uses_kernels in (False, True):
            model.execute_with(uses_kernels=uses_kernels)
            if is_compiled and uses_kernels:
                for block in model.blocks:
                    nn.Module.compile(block)
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss, _ = model(ids, ids, documents=documents)
            loss.backward()
            found.append(torch.cat([loss.detach().view(1), *(p.grad.flatten() for p in model.parameters())]))
    assert (found[0] - found[1]).norm() < 0.02 * found[0].norm()
