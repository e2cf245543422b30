"""MODEL, as every command takes it: a directory, a ``.gguf`` file, a Hugging Face hub id, or ``demo``."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.artifacts.manifest import SCALES
from toolkit.artifacts.output.room import check_room
from toolkit.base.user_path import user_path
from toolkit.errors import ToolkitError, UsageError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.safetensors", f"*{SCALES}", "*.json", "*.jinja", "*.model", "*.tiktoken", "vocab.txt", "merges.txt"]
# A pattern's * takes slashes in too. No folders but additional_chat_templates, and sentence-transformers' modules, as
# 1_Pooling and 2_Dense are.
_UNWANTED = ["[!1-9a]*/*", "[1-9][!_]*/*", "a[!d]*/*", "ad[!d]*/*", "consolidated*.safetensors"]
# Where a model was published without safetensors.
_PICKLED = ["pytorch_model.bin", "pytorch_model-*.bin", "consolidated.*.pth", "adapter_model.bin"]


def resolve_model(
    model: str, *, revision: str | None = None, download_dir: str | None = None, progress: bool = True
) -> Path:
    """The local path of a model: a directory or a ``.gguf`` file.

    ``demo`` is the demo model (``./demo`` is a directory of that name). What exists as a path is taken as one; else
    ``owner/name`` is fetched from the hub, as safetensors where it has them, into ``download_dir`` (default: the hub's
    own cache). Progress goes to standard error. Raises UsageError for a path that does not exist, or ``revision`` and
    ``download_dir`` where nothing is fetched; ToolkitError, one line, if the hub is out of reach or has no such model,
    or the disk no room for it.
    """
    if not model:
        raise UsageError("MODEL: expected a directory, a .gguf file, a hub id or demo, found an empty name")
    path = user_path(model)
    if model != "demo" and not path.exists() and is_hub_id(model):
        return _from_hub(model, revision, download_dir, progress)
    for name, value in (("--revision", revision), ("--download-dir", download_dir)):
        if value is not None:
            raise UsageError(f"{name}: only for models from the hub, {model} is not one; leave it out")
    if model == "demo":
        from toolkit.artifacts.demo import ensure_demo

        return ensure_demo(progress)
    if not path.exists():
        raise UsageError(f"{model}: no such file or directory, and not a hub id (owner/name) or demo")
    if path.is_file() and path.suffix.lower() != ".gguf":
        raise UsageError(f"{model}: expected a model directory, a .gguf file, a hub id or demo, found another file")
    return path.absolute() if str(path) == "demo" else path  # whoever takes it as text again means this directory


def resolve_adapters(adapters: Mapping[str, str], model: Path, *, progress: bool = True) -> dict[str, Path]:
    """``resolve_adapter`` of each by its name; one that was given by its path alone has that name."""
    return {
        name: resolve_adapter(where, "adapters" if where == name else f"adapters: {name}", model, progress=progress)
        for name, where in adapters.items()
    }


def resolve_adapter(adapter: str, option: str, model: Path, *, progress: bool = True) -> Path:
    """The local directory of a LoRA adapter: one that exists, else ``owner/name`` fetched from the hub; of a GGUF file
    what is made of it for ``model``.

    ``option`` begins the messages: what asked for it. Raises UsageError for a path that is missing or another file, and
    what ``resolve_model`` raises of the hub and ``as_peft`` of the file.
    """
    path = user_path(adapter)
    if not path.exists() and not is_hub_id(adapter):  # nor is there a demo adapter
        raise UsageError(f"{option}: {adapter}: no such directory, and not a hub id (owner/name)")
    if path.is_file() and path.suffix.lower() != ".gguf":
        raise UsageError(f"{option}: expected a directory, a .gguf file or a hub id, found the file {adapter}")
    try:
        if path.is_file():
            from toolkit.artifacts.adapters.from_gguf import as_peft

            return as_peft(path, model)
        return path if path.exists() else resolve_model(adapter, progress=progress)
    except ToolkitError as e:
        raise type(e)(f"{option}: {e}") from e


def is_hub_id(model: str) -> bool:
    """owner/name, unless ``owner`` is a directory here: then it is a path that does not exist."""
    return _HUB_ID.fullmatch(model) is not None and not model.endswith(".gguf") and not Path(model).parent.is_dir()


def _from_hub(model: str, revision: str | None, download_dir: str | None, progress: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        DryRunError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    shown: dict[str, Any] = {} if progress and sys.stderr.isatty() else {"tqdm_class": _plain_tqdm(progress)}
    try:
        for wanted in (_WANTED, _WANTED + _PICKLED):
            fetch = partial(
                snapshot_download,
                model,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=wanted,
                ignore_patterns=_UNWANTED,
            )
            with suppress(DryRunError):  # out of reach: what is there already may do
                files: Any = fetch(dry_run=True, tqdm_class=_plain_tqdm(False))
                check_room(_folder(model, download_dir), sum(x.file_size for x in files if x.will_download))
            found = fetch(**shown)
            if any(Path(found).glob("*.safetensors")):
                break
    except GatedRepoError:
        reason = "access must be granted first: accept its terms on the hub and log in (hf auth login)"
    except RepositoryNotFoundError:
        reason = "no such model on the hub (or a private one: hf auth login), and no such directory here"
    except RevisionNotFoundError:
        reason = f"--revision: the hub has no {revision!r} of it"
    except LocalEntryNotFoundError:
        reason = "no such directory here, and the Hugging Face hub cannot be reached; give a local path, or go online"
    except HfHubHTTPError as error:
        reason = f"the hub answered: {_first_line(error)}"
    except (OSError, ValueError) as error:
        reason = _first_line(error)
    else:
        return Path(found)
    raise ToolkitError(f"{model}: {reason}")


def _folder(model: str, download_dir: str | None) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(download_dir or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model, repo_type="model")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _plain_tqdm(progress: bool) -> type:
    """A tqdm that says nothing or, with ``progress``, writes a whole line every ten seconds: for logs and pipes."""
    from tqdm import tqdm

    class Plain(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": not progress, "leave": False, "mininterval": 10.0})

        def display(self, msg: str | None = None, pos: int | None = None) -> bool:
            if msg is None and self.n:
                total = "" if self.total is None else f" of {self.total:,}"
                print(f"{self.desc or 'fetching'}: {self.n:,}{total} {self.unit}", file=sys.stderr, flush=True)
            return False

    return Plain
