"""Hub repositories of the named configurations."""

# Organization, and prefixes of the names of its models. `_RENAMED` lists models whose hub name differs.
_ORGANIZATIONS = """
meta-llama Llama-
codellama CodeLlama-
togethercomputer LLaMA-2-7B-32K RedPajama-
HuggingFaceTB SmolLM
tiiuae falcon Falcon3
BSC-LT salamandra
mistralai Mistral Mathstral Mixtral
Qwen Qwen QwQ
google gemma
microsoft phi Phi
EleutherAI pythia gpt-neox
databricks dolly
stabilityai stable
openai-community gpt2
allenai OLMo
ibm-granite granite
bigcode starcoder2
openai gpt-oss
deepseek-ai DeepSeek
ByteDance-Seed Seed-OSS
LGAI-EXAONE EXAONE
zai-org GLM-
"""
_RENAMED = {
    "tiny-llama-1.1b": "TinyLlama/TinyLlama_v1.1",
    "micro-llama-300M": "keeeeenw/MicroLlama",
    "Llama-3-8B": "meta-llama/Meta-Llama-3-8B",
    "Llama-3-70B": "meta-llama/Meta-Llama-3-70B",
    "Mistral-7B-v0.2": "mistral-community/Mistral-7B-v0.2",
}


def repository_of(name: str) -> str | None:
    """Return the hub repository of a configuration's name; None if it is unknown."""
    for organization, *prefixes in map(str.split, _ORGANIZATIONS.strip().splitlines()):
        if name.startswith(tuple(prefixes)):
            return _RENAMED.get(name, f"{organization}/{name}")
    return _RENAMED.get(name)
