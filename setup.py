"""Builds the native CPU library where a C++ compiler is; everything else about the package stands in pyproject.toml.

Without a compiler, or if it fails, the installation goes on: the torch runner then executes models, and says so.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_ext import build_ext
from setuptools.extension import Extension

ROOT = Path(__file__).resolve().parent
LIBRARY = "toolkit.runners.native._native"


def _builder():
    """The module that knows how to compile, by file: the package itself need not be importable here."""
    path = ROOT / "toolkit" / "runners" / "native" / "build.py"
    spec = importlib.util.spec_from_file_location("toolkit_native_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and annotations look it up
    spec.loader.exec_module(module)
    return module


class BuildNative(build_ext):
    """Compiles the library beside its Python binding (in the source tree for an editable installation)."""

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.endswith("_native"):  # loaded with ctypes: no interpreter in its name
            return os.path.join(*fullname.split(".")) + ".so"
        return str(super().get_ext_filename(fullname))

    def build_extension(self, ext: Extension) -> None:
        module = _builder()
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            module.build(target)
        except module.BuildError as error:
            print(f"toolkit: the native CPU library is not built: {error}", file=sys.stderr)


class BinaryDistribution(Distribution):
    """A wheel with the library in it is for one platform."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    ext_modules=[Extension(LIBRARY, sources=[], optional=True)],
    cmdclass={"build_ext": BuildNative},
    distclass=BinaryDistribution,
)
