"""peft loads exported adapters with equal logits, and its adapters are imported back; random weights, on the CPU."""

import json
import shutil

import pytest
import torch
from helpers.compare_runs import differs
from helpers.initialize import add_lora, initialize
from helpers.optional import importorskip_later
from helpers.tiny_configs import NATIVE_CONFIGS
from toolkit_interop.peft.export_peft import export_peft
from toolkit_interop.peft.import_peft import import_peft

from tests.checkpoints.test_adapters import write_adapted, write_base
from tests.models.test_lora import NONE, stir, tokens
from toolkit.checkpoints.adapters import load_adapters
from toolkit.checkpoints.folder import load_model
from toolkit.checkpoints.hf.export_hf import export_hf
from toolkit.checkpoints.importers import import_adapters
from toolkit.cli import main
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import build_model
from toolkit.models.lora import is_adapter
from toolkit.models.lora_config import LoRAConfig

peft = importorskip_later("peft")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

SMALL = {"vocab_size": 160, "padding_multiple": 1, "block_size": 32, "n_layer": 2, "n_head": 4, "n_embd": 32}
OLDER = {**SMALL, "bias": True, "norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP"}
LINEAR = {"qwen3_next": "qwen3-next", "qwen3_5_text": "qwen3.5"}
GEMMA4 = ("gemma4", "gemma4-shared")
CONFIGS = {
    "llama": ModelConfig(**SMALL, n_query_groups=2),
    "tied": ModelConfig(**SMALL, n_query_groups=2, tie_embeddings=True),
    "mixtral": ModelConfig(
        **SMALL, family="mixtral", mlp_class_name="LLaMAMoE", n_expert=4, n_expert_per_token=2, norm_topk_prob=True
    ),
    "phi3": ModelConfig(**SMALL, family="phi3", n_query_groups=2),
    "gpt_neox": ModelConfig(**OLDER, family="gpt_neox", rotary_percentage=0.25, parallel_residual=True),
    "gpt2": ModelConfig(
        **OLDER, family="gpt2", position_embedding="learned", gelu_approximate="tanh", tie_embeddings=True
    ),
    **{family: ModelConfig(**NATIVE_CONFIGS[name] | SMALL) for family, name in LINEAR.items()},
    **{name: ModelConfig(**NATIVE_CONFIGS[name] | SMALL) for name in GEMMA4},
}
BLOCK = {"query": True, "key": True, "value": True, "projection": True, "mlp": True}
SELECTIONS = {"query": {"query": True}, "query+value": {"query": True, "value": True}, "block": BLOCK}
KINDS = {"lora": {}, "rslora": {"rslora": True}, "dora": {"dora": True}}


def make(tmp_path, config: ModelConfig, lora: LoRAConfig):
    """(folder of the base, folder of the adapters, the model)"""
    model = build_model(config)
    initialize(model, 0)
    g = torch.Generator().manual_seed(9)
    for p in model.parameters():
        p.data.add_(torch.randn(p.shape, generator=g), alpha=0.1)
    base_dir = write_base(tmp_path / "base", model)
    add_lora(model, lora)
    stir(model)
    return base_dir, write_adapted(tmp_path / "run", base_dir, model, lora), model.eval()


def in_peft(base_dir, adapters, tmp_path):
    if not (tmp_path / "hf").exists():
        export_hf(base_dir, tmp_path / "hf")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    return peft.PeftModel.from_pretrained(base, adapters).eval()


ADAPTED = [(family, selection, kind) for family in CONFIGS for selection in SELECTIONS for kind in KINDS]
FAST = [(family, "block", "lora") for family in CONFIGS if family != "qwen3_5_text"] + [
    ("llama", "query", "rslora"),
    ("gpt2", "query+value", "dora"),
]


