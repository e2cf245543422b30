"""Writing a checkpoint as others read it: model.safetensors, or shards and an index; config.json; side files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.checkpoint import Checkpoint
from toolkit.artifacts.json_file import read_json_object, write_json_object
from toolkit.artifacts.manifest import hub_origin
from toolkit.artifacts.side_files import copy_side_files
from toolkit.artifacts.text_head import copy_modules, own_modules
from toolkit.artifacts.weight_files.find import INDEX
from toolkit.artifacts.weight_files.safetensors_file import write_tensors

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 2 << 30


class _Shards:
    """A stream of tensors cut where a shard is full. ``names``: those of each shard so far; ``total``: their bytes."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
        self.rest, self.limit = iter(tensors), shard_bytes
        self.next = next(self.rest, None)
        self.names: list[list[str]] = []
        self.total = 0

    def take(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the next shard, at least one while there are any; none is held when it was handed over."""
        self.names.append([])
        size = 0
        while self.next is not None:
            nbytes = self.next[1].numel() * self.next[1].element_size()
            if size and size + nbytes > self.limit:
                return
            size, self.total = size + nbytes, self.total + nbytes
            self.names[-1].append(self.next[0])
            now, self.next = [self.next], None
            yield now.pop()
            self.next = next(self.rest, None)


def write_checkpoint(
    target: Path,
    source: Checkpoint,
    tensors: Iterable[tuple[str, Tensor]],
    config: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    """Write what ``source`` has become to ``target``. ``config``: its config.json, but for what is said there of
    quantization, → the new one; asked when all ``tensors`` are written. OSError passes through."""
    write_model(target, _with_own_head(source, tensors))
    kept = {key: value for key, value in source.config.items() if key != "quantization_config"}
    write_json_object(target / "config.json", config(kept))
    copy_side_files(source, target, head_apart=False)
    copy_modules(source.tokenizer_dir, target)
    _keep_code(source.path, target)


def _with_own_head(source: Checkpoint, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """``tensors`` and, where they lack it, what a classifier has behind its hidden states, as it was."""
    left = [f"{name}.{part}" for name in own_modules(source) for part in ("weight", "bias")]
    left = [name for name in left if name in source]
    for name, tensor in tensors:
        if name in left:
            left.remove(name)
        yield name, tensor
        del tensor  # before the next one is made
    yield from ((name, source.tensor(name)) for name in left)


def _keep_code(source: Path, target: Path) -> None:
    """What a model's own classes are made of, which others run: files that lie beside it go with it; of those that were
    left on the hub (``auto_map`` names them) the place is told as transformers does."""
    hub_id, _ = hub_origin(source)
    code = {file.stem: file for file in sorted(source.glob("*.py"))}

    def place(name: Any) -> Any:
        """``MODULE.CLASS``, or several, as it is found from the target."""
        if isinstance(name, list):
            return [place(one) for one in name]
        known = not isinstance(name, str) or "--" in name or name.partition(".")[0] in code
        return name if known or hub_id is None else f"{hub_id}--{name}"

    named = False
    for file in sorted(target.glob("*config.json")):
        data = read_json_object(file)
        if isinstance(found := data.get("auto_map"), dict):
            named = True
            if (places := {kind: place(name) for kind, name in found.items()}) != found:
                write_json_object(file, {**data, "auto_map": places})
    for file in code.values() if named else ():
        shutil.copyfile(file, target / file.name)


def write_model(target: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES) -> None:
    """Write (name, tensor) pairs to ``target``, in shards of about ``shard_bytes``; one tensor in memory at a time.

    OSError passes through (``open_stage`` turns a full disk into one line).
    """
    shards = _Shards(tensors, shard_bytes)
    while shards.next is not None or not shards.names:
        write_tensors(target / f"shard-{len(shards.names)}.safetensors", shards.take())
    count = len(shards.names)
    if count == 1:
        (target / "shard-0.safetensors").rename(target / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards.names):
        final = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        (target / f"shard-{i}.safetensors").rename(target / final)
        weight_map.update(dict.fromkeys(names, final))
    write_json_object(target / INDEX, {"metadata": {"total_size": shards.total}, "weight_map": weight_map})
