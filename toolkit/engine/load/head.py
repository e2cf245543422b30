"""The draft head of an engine: checked against its model, planned for and loaded beside it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from toolkit.artifacts.drafts.draft_head import HeadSpec, read_head
from toolkit.artifacts.weight_files.safetensors_file import widened
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.threads import usable_cores
from toolkit.engine.drafts.head import ROOM, DraftHead
from toolkit.engine.load.draft import FLAG, ShareOut, flagged, plan_beside
from toolkit.engine.load.memory_plan import MemoryPlan
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.spec import CacheGroup
from toolkit.runners.base import MemoryNeed, Runner


@dataclass
class OpenHead:
    """A head whose file is mapped. ``layers``: of its model whose inputs it reads."""

    path: Path
    spec: HeadSpec
    tensors: dict[str, NDArray[Any]]
    layers: tuple[int, ...]
    threads: int
    device: str | None = None  # of the tensor runner, None: the native one's

    @property
    def told(self) -> str:
        """For who waits while it is loaded."""
        return "loading the draft head"

    def plan(self, need: MemoryNeed, groups: Seq[CacheGroup], share_out: ShareOut) -> MemoryPlan:
        """How memory is shared out among a model that needs ``need`` and this. Raises ToolkitError."""
        from toolkit.runners.native.draft.eagle3 import packed_bytes

        own = {name: tensor for name, tensor in self.tensors.items() if name != "embed_tokens.weight"}
        weights = 0
        for name, tensor in own.items():
            if self.device is not None or tensor.ndim == 1:
                weights += 4 * tensor.size  # in float32
            else:
                weights += packed_bytes(name, tensor.shape)
        names = f"{FLAG}: no room for {self.path}", "draft head", str(self.path)
        return plan_beside(MemoryNeed(weights, 0, (), 0, True), (), need, groups, share_out, names, ROOM)[0]

    def load(self, plan: MemoryPlan) -> DraftHead:
        """Its weights, in 8 and 4 bits on the native runner, else in float32, and what guesses with them."""
        tensors = dict(self.tensors)
        embed, d2t = tensors.pop("embed_tokens.weight"), tensors.pop("d2t", None)

        def weights() -> dict[str, NDArray[Any]]:
            return {name: widened(tensor) for name, tensor in tensors.items()}

        if self.device is None:
            from toolkit.runners.native.draft.eagle3 import NativeHead

            native = NativeHead(self.spec, weights(), embed, d2t, self.threads)
            return DraftHead(native, self.layers, plan.session_len)
        import torch

        from toolkit.runners.tensor.drafts.eagle3 import TorchHead

        head = TorchHead(self.spec, weights, embed, d2t, torch.device(self.device))
        return DraftHead(head, self.layers, plan.session_len)

    def close(self) -> None:
        """Nothing is held but the mapped file."""


def open_head(path: Path, target: Runner) -> OpenHead:
    """The head in a directory, for the model of ``target``. Raises ToolkitError or UsageError where it is none for
    it."""
    spec = target.spec
    layers = len(spec.layers)
    with flagged():
        head, tensors = read_head(path, layers)
    if head.hidden_size != spec.hidden_size:
        raise UsageError(
            f"{FLAG}: {path} is of a model of width {head.hidden_size}, the model has {spec.hidden_size}; "
            "train one with `tool lite draft`"
        )
    if head.vocab_size != spec.vocab_size:
        raise UsageError(
            f"{FLAG}: {path} is of a model of {head.vocab_size} tokens, the model has {spec.vocab_size}; "
            "train one with `tool lite draft`"
        )
    fused = head.fused(layers)
    if max(fused) > layers:
        raise UsageError(f"{FLAG}: {path} reads layer {max(fused)}, the model has {layers}")
    if "embed_tokens.weight" not in tensors:
        raise ToolkitError(f"{FLAG}: {path}: expected a tensor embed_tokens.weight (speculators' form), found none")
    threads = target.options.threads or usable_cores()
    return OpenHead(path, head, tensors, fused, threads, None if target.name == "native" else target.device)