@pytest.mark.parametrize(
    ("family", "selection", "kind"),
    [pytest.param(*case, marks=[] if case in FAST else [pytest.mark.slow]) for case in ADAPTED],
)
@torch.no_grad()
def test_peft_computes_the_same_logits(tmp_path, family, selection, kind, recwarn):
    chosen = SELECTIONS[selection]
    if CONFIGS[family].n_moe_layer and selection == "block":
        chosen = chosen | dict.fromkeys(("experts", "router"), kind != "dora") | {"mlp": False}
    if family in LINEAR and selection == "block":
        chosen = chosen | {"linear_attention": True}
    lora = LoRAConfig(**{**NONE, "r": 3, "alpha": 6, **chosen, **KINDS[kind]})
    base_dir, folder, model = make(tmp_path, CONFIGS[family], lora)
    assert main(["convert_to_peft", str(folder), str(tmp_path / "peft")]) == 0
    reference = in_peft(base_dir, tmp_path / "peft", tmp_path)
    expected = reference(input_ids=tokens()).logits
    assert differs(model(tokens()), expected) < 1e-5
    assert differs(load_model(base_dir)(tokens()), expected) > 1e-3
    assert not [w for w in recwarn if "missing adapter keys" in str(w.message)]
    assert (tmp_path / "peft" / "tokenizer.json").exists()

    # and the way back, from what peft itself writes
    reference.save_pretrained(tmp_path / "again")
    back, adapters, note = import_peft(tmp_path / "again", CONFIGS[family])
    assert note is None
    again = load_model(base_dir)
    add_lora(again, back)
    assert adapters.keys() == set(filter(is_adapter, again.state_dict()))
    again.load_state_dict(adapters, strict=False)
    assert differs(again(tokens()), expected) < 1e-5
    assert back == lora
    saved = load_adapters(folder, model)
    assert saved.keys() == adapters.keys() and all(torch.equal(saved[name], adapters[name]) for name in saved)


def _unlike_plain(folder) -> dict:
    settings = json.loads((folder / "adapter_config.json").read_text())
    return {name: settings[name] for name in ("rank_pattern", "alpha_pattern") if settings[name]}


QKV = {"query_key_value": 24}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rank_pattern": {"query_key_value": 16}}, "rank_pattern"),
        ({"rank_pattern": {"query_key_value": 24.0}}, "rank_pattern"),
        ({"rank_pattern": {"query_key_value": [24]}}, "rank_pattern"),
        ({"rank_pattern": {"dense_4h_to_h": 24}, "alpha_pattern": {"dense_4h_to_h": 48}}, "rank_pattern"),
        ({"rank_pattern": {**QKV, "dense": 24}, "alpha_pattern": {"query_key_value": 48, "dense": 48}}, "rank_pattern"),
        ({"rank_pattern": {}}, "alpha_pattern"),
        ({"alpha_pattern": {}}, "rank_pattern"),
        ({"alpha_pattern": {"query_key_value": 16}}, "rank_pattern"),
        ({"alpha_pattern": 3}, "rank_pattern"),
    ],
    ids=str,
)
def test_unsupported_rank_patterns_are_rejected(exports, tmp_path, change, named):
    shutil.copytree(exports / "gpt_neox" / "peft", tmp_path / "peft")
    path = tmp_path / "peft" / "adapter_config.json"
    settings = json.loads(path.read_text())
    assert (settings["rank_pattern"], settings["alpha_pattern"]) == (QKV, {"query_key_value": 48})
    import_peft(tmp_path / "peft", CONFIGS["gpt_neox"])
    path.write_text(json.dumps({**settings, **change}))
    with pytest.raises(UserError) as error:
        import_peft(tmp_path / "peft", CONFIGS["gpt_neox"])
    assert f"adapter_config.json: {named} {(settings | change)[named]}: not supported" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2"])
