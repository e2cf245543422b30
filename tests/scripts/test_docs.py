"""The documentation as a site: every page is in its menu, every link leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "scripts" / "site" / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    named = {page for page in re.findall(r"[\w/-]+\.md", menu) if not page.startswith("reference/")}
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert named == pages


FENCE = re.compile(r"^( *)```.*?^\1```$", re.M | re.S)
NOT_PROSE = ("|", "#", "!", "    ")  # tables, headings, pictures, code


def sentences(text: str) -> list[int]:
    """Words of each sentence of a page's prose; code and links count as they read."""
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*[-*] |\s*\d+\. )", FENCE.sub("\n\n", text)):
        if block.strip() and not block.lstrip("\n").startswith(NOT_PROSE):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "X", block)).replace("\n", " ")
            found += [len(s.split()) for s in re.split(r"(?<=[.!?])[)*]*\s+(?=[A-Z*`(])", plain.strip())]
    return found


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_a_stranger_can_read_it(page: Path) -> None:
    """Short sentences, and pages that end. A page that fails wants its ideas told one after the other."""
    text = page.read_text(encoding="utf-8")
    words = sentences(text)
    assert sum(words) / len(words) <= 19, "words a sentence, on average"
    long = sum(n > 30 for n in words)
    assert long <= max(3, 0.12 * len(words)), f"{long} of {len(words)} sentences have more than 30 words"
    assert len(text.splitlines()) <= 220, "lines"


@pytest.mark.slow
def test_the_site_is_built_without_a_broken_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", "scripts/site/mkdocs.yml"]
    env = os.environ | {"PYTHONSAFEPATH": "1"}
    done = subprocess.run([*command, "--site-dir", str(tmp_path)], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "reference" / "cli.html").read_text(encoding="utf-8")
    assert "tool lite auto_awq" in page and "--work-dir" in page
    http = (tmp_path / "reference" / "http.html").read_text(encoding="utf-8")
    assert all(word in http for word in ("max_tokens", "POST /v1/messages", "EmbeddingsRequest"))
    assert not re.search(r"(src|href)=\"https?://[^\"]*\.(css|js|woff2?)", page), "something is fetched from elsewhere"
