"""The predicted speed of a micro-step: what is counted, what a compiler fuses, and the links."""

import re
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from helpers.gpu_products import head_chunk_ms
from toolkit_plan.measure import micro_step
from toolkit_plan.measure import trace as tracing
from toolkit_plan.measure.cuda_on_meta import CUDA, cuda_on_meta
from toolkit_plan.measure.fusion import fuse
from toolkit_plan.measure.inputs import MemoryInputs
from toolkit_plan.measure.links import communication
from toolkit_plan.measure.micro_step import host_seconds, seconds, traced_kernels
from toolkit_plan.measure.operators import Access, Op, OperatorRecorder
from toolkit_plan.measure.optimizer import orthogonalization_flops
from toolkit_plan.measure.parameters import stored_parameters
from toolkit_plan.measure.trace import LOSS, trace_micro_step

from toolkit.cli import main
from toolkit.config import FSDPArgs
from toolkit.distributed.gpus import GPUS, find_gpu
from toolkit.distributed.mesh import Layout
from toolkit.distributed.strategy import StrategyPlan
from toolkit.errors import UserError
from toolkit.models.block import Block
from toolkit.models.families import get_config
from toolkit.models.flops import flops_per_token, matmul_parameters
from toolkit.models.gpt import model_on_meta
from toolkit.models.lora import adapted_on_meta
from toolkit.models.lora_config import LoRAConfig
from toolkit.models.loss import chunk_rows
from toolkit.optim.groups import block_params
from toolkit.optim.hybrid import NS_STEPS

B, T = 2, 128
SINGLE = StrategyPlan("single", None, Layout(), "")


def setup_of(name: str = "pico-llama", **changes) -> MemoryInputs:
    overrides = changes.pop("model", {})
    config = replace(get_config(name).with_vocab_size(512), **overrides)
    given = {"optimizer": {"name": "AdamW"}, "precision": "bf16-mixed", "accumulation": 1, **changes}
    return MemoryInputs(config, strategy=SINGLE, micro_batch_size=B, seq_length=T, **given)


def total(trace, of, *kinds: str) -> float:
    return trace.total(lambda op: of(op) if not kinds or op.kind in kinds else 0)


def is_kernel(op: Op) -> bool:
    return op.kind != "view"


@pytest.mark.parametrize("kind", ["windows", pytest.param("experts", marks=pytest.mark.slow)])
def test_equal_blocks_are_traced_once_and_count_exactly(kind, monkeypatch):
    """Of a model with windows or experts in some of its layers: as if all of them were traced."""
    experts = {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 64}
    windows = {"sliding_window_size": 32, "sliding_window_indices": [0, 1, 1, 0, 1, 1]}
    if kind == "windows":
        setup = setup_of(model={"n_layer": 6, **windows}, activation_checkpointing="full")
    else:
        setup = setup_of(model={"n_layer": 6, **experts, "moe_indices": [0, 0, 1, 1, 1, 1]}, precision="bf16-true")
    short = trace_micro_step(setup, has_gradients=True)
    with monkeypatch.context() as patch:
        patch.setattr(tracing, "one_layer_of_each_kind", lambda config: (config, [1] * config.n_layer))
        complete = tracing._trace(setup, has_gradients=True, is_compiled=False)
    assert len(short.ops) < len(complete.ops)
    for of in (lambda op: op.bytes, lambda op: op.flops, is_kernel):
        # the balancing losses of the layers are stacked: a few bytes more
        assert total(short, of) == pytest.approx(total(complete, of), rel=1e-5 if kind == "experts" else 0)


def test_n8_flops_of_the_operators_are_those_of_the_formula():
    for name in ("pico-llama", "gpt2"):
        # an odd vocabulary is padded on CUDA, which the formula does not count
        setup = setup_of(name, model={"vocab_size": 512, "padded_vocab_size": 512})
        model = model_on_meta(setup.config)
        trace = trace_micro_step(setup, has_gradients=False)
        products = total(trace, lambda op: op.flops, "product")
        assert products == 6 * matmul_parameters(model) * B * T
        # FlashAttention computes the scores again in its backward pass: 2.5 forward passes instead of 2
        attention = total(trace, lambda op: op.flops, "attention")
        causal = flops_per_token(model, setup.config, T, causal=True) * B * T - products
        assert attention == pytest.approx(causal * 3.5 / 3)


