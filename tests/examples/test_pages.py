"""Pages of the guide are run as they stand, on a tiny model in the place of the demo.

What cannot be run here (it takes minutes, asks, or needs another program or machine) is at least understood by the
commands (``test_shown.py``), and checked as far as it goes by ``test_snippets.py``.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from toolkit.eval.tasks import write_lm_eval

DOCS = Path(__file__).resolve().parents[2] / "docs"
SEEING = {  # page → the model that it shows, the tiny one in its place, and which of that family's
    "cogvlm": ("THUDM/cogvlm2-llama3-chat-19B", "cogvlm", 0),
    "internvl": ("OpenGVLab/InternVL3-2B-hf", "internvl", 0),
    "llava": ("llava-hf/llava-1.5-7b-hf", "llava", 0),
    "minicpmv": ("openbmb/MiniCPM-V-2_6", "minicpmv", 0),
    "mllama": ("meta-llama/Llama-3.2-11B-Vision-Instruct", "mllama", 0),
    "molmo": ("allenai/Molmo-7B-D-0924", "molmo", 0),
    "phi3": ("microsoft/Phi-3.5-vision-instruct", "phi3_v", 0),
    "qwen2_vl": ("Qwen/Qwen2.5-VL-3B-Instruct", "qwen2_5_vl", 0),
    "xcomposer2": ("internlm/internlm-xcomposer2d5-7b", "internlmxcomposer2", 0),
}
PAGES = (
    "add-a-model", "distributed", "formats", "install", "lmdeploy", "quantization", "figures/quantization",
    "tools-and-thoughts", "how-to/adapters", "how-to/answer-a-batch", "how-to/debug", "how-to/deploy",
    "how-to/embed-and-rank", "how-to/evaluate", "how-to/opencompass", "how-to/long-prompts", "how-to/endless-texts",
    "how-to/measure-a-server", "how-to/quantize-on-a-laptop", "how-to/run-an-artifact-elsewhere",
    "how-to/serve-a-model", "how-to/serve-an-agent",
    "how-to/several-models", "how-to/several-servers", "how-to/show-pictures", "how-to/use-a-gpu", "vision",
    *(f"vision/{name}" for name in SEEING),
)  # fmt: skip
ELSEWHERE = {
    "index": "test_run.py",
    "add-a-kernel": "test_snippets.py",
    "other-apis": "settings of other programs",
    "serving": "scripts that take minutes",
    "how-to/a-worker-of-dynamo": "a front end of Dynamo: tests/serve",
    "how-to/add-a-device": "a device that is not here; tests/runners has a stand-in",
    "how-to/check-a-gpu": "tests/scripts",
    "how-to/containers": "images and clusters; tests/serve/test_deploy.py reads their files",
    "how-to/plan-a-fleet": "tests/planner",
    "how-to/replicas-on-ray": "a cluster: tests/serve",
    "how-to/several-machines": "several servers: tests/serve",
    "how-to/speculate": "a draft of its own: tests/engine",
    "scale": "tests/planner",
    "how-to/train-beside": "a trainer beside it: test_update_weights.py of tests/engine and tests/serve",
    "kinds-of-models": "a model with experts: tests/engine/test_routed_experts.py",
}

# What is in lines that take minutes, ask, or need another program.
BY_HAND = (
    "toolkit.runners.native.build", "gdb ", "scripts/", "docker ", "helm ", "kubectl ", "systemctl ", "pip install",
    "install -D ", "opencompass ", "--device cuda", "taskset ", "--no-python", " --ray ",
)  # fmt: skip
CODE_BY_HAND = ("read_base", "meta_template", "FAMILY = ", "run_local(", "AutoConfig.register(")
HERE = {
    "hellaswag --limit 100": "toolkit_cloze --limit 1",
    "--tasks hellaswag": "--tasks toolkit_cloze --limit 1 --include_path tasks",
    "--tasks gsm8k": "--tasks toolkit_passkey --limit 1 --include_path tasks",
    "--num-prompts 200": "--num-prompts 4",
    "--limit 20": "--limit 1",
    "--lengths 1000,2000": "--lengths 300",
    "--calib-samples 64 --calib-self-samples 64": "",  # the tiny model has too few tokens to write
    "./demo --backend pytorch --dp 2 --ep 2": "./experts --backend pytorch --dp 2 --ep 2",
    "tales=DIR": "tales=./tales",
    "./demo DIR": "./demo ./tales",
    "OWNER/NAME": "./verse",
    "--dst-path my-engine": "--dst-path work/my-engine",
    **{model: f"./{family}" for model, family, _ in SEEING.values()},
    "tool chat tiny-vlm --image drawings/000.png": "tool chat ./llava --image photo.jpg",
}
LITTLE = "--calib-samples 4 --calib-seqlen 32 --eval-tokens 128 --tune-steps 0 --overwrite"
MORE = {
    "tool lite": LITTLE,
    "tool convert": "--overwrite",
    "tool eval ppl": "--max-tokens 3000",
    "tool profile": "--random-input-len 8 --random-output-len 4",
    "--request-rate": "--num-prompts 4",
    "serve api_server": "--session-len 2048",
    " --image ": "--max-new-tokens 4",
    " --video ": "--max-new-tokens 4",
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


def test_every_page_that_shows_code_is_run(support: Any) -> None:
    """A new page goes into one of the two lists."""
    shown = support("examples")
    found = {str(p.relative_to(DOCS))[:-3] for p in DOCS.rglob("*.md") if shown.blocks(p, "sh", "python")}
    assert found == {*PAGES, *ELSEWHERE}


@pytest.fixture(scope="module")
def made(tiny_models: Callable[..., Path], support: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pages take for granted: models, adapters, texts, a family of one's own, pictures, tools."""
    folder = tmp_path_factory.mktemp("made")
    model = tiny_models("llama", max_position_embeddings=16384)
    shutil.copytree(model, folder / "demo")
    shutil.copytree(tiny_models("seed_oss"), folder / "my-model")
    shutil.copytree(tiny_models("mixtral", max_position_embeddings=2048), folder / "experts")
    for _, family, shape in SEEING.values():
        shutil.copytree(tiny_models(family, shape=shape, max_position_embeddings=2048), folder / family)
    for name in ("tales", "verse"):
        support("adapters").write_adapter(folder / name, model, "q_proj|v_proj")
    (folder / "my_family.py").write_text(support("examples").blocks(DOCS / "add-a-model.md", "python")[0])
    (folder / "notes.txt").write_text("The harbour was quiet, and nobody asked where the boats had gone. " * 400)
    (folder / "raw.txt").write_text(CALL)
    (folder / "key").write_text("0123456789abcdef" * 4)
    weather = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    (folder / "tools.json").write_text(json.dumps([{"type": "function", "function": weather}]))
    (folder / "messages.json").write_text(json.dumps([{"role": "user", "content": "Hello"}]))
    _pictures(folder)
    _wikitext(folder / "data" / "wikitext")
    (folder / "tasks").mkdir()
    write_lm_eval(folder / "tasks", ["cloze", "passkey"], 1)
    shell = support("shell").Shell(folder)
    shell.run(f"tool lite auto_awq ./demo --work-dir work/demo-awq --calib-dataset notes.txt {LITTLE}")
    shell.run("tool convert work/demo-awq --dst-path work/demo-engine")
    shutil.copytree(folder / "work" / "demo-engine", folder / "other-engine")
    (folder / "models").mkdir()
    shutil.rmtree(folder / "bin")
    return folder


