"""Learn from the model's own answers: on-policy distillation and GRPO."""

from toolkit.extension import Extension

# Every command imports this file, so it must not import torch.
EXTENSION = Extension(
    objectives={
        "GRPO": "toolkit_on_policy.grpo.GRPO",
        "OnPolicyDistillation": "toolkit_on_policy.distillation.OnPolicyDistillation",
    },
    data={"Prompts": "toolkit_on_policy.prompts.Prompts"},
    run_callbacks={"metrics": "toolkit_on_policy.checks.make_callbacks"},
    check="toolkit_on_policy.checks.check",
)