def test_weights_are_cast_in_mixed_precision_and_gradients_added():
    setup = setup_of()
    model = model_on_meta(setup.config)
    trace = trace_micro_step(setup, has_gradients=True)
    added = total(trace, lambda op: op.bytes, "accumulate")
    assert added == 3 * 4 * sum(p.numel() for p in model.parameters())  # two reads and a write of fp32
    weights = {p.shape.numel() * 6 for p in model.blocks[0].mlp.parameters()}  # read 4 bytes, write 2
    casts = [op for op in trace.ops if op.name == "_to_copy" and op.layer == 1 and not op.is_backward]
    casts_of_weights = [op for op in casts if op.bytes in weights]
    assert len(casts_of_weights) == len(list(model.blocks[0].mlp.parameters()))
    in_16_bits = trace_micro_step(setup_of(precision="bf16-true"), has_gradients=False)
    assert not [op for op in in_16_bits.ops if op.name == "_to_copy" and op.bytes in weights]


@pytest.mark.parametrize("name", ["gpt2", "OLMo-1B-hf", "gemma-2b", pytest.param("pico-llama", marks=pytest.mark.slow)])
def test_a_bf16_residual_stream_is_read_and_written_in_bf16(name):
    """On CUDA, too, where autocast runs norms in fp32: what is predicted has no fp32 tensor of the stream's size.

    Norms with a weight, without one and with 1 + weight. No post-norms: they read a layer's output.
    """
    wide = {}
    for kind in ("auto", "bf16"):
        # with a key for each query, bf16 queries and keys have as many bytes
        setup = setup_of(name, residual_dtype=kind, model={"n_query_groups": 1})
        trace = trace_micro_step(setup, has_gradients=False)
        size = 4 * B * T * setup.config.n_embd
        ops = [op for op in trace.ops if op.layer == 1 and op.kind == "fusable"]
        wide[kind] = sum(a.bytes == size for op in ops for a in (*op.reads, *op.writes))
    assert wide["auto"] > wide["bf16"] == 0