def _pictures(folder: Path) -> None:
    from PIL import Image

    for name, colour in (("photo.jpg", "red"), ("other.png", "blue")):
        Image.new("RGB", (40, 30), colour).save(folder / name)
    frames = [Image.new("RGB", (40, 30), (i, 0, 0)) for i in range(0, 250, 25)]
    frames[0].save(folder / "clip.gif", save_all=True, append_images=frames[1:], duration=100)
    (folder / "clip.gif").rename(folder / "clip.mp4")  # a file is read as what it holds


def _wikitext(folder: Path) -> None:
    """A data set's repository as the hub has it."""
    folder.mkdir(parents=True)
    told = [{"config_name": "wikitext-2-raw-v1", "data_files": [{"split": "train", "path": "train.jsonl"}]}]
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(told)}\n---\n")
    row = json.dumps({"text": "The harbour was quiet, and nobody asked where the boats had gone."})
    (folder / "train.jsonl").write_text(f"{row}\n" * 200)


@pytest.fixture
def shell(made: Path, support: Any, tmp_path: Path) -> Iterator[Any]:
    shutil.copytree(made, tmp_path / "here")
    shell = support("shell").Shell(tmp_path / "here")
    shell.env["KEY"] = "secret"
    yield shell
    shell.close()


def can_run(line: str) -> bool:
    return not any(part in line for part in BY_HAND) and ("lm_eval" not in line or _has("lm_eval"))


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def as_here(line: str, shown: Any) -> str:
    """A page's line on the tiny model, with less to do, as far as its command has options for that."""
    line = re.sub(r"(?<=\s)(demo|MODEL)(?=\s|$)", "./demo", line)
    for there, here in HERE.items():
        line = line.replace(there, here)
    more = " ".join(more for part, more in MORE.items() if part in line)
    if line.startswith("tool lite") and "--calib-dataset" not in line:
        more += " --calib-dataset notes.txt"
    known = {option for words, command in shown.commands() if f"tool {' '.join(words)} " in line
             for option in shown.options(command)}  # fmt: skip
    own = [option for option in re.findall(r"--\S+(?: [^-]\S*)?", more) if option.split()[0] in known]
    command, less, source = line.partition(" <")
    return " ".join([command, *own]) + less + source


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs(name: str, shell: Any, support: Any) -> None:
    shown, page = support("examples"), DOCS / f"{name}.md"
    every = [line for block in shown.blocks(page, "sh") for line in shown.whole_lines(block)]
    lines = [line for line in every if can_run(line)]
    code = [block for block in shown.blocks(page, "python") if not any(part in block for part in CODE_BY_HAND)]
    if "23333" in "".join(lines + code) and not any("serve api_server" in line for line in lines):
        shell.run("tool serve api_server ./demo --server-port 23333")
    for line in lines:
        shell.run(as_here(line, shown))
    if code:
        text = re.sub(
            r'(?<=\()"(demo|MODEL|my-model)"', lambda m: f'"./{m[1].replace("MODEL", "demo")}"', "\n".join(code)
        )
        for model, family, _ in SEEING.values():
            text = text.replace(model, f"./{family}")
        shell.python(text.replace('"DIR"', '"./tales"'))