@pytest.mark.parametrize("patterns", [True, False])
@torch.no_grad()
def test_dense_fused_adapters_stay_fused(tmp_path, family, patterns):
    """What peft has trained itself is dense: each part gets all of A, unless other layers have a smaller rank."""
    lora = LoRAConfig(**{**NONE, **SELECTIONS["block" if patterns else "query+value"], "r": 4})
    base_dir, folder, _ = make(tmp_path, CONFIGS[family], lora)
    export_peft(folder, tmp_path / "peft")
    path = tmp_path / "peft" / "adapter_model.safetensors"
    tensors = safetensors.load_file(path)
    for name in tensors:
        if name.endswith(("query_key_value.lora_B.weight", "c_attn.lora_B.weight")):
            tensors[name] += 0.1
    safetensors.save_file(tensors, path, {"format": "pt"})
    if patterns:
        with pytest.raises(UserError, match="rank_pattern"):
            import_peft(tmp_path / "peft", CONFIGS[family])
        return
    back, adapters, note = import_peft(tmp_path / "peft", CONFIGS[family])
    assert (back.r, back.query, back.key, back.value) == (8, True, True, True)
    assert "each of the 3 parts of" in note and "an export will have rank 24" in note
    again = load_model(base_dir)
    add_lora(again, back)
    again.load_state_dict(adapters, strict=False)
    assert differs(again(tokens()), in_peft(base_dir, tmp_path / "peft", tmp_path)(input_ids=tokens()).logits) < 1e-5


@pytest.mark.parametrize("dora", [False, True])
@torch.no_grad()
def test_hf_fused_layers_import_from_peft(tmp_path, dora):
    """Phi-3's gate_up_proj: of the rank of all other layers, both native layers get all of A."""
    base_dir, _, _ = make(tmp_path, CONFIGS["phi3"], LoRAConfig())
    export_hf(base_dir, tmp_path / "hf")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    targets = ["gate_up_proj", "down_proj"]
    reference = peft.get_peft_model(
        base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, use_dora=dora)
    ).eval()
    g = torch.Generator().manual_seed(7)
    for name, p in reference.named_parameters():
        if ".lora_" in name:
            p.add_(torch.randn(p.shape, generator=g), alpha=0.1)
    reference.save_pretrained(tmp_path / "peft")
    back, adapters, note = import_peft(tmp_path / "peft", CONFIGS["phi3"])
    assert "each of the 2 parts of gate_up_proj gets a copy of its adapter" in note
    assert back == LoRAConfig(**{**NONE, "r": 4, "alpha": 8, "mlp": True, "dora": dora})
    again = load_model(base_dir)
    add_lora(again, back)
    again.load_state_dict(adapters, strict=False)
    assert differs(again(tokens()), reference(input_ids=tokens()).logits) < 1e-5


@pytest.mark.parametrize(("family", "module", "n"), [("phi3", "qkv_proj", 3), ("deepseek_v3", "kv_b_proj", 2)])
def test_copies_of_an_adapter_for_each_part_are_noted(tmp_path, family, module, n):
    config = CONFIGS.get(family) or ModelConfig(**NATIVE_CONFIGS["deepseek-v3"] | SMALL)
    base_dir, _, _ = make(tmp_path, config, LoRAConfig())
    export_hf(base_dir, tmp_path / "hf")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    settings = peft.LoraConfig(r=4, target_modules=[module], init_lora_weights=False)
    peft.get_peft_model(base, settings).save_pretrained(tmp_path / "peft")
    note = import_peft(tmp_path / "peft", config)[2]
    assert f"each of the {n} parts of {module} gets a copy of its adapter" in note, note


@pytest.mark.parametrize(("change", "is_read"), [(0.0, True), (0.1, False)])
def test_hf_fused_layers_need_disjoint_columns_at_higher_rank(tmp_path, change, is_read):
    """Before the first step B is zero: each has its half of A still."""
    _, folder, model = make(tmp_path, CONFIGS["phi3"], LoRAConfig(**BLOCK))
    export_peft(folder, tmp_path / "peft")
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert settings["rank_pattern"] == {"qkv_proj": 24, "gate_up_proj": 16}
    path = tmp_path / "peft" / "adapter_model.safetensors"
    tensors = safetensors.load_file(path)
    for name in tensors:
        if name.endswith("gate_up_proj.lora_B.weight"):
            tensors[name] = torch.full_like(tensors[name], change)
    safetensors.save_file(tensors, path, {"format": "pt"})
    if is_read:
        _, adapters, _ = import_peft(tmp_path / "peft", CONFIGS["phi3"])
        name = "transformer.h.1.mlp.fc_2.lora.whole.A"
        assert torch.equal(adapters[name], load_adapters(folder, model)[name])
        return
    with pytest.raises(UserError, match="rank_pattern .*gate_up_proj.*: not supported"):
        import_peft(tmp_path / "peft", CONFIGS["phi3"])


