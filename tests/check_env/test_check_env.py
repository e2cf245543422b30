from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from toolkit.check_env import machine, self_test
from toolkit.check_env.advice import advice
from toolkit.check_env.gpu import gpu_support
from toolkit.check_env.links import backends, links
from toolkit.check_env.native import native_variants
from toolkit.check_env.reference_llama import CONFIG, greedy, logits, random_weights
from toolkit.commands.main import main
from toolkit.errors import UsageError
from toolkit.kernels.cuda import driver
from toolkit.runners import host_memory
from toolkit.runners.native import library


def test_the_answer_key_is_transformers(tmp_path: Path) -> None:
    """The numpy llama against an independent implementation, on the same weights."""
    import torch
    from transformers import AutoModelForCausalLM

    weights = random_weights()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = np.random.default_rng(5).integers(0, CONFIG["vocab_size"], 40).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].numpy()
    got = logits(weights, prompt)
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


def test_the_answers_do_not_hang_on_rounding() -> None:
    weights, rng = random_weights(), np.random.default_rng(1)
    for length in self_test.PROMPT_LENGTHS:
        tokens, lead = greedy(weights, rng.integers(0, CONFIG["vocab_size"], length).tolist(), self_test.NEW_TOKENS)
        assert lead > 1e-3 and len(set(tokens)) > 3


def test_the_engine_passes() -> None:
    result = self_test.engine_self_test("pytorch", "cpu")
    assert result["passed"], result
    assert "36 greedy tokens" in result["detail"]


def test_a_wrong_engine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(weights: dict[str, Any], *rest: Any) -> Any:  # what is expected of a model that differs a little
        name = "model.layers.1.self_attn.k_proj.weight"
        return greedy({**weights, name: weights[name] * 1.3}, *rest)

    monkeypatch.setattr(self_test, "greedy", other)
    result = self_test.engine_self_test("pytorch", "cpu")
    assert not result["passed"] and "expected" in result["detail"]


def test_a_crash_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(self_test, "open_runner", broken)
    result = self_test.engine_self_test("pytorch", "cpu")
    assert not result["passed"] and result["detail"] == "RuntimeError: first line second line"


def test_facts() -> None:
    versions = machine.versions()
    assert versions["numpy"] == np.__version__ and versions["python"] == sys.version.split()[0]
    assert machine.cpu()["usable"] >= 1
    memory = machine.memory()
    assert 0 < memory["free_gib"] <= memory["total_gib"]
    assert machine.read_bandwidth(seconds=0.05, size=32 << 20)["gb_per_s"] > 0.1


def test_free_memory_is_psutils_where_the_kernel_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    told, real = host_memory.free_host_bytes(), Path.read_text

    def read(self: Path, *rest: Any, **more: Any) -> str:
        if self.name == "meminfo":
            raise OSError
        return real(self, *rest, **more)

    monkeypatch.setattr(Path, "read_text", read)
    assert told == pytest.approx(host_memory.free_host_bytes(), rel=0.2)


def test_a_gpu_that_has_no_room_to_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(index: int) -> None:
        raise RuntimeError("CUDA error: out of memory")

    facts = SimpleNamespace(name="GPU", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30)
    found = {"is_available": lambda: True, "device_count": lambda: 1, "get_device_properties": lambda index: facts}
    for name, value in (found | {"mem_get_info": refused, "get_device_capability": lambda device: (9, 0)}).items():
        monkeypatch.setattr(torch.cuda, name, value)
    row = machine.gpus()[0]
    assert row["capability"] == "9.0" and row["total_gib"] == 80 and row["free_gib"] == 0


def test_links_are_what_the_system_says(tmp_path: Path) -> None:
    for name, facts in {
        "eth0": {"type": "1", "operstate": "up", "speed": "1000"},
        "lo": {"type": "772", "operstate": "unknown"},
        "eth1": {"type": "1", "operstate": "down", "speed": "-1"},
    }.items():
        (tmp_path / name).mkdir()
        for file, text in facts.items():
            (tmp_path / name / file).write_text(text + "\n")
    (tmp_path / "bonding_masters").write_text("bond0\n")
    assert [(row["name"], row["up"], row["mbit_per_s"]) for row in links(tmp_path)] == [
        ("lo", True, None),
        ("eth0", True, 1000),
        ("eth1", False, None),
    ]
    assert links(tmp_path / "none") == []


