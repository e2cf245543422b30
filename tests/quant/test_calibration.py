"""Calibration text: files of every kind, known names, self-generated text, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from toolkit.artifacts.output.stage import open_stage
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.configs.engine import TurbomindEngineConfig
from toolkit.errors import ToolkitError, UsageError
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.text.calibration import CalibrationPlan, make_plan, read_samples
from toolkit.quant.text.calibration_text import CalibrationText
from toolkit.quant.text.datasets import KNOWN
from toolkit.quant.text.selftext import PIECE, openings, self_samples

SENTENCE = "It was a bright cold day in April. "


@pytest.fixture
def model(tiny_models: Any) -> Path:
    return tiny_models("llama")


def read(dataset: str | Path, model: Path, samples: int = 4, seqlen: int = 32) -> list[list[int]]:
    plan = make_plan(str(dataset), samples, seqlen, 0, 512)
    return read_samples(plan, Tokenizer.open(model), model)


def text_of(samples: list[list[int]], model: Path) -> str:
    return Tokenizer.open(model).decode([i for s in samples for i in s], skip_special_tokens=False)


def write(path: Path, suffix: str) -> Path:
    rows = [{"text": SENTENCE * 5, "id": i} for i in range(20)]
    file = path / f"data{suffix}"
    if suffix == ".txt":
        file.write_text(SENTENCE * 100)
    elif suffix == ".jsonl":
        file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    elif suffix == ".json":
        file.write_text(json.dumps([r["text"] for r in rows]))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), file)
    return file


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".json", ".parquet"])
def test_every_kind_of_file_gives_samples_of_the_model_s_tokens(suffix: str, tmp_path: Path, model: Path) -> None:
    samples = read(write(tmp_path, suffix), model)
    assert [len(s) for s in samples] == [32] * 4
    assert "bright cold day" in Tokenizer.open(model).decode(samples[0] + samples[1])


def test_blank_rows_are_no_text(tmp_path: Path, model: Path) -> None:
    """Every third row of wikitext is blank."""
    rows = [SENTENCE * 5, "", " \n"] * 20
    (tmp_path / "blank.json").write_text(json.dumps(rows))
    (tmp_path / "dense.json").write_text(json.dumps(rows[::3]))
    found = read(tmp_path / "blank.json", model)
    assert found == read(tmp_path / "dense.json", model)


def test_a_folder_is_all_its_files(tmp_path: Path, model: Path) -> None:
    write(tmp_path, ".txt")
    write(tmp_path, ".jsonl")
    (tmp_path / "readme.md").write_text("not read")
    assert len(read(tmp_path, model, samples=8)) == 8


def test_chats_go_through_the_chat_template(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "chat.jsonl"
    row = {"messages": [{"role": "user", "content": SENTENCE}, {"role": "assistant", "content": "Yes."}]}
    file.write_text((json.dumps(row) + "\n") * 20)
    text = text_of(read(file, model), model)
    assert "<|im_start|>user\n" in text and "<|im_start|>assistant\nYes.<|im_end|>" in text


def test_sharegpt_s_chats_are_chats_too(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "chat.json"
    row = {"conversations": [{"from": "human", "value": SENTENCE}, {"from": "gpt", "value": "Yes."}]}
    file.write_text(json.dumps([row] * 20))
    text = text_of(read(file, model), model)
    assert "<|im_start|>user\n" in text and "<|im_start|>assistant\nYes.<|im_end|>" in text


def test_byte_order_marks_and_separators_inside_of_strings_are_no_trouble(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "text.jsonl"
    rows = "".join(json.dumps({"text": "a\u2028b\x85c " * 30}, ensure_ascii=False) + "\r\n" for _ in range(20))
    file.write_bytes(b"\xef\xbb\xbf" + rows.encode())
    assert "a\u2028b\x85c " in text_of(read(file, model), model)


def test_the_seed_draws_the_samples(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "numbers.txt"
    file.write_text(" ".join(map(str, range(3000))))
    tokenizer = Tokenizer.open(model)
    first, again, other = (read_samples(CalibrationPlan(str(file), 4, 32, s), tokenizer, model) for s in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        (
            "short.txt",
            SENTENCE * 3,
            r"tokens, [\d,]+ too few for 4 samples of 32; give more text or --calib-samples",
        ),
        ("tiny.txt", "Hi.", r"too few for even one sample of 32"),
        ("empty.txt", "", r"empty\.txt: the file holds no text"),
        ("bad.json", "{", r"bad\.json: not valid JSON: .* at line 1, column 2"),
        ("bad.jsonl", '{"text": "a"}\n{"tex', r"bad\.jsonl: line 2: not valid JSON: .* column 2"),
        ("object.json", "{}", r"expected a list of texts or objects, found dict"),
        ("rows.jsonl", '{"prompt": "a"}\n', r"row 1: expected text or messages, found \{'prompt': 'str'\}"),
        ("null.jsonl", '{"text": "a"}\n{"text": null}\n', r"row 2: expected text or messages, .* 'NoneType'\}"),
        ("bad.parquet", "nonsense", r"bad\.parquet: not a valid \.parquet file"),
        ("notes.md", "text", r"expected a \.txt, \.jsonl, \.json, \.parquet file"),
        ("latin.txt", b"\xff\xfe\xff", r"latin\.txt: not a valid \.txt file"),
    ],
)
def test_what_cannot_be_calibrated_on(
    name: str, content: str | bytes, complaint: str, tmp_path: Path, model: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UsageError, match=complaint) as caught:
        read(file, model)
    assert "\n" not in str(caught.value)


def test_options_out_of_range(tmp_path: Path) -> None:
    for options, complaint in [
        (("self", 0, 512, 0, 2048), "--calib-samples: expected 1 or more"),
        (("self", None, 4096, 0, 2048), "--calib-seqlen: expected 16 to 2048"),
        (("wikitext3", None, 512, 0, 2048), "no such file or folder, and none of self, c4"),
        ((str(tmp_path / "nowhere"), None, 512, 0, 2048), "no such file or folder"),
        ((str(tmp_path), None, 512, 0, 2048, -1), "--calib-self-samples: expected 0 or more"),
        (("self", None, 512, 0, 2048, 4), "--calib-self-samples: the model writes all of the text"),
        (("self", None, 512, 1 << 31, 2048), "--seed: expected 0 to 2147483647, found 2147483648"),
        (("self", None, 512, -1, 2048), "--seed: expected 0 to 2147483647, found -1"),
        (("", None, 512, 0, 2048), "--calib-dataset: : no such file or folder"),  # not all of the current directory
        (("c4=", None, 512, 0, 2048), "--calib-dataset c4=: expected a folder"),
    ]:
        with pytest.raises(UsageError, match=complaint):
            make_plan(*options)
    assert make_plan("self", None, 512, 0, 2048).samples == 32  # 16k tokens
    assert make_plan("self", 128, 512, 0, 2048).samples == 128


@pytest.mark.parametrize(
    ("samples", "own", "usual", "expected"),
    [(None, None, None, (128, 32)), (None, None, 16, (16, 8)), (None, 0, None, (128, 0)), (None, 8, None, (136, 8)),
     (40, None, 16, (40, 0)), (40, 8, 16, (48, 8))],
)  # fmt: skip
def test_some_of_the_text_is_the_model_s_own_unless_the_user_says_how_much(
    samples: int | None, own: int | None, usual: int | None, expected: tuple[int, int]
) -> None:
    plan = make_plan("c4", samples, 512, 0, 2048, own, usual)
    assert (plan.samples, plan.own) == expected
    assert make_plan("self", None, 512, 0, 2048, None, usual).own == 0


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_known_names_read_the_columns_that_the_table_says(
    name: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, asked = KNOWN[name], []

    class Rows(list):  # type: ignore[type-arg]
        def shuffle(self, seed: int, buffer_size: int) -> Rows:
            return self

    def load_dataset(path: str, config: str | None, *, split: str, revision: str | None, streaming: bool) -> Rows:
        asked.append((path, config, split, revision))
        if known.columns == ("messages",):
            return Rows([{"messages": [{"role": "user", "content": SENTENCE}]}] * 60)
        return Rows([{c: SENTENCE + c for c in known.columns}] * 60)

    stub = ModuleType("datasets")
    stub.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", stub)
    text = text_of(read(name, model, samples=1, seqlen=128), model)
    assert asked == [(known.repository, known.config, known.split, known.revision)]
    for column in known.columns:
        assert ("<|im_start|>user" if column == "messages" else SENTENCE + column) in text


def test_a_known_name_without_a_network_is_one_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*args: Any, **options: Any) -> Any:
        raise ConnectionError("Couldn't reach the hub\nlong story")

    stub = ModuleType("datasets")
    stub.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", stub)
    with pytest.raises(
        ToolkitError, match=r"wikitext2: Salesforce/wikitext cannot be fetched .*--calib-dataset self"
    ) as e:
        read("wikitext2", model)
    assert "\n" not in str(e.value)


# What the hub has under these names: its configurations as the README of a repository gives them, and its files.
COPIES = {
    "wikitext2": {"wikitext-103-raw-v1/train-0.parquet": "no", "wikitext-2-raw-v1/test-0.parquet": "no",
                  "wikitext-2-raw-v1/train-0.parquet": "yes"},
    "c4": {"realnewslike/c4-train.00000.json.gz": "no", "en/c4-validation.00000.json.gz": "no",
           "en/c4-train.00000.json.gz": "yes"},
    "ptb": {"default/test/0000.parquet": "no", "default/train/0000.parquet": "yes"},
}  # fmt: skip


@pytest.mark.parametrize("name", COPIES)
def test_a_known_name_may_be_a_folder_laid_out_as_the_hub_s(name: str, model: Path, tmp_path: Path) -> None:
    """Read by the library itself: of its files those of the configuration and split that the name means."""
    import gzip

    import pandas

    known = KNOWN[name]
    files: dict[str, list[dict[str, str]]] = {}
    for path, word in COPIES[name].items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = [{c: f"{word} {c} {SENTENCE}" for c in known.columns}] * 60
        if file.suffix == ".gz":
            file.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
        else:
            pandas.DataFrame(rows).to_parquet(file)
        config, split = (
            path.split("/")[0],
            next(s for s in ("train", "test", "validation") if s in path.split("/", 1)[1]),
        )
        files.setdefault(config, []).append({"split": split, "path": path})
    told = json.dumps([{"config_name": c, "data_files": f} for c, f in files.items()])
    (tmp_path / "README.md").write_text(f"---\nconfigs: {told}\n---\n")
    text = text_of(read(f"{name}={tmp_path}", model, samples=1, seqlen=128), model)
    assert "no " + known.columns[0] not in text
    for column in known.columns:
        assert f"yes {column} {SENTENCE}"[:20] in text


def test_a_folder_that_is_no_copy_is_one_line(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"c4=/nowhere: expected a folder, a copy of allenai/c4"):
        make_plan("c4=/nowhere", None, 512, 0, 2048)
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(ToolkitError, match="cannot be read as a copy of allenai/c4") as error:
        read(f"c4={tmp_path}", model)
    assert "\n" not in str(error.value)


def test_text_of_the_model_s_own_is_spread_among_that_of_a_dataset(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path / "home"))
    file = tmp_path / "text.txt"
    file.write_text(SENTENCE * 100)
    source, tokenizer = LayerSource(model), Tokenizer.open(model)
    text = CalibrationText(source, make_plan(str(file), 6, 32, 0, 512, 2))
    told: list[tuple[str, int, int]] = []
    with open_stage(
        tmp_path / "out", kind="quantized", stage="lite auto_awq", parent={}, options=text.options()
    ) as stage:
        ids = text.read(stage, tokenizer, "sha256:abc", lambda *step: told.append(step))
        stage.finish()
    assert text.options()["calib_samples"] == 6 and text.options()["calib_self_samples"] == 2
    own = self_samples(model, "sha256:abc", CalibrationPlan("self", 2, 32, 0), tokenizer, lambda done, total: None)
    given = read(file, model, 6)
    assert told[-1] == ("writing calibration text", 2, 2)
    assert ids.tolist() == [*given[:2], own[0], *given[2:5], own[1], given[5]]


def test_self_text_is_the_model_s_own_seeded_and_cached(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.open(model)
    calls = []

    def make(seed: int, home: str) -> list[list[int]]:
        monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path / home))
        plan = CalibrationPlan("self", 5, 40, seed)
        return self_samples(model, "sha256:abc", plan, tokenizer, lambda done, total: calls.append((done, total)))

    first = make(0, "a")
    assert [len(s) for s in first] == [40] * 5
    assert calls == [(i, 5) for i in range(1, 6)]
    assert not {e for s in first for e in s} & set(tokenizer.eos_ids)
    assert len({tuple(s) for s in first}) == 5
    calls.clear()
    assert make(0, "a") == first and not calls  # from the cache
    assert make(0, "b") == first  # the same again without it
    assert make(1, "a") != first
    cached = next((tmp_path / "a" / "calibration").glob("*seed0*"))
    cached.write_text("[[1, 2")  # a damaged cache is as good as none
    assert make(0, "a") == first


def test_self_text_that_cannot_be_kept_is_taken_all_the_same(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have taken minutes to write, and a home may be read-only or full."""
    plan, tokenizer = CalibrationPlan("self", 1, 20, 0), Tokenizer.open(model)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "file").touch()
    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path / "file"))
    assert len(self_samples(model, "sha256:abc", plan, tokenizer, lambda done, total: None)) == 1
    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path / "home"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert len(self_samples(model, "sha256:abc", plan, tokenizer, lambda done, total: None)) == 1
    assert not list((tmp_path / "home" / "calibration").iterdir())


