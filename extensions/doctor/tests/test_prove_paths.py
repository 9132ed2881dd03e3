"""Every function that branches on CUDA is proven by a row of `toolkit doctor --prove`, or has a reason why not."""

import ast
import re

from helpers.sources import FILES, file_name
from toolkit_doctor.prove import ROWS

CUDA = re.compile(r"\.is_cuda\b|torch\.cuda\.|backends\.cuda|'cuda'|\bon_cuda\b|DEVICES\b|OFFLOADING\b")
# whole packages and files that compute nothing on a GPU
REASONS = {
    "planning/": "estimates, which 'planned memory' and 'predicted speed' measure",
    "toolkit_plan/": "estimates, which 'planned memory' and 'predicted speed' measure",
    "toolkit_doctor/": "the checks themselves",
    "commands/": "names of options",
    "config/": "names of options",
}
FLASH, SDPA, CURVES = (
    ("flash, windows", "flex, soft cap"),
    ("attention, cuDNN", "attention, masks"),
    ("curve, bf16-mixed",),
)
STATISTICS, CHOICE = "only reads statistics", "only chooses or counts devices"
# file:function: its rows, or the reason why it needs none
PATHS: dict[str, tuple[str, ...] | str] = {
    "checkpoints/run/host_copy.py:HostCopies.__init__": ("async save",),
    "checkpoints/run/host_copy.py:HostCopies._copy_tensor": ("async save",),
    "checkpoints/run/host_copy.py:HostCopies.end": ("async save",),
    "checkpoints/run/state_dicts.py:_on_cuda": ("resume",),
    "data/batch.py:choose_padding": "lengths of rows only; padding has no loss on any device",
    "data/prefetch.py:Prefetcher.__next__": CURVES,
    "data/prefetch.py:Prefetcher._read": CURVES,
    "distributed/device.py:can_fuse": "only chooses torch's fused AdamW, which 'curve, fp32' runs",
    "distributed/device.py:choose_attention_kernels": SDPA,
    "distributed/device.py:count_devices": CHOICE,
    "distributed/device.py:device_memory": STATISTICS,
    "distributed/device.py:fp32_reductions": CURVES,
    "distributed/device.py:pick_accelerator": CHOICE,
    "distributed/device.py:pick_precision": CHOICE,
    "distributed/device.py:peak_flops": STATISTICS,
    "distributed/device.py:without_cudnn_attention": ("CUDA graph",),
    "distributed/fabric.py:single_device_fabric": CHOICE,
    "distributed/run_group.py:choose_backends": ("FSDP", "collectives"),
    "distributed/script.py:setup_distributed": "only sets the device of a user's script",
    "distributed/strategy.py:plan_strategy": ("CPU offload",),
    "distributed/world.py:_check_available": CHOICE,
    "distributed/world.py:count_processes": CHOICE,
    "inference/cuda_graph.py:capture": ("CUDA graph",),
    "inference/cuda_graph.py:_warm_up_stream": ("CUDA graph",),
    "inference/decode.py:has_fixed_shapes": ("CUDA graph",),
    "inference/decode.py:tokens_per_read": ("CUDA graph",),
    "inference/load.py:load_checkpoint": "only chooses the dtype",
    "toolkit_metric/answerer.py:_has_room": CHOICE,
    "toolkit_quantized/layers.py:_has_room": CHOICE,
    "models/aligned.py:needs_alignment": ("loss, Triton, odd vocabulary",),
    "models/attention.py:sdpa_supports_gqa": ("attention, grouped", "attention, masks", "attention, fp32"),
    "models/attention_dispatch.py:_newer_flash": ("flash, windows", "flash, packed rows", "flash, sinks"),
    "models/attention_dispatch.py:choose_kernel": FLASH,
    "models/cross_entropy.py:choose_cross_entropy": ("loss, Triton", "loss, compiled"),
    "models/cross_entropy_triton.py:triton_cross_entropy": ("loss, Triton",),
    "models/fp8.py:require_fp8": ("fp8, tensorwise", "fp8, rowwise", "fp8 all-gather"),
    "models/gated_delta_fla.py:has_kernel": "an optional package, compared with torch before its first use",
    "models/loss.py:_is_small_gpu": STATISTICS,
    "models/loss.py:chunk_rows": ("loss",),
    "models/mixed_mm.py:_has_fp32_results": ("fp32 products",),
    "optim/update.py:FusedUpdate.supports": ("curve, fp32",),
    "optim/update.py:_read_later": ("curve, fp32",),
    "private_torch.py:dump_memory_history": STATISTICS,
    "private_torch.py:record_memory_history": STATISTICS,
    "training/callbacks/metrics.py:MetricsFile.on_train_start": "only the name of the device",
    "training/callbacks/profile.py:Profile.on_train_start": ("profile",),
    "training/checkpointer.py:rng_state": ("resume",),
    "training/checkpointer.py:set_rng_state": ("resume",),
    "training/engine.py:Engine.__init__": ("curve, fp32",),  # as any run of AdamW, it reads each step during the next
    "training/hyperparameters.py:resolved_hyperparameters": CHOICE,
    "training/launched_step.py:Clock.note": ("curve, fp32",),
    "training/memory_stats.py:memory_stats": STATISTICS,
    "toolkit_report/energy.py:Energy.__init__": STATISTICS,
    "toolkit_report/energy.py:find_gpu": STATISTICS,
    "toolkit_align/reference.py:with_reference": "only frees memory",
    "training/throughput.py:peak_memory_gb": ("planned memory",),
}


def cuda_functions() -> set[str]:
    """Return file:function of all functions, without those inside them, whose code names CUDA."""
    found = set()
    for file in FILES:
        name = file_name(file)
        if name.startswith(tuple(REASONS)):
            continue
        source = file.read_text()
        if not re.search("cuda|DEVICES|OFFLOADING", source):
            continue
        for place, node in functions(ast.parse(source)):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if any(CUDA.search(ast.unparse(statement)) for statement in body):
                found.add(f"{name}:{place}")
    return found


def functions(tree: ast.AST, prefix: str = ""):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def test_every_path_of_cuda_has_a_row_or_a_reason():
    found, names = cuda_functions(), {row.name for row in ROWS}
    assert not found - PATHS.keys(), "without a row: add it to PATHS, with a row of toolkit_doctor/prove*.py"
    assert not PATHS.keys() - found, "no longer there"
    rows = {value for values in PATHS.values() if isinstance(values, tuple) for value in values}
    assert rows <= names


def test_a_new_path_is_found():
    source = "class A:\n    def f(self, x):\n        return x.is_cuda\ndef g(x):\n    '''torch.cuda.is'''\n    return x"
    found = [place for place, node in functions(ast.parse(source)) if CUDA.search(ast.unparse(node.body[-1]))]
    assert found == ["A.f"]