def test_links_between_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus, near = 0, {(0, 1), (2, 3)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) in near)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert [(row["name"], row["runs"], row["why_not"]) for row in backends()] == [
        ("gloo", True, None),
        ("nccl", False, "torch sees no GPU here"),
    ]
    gpus = 1
    assert backends()[1]["why_not"] == "one GPU here, and each rank takes one of its own"
    gpus = 2
    assert backends()[1]["between"] == "ranks on GPUs: 2, which all reach each other's memory"
    gpus = 4
    assert backends()[1]["runs"] and "of which 0-1, 2-3 reach each other's memory" in backends()[1]["between"]
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert backends()[1] == {
        "name": "nccl",
        "runs": False,
        "why_not": "this torch was built without it",
        "between": None,
    }


def test_the_command(support: Any) -> None:
    done = support("command").tool("check_env", "--json", "-")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {
        "versions",
        "cpu",
        "memory",
        "memory_bandwidth",
        "gpus",
        "devices",
        "gpu_topology",
        "gpu_support",
        "environment",
        "links",
        "ranks",
        "native",
        "native_refuses",
        "kernels",
        "self_test",
        "no_torch",
    }
    assert {"op", "implementation", "runs", "chosen", "why_not"} == set(found["kernels"][0])
    names = [test["name"] for test in found["self_test"]]
    assert "engine, auto" in names and len(names) > 10


FOUND: dict[str, Any] = {
    "versions": {"toolkit": "0", "python": "3", "torch": "2", "transformers": "5", "fastapi": "1"},
    "cpu": {"model": "A processor", "cores": 2, "threads": 2, "usable": 2, "features": ["avx2"]},
    "memory": {"total_gib": 8.0, "free_gib": 7.0},
    "memory_bandwidth": {"gb_per_s": 20.0, "threads": 2},
    "gpus": [],
    "devices": [],
    "gpu_topology": None,
    "gpu_support": [{"gpu": None, "what": "GPU", "here": "none"}],
    "environment": {},
    "links": [{"name": "eth0", "up": True, "mbit_per_s": 1000, "loopback": False}],
    "ranks": [{"name": "gloo", "runs": True, "why_not": None, "between": "ranks on CPUs"}],
    "native_refuses": {"mllama": "it runs no cross layers"},
    "native": [{"isa": "avx2", "runs": True, "chosen": True, "why_not": None}],
    "kernels": [{"op": "rope", "implementation": "torch", "runs": True, "chosen": True, "why_not": None}] * 80,
    "self_test": [{"name": "engine, auto", "passed": True, "detail": "", "seconds": 1.0}] * 60,
    "no_torch": None,
}


@pytest.mark.parametrize("verbose", [False, True])
def test_one_screen_unless_all_is_asked_for(
    verbose: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("toolkit.check_env.report.report", lambda told: FOUND)
    with pytest.raises(SystemExit) as left:
        main(["check_env", *["--verbose"] * verbose])
    shown = capsys.readouterr().out.splitlines()
    assert left.value.code == 0 and shown[-1] == "next: tool chat demo"
    told = "it runs no cross layers" if verbose else "pytorch runs mllama"
    assert told in "\n".join(shown)
    assert (len(shown) > 100) if verbose else (len(shown) <= 24 and "60 of 60 passed" in "".join(shown))


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (
            {"native": [{"isa": "avx2", "runs": False, "chosen": False, "why_not": "not built"}]},
            "native runner is missing",
        ),
        ({"versions": {"fastapi": None}}, "fastapi is not installed: pip install fastapi"),
        ({"environment": {"HF_HUB_OFFLINE": "1"}}, "HF_HUB_OFFLINE is set"),
        ({"memory": {"free_gib": 0.5}}, "0.5 GiB of memory are free"),
        ({"self_test": [{"name": "rope", "passed": False, "detail": "off"}]}, "rope: FAILED (off)"),
    ],
)
def test_what_can_be_mended_is_told(part: dict[str, Any], told: str) -> None:
    assert "everything that this machine can run works" in advice(FOUND)
    lines = advice(FOUND | part)
    assert any(told in line for line in lines) and not any("everything" in line for line in lines)