def test_autocast_leaves_sums_in_the_dtype_that_is_asked_for():
    x = torch.empty(64, 32, dtype=torch.bfloat16, device="meta")
    with cuda_on_meta(torch.bfloat16), OperatorRecorder() as seen:
        assert x.sum(1, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert x.sum(1).dtype == torch.float32
    assert [op.bytes for op in seen.ops if op.name == "sum"][0] == 2 * (64 * 32 + 64)


@pytest.mark.slow
def test_checkpointing_recomputes_the_products_of_the_blocks():
    flops = {}
    for mode in ("none", "selective", "full"):
        trace = trace_micro_step(setup_of(activation_checkpointing=mode), has_gradients=False)
        flops[mode] = trace.total(lambda op: op.flops if op.layer is not None else 0.0)
    model = model_on_meta(setup_of().config)
    last = model.blocks[0].mlp.proj.weight.numel() * len(model.blocks)  # its output is not needed
    blocks = sum(p.numel() for block in model.blocks for p in block.parameters() if p.ndim == 2)
    recomputed = flops["full"] - flops["none"]
    attention = sum(o.flops for o in trace.ops if o.kind == "attention" and not o.is_backward) * len(model.blocks) / 2
    assert recomputed == pytest.approx(2 * (blocks - last) * B * T + attention, rel=0.2)
    assert flops["none"] < flops["selective"] < flops["full"]


def test_a_compiler_reads_and_writes_only_what_crosses_products():
    """silu(gate) * up: two reads and a write; what the backward pass needs again, it recomputes.

    A sum that two kernels of one pass need is written.
    """
    gate, up, hidden, out = (Access((i, 0), 0, 100) for i in range(4))
    silu, again, total, last, other = (Access((i, 0), 0, 100) for i in range(5, 10))

    def op(name, kind, reads, writes, is_backward=False):
        return Op(name, kind, 0, is_backward, tuple(reads), tuple(writes))

    ops = [
        op("mm", "product", [], [gate]),
        op("silu", "fusable", [gate], [silu]),
        op("mm", "product", [], [up]),
        op("mul", "fusable", [silu, up], [hidden]),
        op("add", "fusable", [hidden, up], [total]),
        op("mul", "fusable", [total, silu], [last]),
        op("mm", "product", [hidden, last], [out]),
        op("add", "fusable", [total, out], [other]),
        op("mm", "product", [other], []),
        op("mul", "fusable", [silu], [again], is_backward=True),
        op("mm", "product", [again], [], is_backward=True),
    ]
    fused = [o for o in fuse(ops) if o.kind == "fusable"]
    assert [(sorted(a.key for a in o.reads), [a.key for a in o.writes]) for o in fused] == [
        ([gate.key, up.key], [hidden.key, total.key, last.key]),
        ([out.key, total.key], [other.key]),
        ([gate.key], [again.key]),
    ]
    outside = [replace(o, layer=None) for o in ops]
    assert fuse(outside) == outside


@pytest.mark.slow
def test_kernels_without_masks_are_counted():
    """Of packed rows, windows and soft caps, as on CUDA: no scores, no masks, and a window's share of the FLOPs."""
    windows = {"sliding_window_size": 32, "sliding_window_indices": [1] * get_config("pico-llama").n_layer}
    setups = {
        "packed": setup_of(packed=True),
        "windows": setup_of(model=windows),
        "soft caps": setup_of(model={"attention_logit_softcapping": 50.0}),
    }
    flops = {}
    for kind, setup in setups.items():
        trace = trace_micro_step(setup, has_gradients=False)
        names = {op.name for op in trace.ops if op.kind == "attention"}
        assert names == {"flash_attention", "flash_attention_backward"}, kind
        assert not [op for op in trace.ops if op.layer is not None and op.name in ("_softmax", "bmm")]
        flops[kind] = total(trace, lambda op: op.flops, "attention")
    assert flops["packed"] == flops["soft caps"] > 2 * flops["windows"] > 0


def test_a_chunk_of_the_head_loss_takes_few_kernels():
    """At most 8: three products, the compiled kernel, and an addition that CUDA does in a product."""
    kernels = []
    for rows in (1, 2):
        setup = replace(setup_of(), micro_batch_size=rows * chunk_rows(512, CUDA) // T)
        trace = trace_micro_step(setup, has_gradients=False, is_compiled=True)
        kernels.append(sum(is_kernel(op) for op in fuse(trace.ops) if op.layer in (None, LOSS)))
    assert 4 <= kernels[1] - kernels[0] <= 8


def test_products_and_attention_stay_under_a_compiler():
    trace = trace_micro_step(setup_of(), has_gradients=False)
    fused = trace._replace(ops=fuse(trace.ops))
    assert total(fused, lambda op: op.flops) == total(trace, lambda op: op.flops)
    assert total(fused, lambda op: op.bytes) < 0.75 * total(trace, lambda op: op.bytes)


def test_gradients_of_masters_are_added_in_fp32():
    trace = trace_micro_step(setup_of(precision="bf16-master"), has_gradients=True)
    parameters = sum(p.numel() for p in model_on_meta(setup_of().config).parameters())
    assert total(trace, lambda op: op.bytes, "accumulate") == 3 * 4 * parameters


def test_attention_of_grouped_queries_is_counted_without_torchs_formulas(monkeypatch):
    """Which refuse groups in torch 2.10 and 2.11."""

    def refuse(*shapes):
        raise AssertionError("query/key/value shapes are incompatible")

    for name in ("sdpa_flop_count", "sdpa_backward_flop_count"):
        monkeypatch.setattr(f"torch.utils.flop_counter.{name}", refuse)
    setup = setup_of(model={"n_head": 4, "n_query_groups": 2, "head_size": 16})
    attention = [
        op for op in tracing._trace(setup, has_gradients=False, is_compiled=False).ops if op.kind == "attention"
    ]
    forward = 4 * B * 4 * 16 * T * T / 2
    assert {op.is_backward: op.flops for op in attention} == {False: forward, True: 2.5 * forward}


def test_links_of_strategies():
    """ddp sends each gradient twice but for a rank's own part; fsdp gathers weights twice and reduces gradients."""
    card, setup = GPUS["H100"], setup_of(precision="32-true")
    model = model_on_meta(setup.config)
    size = 4 * sum(p.numel() for p in model.parameters())
    rate = card.link * 0.8

    def sent(kind, sharding, mesh, devices, nodes):
        planned = replace(setup, strategy=StrategyPlan(kind, sharding, mesh, ""))
        return communication(planned, model, card, devices, nodes, 0.0, 0.0).sent

    def latency(n):
        return 30e-6 * n

    assert sent("single", None, Layout(), 1, 1) == 0
    assert sent("ddp", None, Layout(replicate=8), 8, 1) == pytest.approx(2 * 7 / 8 * size / rate + latency(2))
    units, head = len(model.blocks), 4 * sum(p.numel() for n, p in model.named_parameters() if ".h." not in n)
    moved = 3 * (size - head) + 2 * head  # head, embedding and root are gathered once
    others = 1 if setup.config.tie_embeddings else 3
    collectives = latency(3 * units + 2 * others)
    assert sent("fsdp", "FULL_SHARD", Layout(shard=8), 8, 1) == pytest.approx(7 / 8 * moved / rate + collectives)
    over_nodes = 15 / 16 * moved / (8 * card.network * 0.8)  # less than the GPUs' link
    assert sent("fsdp", "FULL_SHARD", Layout(shard=16), 8, 2) == pytest.approx(over_nodes + collectives)
    assert sent("ddp", None, Layout(replicate=16), 8, 2) > sent("ddp", None, Layout(replicate=8), 8, 1)
    of_nodes = communication(
        replace(setup, strategy=StrategyPlan("ddp", None, Layout(replicate=16), "")),
        model,
        GPUS["RTX 4090"],
        8,
        2,
        0.0,
        0.0,
    )
    assert of_nodes.links == "PCIe 4.0, 100 Gb/s Ethernet per node of 8 between nodes"
    assert 8 * 8 * GPUS["RTX 4090"].network == 100e9


def test_links_of_4_bits_masters_and_accumulation():
    """4-bit weights are sent as such, masters' gradients in fp32; only the last backward pass hides reductions."""
    card, model = GPUS["H100"], model_on_meta(setup_of().config)

    def links(kind, sharding, busy=0.0, model=model, **changes):
        layout = Layout(shard=8) if kind == "fsdp" else Layout(replicate=8)
        planned = replace(setup_of(**changes), strategy=StrategyPlan(kind, sharding, layout, ""))
        return communication(planned, model, card, 8, 1, busy, busy)

    ddp = [links("ddp", None, precision=precision).sent for precision in ("bf16-mixed", "bf16-true", "bf16-master")]
    assert ddp[0] == ddp[2] > ddp[1]
    lora = {"lora": LoRAConfig(), "precision": "bf16-true"}
    adapted = adapted_on_meta(setup_of(**lora).config, LoRAConfig())
    whole, packed = (links("fsdp", "FULL_SHARD", model=adapted, **lora, quantize=q).sent for q in (None, "bnb.nf4"))
    modules = [m for block in model.blocks for m in block.modules()]
    linear = sum(m.weight.numel() for m in modules if isinstance(m, torch.nn.Linear))
    assert whole - packed == pytest.approx(2 * 1.5 * linear * 7 / 8 / (0.8 * card.link), rel=1e-3)
    blocks = 4 * sum(p.numel() for n, p in model.named_parameters() if ".h." in n)
    gathers = 7 / 8 * blocks / (0.8 * card.link) + 30e-6 * len(model.blocks)
    hidden, tight = (
        links("fsdp", "FULL_SHARD", busy, accumulation=4, precision="32-true").exposed for busy in (1.0, 1.25 * gathers)
    )
    assert tight == pytest.approx(hidden + 0.75 * gathers)
    kept, sharded = (
        links("fsdp", "SHARD_GRAD_OP", accumulation=4, fsdp=FSDPArgs(accumulate=how)).sent
        for how in ("unsharded", "sharded")
    )
    assert 3 * kept < sharded  # weights stay gathered until the gradients are reduced
    early, late = (links("fsdp", "FULL_SHARD", 1.0, fsdp=FSDPArgs(backward_prefetch=how)) for how in ("pre", "none"))
    assert early.exposed < late.exposed and early.sent == late.sent


def test_orthogonalization_of_muon_takes_time():
    setup = setup_of(optimizer={"name": "Muon", "split_qkv": True})
    model = model_on_meta(setup.config)
    trace, inside, stored = OperatorRecorder(), block_params(model, (Block,)), stored_parameters(setup, model)
    with trace:
        for name, weight in model.named_parameters():
            is_main = any(one.parameter is weight and one.is_main for one in stored)
            for part in torch.empty_like(weight).split(inside[name] or len(weight)) if is_main else ():
                torch.optim._muon._zeropower_via_newtonschulz(part, (1.0, 1.0, 1.0), NS_STEPS, 1e-7)
    assert orthogonalization_flops(setup, stored) == sum(op.flops for op in trace.ops) > 0


# ---- against measurements on an H100 (docs/predictions.md)

CHUNK_MS = (163 + 116 + 108) / 48
"""The three products of a chunk of GPT-2's head, 4,096 rows: 48 calls of each kernel in the profile."""


def test_products_of_an_odd_vocabulary_are_slow():
    assert head_chunk_ms(50_257) == pytest.approx(CHUNK_MS, rel=0.05)
    assert head_chunk_ms(50_304) < CHUNK_MS / 5


def test_the_loss_kernel_reads_the_logits_twice(monkeypatch):
    """torch.compile's kernel reads them three times, which was measured; Triton's time is only predicted."""
    logits, grad = 4096 * 50_257 * 4, 4096 * 50_257 * 2
    op = Op("fused", "fusable", LOSS, False, (Access((0, 0), 0, logits),), (Access((1, 0), 0, grad),))
    predicted = seconds(op, GPUS["H100"])
    monkeypatch.setattr(micro_step, "LOSS_READS", 3)
    assert 1e3 * seconds(op, GPUS["H100"]) == pytest.approx(42 / 48, rel=0.15)
    assert predicted == pytest.approx(seconds(op, GPUS["H100"]) * 10 / 14, rel=0.01)


@pytest.mark.slow
def test_short_rows_of_lora_wait_for_launches():
    """The figures of tutorials/performance.md: micro-batches of 4 rows of SmolLM2-135M."""

    def micro_step(length: int, is_compiled: bool = False, is_packed: bool = False) -> tuple[int, float, float]:
        given = {"lora": LoRAConfig(), "precision": "bf16-true", "accumulation": 4, "packed": is_packed}
        setup = replace(setup_of(**given), config=get_config("smollm2-135m"), micro_batch_size=4, seq_length=length)
        trace = traced_kernels(setup, is_compiled)
        busy = total(trace, lambda op: seconds(op, GPUS["H100"]))
        return total(trace, is_kernel), busy, host_seconds(trace, setup, is_compiled)

    kernels, busy, host = micro_step(128)
    assert kernels == pytest.approx(2016, rel=0.05) and 1 - busy / host > 0.75
    fewer, busy, faster = micro_step(128, is_compiled=True)
    assert fewer == pytest.approx(1166, rel=0.05) and 1 - busy / faster > 0.5 and faster < host / 3
    _, busy, host = micro_step(2048, is_packed=True)
    assert busy > 0.9 * host


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
def test_fp8_products_run_at_the_peak_of_fp8_and_casts_count(capsys):
    plain, fp8 = (trace_micro_step(setup_of(fp8=kind), has_gradients=False) for kind in ("none", "rowwise"))
    blocks = sum(p.numel() for p in model_on_meta(setup_of().config).transformer.h.parameters() if p.ndim == 2)
    assert total(fp8, lambda op: op.flops * (op.itemsize == 1), "product") == 6 * blocks * B * T
    assert total(fp8, lambda op: op.flops) == total(plain, lambda op: op.flops)
    assert total(fp8, lambda op: op.bytes, "fusable") > 1.2 * total(plain, lambda op: op.bytes, "fusable")
    large = replace(next(op for op in fp8.ops if op.itemsize == 1 and op.kind == "product"), flops=1e15)
    for name, rate in (("H100", 1979e12), ("A100", 624e12)):  # the latter stands for unknown GPUs
        gpu = GPUS[name]
        assert seconds(large, gpu) == pytest.approx(1e15 / (rate * gpu.generation.products), rel=1e-4)
        in_bf16 = seconds(replace(large, itemsize=2), gpu)
        assert in_bf16 == pytest.approx(1e15 / (gpu.peak * gpu.generation.products), rel=1e-4)
    assert all(card.fp8 == 0 or card.fp8 / card.peak == pytest.approx(2, abs=0.05) for card in GPUS.values())
    words = ["pico-llama", "--data", "SyntheticTokens", "--data.vocab_size", "512", "--train.max_seq_length", str(T)]
    words += ["--train.micro_batch_size", str(B), "--train.global_batch_size", str(B), "--compiler", "none"]
    assert main(["plan", "pretrain", *words, "--train.fp8", "rowwise", "--speed", "A100"]) == 2
    assert capsys.readouterr().err.endswith("--train.fp8 rowwise: the GPU of --speed has no fp8; use none\n")


def test_unknown_gpus_and_devices_without_prediction_are_refused(capsys, refusal):
    for argv, expected in ((["--speed", "H20O"], " H200,"), (["--speed", "X9"], "RTX 4090")):
        assert expected in refusal("plan", "pretrain", "pico-llama", *argv)
    assert main(["plan", "pretrain", "pico-llama", "--speed", "H200", "--accelerator", "cpu"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_gpus_are_known_by_the_names_of_vendors_and_drivers():
    names = {
        "4090": "RTX 4090", "rtx4090": "RTX 4090", "NVIDIA GeForce RTX 4090": "RTX 4090", "RTX-4090 24GB": "RTX 4090",
        "A100 80GB": "A100", "A100-40GB": "A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB": "A100", "a100": "A100",
        "H100 80GB": "H100", "NVIDIA H100 80GB HBM3": "H100", "h100-pcie": "H100 PCIe", "H100 NVL 94 GB": "H100 NVL",
        "H200 141GB": "H200", "B200 180GB": "B200", "Tesla T4": "T4", "Tesla V100-SXM2-32GB": "V100",
        "A6000": "RTX A6000",
    }  # fmt: skip
    assert {name: find_gpu(name)[0] for name in names} == names
    assert {find_gpu(name)[0] for name in GPUS} == set(GPUS)
    assert all(0.9 < card.memory / 1e9 / card.marketed_gb < 1.1 for card in GPUS.values())
    for name in names:  # those with a size
        if (size := re.search(r"(\d+) ?GB", name)) is not None:
            assert find_gpu(name)[1].marketed_gb == int(size[1]), name
    for name, hint in {
        "V100 16GB": "with other memory: V100",
        "A100 80GB PCIe": "unknown GPU; known are .*, A100",
        "H300": "unknown GPU",
        "RTX 4090 Laptop GPU": "unknown GPU",
    }.items():
        with pytest.raises(UserError, match=hint):
            find_gpu(name)
