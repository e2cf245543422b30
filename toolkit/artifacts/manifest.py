"""``manifest.json``: what an artifact is, what it was made from and how, and how good it is."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from toolkit.artifacts.json_file import finite, read_json, write_json_object
from toolkit.artifacts.weight_files.find import gguf_name, gguf_parts, pickled_weights
from toolkit.artifacts.weight_files.safetensors_file import MAX_HEADER
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import later, plain, read
from toolkit.errors import ToolkitError

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
SCALES = ".scales"  # how names of files end that hold what was folded into weights (``scales.py``)
EYES = "mmproj*.gguf"  # what a GGUF file's model sees with, in the same directory
TENSORS = (".safetensors", ".gguf", SCALES)  # how names of files of tensors end
_LONGEST_NAME, _DEEPEST = 255, 16  # bytes of a part of a file's name, and parts
_OURS = ("schema_version", "tool_version")  # that a manifest of ours has, and others of that name do not
KINDS = ("checkpoint", "quantized", "engine", "calibration", "deployment", "draft")

# What counts as content of a model directory, beside weights of torch.save where it has no others; anything else in it
# (notes, caches) does not.
_CONTENT = (
    *("*.safetensors", f"*{SCALES}", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"),
    "additional_chat_templates/*.jinja",
    *("[1-9]_*/config.json", "[1-9]_*/model.safetensors"),  # sentence-transformers' modules
    "adapter_model.bin",  # of an adapter's directory: no weights of a model's
)


@dataclass(frozen=True)
class FileEntry:
    """A file of an artifact, by its ``name`` in the directory. ``header_sha256``: of the header of a safetensors file,
    which is cheap enough to be checked whenever one is opened. ``sha256``: 64 digits, or ``pending``."""

    name: str
    size: int
    sha256: str
    header_sha256: str | None = later(None)

    @property
    def digest(self) -> str | None:
        """The file's SHA-256, None where it is not known yet."""
        return None if self.sha256.startswith(_PENDING) else self.sha256


_PENDING = "pending "


def pending(boot: str) -> str:
    """What stands for a digest, in as many characters, until the file is known to be on disk: it is whole as long as
    the system runs whose start is called ``boot``."""
    return f"{_PENDING}{boot}".ljust(64)[:64]


@dataclass(frozen=True)
class Manifest:
    """One stage's record. Field names are the JSON keys.

    ``parent``: {path, hub_id, revision, digest, manifest} of the input, ``manifest`` being the parent's own record
    without its file list, or None where the chain starts. ``options`` of the stage; ``quality``: figures it measured.
    ``files``: every file but the manifest; ``size_bytes``: sum of their sizes.
    """

    kind: str
    stage: str
    tool_version: str
    created: str  # ISO 8601, UTC
    parent: dict[str, Any]
    options: dict[str, Any]
    quality: dict[str, Any]
    files: list[FileEntry]
    size_bytes: int
    schema_version: int = SCHEMA_VERSION

    @property
    def pending(self) -> bool:
        """Whether a file's digest is not known yet."""
        return any(entry.digest is None for entry in self.files)

    @property
    def packed_from(self) -> Path | None:
        """The directory or file that was the input, None for one of the hub's, and where nothing is there."""
        path = Path(str(self.parent.get("path")))
        return path if self.parent.get("hub_id") is None and path.exists() else None

    def to_json(self) -> dict[str, Any]:
        return dict(plain(self))


def read_manifest(directory: Path) -> Manifest | None:
    """The directory's manifest, None if it has none (a plain checkpoint) or another program's of that name.

    Raises ToolkitError if it is broken or of a newer schema than this version knows.
    """
    path = directory / MANIFEST
    data = read_json(path) if path.is_file() else None
    if not isinstance(data, dict) or data.keys().isdisjoint(_OURS):
        return None
    return parse_manifest(data, path)


