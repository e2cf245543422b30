"""docs/models.md lists the registry."""

from pathlib import Path

from toolkit.models.gguf import Gguf
from toolkit.models.registry import families

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def test_the_table_is_the_registry() -> None:
    rows = ["| Models | architecture | `model_type` | GGUF |", "|---|---|---|---|"]
    for family in families():
        architectures = ", ".join(f"`{name}`" for name in family.architectures)
        gguf = f"`{family.gguf.arch}`" if isinstance(family.gguf, Gguf) else "–"
        rows.append(f"| {family.known_as} | {architectures} | `{family.name}` | {gguf} |")
    found = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert found == rows, "docs/models.md: expected this table\n" + "\n".join(rows)
