"""Devices that torch knows by an extension, and packages that say more of one: through the commands that users type."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from toolkit.check_env.machine import devices
from toolkit.configs.engine import PytorchEngineConfig
from toolkit.errors import UsageError
from toolkit.kernels import registry
from toolkit.kernels.op import Target
from toolkit.messages import GenerationConfig
from toolkit.pipeline.pipeline import pipeline
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_model
from toolkit.runners.tensor.devices.find import find_device, kernel_target
from toolkit.runners.tensor.support import unsupported

SUPPORT = Path(__file__).parents[1] / "support"
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "add-a-device.md"


@pytest.fixture(scope="module")
def packages(support, tmp_path_factory):
    """A folder of packages: the extension of torch, and what the page shows with its entry point."""
    folder = tmp_path_factory.mktemp("packages")
    shutil.copy(SUPPORT / "torch_stand_in.py", folder / "torch_acme.py")
    code = next(block for block in support("examples").blocks(PAGE, "python") if "DEVICE" in block)
    (folder / "acme_toolkit.py").write_text(code)
    (points,) = support("examples").blocks(PAGE, "toml")
    brought = folder / "acme_toolkit-1.0.dist-info"
    brought.mkdir()
    (brought / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-toolkit\nVersion: 1.0\n")
    found = re.sub(r'project.entry-points."(.*)"', r"\1", points).replace('"', "")
    (brought / "entry_points.txt").write_text(found)
    return folder


IN_A_PROCESS = """
import json, sys
from toolkit.check_env.machine import devices
from toolkit.check_env.report import engine_tests, kernel_rows
from toolkit.commands.main import main
from toolkit.errors import UsageError
from toolkit.kernels import Target
from toolkit.runners.tensor.devices.find import find_device

found = {"devices": devices(), "tests": engine_tests(["acme"])}
found["kernels"] = {r["op"]: r["implementation"] for r in kernel_rows(Target("acme", "float32")) if r["chosen"]}
try:
    find_device("acme:3")
except UsageError as error:
    found["refused"] = str(error)
print(json.dumps(found))
main(["chat", *sys.argv[1:]])
"""


def test_a_package_brings_a_device(packages, tiny_models):
    """In a process of its own, for torch keeps a device that it was told of."""
    wishes = ("--prompt", "the fox", "--max-new-tokens", "8", "--session-len", "256", "--dtype", "float32")
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS, str(tiny_models("llama")), *wishes, "--device", "acme"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    told, answer = done.stdout.split("\n", 1)
    found = json.loads(told)
    (row,) = found["devices"]
    assert row == {"device": "acme", "what": "Acme's NPU", "why_not": None, "total_gib": 6.0, "free_gib": 3.0}
    assert found["kernels"]["rms_norm"] == "acme" and found["kernels"]["paged_attention"] == "torch"
    assert found["tests"][-1]["name"] == "engine, pytorch on acme" and found["tests"][-1]["passed"], found["tests"]
    assert found["refused"] == "device: 'acme:3' asked for, but there are 1 of acme, counted from 0; use cpu or auto"
    config = PytorchEngineConfig(device_type="cpu", dtype="float32", session_len=256)
    with pipeline(str(tiny_models("llama")), backend_config=config) as pipe:
        expected = pipe("the fox", gen_config=GenerationConfig(max_new_tokens=8, do_sample=False)).text
    assert answer.strip() == expected.strip()


@pytest.mark.slow
def test_the_stages_run_on_a_device(packages, tiny_models, support, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(packages))
    shell = support("shell").Shell(tmp_path)
    shutil.copytree(tiny_models("llama"), tmp_path / "model")
    (tmp_path / "notes.txt").write_text("The harbour was quiet, and nobody asked where the boats had gone. " * 99)
    few = "--calib-dataset notes.txt --calib-samples 2 --calib-seqlen 32 --eval-tokens 64 --tune-steps 0"
    shell.run("tool check_env")
    shell.run(f"tool lite auto_awq ./model --work-dir small --device acme {few}")
    shell.run("tool serve api_server ./small --device acme --session-len 256 --server-port 23333")
    shell.python(
        "from openai import OpenAI\n"
        "client = OpenAI(base_url='http://127.0.0.1:23333/v1', api_key='none')\n"
        "assert client.completions.create(model='small', prompt='the fox', max_tokens=4).usage.completion_tokens == 4"
    )
    shell.close()


POINTS = "[toolkit.devices]\nlame = lame_device:device\ngone = gone_device:DEVICE\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("xpu", "'xpu' asked for, but torch sees no xpu here"),
        ("hpu", "'hpu' asked for, but this torch has no module for hpu; install the extension"),
        ("lame", "entry point lame_device:device of wrong: found function, expected a DeviceKind"),
        ("gone", "entry point gone_device:DEVICE of wrong: ModuleNotFoundError: No module named 'torch_gone'"),
    ],
)
def test_devices_that_cannot_be_are_one_line(name, said, tmp_path, monkeypatch):
    (tmp_path / "lame_device.py").write_text("def device(): pass\n")
    (tmp_path / "gone_device.py").write_text("import torch_gone\n")
    brought = tmp_path / "wrong-1.0.dist-info"
    brought.mkdir()
    (brought / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong\nVersion: 1.0\n")
    (brought / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError) as caught:
        find_device(name)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    listed = {row["device"]: row["why_not"] for row in devices()}
    assert set(listed) == {"lame", "gone"} and said in (listed.get(name) or said)


def test_gpus_through_rocm_run_torchs_kernels(monkeypatch, tiny_models):
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "AMD Instinct MI300X")
    opened = open_model(tiny_models("llama"))
    reason = unsupported(opened.spec, opened.weights, RunnerOptions(device="cuda"))
    assert reason == "its kernels are for NVIDIA's GPUs, AMD Instinct MI300X is used through rocm"
    device, capability = kernel_target(torch.device("cuda"))
    target = Target(device, "float16", capability)
    float32 = Target(device, "float32", capability)
    ops = registry.load().values()
    chosen = {registry.choose(op, target if "float16" in op.dtypes else float32).family for op in ops}
    assert chosen == {"torch", "reference"}