@pytest.mark.parametrize(
    ("gpu", "native", "expected"), [(False, True, "int8"), (True, True, "auto"), (False, False, "auto")]
)
def test_self_text_is_written_with_8_bit_weights_where_that_is_faster(
    gpu: bool, native: bool, expected: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit.engine.process.frontend import AsyncEngine
    from toolkit.quant.text import selftext

    asked, opened = [], AsyncEngine.open

    def open_engine(path: Path, *, backend_config: Any, progress: Any) -> Any:
        asked.append(backend_config.load_format)
        return opened(path, backend_config=TurbomindEngineConfig(device="cpu"), progress=progress)

    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path))
    monkeypatch.setattr(selftext, "gpu_is_likely", lambda: gpu)
    monkeypatch.setattr(selftext.library, "available", lambda: None if native else "no compiler")
    monkeypatch.setattr(selftext.AsyncEngine, "open", open_engine)
    plan = CalibrationPlan("self", 1, 20, 0)
    self_samples(model, "sha256:abc", plan, Tokenizer.open(model), lambda done, total: None)
    assert asked == [expected]


def test_a_long_self_sample_is_pieces_with_openings_of_their_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path))
    tokenizer = Tokenizer.open(model)
    samples = self_samples(model, "sha256:abc", CalibrationPlan("self", 2, 200, 3), tokenizer, lambda done, total: None)
    assert [len(s) for s in samples] == [200, 200]
    starts = [tuple(s[a : a + 8]) for s in samples for a in (0, PIECE)]
    assert len(set(starts)) == 4
    assert set(starts) <= {tuple(tokenizer.encode(x)[:8]) for x in openings()}
