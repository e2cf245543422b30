"""Gaps in a text: how models that were trained to fill them are asked, by their tokenizer's special tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.serve.http.errors import bad_field

if TYPE_CHECKING:
    from toolkit.artifacts.text.tokenizer import Tokenizer

Gap = tuple[str, str, str]  # marks: of the text before the gap, of that behind it, of what fills it
GAPS: tuple[Gap, ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, Qwen3-Coder
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # CodeGeeX4
)


def find_gap(tokenizer: Tokenizer) -> Gap | None:
    """How this model is asked; None where it was not trained to fill gaps."""
    return next((gap for gap in GAPS if all(tokenizer.token_id(mark) is not None for mark in gap)), None)


def with_gap(tokenizer: Tokenizer, param: str, before: str, behind: str, begun: str = "") -> str:
    """The prompt that asks for what is between two texts, and goes on with ``begun``. Raises ApiError (400), which
    names ``param``, where the model cannot be asked."""
    gap = find_gap(tokenizer)
    if gap is None:
        raise bad_field(param, "this model was not trained to fill gaps; put the whole context into prompt")
    return f"{gap[0]}{before}{gap[1]}{behind}{gap[2]}{begun}"
