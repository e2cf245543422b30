"""The walls of the house: who may import whom, what the wheel holds, and what loads when."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Folder (or module) of `toolkit` -> what it may import. Arrows point down; those of BASE are everyone's.
BASE = {"base", "configs", "errors", "messages", "__version__"}
MAY_IMPORT = {
    "errors": set(),
    "base": {"errors"},
    "configs": {"base", "errors"},
    "messages": {"base", "configs", "errors"},
    "kernels": set(),
    "templates": set(),
    "parsers": {"base", "errors"},
    "box": {"base"},
    "artifacts": {"models", "templates", "box"} | BASE,
    "models": BASE,
    "runners": {"artifacts", "models", "kernels"} | BASE,
    "vision": {"artifacts", "models", "box"} | BASE,
    "chat": {"vision", "artifacts", "templates", "parsers", "box"} | BASE,
    "parallel": {"runners", "models", "artifacts"} | BASE,
    "engine": {"parallel", "runners", "models", "artifacts", "kernels", "box"} | BASE,
    "measure": {"engine", "runners", "artifacts", "kernels"} | BASE,
    "convert": {"measure", "runners", "models", "artifacts"} | BASE,
    "deploy": {"engine", "runners", "models", "artifacts"} | BASE,
    "eval": {"measure", "artifacts"} | BASE,
    "quant": {"measure", "engine", "runners", "models", "artifacts", "kernels", "chat", "vision"} | BASE,
    "serve": {"engine", "chat", "vision", "models", "parsers", "artifacts"} | BASE,
    "batch": {"serve", "engine", "chat"} | BASE,
    "planner": {"engine", "artifacts"} | BASE,
    "profile": {"engine", "chat", "vision", "models", "artifacts"} | BASE,
    "check_env": {"engine", "runners", "models", "artifacts", "kernels"} | BASE,
    "vl": {"vision", "models", "artifacts"} | BASE,
    "model": {"chat"},
    "pytorch": {"artifacts", "models"} | BASE,
    "opencompass": {"pipeline"} | BASE,
    "pipeline": {"batch", "serve", "engine", "chat", "vision", "models", "artifacts"} | BASE,
    "__main__": {"base", "commands"},
}
APIS = ("openai", "lmdeploy", "anthropic", "llama_cpp", "ollama")
# Rooms inside a room: what a room may import of its neighbours, "" being the files beside the rooms.
INSIDE = {
    "artifacts": {
        "adapters": {"", "gguf", "weight_files"},
        "drafts": {"", "weight_files"},
        "weight_files": {""},
        "text": {""},
        "formats": {""},
        "gguf": {"", "formats", "text", "weight_files"},
        "engine": {"", "adapters", "weight_files"},
        "output": {"", "gguf", "weight_files"},
        "": {"adapters", "engine", "formats", "gguf", "output", "weight_files"},
    },
    "engine": {
        "pictures": {""},
        "cache": {"", "pictures"},
        "constraints": {""},
        "drafts": {"", "cache", "constraints"},
        "text": {""},
        "load": {"", "cache", "drafts"},
        "process": {"", "cache", "constraints", "load", "text"},
        "": {"cache", "constraints", "drafts", "pictures"},
    },
    "runners": {
        "weights": {"", "native"},
        "drafts": {""},
        "tensor": {"", "drafts", "weights"},
        "native": {"", "drafts", "weights", "tensor"},
        "": {"weights", "tensor", "native"},
    },
    "serve": {
        "": {*("fields", "http", "watch", "generation", "page", "proxy"), *APIS},
        "page": set(),
        "fields": {"http"},
        "http": {"", "fields", "page"},
        "watch": {"http"},
        "generation": {"", "fields", "http", "watch"},
        "openai": {"", "fields", "generation", "http"},
        "lmdeploy": {"", "fields", "generation", "http"},
        "anthropic": {"", "fields", "generation", "http", "openai"},
        "llama_cpp": {"", "fields", "generation", "http", "openai"},
        "ollama": {"", "fields", "generation", "http", "openai", "llama_cpp"},
        "gradio": {""},
        "dynamo": {"", "generation"},
        "ray": {"", "generation", "http", "ollama", "page", "proxy", "watch"},
        "proxy": {"", "fields", "generation", "http", "lmdeploy", "ollama", "page"},
        "fleet": {"", "generation", "http", "ollama", "page", "proxy", "watch"},
    },
    "serve/http": {
        "": {"access", "openapi", "sharing"},
        "openapi": set(),
        "access": {"", "openapi"},
        "sharing": {"", "access"},
    },
}
# Of another room only these: the contract and what the registry says, no family by its name.
SEEN = (
    "spec",
    "gguf",
    "family",
    "registry",
    *(f"drafts.{name}" for name in ("absent", "assistant", "dflash", "mtp", "of_model")),
)
SEEN += tuple(f"eyes.{name}" for name in ("mmproj", "pictures", "videos", "vision"))
ONLY = {("artifacts", "models"): {f"toolkit.models.{name}" for name in SEEN}}


def sources() -> list[Path]:
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in tracked.split() if (ROOT / name).exists()]


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    if parts[0] == "toolkit":
        return parts[1].removesuffix(".py")
    return parts[0]


def imports(path: Path) -> list[str]:
    """Every absolute module name that ``path`` imports, at any depth, TYPE_CHECKING blocks included; packages whose
    resources it reads count too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append(node.module)
            if node.module == "toolkit":
                found += [f"toolkit.{a.name}" for a in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("files", "import_module"):
            found += [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return found


def test_imports_point_one_way() -> None:
    wrong = []
    for path in sources():
        here = room(path)
        if here not in MAY_IMPORT or path.relative_to(ROOT).parts[0] in ("tests", "scripts"):
            continue
        for module in imports(path):
            parts = module.split(".")
            if parts[0] != "toolkit" or len(parts) < 2 or parts[1] == here or parts[1] == "__version__":
                continue
            target = parts[1]
            allowed = target in MAY_IMPORT[here]
            if (here, target) in ONLY:
                allowed = module in ONLY[here, target]
            if not allowed:
                wrong.append(f"{path.relative_to(ROOT)}: {here} must not import {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("outer", INSIDE)
def test_rooms_inside_rooms_have_their_walls(outer: str) -> None:
    house = ["toolkit", *outer.split("/")]
    folder, rooms = ROOT.joinpath(*house), INSIDE[outer]
    found = {path.name for path in folder.iterdir() if (path / "__init__.py").exists()}
    assert found == set(rooms) - {""}
    wrong = []
    for path in sources():
        if not path.is_relative_to(folder):
            continue
        here = path.relative_to(folder).parts[0] if path.parent != folder else ""
        for module in imports(path):
            parts = module.split(".")
            above, parts = parts[: len(house)], parts[len(house) :]
            if above != house or not parts:
                continue
            there = parts[0] if (folder / parts[0]).is_dir() else ""
            if there != here and there not in rooms[here]:
                wrong.append(f"{path.relative_to(ROOT)}: {here or outer} must not import {module}")
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_one_another() -> None:
    """Neither at the top nor later; what only type checkers see does not count."""
    paths = {module_name(p): p for p in sources() if p.relative_to(ROOT).parts[0] not in ("tests", "scripts")}
    arrows = {name: running_imports(name, path, set(paths)) - {name, ""} for name, path in paths.items()}
    while ends := {name for name, targets in arrows.items() if not targets & set(arrows)}:
        arrows = {name: targets for name, targets in arrows.items() if name not in ends}
    found = set()
    for name in arrows:
        circle = frozenset(other for other in reach(arrows, name) if name in reach(arrows, other))
        found |= {circle} if circle else set()
    assert not found


def test_nobody_asks_which_class_a_mixer_has() -> None:
    """It answers for itself, or stands in an executor's table by its kind."""
    from toolkit.models.spec.mixer import MixerSpec

    mixers = {cls.__name__ for cls in MixerSpec.__subclasses__()}
    assert {"AttentionSpec", "MlpSpec", "MoeSpec"} <= mixers
    wrong = []
    for path in sources():
        if path.relative_to(ROOT).parts[0] != "toolkit":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            asked = [node.cls] if isinstance(node, ast.MatchClass) else []
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                asked = [node.args[1]]
            if any(isinstance(x, ast.Name) and x.id in mixers for cls in asked for x in ast.walk(cls)):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong


def test_a_home_that_nobody_has_is_no_surprise() -> None:
    """``expanduser`` raises RuntimeError for it; ``user_path`` does not. What ``home.py`` names must be there."""
    ours = [path for path in sources() if path.is_relative_to(ROOT / "toolkit")]
    asked = [path.name for path in ours if ".expanduser()" in path.read_text(encoding="utf-8")]
    assert sorted(asked) == ["home.py", "user_path.py"]


def module_name(path: Path) -> str:
    """As it is imported, without "toolkit."; the package itself is ""."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in (parts[1:] if parts[0] == "toolkit" else parts) if part != "__init__")


def running_imports(name: str, path: Path, known: set[str]) -> set[str]:
    """The ``known`` modules that are imported when ``path``'s code runs; of a package one of whose modules is meant,
    that module alone.
    """
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name.removeprefix("toolkit.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])]).removeprefix("toolkit").lstrip(".")
            for full in (f"{base}.{alias.name}".lstrip(".") for alias in node.names):
                found.add(full if full in known else base)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found & known


def reach(arrows: dict[str, set[str]], start: str) -> set[str]:
    """Everything that can be come to along the arrows, in one step or more."""
    seen: set[str] = set()
    waiting = list(arrows.get(start, ()))
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += arrows.get(name, ())
    return seen


def test_every_room_has_a_rule() -> None:
    rooms = {room(p) for p in sources() if p.relative_to(ROOT).parts[0] in ("toolkit", "kernels", "templates")}
    assert rooms - {"__init__"} <= set(MAY_IMPORT)


def test_kernels_do_not_know_the_package() -> None:
    for path in sources():
        if room(path) == "kernels":
            assert not [m for m in imports(path) if m.split(".")[0] == "toolkit"], path


def test_commands_hold_no_heavy_import_at_the_top() -> None:
    heavy = {"torch", "transformers", "datasets", "xgrammar", "fastapi", "uvicorn", "matplotlib"}
    for path in sources():
        if room(path) == "commands":
            top = [
                n.module if isinstance(n, ast.ImportFrom) else a.name
                for n in ast.parse(path.read_text(encoding="utf-8")).body
                if isinstance(n, (ast.Import, ast.ImportFrom))
                for a in n.names
            ]
            assert not {str(m).split(".")[0] for m in top} & heavy, path


def test_packages_in_pyproject_are_the_folders_on_disk() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    found = set()
    for init in sources():
        parts = init.relative_to(ROOT).parts
        if init.name == "__init__.py" and parts[0] in ("toolkit", "commands", "kernels", "templates"):
            found.add(".".join(parts[:-1] if parts[0] == "toolkit" else ("toolkit", *parts[:-1])))
    assert listed == found


def test_no_module_named_like_a_catch_all() -> None:
    """But for the one whose name users of LMDeploy write."""
    found = [p for p in sources() if p.name in ("utils.py", "helpers.py", "misc.py", "common.py")]
    assert found == [ROOT / "toolkit" / "vl" / "utils.py"]


@pytest.mark.parametrize("argv", [["--version"], ["--help"]])
def test_the_command_line_answers_without_loading_the_engine(argv: list[str]) -> None:
    code = (
        "import sys; from toolkit.commands.main import main\n"
        f"try: main({argv!r})\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'xgrammar', 'fastapi', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


def test_the_fast_path_needs_no_torch() -> None:
    """chat/serve → engine → native runner: none of the heavy packages is imported by loading these modules."""
    code = (
        "import sys\n"
        "import toolkit.engine.process.frontend, toolkit.engine.core, toolkit.chat.template\n"
        "import toolkit.artifacts.text.tokenizer\n"
        "import toolkit.artifacts.source, toolkit.artifacts.engine.files\n"
        "import toolkit.models.registry, toolkit.runners.choose\n"
        "heavy = {'torch', 'transformers', 'datasets', 'xgrammar'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


def test_rooms_of_triton_kernels_have_their_walls() -> None:
    """Files beside the rooms are for all of them; other than that:"""
    may = {
        "linear": set(),
        "states": set(),
        "sampling": set(),
        "cache": set(),
        "elementwise": {"linear"},  # a norm may round what it writes for a linear
        "attention": {"cache", "elementwise"},
        "moe": {"elementwise", "linear"},
        "ahead_of_time": set(),
        "": set(),
    }
    folder = ROOT / "kernels" / "triton"
    found = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert found == set(may) - {""}
    wrong = []
    for path in folder.rglob("*.py"):
        here = path.parent.name if path.parent != folder else ""
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == (2 if here else 1):
                there = (node.module or "").split(".")[0]
                if there in found and there not in may[here]:
                    wrong.append(f"{path.relative_to(ROOT)}: {here or 'triton'} must not import {there}")
    assert not wrong, "\n".join(wrong)
