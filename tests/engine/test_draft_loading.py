"""Which models may guess for another, and the memory that they are given."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig
from toolkit.configs.speculative import SpeculativeConfig
from toolkit.engine.drafts.vocabulary import by_text, equal
from toolkit.engine.load.drafts.find import DraftFiles, find_draft
from toolkit.engine.load.drafts.model import match, open_draft
from toolkit.engine.load.memory_plan import Wishes, plan
from toolkit.errors import ToolkitError, UsageError
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner


def write_tokenizer(folder: Path, tokens: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token=tokens[0])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.decoder = tokenizers.decoders.Fuse()
    backend.save(str(folder / "tokenizer.json"))
    return folder


def test_tokens_are_matched_by_their_texts() -> None:
    vocabulary, share = by_text([b"a", b"b", b"c", b"", b"d"], [b"x", b"c", b"a", b"a"], (6, 5))
    assert vocabulary.to_draft.tolist() == [2, -1, 1, -1, -1, -1]
    assert vocabulary.to_target.tolist() == [-1, 2, 0, -1, -1]
    assert share == 0.5 and not vocabulary.same
    assert vocabulary.read(np.array([2, 1, 0], np.int32)).tolist() == [1, 0, 2]
    padded = equal(4, 6)
    assert padded.to_target.tolist() == [0, 1, 2, 3, -1, -1] and not padded.same and equal(4, 4).same


def test_a_draft_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(20)]
    mine = write_tokenizer(tmp_path / "a", words)

    def matched(tokens: list[str]) -> Any:
        draft = write_tokenizer(tmp_path / "b", tokens)
        return match(mine, DraftFiles(draft, draft, draft), 20, len(tokens))

    assert matched(words).same
    assert matched(words[::-1]).to_draft.tolist() == list(range(19, -1, -1))
    with pytest.raises(
        UsageError, match=r"^speculative_draft_model: .*/b has another vocabulary: .* knows 50 %, expected 90"
    ):
        matched(words[:10] + [f"x{i}" for i in range(10)])


@pytest.mark.parametrize("k", [0, -1, 10**6, 2.5, "4"])
def test_numbers_of_tokens_that_cannot_be(k: Any) -> None:
    with pytest.raises(UsageError, match="num_speculative_tokens"):
        SpeculativeConfig("draft_model", "x", num_speculative_tokens=k)
    with pytest.raises(UsageError, match="speculative_num_draft_tokens"):
        TurbomindEngineConfig(speculative_num_draft_tokens=k, speculative_draft_model="x")


def test_a_draft_that_is_nowhere_or_has_nothing_to_guess_for(tmp_path: Path) -> None:
    def find(backend: Any = TurbomindEngineConfig, **fields: Any) -> None:
        find_draft(backend(speculative_draft_model=str(tmp_path / "none"), **fields), Path, None)

    with pytest.raises(UsageError, match=r"^speculative_draft_model: .*no such file or directory"):
        find()
    with pytest.raises(UsageError, match=r"^speculative_draft_model: .*empty_init"):
        find(empty_init=True)
    with pytest.raises(UsageError, match=r"^speculative_draft_model: runs with tp at most; leave it out, or pp"):
        find(pp=2, backend=PytorchEngineConfig)


@pytest.fixture
def models(tiny_models: Any, tmp_path: Path) -> Any:
    """``models(family, **changes)``: a tiny model with a tokenizer, and its files as those of a draft."""

    def make(family: str, **changes: Any) -> DraftFiles:
        made = Path(tiny_models(family, **changes))
        folder = tmp_path / f"{family}{len(list(tmp_path.iterdir()))}"
        shutil.copytree(made, folder)
        size = json.loads((made / "config.json").read_text())["vocab_size"]
        write_tokenizer(folder, [f"w{i}" for i in range(size)])
        return DraftFiles(folder, folder, folder)

    return make


def opened(target: DraftFiles, draft: DraftFiles) -> Any:
    options = RunnerOptions(device="cpu", dtype="float32", block_size=16, threads=1)
    runner, _ = open_runner(target.path, backend="turbomind", options=options)
    return runner, open_draft(draft, runner, target.path, TurbomindEngineConfig(), "turbomind")


def test_drafts_that_cannot_guess_for_a_model(models: Any) -> None:
    small = models("llama")
    large = models("llama", num_hidden_layers=4)
    with pytest.raises(UsageError, match=r"^speculative_draft_model: .* is larger than the model it guesses for"):
        opened(small, large)
    with pytest.raises(UsageError, match=r"^speculative_draft_model: .* keeps recurrent states"):
        opened(large, models("mamba2"))


def test_a_drafts_cache_is_planned_with_its_targets(models: Any) -> None:
    small = models("llama")
    runner, draft = opened(small, small)
    need, groups = runner.memory(), runner.spec.cache_groups

    def share_out(need: Any, groups: Any, free: int = 1 << 24) -> Any:
        wishes = Wishes(session_len=2048, max_batch_size=2, max_prefill_token_num=64, kv=0.5)
        whole = replace(need, free=free)
        return plan(whole, groups, block_size=16, vocab_size=200, max_position=2048, device="cpu", wishes=wishes)

    alone = share_out(need, groups)
    both = draft.plan(need, groups, share_out)
    assert len(both.num_blocks) == len(groups) and draft.blocks == both.num_blocks, "one has as many as the other"
    assert both.total <= both.free and {what for what, _, _ in both.rows} > {what for what, _, _ in alone.rows}
    assert {"draft model", "its KV cache"} <= {what for what, _, _ in both.rows}
    per_token = sum(need.block_bytes) // 16
    tight = need.weights + 2048 * per_token + (1 << 18)
    with pytest.raises(ToolkitError, match=r"^speculative_draft_model: no room for .* and its KV cache: "):
        draft.plan(need, groups, lambda n, g: share_out(n, g, int(tight * 1.3)))
    model = draft.load(both)
    model.rest()
    model.wake()
    model.close()
