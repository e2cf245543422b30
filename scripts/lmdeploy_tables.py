"""Write the tables of docs/lmdeploy.md anew from toolkit/configs/lmdeploy.py: python scripts/lmdeploy_tables.py"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from toolkit.configs.generation import NOT_GENERATED, GenerationConfig
from toolkit.configs.lmdeploy import CONFIGS, FLAGS, OPTIONS, PLACES, Theirs, of
from toolkit.configs.option import spelled

PAGE = Path(__file__).resolve().parents[1] / "docs/lmdeploy.md"
BEGIN, END = "<!-- made by scripts/lmdeploy_tables.py -->", "<!-- end -->"
SHORT = {CONFIGS[0]: "turbomind", CONFIGS[1]: "pytorch"}
FATES = {
    "works": "These work; where something is different, it is said:",
    "notice": "These are taken, since nothing that they ask for gets lost without them; one line says why:",
    "refused": "These ask for something that is not there, and take their default alone; any other value is refused:",
}
# LMDeploy's fields that the tables lack since they are the flags or arguments of other records.
SAMPLING = [name for name in GenerationConfig.__dataclass_fields__ if name in NOT_GENERATED]


def tables() -> str:
    """All that stands between the marks."""
    parts = [f"{words}\n\n{_table(fate)}\n" for fate, words in FATES.items()]
    return "\n".join([f"{_same()}\n", *parts])


def _same() -> str:
    """Those of which there is nothing to say."""
    same = [name for name in sorted(OPTIONS) if OPTIONS[name].fate == "works" and not OPTIONS[name].why]
    return "These work as they do there: " + ", ".join(f"`{name.rstrip('_')}`" for name in same) + "."


def _table(fate: str) -> str:
    lines = ["| option | where | |", "|---|---|---|"]
    for name in sorted(OPTIONS):
        by_why: dict[str, list[str]] = {}
        for place in PLACES:
            if name in PLACES[place] and (found := of(place, name)).fate == fate and found.why:
                by_why.setdefault(_why(found), []).append(place)
        lines += [f"| {_names(name, places)} | {_where(places)} | {why} |" for why, places in by_why.items()]
    if fate == "refused":
        lines += [f"| `{name}` | `GenerationConfig` | {NOT_GENERATED[name]} |" for name in SAMPLING]
    return "\n".join(lines)


def _why(option: Theirs) -> str:
    return option.why.replace("|", "\\|")


def _names(name: str, places: Iterable[str]) -> str:
    flag = spelled(FLAGS.get(name, name))
    return f"`{name.rstrip('_')}`" if spelled(name) == flag else f"`{name}`, `{flag}`"


def _where(places: list[str]) -> str:
    """Its configs, then its commands."""
    configs = [SHORT[place] for place in places if place in SHORT]
    return ", ".join([*configs, *(f"`{place}`" for place in places if place not in SHORT)])


def page(text: str) -> str:
    """The page with the tables as they are to be."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{PAGE}: {len(OPTIONS)} options", file=sys.stderr)
