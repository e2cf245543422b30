"""How text is cut before byte-level BPE, by the names that llama.cpp has for it (``tokenizer.ggml.pre``).

The patterns are those of the models' own tokenizer.json. Names whose texts llama.cpp cuts alike stand together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.artifacts.text.patterns import BLANK, CASED, ENDINGS, KIMI, LOWER, ODD, ONES, THREES, UPPER

if TYPE_CHECKING:
    from tokenizers import pre_tokenizers

# Steps that are no pattern: byte level's own, each digit for itself, runs of punctuation.
GPT2, DIGITS, PUNCTUATION = "gpt2", "digits", "punctuation"
_CASED = rf"{ODD}[{UPPER}]*[{LOWER}]+%s|{ODD}[{UPPER}]+[{LOWER}]*%s|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANK}"
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
STEPS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("gpt-2", "default", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "a.x-4.0", "mellum", "modern-bert",
     "granite-docling", "exaone4", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"): (GPT2,),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"): (DIGITS, GPT2),
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo", "grok-2", "solar-open",
     "f2llmv2"): (ONES,),
    ("qwen35",): (
        rf"{ENDINGS}|{ODD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{BLANK}",
    ),
    ("llama-bpe", "llama-v3", "llama3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): (THREES,),
    ("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"): (THREES,),
    ("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"): (_CASED % (f"{ENDINGS}?", f"{ENDINGS}?", r"\p{N}{1,3}"),),
    ("tekken",): (_CASED % ("", "", r"\p{N}"),),
    ("kimi-k2",): (KIMI,),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        rf"{_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{BLANK}",
    ),
    ("deepseek-llm",): (
        r"[\r\n]",
        rf"\s?[{CASED}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _ASIAN,
        DIGITS,
    ),
    ("deepseek-coder",): (
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        _ASIAN,
        DIGITS,
    ),
    ("falcon",): (PUNCTUATION, GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    ("seed-coder",): (
        rf"{ENDINGS}|{ODD}\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{BLANK}",
    ),
    ("bailingmoe", "bailingmoe2", "llada-moe"): (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
}  # fmt: skip
BY_NAME = {name: steps for names, steps in STEPS.items() for name in names}
# Whose tokenizers take a piece that is a token as it is, whatever its merges, and add bos where a file does not say.
WHOLE_PIECES = {*next(names for names in STEPS if names[0] == "llama-bpe"), "tekken"}
EITHER = {"gpt-4o", "tekken", "kimi-k2"}  # whose merges, tiktoken's, make every token: a tokenizer may say either
COMPOSED = {"qwen2", "qwen35", "deepseek-r1-qwen", "f2llmv2"}  # whose texts are brought into Unicode's form NFC first


def build_cuts(steps: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of the steps; byte level comes last where no step is its own."""
    from tokenizers import Regex, pre_tokenizers

    made: list[Any] = []
    for step in steps:
        if step == GPT2:
            made.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
        elif step == DIGITS:
            made.append(pre_tokenizers.Digits(individual_digits=True))
        elif step == PUNCTUATION:
            made.append(pre_tokenizers.Punctuation("contiguous"))
        else:
            made.append(pre_tokenizers.Split(Regex(step), behavior="isolated", invert=False))
    if GPT2 not in steps:
        made.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return made[0] if len(made) == 1 else pre_tokenizers.Sequence(made)


def name_of(parts: list[dict[str, Any]], whole_pieces: bool) -> str | None:
    """llama.cpp's name for the pre-tokenizer of a tokenizer.json, whose ``parts`` are one after another; None where it
    has none."""
    steps = [_step(part) for part in parts]
    if not parts or None in steps or not any(part.get("type") == "ByteLevel" for part in parts):
        return None
    cuts = tuple(step for step in steps if step)
    found = [names[0] for names, known in STEPS.items() if known == cuts]
    return next((name for name in found if name in EITHER or (name in WHOLE_PIECES) == whole_pieces), None)


def _step(part: dict[str, Any]) -> str | None:
    """What a part of tokenizer.json does; "" nothing, None what is not known here."""
    kind = part.get("type")
    if kind == "ByteLevel":
        if part.get("add_prefix_space"):
            return None
        return GPT2 if part.get("use_regex", True) else ""
    if kind == "Digits":
        return DIGITS if part.get("individual_digits") else r"\p{N}+"
    if kind == "Punctuation":
        return PUNCTUATION if part.get("behavior") == "Contiguous" else None
    pattern = part.get("pattern")
    # An older way to say the same: what lies between the pieces is left out, and nothing does.
    plain = kind == "Split" and (part.get("behavior"), bool(part.get("invert"))) in (
        ("Isolated", False),
        ("Removed", True),
    )
    text = pattern.get("Regex") if plain and isinstance(pattern, dict) else None
    return text.replace("\r", r"\r").replace("\n", r"\n") if isinstance(text, str) else None
