"""Faults of transformers' versions that an oracle would fall over, and the way around each."""

from __future__ import annotations


def mend() -> None:
    """Let Llama 4 that sees answer. Its class of transformers 5.24.0 hands on `image_outputs` of its language model's
    output, whose class has no such field; logits are computed by then, and no test reads it."""
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
        MoeCausalLMOutputWithPast.image_outputs = None