def parse_manifest(data: dict[str, Any], path: Path) -> Manifest:
    """Check a manifest's JSON. ``path`` is named in errors (ToolkitError)."""
    version = data.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ToolkitError(f"{path}: schema_version: expected a whole number from 1 up, found {version!r:.40}")
    if version > SCHEMA_VERSION:
        raise ToolkitError(
            f"{path}: schema_version {version} is newer than {SCHEMA_VERSION}, the newest this version reads; "
            f"upgrade (it was written by {data.get('tool_version')!r:.40})"
        )
    try:
        manifest = read(Manifest, data, others=True)
    except ValueError as error:
        raise ToolkitError(f"{path}: {error}") from None
    if manifest.kind not in KINDS:
        raise ToolkitError(f"{path}: kind: expected one of {', '.join(KINDS)}, found {manifest.kind!r:.40}")
    for entry in manifest.files:
        if not _is_plain(entry.name):
            raise ToolkitError(f"{path}: files: expected names of files in the directory, found {entry.name!r:.60}")
    return manifest


def _is_plain(name: str) -> bool:
    """Whether ``name`` can be a file's in the directory: relative, of parts that are names and no longer than those."""
    parts = name.split("/")
    good = all(part not in ("", ".", "..") and len(part.encode()) <= _LONGEST_NAME for part in parts)
    return good and len(parts) <= _DEEPEST and "\0" not in name


def write_manifest(directory: Path, manifest: Manifest) -> None:
    write_json_object(directory / MANIFEST, finite(manifest.to_json()))


def describe_file(directory: Path, file: Path, boot: str = "") -> FileEntry:
    """The entry of ``files`` for a file of an artifact. ``boot``: the digest of one of tensors is ``pending``."""
    name = str(file.relative_to(directory))
    header = _header_digest(file) if name.endswith((".safetensors", SCALES)) else None
    later = boot and name.endswith(TENSORS)
    return FileEntry(name, file.stat().st_size, pending(boot) if later else file_digest(file), header)


def check_tensors(directory: Path, manifest: Manifest, only: str | None = None) -> None:
    """What is checked whenever an artifact is opened: the size of every file of tensors, and the digest of its header.
    Other files may be edited: a chat template, a context length. ``only``: one file of them. Raises ToolkitError, one
    line."""
    for entry in manifest.files:
        if not entry.name.endswith(TENSORS) or only not in (None, entry.name):
            continue
        file = directory / entry.name
        _check_size(file, entry.size)
        if entry.header_sha256 is not None and (found := _header_digest(file)) != entry.header_sha256:
            raise _changed(file, entry.header_sha256, found)


def check_files(directory: Path, manifest: Manifest, verify: bool = False) -> None:
    """Check that every file is there and of its size; ``verify``: also that every byte is as it was written.

    Raises ToolkitError, one line.
    """
    check_tensors(directory, manifest)
    for entry in manifest.files:
        file = directory / entry.name
        _check_size(file, entry.size)
        if verify and entry.digest is not None and (found := file_digest(file)) != entry.digest:
            raise _changed(file, entry.digest, found)


def _check_size(file: Path, expected: int) -> None:
    if not file.is_file():
        raise ToolkitError(f"{file}: missing, though {MANIFEST} lists it; make the artifact again")
    if (size := file.stat().st_size) != expected:
        what = "truncated" if size < expected else "trailing bytes"
        raise ToolkitError(
            f"{file}: {what}: expected {expected} bytes by {MANIFEST}, found {size}; restore the file, or make the "
            "artifact again"
        )


def _changed(file: Path, expected: str, found: str) -> ToolkitError:
    return ToolkitError(
        f"{file}: was changed since it was written: expected sha256 {expected} by {MANIFEST}, found {found}; restore "
        "the file, or make the artifact again"
    )


def _header_digest(file: Path) -> str:
    """Hex SHA-256 of the header of a safetensors file, its length included."""
    try:
        with file.open("rb") as handle:
            size = handle.read(8)
            return hashlib.sha256(size + handle.read(min(int.from_bytes(size, "little"), MAX_HEADER))).hexdigest()
    except OSError as error:
        raise ToolkitError(f"{file}: cannot be read: {error.strerror}") from error


