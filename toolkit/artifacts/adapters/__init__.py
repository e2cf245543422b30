"""LoRA adapters as PEFT writes them."""
