"""How widespread tokenizers cut a text, and the parts of these patterns."""

ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ODD = r"[^\r\n\p{L}\p{N}]?"
BLANK = r"\s*[\r\n]+|\s+(?!\S)|\s+"
REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANK}"
WORDS = rf"{ENDINGS}|{ODD}\p{{L}}+|%s|{REST}"
ONES, THREES = WORDS % r"\p{N}", WORDS % r"\p{N}{1,3}"  # Qwen; cl100k, Llama 3 and GLM
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_BIG, _SMALL = rf"[{UPPER}&&[^\p{{Han}}]]", rf"[{LOWER}&&[^\p{{Han}}]]"
KIMI = rf"[\p{{Han}}]+|{ODD}{_BIG}*{_SMALL}+{ENDINGS}?|{ODD}{_BIG}+{_SMALL}*{ENDINGS}?|\p{{N}}{{1,3}}|{REST}"
