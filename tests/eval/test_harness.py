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

pytestmark = pytest.mark.slow


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from toolkit.commands.main import main; main(sys.argv[1:])"
    return subprocess.run([sys.executable, "-P", "-c", code, *arguments], capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(("name", "flags"), [("cloze", []), ("passkey", ["--chat"])])
def test_lm_eval_and_our_own_give_one_number(name: str, flags: list[str], tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    own = tmp_path / "own.json"
    assert tool("eval", "tasks", "demo", "--task", name, "--limit", "12", "--json", str(own)).returncode == 0
    (row,) = json.loads(own.read_text())
    done = tool("eval", "lm_eval", "demo", "--tasks", f"toolkit_{name}", "--limit", "12", *flags)
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