@pytest.mark.parametrize("family", ["llama", "tied", "gpt_neox"])
@torch.no_grad()
def test_adapted_head_is_exported(tmp_path, family):
    lora = LoRAConfig(**{**NONE, "query": True, "head": True})
    base_dir, folder, model = make(tmp_path, CONFIGS[family], lora)
    exported = export_peft(folder, tmp_path / "peft")
    reference = in_peft(base_dir, tmp_path / "peft", tmp_path)
    assert differs(model(tokens()), reference(input_ids=tokens()).logits) < 1e-5
    reference.save_pretrained(tmp_path / "again")
    merged = in_peft(base_dir, tmp_path / "peft", tmp_path).merge_and_unload()
    is_wrong = differs(model(tokens()), merged(input_ids=tokens()).logits) > 1e-3  # the embedding changes as well
    assert exported.has_tied_head == is_wrong == (family == "tied")
    for source in ("peft", "again"):
        back, adapters, _ = import_peft(tmp_path / source, CONFIGS[family])
        assert back.head and torch.equal(adapters["lm_head.lora.whole.B"], model.lm_head.lora.whole.B)


def test_names_and_settings_match_peft(tmp_path):
    lora = LoRAConfig(r=4, alpha=10, dropout=0.1, projection=True)
    _, folder, _ = make(tmp_path, CONFIGS["llama"], lora)
    base_name = export_peft(folder, tmp_path / "peft").base
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["o_proj", "q_proj", "v_proj"]
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (4, 10, 0.1)
    assert (settings["task_type"], settings["fan_in_fan_out"], settings["bias"]) == ("CAUSAL_LM", False, "none")
    assert settings["base_model_name_or_path"] == base_name == str(tmp_path / "base")
    assert not _unlike_plain(tmp_path / "peft")
    names = set(safetensors.load_file(tmp_path / "peft" / "adapter_model.safetensors"))
    layers = [f"{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qvo"]
    assert names == {f"base_model.model.model.layers.{name}.lora_{f}.weight" for name in layers for f in "AB"}


def test_layers_fused_on_both_sides_sum_the_ranks(tmp_path):
    for family, target in [("gpt_neox", "query_key_value"), ("gpt2", "c_attn")]:
        _, folder, _ = make(tmp_path / family, CONFIGS[family], LoRAConfig(r=4, alpha=10, rslora=True, mlp=True))
        export_peft(folder, tmp_path / family / "peft")
        settings = json.loads((tmp_path / family / "peft" / "adapter_config.json").read_text())
        assert settings["r"] == 4 and settings["rank_pattern"] == {target: 8}
        assert settings["alpha_pattern"] == {target: pytest.approx(10 * 2**0.5)}
        assert settings["fan_in_fan_out"] == (family == "gpt2")
        wanted = {"gpt2": ["c_attn", "c_fc", "mlp.c_proj"],
                  "gpt_neox": ["dense_4h_to_h", "dense_h_to_4h", "query_key_value"]}  # fmt: skip
        assert settings["target_modules"] == wanted[family]


