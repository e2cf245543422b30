"""What is compiled here is used on a machine that is lent: the CUDA kernels' fatbin and Triton's kernels in a folder.

    PYTHONPATH=FOLDER_OF_TRITON_3.6.0 python scripts/gpu/compiling/carry.py build/carried --seconds 540

compiles (it needs no GPU) for as long as it is given, and goes on there when it is called again. Triton keeps a kernel
under a key that its own files are part of, so it must be the version that the other machine has. Its wheels for other
Pythons differ in one library alone: --libtriton names that of the other machine's. scripts/gpu_check and bench_gpu use
the folder build/carried where it is there, and say what they found in it.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import shutil
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
CARRIED = ROOT / "build" / "carried"  # which git leaves out
ARCHIVE = "triton.tar.xz"
STAGES = ("smoke", "attention", "runner", "self-test", "manifest", "ops", "kernels", "engine")
_NEEDED = (".json", ".cubin")  # of a kernel's files, what launching it takes


def other_key(libtriton: Path) -> None:
    """Have Triton take its key for that of an installation whose library is ``libtriton``."""
    from triton.runtime import cache

    here = Path(cache.__file__).parents[1] / "_C" / "libtriton.so"
    key = cache.triton_key()
    own, other = (hashlib.sha256(path.read_bytes()).hexdigest() for path in (here, libtriton))
    assert own in key, "this Triton's key does not hold the digest of its library"
    cache.triton_key = lambda: key.replace(own, other)


def pack(folders: Iterable[Path], archive: Path) -> int:
    """Put the kernels that lie in ``folders`` of Triton's cache into ``archive``; bytes written."""
    partial = archive.with_name(f".{archive.name}.partial")
    with tarfile.open(partial, "w:xz", preset=6) as tar:
        for folder in sorted(set(folders)):
            for path in sorted(folder.iterdir()):
                if path.suffix in _NEEDED and not path.name.startswith("__grp__"):
                    entry = tarfile.TarInfo(f"{folder.name}/{path.name}")
                    entry.size = path.stat().st_size
                    tar.addfile(entry, io.BytesIO(path.read_bytes()))
    partial.replace(archive)
    return archive.stat().st_size


def unpack(archive: Path, cache: Path) -> int:
    """Put the kernels of ``archive`` into Triton's cache, which names files by whole paths; how many there are."""
    with tarfile.open(archive) as tar:
        tar.extractall(cache, filter="data")
        names = [Path(name) for name in tar.getnames()]
    kernels = [name for name in names if name.suffix == ".json"]
    for kernel in kernels:
        files = {n.name: str(cache / n) for n in names if n.parent == kernel.parent}
        (cache / kernel.parent / f"__grp__{kernel.name}").write_text(json.dumps({"child_paths": files}))
    return len(kernels)


def use(carried: Path = CARRIED) -> str | None:
    """Put what ``carried`` holds in its places; a line that says what, None where there is no such folder.

    A fatbin of other sources than this tree's is left alone, and one that is here already stays.
    """
    from triton import knobs

    from toolkit.kernels.cuda.build import sources
    from toolkit.kernels.cuda.driver import FATBIN, fatbin_note

    if not carried.is_dir():
        return None
    said, brought = [], carried / FATBIN.name
    if (note := fatbin_note(brought)) is None:
        said.append("no CUDA kernels")
    elif note.get("sources") != sources():
        said.append("CUDA kernels of other sources, which are not used")
    else:
        for path in (brought, brought.with_suffix(".json")):
            shutil.copyfile(path, FATBIN.with_name(path.name))
        said.append(f"the CUDA kernels for {', '.join(map(str, note['architectures']))}")
    if (carried / ARCHIVE).is_file():
        said.append(f"{unpack(carried / ARCHIVE, Path(knobs.cache.dir))} of Triton's")
    return f"carried: {' and '.join(said)}"


def bring_fatbin(carried: Path, capability: int) -> str:
    """Build the CUDA kernels for one GPU into ``carried``, where they are not there; one line."""
    from toolkit.kernels.cuda.build import BuildError, build, sources
    from toolkit.kernels.cuda.driver import FATBIN, fatbin_note

    target = carried / FATBIN.name
    note = fatbin_note(target)
    if note is not None and note.get("sources") == sources() and capability in note["architectures"]:
        return "the CUDA kernels are there"
    try:
        return f"the CUDA kernels are built: {build(target, only=capability).stat().st_size >> 10} KiB"
    except BuildError as error:
        return f"the CUDA kernels are not built: {error}"


def main() -> int:
    """Compile and pack; the exit code is 1 where something did not compile or is left."""
    from gpu.compiling.precompile import precompile
    from triton import knobs

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=CARRIED)
    parser.add_argument("--stages", nargs="+", default=list(STAGES), help=f"of {', '.join(STAGES)}")
    parser.add_argument("--arch", type=int, default=90, help="compute capability, as 90")
    parser.add_argument("--device", default="nvidia-h200", help="the GPU's name in kernels/triton/tuned")
    parser.add_argument("--libtriton", type=Path, help="libtriton.so of the other machine's Triton")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=540.0, help="of compiling Triton's kernels")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    cache = options.folder.with_name(f"{options.folder.name}-cache")
    knobs.cache.dir = str(cache)
    print(bring_fatbin(options.folder, options.arch), flush=True)
    if options.libtriton is not None:
        other_key(options.libtriton)
    folders: list[str] = []
    found: dict[str, Any] = precompile(
        options.stages, options.arch, options.device, options.jobs, options.seconds, folders
    )
    size = pack((cache / name for name in folders), options.folder / ARCHIVE)
    print(json.dumps(found | {"kept": len(set(folders)), "bytes": size}), flush=True)
    return 1 if found["errors"] else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "scripts"))
    sys.exit(main())
