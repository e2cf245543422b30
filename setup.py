"""Builds the native CPU library where a C++ compiler is, and the CUDA kernels where nvcc is; everything else about the
package stands in pyproject.toml.

Without a compiler, or if it fails, the installation goes on: other kernels then execute models, and say so.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.extension import Extension

ROOT = Path(__file__).resolve().parent
LIBRARY, FATBIN = "toolkit.runners.native._native", "toolkit.kernels.cuda._kernels"
GPU = Path("/dev/nvidiactl")  # there where NVIDIA's driver is
BUILDERS = {LIBRARY: "toolkit/runners/native/build.py", FATBIN: "kernels/cuda/build.py"}


def _builder(name: str):
    """The module that knows how to compile, by file: the package itself need not be importable here."""
    spec = importlib.util.spec_from_file_location(name.replace(".", "_") + "_build", ROOT / BUILDERS[name])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and annotations look it up
    spec.loader.exec_module(module)
    return module


class BuildNative(build_ext):
    """Compiles each beside its Python binding (in the source tree for an editable installation)."""

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.endswith("_native"):  # loaded with ctypes: no interpreter in its name
            return os.path.join(*fullname.split(".")) + ".so"
        if fullname.endswith("_kernels"):  # loaded by the driver
            return os.path.join(*fullname.split(".")) + ".fatbin"
        return str(super().get_ext_filename(fullname))

    def build_extension(self, ext: Extension) -> None:
        if ext.name == FATBIN and self.editable_mode and not GPU.exists():
            return  # minutes of compiling for what cannot run here; a wheel is for other machines too
        module = _builder(ext.name)
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            module.build(target)
        except module.BuildError as error:
            print(f"toolkit: {ext.name} is not built: {error}", file=sys.stderr)

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        note = Path(self.build_lib, *FATBIN.split(".")).with_suffix(".json")  # says what is in the fatbin
        if note.exists():
            self.copy_file(str(note), str(ROOT / "kernels" / "cuda" / note.name))


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def note_build(package: Path) -> None:
    """Write what toolkit/base/build_info.py reads. The commit: of the clone, or what a source distribution has noted,
    or TOOLKIT_COMMIT where only the files of a commit are there."""
    noted = ROOT / "toolkit" / "_build.json"
    if (ROOT / ".git").exists():
        commit = _git("rev-parse", "--short=10", "HEAD") or None
        told = {"commit": commit, "changed": bool(_git("status", "--porcelain", "--untracked-files=no"))}
    elif noted.exists():
        told = json.loads(noted.read_text(encoding="utf-8"))
    else:
        told = {"commit": os.environ.get("TOOLKIT_COMMIT"), "changed": False}
    built = time.gmtime(float(os.environ.get("SOURCE_DATE_EPOCH") or time.time()))
    told |= {"built": time.strftime("%Y-%m-%d", built), "platform": sysconfig.get_platform()}
    package.mkdir(parents=True, exist_ok=True)
    (package / "_build.json").write_text(json.dumps(told) + "\n", encoding="utf-8")


class NotedBuild(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            note_build(Path(self.build_lib, "toolkit"))


class NotedSource(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        note_build(Path(base_dir, "toolkit"))


class BinaryDistribution(Distribution):
    """A wheel with the library in it is for one platform."""

    def has_ext_modules(self) -> bool:
        return True


class AnyPython(bdist_wheel):
    """The libraries are loaded by path, not imported: one wheel for every Python, of one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension(name, sources=[], optional=True) for name in BUILDERS],
    cmdclass={"build_py": NotedBuild, "build_ext": BuildNative, "bdist_wheel": AnyPython, "sdist": NotedSource},
    distclass=BinaryDistribution,
)