def test_base_is_named_by_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, folder, _ = make(tmp_path, CONFIGS["llama"], LoRAConfig())
    (tmp_path / "checkpoints" / "org").mkdir(parents=True)
    (tmp_path / "base").rename(tmp_path / "checkpoints" / "org" / "name")
    assert export_peft(folder, tmp_path / "a", base_checkpoint_dir="checkpoints/org/name").base == "org/name"
    # What a model was made from is another model.
    (tmp_path / "checkpoints" / "org" / "name" / "config.json").write_text('{"_name_or_path": "org/ancestor"}')
    assert export_peft(folder, tmp_path / "b", base_checkpoint_dir="org/name").base == "org/name"
    (tmp_path / "checkpoints" / "org" / "name").rename(tmp_path / "mine")
    assert export_peft(folder, tmp_path / "c", base_checkpoint_dir="mine").base == "mine"


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Adapters in PEFT's format, to be copied: of llama, and of gpt_neox with patterns of ranks."""
    folder = tmp_path_factory.mktemp("exports")
    for family, lora in (("llama", LoRAConfig(projection=True, mlp=True)), ("gpt_neox", LoRAConfig(**BLOCK))):
        export_peft(make(folder / family, CONFIGS[family], lora)[1], folder / family / "peft")
    return folder


@pytest.fixture
def exported(exports, tmp_path):
    return shutil.copytree(exports / "llama" / "peft", tmp_path / "peft")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
        ({"bias": "all"}, "bias 'all': not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 3}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights pissa_niter_4: also changes the base"),
        ({"r": 9}, "lora_A is (8, 32), not (9, 32)"),
        ({"r": "many"}, "adapter_config.json: r 'many': must be an integer"),
        ({"r": 8.0}, "r 8.0: must be an integer"),
        ({"r": 2**40}, "must be an integer below 2**31"),
        ({"lora_dropout": 1.5}, "--lora_dropout 1.5"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_unsupported_settings_are_named(exported, change, message):
    path = exported / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError) as error:
        import_peft(exported, CONFIGS["llama"])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_unsupported_tensors_are_named(exported):
    path = exported / "adapter_model.safetensors"
    tensors = safetensors.load_file(path)
    block = "base_model.model.model.layers.1."

    def refused(change: dict, without: str = "-") -> str:
        left = {name: t for name, t in tensors.items() if without not in name}
        safetensors.save_file({**left, **change}, path)
        with pytest.raises(UserError) as error:
            import_peft(exported, CONFIGS["llama"])
        return str(error.value)

    assert "has no model.layers.1.mlp.up_proj.lora_A" in refused({}, "1.mlp.up_proj")
    assert "has no model.layers.0.mlp.up_proj.lora_A; " in refused({}, "up_proj")
    resized = {"base_model.model.lm_head.base_layer.weight": torch.zeros(161, 32)}
    assert "lm_head.base_layer.weight, which is not an adapter" in refused(resized)
    bad = {f"{block}self_attn.q_proj.lora_B.weight": torch.zeros(31, 8)}
    assert "model.layers.1.self_attn.q_proj.lora_B is (31, 8), not (32, 8)" in refused(bad)
    assert "adapts model.layers.7.mlp.up_proj" in refused(
        {f"{block}mlp.up_proj.lora_A.weight".replace("1", "7"): torch.zeros(1)}
    )
    assert "lora_embedding_A, which is not an adapter" in refused({"base_model.model.lora_embedding_A": torch.zeros(1)})
    assert "adapts none of this model's layers" in refused({}, "layers")
    path.write_bytes(b"\x00" * 20)
    with pytest.raises(UserError, match="damaged or truncated"):
        import_peft(exported, CONFIGS["llama"])
    path.unlink()
    with pytest.raises(UserError, match="holds no adapter_model.safetensors"):
        import_peft(exported, CONFIGS["llama"])
    (exported / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        import_peft(exported, CONFIGS["llama"])
    (exported / "adapter_config.json").unlink()
    with pytest.raises(UserError, match="holds no adapter_config.json"):
        import_adapters(exported, exported, CONFIGS["llama"])


def test_export_requires_adapters(tmp_path, refusal):
    base_dir, _, _ = make(tmp_path, CONFIGS["llama"], LoRAConfig())
    assert "holds no lit_model.pth.lora" in refusal("convert_to_peft", base_dir, tmp_path / "peft")