def require_kind(path: Path, allowed: tuple[str, ...], stage: str) -> Manifest | None:
    """The manifest of a stage's input, None for a plain checkpoint or a GGUF file.

    Raises ToolkitError if the artifact is of a kind that the stage does not take.
    """
    manifest = read_manifest(path) if path.is_dir() else None
    if manifest is not None and manifest.kind not in allowed:
        raise ToolkitError(
            f"{path}: {stage} takes {' or '.join(allowed)}, found {_article(manifest.kind)} artifact "
            f"made by {manifest.stage!r}; give the model it was made from: {manifest.parent.get('path')}"
        )
    return manifest


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def describe_parent(path: Path, digest: str | None = None) -> dict[str, Any]:
    """The ``parent`` record for a stage whose input is ``path`` (a directory or a ``.gguf`` file).

    Hashes every content file unless ``digest``, that of the content, is known. Hub id and revision are read off the
    path where it lies in the hub's cache.
    """
    manifest = read_manifest(path) if path.is_dir() else None
    hub_id, revision = hub_origin(path)
    return {
        "path": str(path.resolve()) if hub_id is None else hub_id,
        "hub_id": hub_id,
        "revision": revision,
        "digest": digest or content_digest(path),
        "manifest": None if manifest is None else {**manifest.to_json(), "files": []},
    }


def hub_origin(path: Path) -> tuple[str | None, str | None]:
    """``…/models--owner--name/snapshots/<revision>`` → ("owner/name", revision)."""
    found = re.search(r"/models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})(/|$)", str(path.absolute()))
    return (f"{found[1]}/{found[2]}", found[3]) if found else (None, None)


def title(path: Path) -> str:
    """What people call the model of a file or directory: its name here, or of one that is the hub's there."""
    if path.is_file():
        return Path(gguf_name(path)).stem
    hub_id, _ = hub_origin(path)
    return path.absolute().name if hub_id is None else hub_id.rpartition("/")[2]


def content_digest(path: Path) -> str:
    """``sha256:…`` over the content of a GGUF file or of a model directory: names and bytes, no times, no path.

    Raises ToolkitError for tensors of an artifact that are not those which were written.
    """
    files = content_files(path)
    if path.is_file() and len(files) == 1:
        return f"sha256:{file_digest(path)}"
    manifest = None if path.is_file() else read_manifest(path)
    path = files[0].parent if path.is_file() else path
    names = [str(file.relative_to(path)) for file in files]
    entries = manifest.files if manifest is not None else ()
    recorded = {entry.name: entry.digest for entry in entries if entry.digest is not None}
    lines = []
    for name in names:
        found = file_digest(path / name)
        if name.endswith(TENSORS) and recorded.get(name, found) != found:
            raise _changed(path / name, recorded[name], found)
        lines.append(f"{name} {found}\n")
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"


def scales_file(model: Path) -> Path:
    """Where what was folded into the weights of a model lies: a directory, or a GGUF file."""
    return model.with_name(model.name + SCALES) if model.suffix.lower() == ".gguf" else model / f"folded{SCALES}"


def content_files(path: Path) -> list[Path]:
    """A GGUF file with its scales and what it may see with beside it, or the files of a model directory that count as
    its content, by name."""
    if path.is_file():
        beside = [*gguf_parts(path), *path.parent.glob(EYES), scales_file(path)]
        return [path, *(file for file in sorted(beside) if file != path and file.is_file())]
    found = {file for pattern in _CONTENT for file in path.glob(pattern) if file.is_file()} - {path / MANIFEST}
    return sorted(found.union(pickled_weights(path)))


def file_digest(path: Path) -> str:
    """Hex SHA-256 of a file."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(4 << 20))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    except OSError as error:
        raise ToolkitError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()
