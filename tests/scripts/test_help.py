"""Every script answers ``--help``, also where packages of others that it measures or talks to are missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCED = "scripts/testing/oldest"  # by scripts/test, and never started
MISSING = (
    "llama_cpp",
    "ik_llama_cpp",
    "xllamacpp",
    "openvino",
    "openvino_genai",
    "vllm",
    "llmcompressor",
    "compressed_tensors",
)
RUN = """
import contextlib, io, json, runpy, sys, traceback
from pathlib import Path

for name in %r:
    sys.modules[name] = None  # not installed
path, found, own = list(sys.path), {}, %r
for script in sys.argv[1:]:
    sys.argv, sys.path[:], said = [script, "--help"], [str(Path(script).parent), *path], io.StringIO()
    code = "no end"
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        code = traceback.format_exc()
    found[script] = (code, said.getvalue())
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(own):
            del sys.modules[name]
print(json.dumps(found))
"""


def scripts() -> Iterator[tuple[str, bool]]:
    """Each that is started by itself, and whether it is Python."""
    tracked = subprocess.run(["git", "ls-files", "scripts"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in tracked.stdout.split():
        text = (ROOT / name).read_text(encoding="utf-8")
        if name.endswith(".py"):
            if re.search("^if __name__ == .__main__.:", text, re.MULTILINE):
                yield name, True
        elif re.fullmatch(r"scripts/([a-z_]+/)?[^/.]+", name) and name != SOURCED:
            yield name, "python" in text.partition("\n")[0]


SCRIPTS = dict(scripts())


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[object, str]]:
    """What the Python ones say, all in one process, so that what is slow to import is imported once."""
    code = RUN % (MISSING, str(ROOT / "scripts"))
    names = [name for name, python in SCRIPTS.items() if python]
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *names], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {name: (code, said) for name, (code, said) in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name: str, request: pytest.FixtureRequest) -> None:
    if SCRIPTS[name]:
        code, said = request.getfixturevalue("answers")[name]
        assert said.startswith("usage:"), code
    else:
        env = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}  # scripts/test's
        done = subprocess.run(["bash", name, "--help"], cwd=ROOT, capture_output=True, text=True, env=env)
        code, said = done.returncode, done.stdout
    assert code in (0, None), code
    assert said.strip()
