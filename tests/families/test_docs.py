"""docs/models.md and `tool list models` are the registry."""

import json
from pathlib import Path

from typer.testing import CliRunner

from toolkit.commands.main import app
from toolkit.models.registry import families
from toolkit.runners.coverage import coverage

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def test_the_table_is_the_registry() -> None:
    text, known = DOCUMENT.read_text(encoding="utf-8"), coverage(families())
    rows = ["| Models | architecture | `model_type` | GGUF |", "|---|---|---|---|"]
    for one in known:
        architectures = ", ".join(f"`{name}`" for name in one.family.architectures)
        gguf = f"`{one.gguf}`" if one.gguf else "–"
        rows.append(f"| {one.family.known_as} | {architectures} | `{one.family.name}` | {gguf} |")
    not_native = ", ".join(f"`{one.family.name}`" for one in known if one.native is not None)
    no_method = ", ".join(f"`{one.family.name}`" for one in known if one.no_method)
    assert {name for one in known for name in one.no_method} <= {"kv"}
    for line in (
        f"so that `pytorch` stands in: {not_native or 'none'}.\n",
        f"because they keep no keys and values: {no_method}.\n",
    ):
        assert line in text, f"docs/models.md lacks\n{line}"
    found = [line for line in text.splitlines() if line.startswith("|")]
    lacks, odd = [row for row in rows if row not in found], [row for row in found if row not in rows]
    assert not lacks, "docs/models.md lacks\n" + "\n".join(lacks)
    assert not odd, "docs/models.md has what the registry does not say\n" + "\n".join(odd)
    assert found == rows, "docs/models.md: expected the registry's order"


def test_the_command_shows_each_family_and_why_one_is_not_written_or_run() -> None:
    listed = CliRunner().invoke(app, ["list", "models", "--json", "-"])
    assert listed.exit_code == 0
    rows = json.loads(listed.stdout)
    assert {row["architecture"] for row in rows} == {name for family in families() for name in family.architectures}
    for row in rows:
        assert (row["gguf"] is None) == bool(row["no_gguf"]) and ("gguf" in row["formats"]) == bool(row["gguf"])
        assert ("turbomind" in row["backends"]) == (row["not_on_turbomind"] is None)
    table = CliRunner().invoke(app, ["list", "models"], env={"COLUMNS": "80"}).stdout
    assert all(len(line) <= 80 for line in table.splitlines()[:-1])
    assert all(family.name in table for family in families())
