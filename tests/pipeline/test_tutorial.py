"""Programs as users of LMDeploy write them, but for the package's name, on the demo model; each in its own process.

Collected where the demo has been fetched (``tool pull demo``); the long answers are for ``-m slow``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.artifacts.home import toolkit_home

BATCH = "from toolkit import pipeline\nprint(pipeline('demo')(['Say hi.', 'Rome is']))"
SHARE = """
from toolkit import pipeline, TurbomindEngineConfig
pipe = pipeline('demo', backend_config=TurbomindEngineConfig(cache_max_entry_count=0.2))
print(pipe(['Say hi.', 'Rome is']))
"""
SAMPLING = """
from toolkit import pipeline, GenerationConfig, TurbomindEngineConfig
gen_config = GenerationConfig(top_p=0.8, top_k=40, temperature=0.8, max_new_tokens=1024)
pipe = pipeline('demo', backend_config=TurbomindEngineConfig(tp=1))
print(pipe(['Say hi.', 'Rome is'], gen_config=gen_config))
"""
MESSAGES = """
from toolkit import pipeline, GenerationConfig, TurbomindEngineConfig
gen_config = GenerationConfig(top_p=0.8, top_k=40, temperature=0.8, max_new_tokens=1024)
pipe = pipeline('demo', backend_config=TurbomindEngineConfig(tp=1))
prompts = [[{'role': 'user', 'content': 'Say hi.'}], [{'role': 'user', 'content': 'Rome is'}]]
print(pipe(prompts, gen_config=gen_config))
"""
STREAM = """
from toolkit import pipeline, GenerationConfig, TurbomindEngineConfig
gen_config = GenerationConfig(top_p=0.8, top_k=40, temperature=0.8, max_new_tokens=1024)
pipe = pipeline('demo', backend_config=TurbomindEngineConfig(tp=1))
prompts = [[{'role': 'user', 'content': 'Say hi.'}], [{'role': 'user', 'content': 'Rome is'}]]
for item in pipe.stream_infer(prompts, gen_config=gen_config):
    print(item)
"""
PYTORCH = """
from toolkit import pipeline, GenerationConfig, PytorchEngineConfig
gen_config = GenerationConfig(top_p=0.8, top_k=40, temperature=0.8, max_new_tokens=1024)
if __name__ == '__main__':
    pipe = pipeline('demo', backend_config=PytorchEngineConfig(session_len=2048))
    prompts = [[{'role': 'user', 'content': 'Say hi.'}], [{'role': 'user', 'content': 'Rome is'}]]
    print(pipe(prompts, gen_config=gen_config))
"""
PROGRAMS = {
    "batch": BATCH, "share of memory": SHARE, "sampling": SAMPLING, "messages": MESSAGES, "stream": STREAM,
    "pytorch": PYTORCH,
}  # fmt: skip


def run(program: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    (tmp_path / "program.py").write_text(program)
    return subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )


if (toolkit_home() / "models" / "demo" / "config.json").is_file():

    @pytest.mark.slow
    @pytest.mark.parametrize("name", PROGRAMS)
    def test_runs_as_it_stands(name: str, tmp_path: Path) -> None:
        done = run(PROGRAMS[name], tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("Response(text=") >= 2
        assert "finish_reason='stop'" in done.stdout or "finish_reason='length'" in done.stdout
        assert "finish_reason='error'" not in done.stdout

    @pytest.mark.parametrize("name", ["messages", "stream", "pytorch"])
    def test_runs_with_short_answers(name: str, tmp_path: Path) -> None:
        done = run(PROGRAMS[name].replace("max_new_tokens=1024", "max_new_tokens=4"), tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("Response(text=") >= 2 and "generate_token_len=4" in done.stdout

    def test_two_devices_that_are_not_there(tmp_path: Path) -> None:
        done = run(SAMPLING.replace("tp=1", "tp=64"), tmp_path)
        assert done.returncode == 1 and done.stdout == ""
        said = done.stderr.splitlines()[-1]
        assert said.startswith("toolkit.errors.UsageError: tp=64: ") and "up to 9 would do" in said
