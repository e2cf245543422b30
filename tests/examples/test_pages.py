"""Pages of the guide are run as they stand, on a tiny model in the place of the demo."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HOW_TO = Path(__file__).resolve().parents[2] / "docs" / "how-to"
PAGES = ("adapters", "debug", "deploy", "long-prompts", "measure-a-server", "several-servers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# What is in lines that take minutes, ask, or need another program.
BY_HAND = ("toolkit.runners.native.build", "gdb ", "bash scripts/", "docker ", "helm ", "kubectl ", "systemctl ")
LESS = {"--num-prompts 200": "--num-prompts 4"}
MORE = {
    "tool profile": "--random-input-len 8 --random-output-len 4",
    "--request-rate": "--num-prompts 4",
}
SMALL = "--calib-dataset notes.txt --calib-samples 4 --calib-seqlen 32 --eval-tokens 128"


@pytest.fixture(scope="module")
def made(tiny_models: Callable[..., Path], support: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pages take for granted: models, adapters, a text."""
    folder = tmp_path_factory.mktemp("made")
    model = tiny_models("llama", max_position_embeddings=16384)
    shutil.copytree(model, folder / "demo")
    for name in ("tales", "verse"):
        support("adapters").write_adapter(folder / name, model, "q_proj|v_proj")
    (folder / "notes.txt").write_text("The harbour was quiet, and nobody asked where the boats had gone. " * 400)
    shell = support("shell").Shell(folder)
    shell.run(f"tool lite auto_awq ./demo --work-dir work/demo-awq --tune-steps 0 {SMALL}")
    shell.run("tool convert work/demo-awq --dst-path work/demo-engine")
    shutil.rmtree(folder / "bin")
    return folder


@pytest.fixture
def shell(made: Path, support: Any, tmp_path: Path) -> Iterator[Any]:
    shutil.copytree(made, tmp_path / "here")
    shell = support("shell").Shell(tmp_path / "here")
    shell.env["KEY"] = "secret"
    yield shell
    shell.close()


def as_here(line: str) -> str:
    """A page's line on the tiny model, with less to do."""
    line = re.sub(r"(?<=\s)(demo|MODEL)(?=\s|$)", "./demo", line)
    line = line.replace("tales=DIR", "tales=./tales").replace("OWNER/NAME", "./verse")
    for shown, here in LESS.items():
        line = line.replace(shown, here)
    return line + "".join(f" {more}" for part, more in MORE.items() if part in line)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs(name: str, shell: Any, support: Any) -> None:
    shown, page = support("examples"), HOW_TO / f"{name}.md"
    every = [line for block in shown.blocks(page, "sh") for line in shown.whole_lines(block)]
    lines = [line for line in every if not any(part in line for part in BY_HAND)]
    code = shown.blocks(page, "python")
    if "23333" in "".join(lines + code) and not any("serve api_server" in line for line in lines):
        shell.run("tool serve api_server ./demo --server-port 23333")
    for line in lines:
        shell.run(as_here(line))
    if code:
        shell.python(re.sub(r'(?<=\()"(demo|MODEL)"', '"./demo"', "\n".join(code)).replace('"DIR"', '"./tales"'))
