"""Our tasks by lm-eval on a served model, and our engine as OpenCompass's model: the numbers of the engine itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit import pipeline, serve
from toolkit.eval.tasks import TASKS, Choice
from toolkit.pipeline.pipeline import Pipeline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ITEMS = 2


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from toolkit.commands.main import main; main(sys.argv[1:])"
    return subprocess.run([sys.executable, "-P", "-c", code, *arguments], capture_output=True, text=True, timeout=1200)


SMALL = "--calib-samples 2 --calib-seqlen 64 --eval-tokens 64 --tune-steps 0"
MADE = {  # a model -> how it is made of the original
    "awq": f"lite auto_awq tiny --work-dir awq --calib-dataset text.txt {SMALL}",
    "w8a8": "convert tiny --to w8a8 --dst-path w8a8",
    "tiny.gguf": "convert tiny --to gguf --gguf-type q8_0 --dst-path tiny.gguf",
}


@pytest.mark.parametrize("model", MADE)
def test_what_is_served_has_the_likelihoods_that_we_measure(
    model: str, tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval's client on a server, and ``tool eval``'s own way, on the same endings of the same sentences."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.chdir(tmp_path)
    Path("tiny").symlink_to(tiny_models("llama", max_position_embeddings=4096))
    Path("text.txt").write_text("The harbour was quiet, and nobody asked where the boats had gone. " * 100)
    done = tool(*MADE[model].split())
    assert done.returncode == 0, done.stderr
    items = [item for i in range(ITEMS) if isinstance(item := TASKS["cloze"].item(i), Choice)]
    pairs = [(item.context, f" {option}") for item in items for option in item.options]
    with pipeline(model) as pipe:
        own = [likelihood(pipe, *pair) for pair in pairs]
    with serve(model, server_port=0) as server:
        lm = LocalCompletionsAPI(model=server.available_models[0], base_url=f"{server.url}/v1/completions")
        got = lm.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    assert [found for found, _ in got] == pytest.approx(own, abs=1e-4)


def likelihood(pipe: Pipeline, context: str, ending: str) -> float:
    before = len(pipe.tokenizer.encode(context))
    return float(pipe.engine.score(pipe.tokenizer.encode(context + ending))[before - 1 :].sum())


def test_the_command_and_our_own_give_one_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    done = tool("eval", "tasks", "demo", *"--task cloze --task passkey --limit 2 --json own.json".split())
    assert done.returncode == 0, done.stderr
    with serve("demo", server_port=0) as server:
        for row in json.loads(Path("own.json").read_text()):
            chat = ["--chat"] if row["task"] == "passkey" else []
            done = tool("eval", "lm_eval", server.url, "--tasks", f"toolkit_{row['task']}", "--limit", "2", *chat)
            found = re.search(rf"toolkit_{row['task']}\s*\|.*acc\s*\|↑\s*\|\s*([\d.]+)", done.stdout)
            assert found, done.stdout + done.stderr
            assert float(found[1]) == pytest.approx(row["accuracy"], abs=1e-4)


def test_opencompass_model(tiny_models: Any) -> None:
    pytest.importorskip("opencompass")
    from toolkit.opencompass import TurboMindModel

    texts = ["the quick brown fox", "jumps over the lazy dog"]
    model = TurboMindModel(str(tiny_models("llama")), max_seq_len=128, gen_config={"max_new_tokens": 4}, end_str="\n")
    try:
        assert len(model.generate(texts, 16)) == 2
        scored = [model.pipe.engine.score(model.pipe.tokenizer.encode(t)) for t in texts]
        assert model.get_ppl(texts) == pytest.approx(np.array([-row.mean() for row in scored]), abs=1e-5)
        ends = [" fox", " dog"]
        sums = [
            row[model.get_token_len(t.removesuffix(e)) - 1 :].sum()
            for row, t, e in zip(scored, texts, ends, strict=True)
        ]
        assert model.get_loglikelihood(texts, ends) == pytest.approx(np.array(sums), abs=1e-5)
    finally:
        model.pipe.close()
