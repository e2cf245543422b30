"""A draft head (EAGLE-3)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.drafts.draft_head import HeadSpec, read_head
from toolkit.artifacts.weight_files.safetensors_file import widened
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.threads import usable_cores
from toolkit.engine.drafts.head import ROOM, DraftHead
from toolkit.engine.load.drafts.beside import FLAG, ShareOut, flagged, plan_beside
from toolkit.engine.load.memory_plan import MemoryPlan
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.spec import CacheGroup
from toolkit.runners.base import MemoryNeed, Runner
from toolkit.runners.drafts.head import F32, I64, Words


@dataclass
class OpenHead:
    """A head whose file is mapped. ``layers``: of its model whose inputs it reads; ``lent``: the model's embedding,
    which one without its own has."""

    path: Path
    spec: HeadSpec
    tensors: dict[str, NDArray[Any]]
    layers: tuple[int, ...]
    threads: int
    lent: Words
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
        embed, d2t = tensors.pop("embed_tokens.weight", None), tensors.pop("d2t", None)
        words = self.lent if embed is None else lambda ids: widened(embed[ids])

        def weights() -> dict[str, NDArray[Any]]:
            return {name: widened(tensor) for name, tensor in tensors.items()}

        if self.device is None:
            from toolkit.runners.native.draft.eagle3 import NativeHead

            native = NativeHead(self.spec, weights(), words, d2t, self.threads)
            return DraftHead(native, self.layers, plan.session_len, plan.max_prefill_token_num)
        import torch

        from toolkit.runners.tensor.drafts.eagle3 import TorchHead

        head = TorchHead(self.spec, weights, words, d2t, torch.device(self.device))
        return DraftHead(head, self.layers, plan.session_len, plan.max_prefill_token_num)

    def close(self) -> None:
        """Nothing is held but the mapped file."""


def open_head(path: Path, target: Runner) -> OpenHead:
    """The head in a directory, for the model of ``target``. Raises ToolkitError or UsageError where it is none for
    it."""
    spec = target.spec
    layers = len(spec.layers)
    with flagged():
        head, tensors = read_head(path, layers)
    if head.reads != spec.hidden_size:
        raise UsageError(
            f"{FLAG}: {path} is of a model of width {head.reads}, the model has {spec.hidden_size}; "
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
    lender: Any = getattr(target, "first", target)  # of several ranks
    if "embed_tokens.weight" not in tensors:
        if head.states_size:
            raise ToolkitError(f"{FLAG}: {path}: expected a tensor embed_tokens.weight as wide as the head, found none")
        if not hasattr(lender, "embed"):
            raise UsageError(f"{FLAG}: {path} has no embedding, and the model's is cut for ranks; leave tp out")
        if lender is not target:
            with flagged():
                lender.lend()

    def lent(ids: I64) -> F32:
        found: F32 = lender.embed(np.clip(ids, 0, spec.vocab_size - 1).astype(np.int32))
        return found

    threads = target.options.threads or usable_cores()
    return OpenHead(path, head, tensors, fused, threads, lent, None if target.name == "native" else target.device)