def gpu(capability: str, free: float = 139.0) -> list[dict[str, Any]]:
    return [
        {
            "index": 0,
            "name": "NVIDIA Test",
            "kernels": "cuda",
            "capability": capability,
            "total_gib": 141.0,
            "free_gib": free,
        }
    ]


def lines(capability: str, free: float = 139.0) -> dict[str, str]:
    """``gpu_support`` of a GPU that is not here."""
    rows = gpu_support(gpu(capability, free))
    assert all("\n" not in row["here"] and row["gpu"] == 0 for row in rows)
    return {row["what"]: row["here"] for row in rows}


def test_a_gpu_that_runs_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "fatbin_note", lambda path: {"cuda": 13000, "architectures": [90]})
    monkeypatch.setattr(driver, "driver_version", lambda: 13000)
    found = lines("9.0")
    assert found["turbomind"] == "runs" and found["CUDA kernels"] == "run"
    assert found["memory"].startswith("139.0 GiB free: models of about 70.")
    assert found["paged_attention, head_dim 64, 80, 96, 112, 128, 192, 256, 512"] == "triton"
    assert found["paged_attention, latent rows of 288, 576"] == "triton"
    assert found["paged_attention, head_dim 640"] == "torch (triton takes head_dim up to 512 in steps of 8, not this)"
    assert found["linear_group_int, groups of 32, 64, 128, a whole row"] == "cuda"
    odd = found["linear_group_int, groups of 16, 96"]
    assert odd == "triton (cuda takes groups of 32, 64, 128 … inputs or one for all, not this)"


def test_an_old_gpu_a_full_one_and_an_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "fatbin_note", lambda path: {"cuda": 13000, "architectures": [90]})
    monkeypatch.setattr(driver, "driver_version", lambda: 12040)
    assert lines("9.0")["CUDA kernels"] == "the driver knows CUDA 12.4, the fatbin needs 13.0: update the driver"
    old = lines("7.5", 0.8)
    assert old["turbomind"] == "needs compute capability 8.0 or newer, this GPU has 7.5: pytorch runs models"
    assert old["CUDA kernels"].startswith("needs compute capability 8.0 or newer")
    assert old["memory"] == "0.8 GiB free is too little for any model: CUDA and a KV cache take 1.6 GiB"
    every = old["paged_attention, head_dim 64, 80, 96, 112, 128, 192, 256, 512"]
    assert every == "torch (triton needs compute capability 8.0 or newer, this GPU has 7.5)"
    monkeypatch.setattr(driver, "fatbin_note", lambda path: None)
    assert "no fatbin" in lines("9.0")["CUDA kernels"]


def test_no_gpu_is_said_with_its_reason() -> None:
    why = "torch cannot use a GPU here (The NVIDIA driver on your system is too old (found version 11040).)"
    (row,) = gpu_support([], why)
    assert row == {"gpu": None, "what": "GPU", "here": f"{why}; the CPU runs models"}


def test_native_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOOLKIT_CPU_ISA", raising=False)
    rows = native_variants()
    assert [row["isa"] for row in rows] == list(library.ISAS)
    if library.unloadable():
        pytest.skip(f"{library.unloadable()}")
    running = [row["isa"] for row in rows if row["runs"]]
    assert running == library.isas()
    assert running[-1] == "generic" or len(running) == 1  # built for this processor alone
    assert [row["isa"] for row in rows if row["chosen"]] == running[:1]
    assert all((row["why_not"] is None) == row["runs"] for row in rows)
    monkeypatch.setenv("TOOLKIT_CPU_ISA", running[-1])
    assert [row["isa"] for row in native_variants() if row["chosen"]] == running[-1:]
    monkeypatch.setenv("TOOLKIT_CPU_ISA", "sse9")
    with pytest.raises(UsageError, match="TOOLKIT_CPU_ISA: expected one of amx"):
        native_variants()


def test_native_variants_without_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOOLKIT_NATIVE_LIBRARY", str(tmp_path / "nothing.so"))
    rows = native_variants()
    assert not any(row["runs"] or row["chosen"] for row in rows)
    assert all("not built" in row["why_not"] for row in rows)
