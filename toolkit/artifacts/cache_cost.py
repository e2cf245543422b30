"""What rounding the KV cache of an engine artifact costs, as it was measured: in its manifest, or kept at home."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from toolkit.artifacts.home import toolkit_home
from toolkit.artifacts.manifest import Manifest, read_manifest
from toolkit.base.figures import rise
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import later, plain, read
from toolkit.base.whole_file import write_whole
from toolkit.errors import ToolkitError

QUALITY = "kv_cache"  # its key in a manifest's quality
BROKEN = 1.5  # % of perplexity from which a precision is refused, or warned of
FORM = 2  # 2: values are turned too, and keys are less their mean


@dataclass(frozen=True)
class Choice:
    """A precision of the cache. ``policies``: of each layer that keeps rows of tokens: 0 (unrounded), 8, 4 (keys 6
    bits, values 4), or the digits are bits of keys and of values (65, 55, 54, 44). ``bits``: of a number, on average;
    ``bytes``: of a token. ``kl``: mean over tokens of KL(unrounded ‖ rounded), nats."""

    policies: tuple[int, ...]
    bits: float
    bytes: int
    perplexity_ratio: float
    kl: float

    @property
    def loss(self) -> float:
        """Share of the perplexity that it adds. On text of the model's own, exp(KL) is what the ratio comes to with
        tokens enough; with few the larger of both is the safer guess."""
        return max(self.perplexity_ratio, math.exp(min(self.kl, 700.0))) - 1

    @property
    def policy(self) -> int | None:
        """The one that all layers have, None where they differ."""
        return self.policies[0] if len(set(self.policies)) == 1 else None

    def told(self) -> str:
        return f"{self.bits:.3g} bits, {self.bytes:,} bytes a token, {self.cost()}"

    def cost(self) -> str:
        return f"{rise(self.loss)} perplexity (KL {self.kl:.4f})"


@dataclass(frozen=True)
class CacheCost:
    """``choices``: what was measured, on ``tokens`` tokens. ``layers``: of each layer the KL of a policy in it alone,
    by the policy's name; empty where only whole models were measured. ``key_means``: with which it was (see
    ``native/key_means.py``). ``form``: how numbers were rounded; a measure of another says nothing."""

    tokens: int
    choices: tuple[Choice, ...]
    layers: tuple[dict[str, float], ...] = ()
    key_means: str = later("")
    form: int = later(0)

    def of(self, policy: int) -> Choice | None:
        """All layers in one precision."""
        return next((choice for choice in self.choices if choice.policy == policy), None)

    def least(self, percent: float) -> Choice | None:
        """That of the fewest bytes among those that add at most ``percent`` to the perplexity; None: only unrounded."""
        good = [choice for choice in self.choices if 100 * choice.loss <= percent]
        return min(good, key=lambda choice: (choice.bytes, choice.loss), default=None)

    def instead(self) -> int:
        """A policy for all layers that does not break the model."""
        return next((p for p in (4, 8) if (cost := self.of(p)) is not None and 100 * cost.loss < BROKEN), 0)

    def rows(self) -> list[tuple[str, str]]:
        """To be shown: each precision of the whole model, and the mixes by layer."""
        mixed = {p: f"keys {p // 10} bits, values {p % 10}" for p in (65, 55, 54)}  # for a mix alone
        whole = [(mixed.get(p, f"quant_policy {p}"), c.told()) for c in self.choices if (p := c.policy) is not None]
        return whole + [("layers mixed", c.told()) for c in self.choices if c.policy is None]


def read_cost(artifact: Path) -> CacheCost | None:
    """What is known of an engine artifact: its manifest's own measure, or one kept at home; None: nothing, or it is no
    artifact."""
    manifest = read_manifest(artifact) if artifact.is_dir() else None
    if manifest is None or manifest.kind != "engine":
        return None
    try:
        found = manifest.quality.get(QUALITY) or json.loads(_kept(manifest).read_text(encoding="utf-8"))
        cost = read(CacheCost, found)
        known = not any(math.isnan(choice.kl + choice.perplexity_ratio) for choice in cost.choices)
        return cost if known and cost.form == FORM else None
    except (OSError, ValueError):
        return None


def keep_cost(artifact: Path, cost: CacheCost) -> None:
    """Keep a measure of an artifact at home. Raises ToolkitError where that cannot be written."""
    manifest = read_manifest(artifact)
    assert manifest is not None
    path = _kept(manifest)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(to_json(cost)).encode())
    except OSError as error:
        raise ToolkitError(f"{path}: cannot be written: {error.strerror or error}") from error


def to_json(cost: CacheCost) -> dict[str, Any]:
    """As a manifest has it."""
    return dict(plain(cost))


def _kept(manifest: Manifest) -> Path:
    """The file at home, by what the artifact was made of and how."""
    made = json.dumps([manifest.parent.get("digest"), manifest.options, manifest.tool_version], sort_keys=True)
    return toolkit_home() / "kv-cost" / f"{hashlib.sha256(made.encode()).hexdigest()[:24]}.json"
