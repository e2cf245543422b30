"""Of how many seeds are answers as JSON cut or padded? Drawn at temperature 1, many at once.

python scripts/bench/serving/json_seeds.py MODEL --seeds 200 --max-tokens 256
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from toolkit import GenerationConfig, TurbomindEngineConfig, pipeline


def schema(**properties: Any) -> dict[str, Any]:
    asked = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": asked}}


STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')
BLANKS = re.compile(r"\s\s|\s$|[^,:]\s")  # outside strings one blank stands after each comma and colon
STRING = {"type": "string"}
CASES = {
    "person": (
        "Describe a person as JSON: name, age, married.",
        schema(name=STRING, age={"type": "integer"}, married={"type": "boolean"}),
    ),
    "place": ("Name a city and its country as JSON.", schema(city=STRING, country=STRING)),
    "weather": (
        "Weather report in JSON: city, temperature, sky.",
        schema(city=STRING, temperature={"type": "number"}, sky={"enum": ["clear", "cloudy", "rain"]}),
    ),
    "list": ("List three fruits as JSON.", schema(fruits={"type": "array", "items": STRING})),
    "json_object": ("Describe a person as a JSON object with name and age.", {"type": "json_object"}),
}


def wrong(text: str) -> bool:
    """Whether it is no JSON, or has blanks that plain JSON has not."""
    try:
        json.loads(text)
    except ValueError:
        return True
    return bool(BLANKS.search(STRINGS.sub("", text)))


def count(model: str, seeds: int, max_tokens: int) -> dict[str, dict[str, int]]:
    """By case: answers whose finish_reason is not "stop", answers that are wrong, tokens of the longest."""
    found = {}
    with pipeline(model, TurbomindEngineConfig(session_len=2048, max_batch_size=32)) as pipe:
        for name, (prompt, form) in CASES.items():
            wishes = [
                GenerationConfig(
                    max_new_tokens=max_tokens, do_sample=True, temperature=1.0, random_seed=seed, response_format=form
                )
                for seed in range(seeds)
            ]
            answers = pipe([prompt] * seeds, gen_config=wishes)
            found[name] = {
                "cut": sum(answer.finish_reason != "stop" for answer in answers),
                "wrong": sum(wrong(answer.text) for answer in answers),
                "longest": max(answer.generate_token_len for answer in answers),
            }
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=256)
    given = parser.parse_args()
    for case, figures in count(given.model, given.seeds, given.max_tokens).items():
        print(f"{case}: of {given.seeds} " + ", ".join(f"{key} {value}" for key, value in figures.items()), flush=True)
