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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]  # each model is opened four times


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from toolkit.commands.main import main; main(sys.argv[1:])"
    return subprocess.run([sys.executable, "-P", "-c", code, *arguments], capture_output=True, text=True, timeout=1500)


SMALL = "--calib-samples 2 --calib-seqlen 64 --eval-tokens 64 --tune-steps 0"
MADE = {  # a model -> how it is made of the demo
    "demo": None,
    "awq": f"lite auto_awq demo --work-dir awq --calib-dataset text.txt {SMALL}",
    "w8a8": "convert demo --to w8a8 --dst-path w8a8",
    "demo.gguf": "convert demo --to gguf --gguf-type q8_0 --dst-path demo.gguf",
}


@pytest.mark.parametrize("model", MADE)
def test_lm_eval_and_our_own_give_one_number(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("The harbour was quiet, and nobody asked where the boats had gone. " * 100)
    if command := MADE[model]:
        done = tool(*command.split())
        assert done.returncode == 0, done.stderr
    for name, flags in (("cloze", []), ("passkey", ["--chat"])):
        done = tool("eval", "tasks", model, "--task", name, "--limit", "8", "--json", "own.json")
        assert done.returncode == 0, done.stderr
        (row,) = json.loads(Path("own.json").read_text())
        done = tool("eval", "lm_eval", model, "--tasks", f"toolkit_{name}", "--limit", "8", *flags)
        found = re.search(rf"toolkit_{name}\s*\|.*acc\s*\|↑\s*\|\s*([\d.]+)", done.stdout)
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
