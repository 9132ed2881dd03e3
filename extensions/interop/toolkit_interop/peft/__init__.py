"""LoRA adapters in the format of peft: import and export."""
