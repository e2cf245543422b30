"""Write the tables of docs/lmdeploy.md anew from toolkit/configs/lmdeploy.py: python scripts/site/lmdeploy_tables.py"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from toolkit.configs.generation import NOT_GENERATED, GenerationConfig
from toolkit.configs.lmdeploy import FLAGS, OPTIONS, PLACES, of
from toolkit.configs.option import spelled

PAGE = Path(__file__).resolve().parents[2] / "docs/lmdeploy.md"
BEGIN, END = "<!-- made by scripts/site/lmdeploy_tables.py -->", "<!-- end -->"
FATES = {
    "works": "These work, with a difference:",
    "notice": "These are accepted without effect, with a notice:",
    "refused": "These accept only their default, because what they ask for does not exist here:",
}
# LMDeploy's fields that the tables lack since they are the flags or arguments of other records.
SAMPLING = [name for name in GenerationConfig.__dataclass_fields__ if name in NOT_GENERATED]


def tables() -> str:
    """All that stands between the marks."""
    parts = [f"{words}\n\n{_table(fate)}\n" for fate, words in FATES.items()]
    return "\n".join([f"{_same()}\n", *parts])


def _same() -> str:
    """Those without a difference."""
    same = [name for name in sorted(OPTIONS) if OPTIONS[name].fate == "works" and not OPTIONS[name].why]
    return "These work as in LMDeploy: " + ", ".join(f"`{name.rstrip('_')}`" for name in same) + "."


def _table(fate: str) -> str:
    """A row for each thing that there is to say."""
    by_why: dict[str, dict[str, list[str]]] = {}
    for name in sorted(OPTIONS):
        for place in PLACES:
            if name in PLACES[place] and (found := of(place, name)).fate == fate and found.why:
                by_why.setdefault(found.why.replace("|", "\\|"), {}).setdefault(name, []).append(place)
    rows = [(", ".join(_named(name, places) for name, places in names.items()), why) for why, names in by_why.items()]
    if fate == "refused":
        rows += [(f"`{name}` (`GenerationConfig`)", NOT_GENERATED[name]) for name in SAMPLING]
    return "\n".join(["| option | |", "|---|---|", *(f"| {names} | {why} |" for names, why in rows)])


def _named(name: str, places: list[str]) -> str:
    """With its flag, where that has another name, and its commands, where it is something else in others."""
    flag, text = spelled(FLAGS.get(name, name)), f"`{name.rstrip('_')}`"
    if spelled(name) != flag:
        text += f", `{flag}`"
    differs = any(of(place, name) != of(places[0], name) for place in PLACES if name in PLACES[place])
    return f"{text} ({', '.join(f'`{place}`' for place in places)})" if differs else text


def page(text: str) -> str:
    """The page with the tables as they are to be."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{PAGE}: {len(OPTIONS)} options", file=sys.stderr)
