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
