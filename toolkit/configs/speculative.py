"""What users say of speculative decoding."""

from __future__ import annotations

from typing import Any, Literal

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.checks import named, number, shown
from toolkit.errors import UsageError

MOST = 16  # tokens that a step verifies of a request, where nothing else is said
MOST_ASKED = 64  # that may be asked for
# LMDeploy's and vLLM's names of ways to guess: ours, or None where there is none yet
ALGORITHMS: dict[str, str | None] = {
    "lookup": "lookup",
    "ngram": "lookup",
    "prompt_lookup": "lookup",
    "draft_model": "draft_model",
    "eagle3": "eagle3",
    "eagle": "eagle",
    "dflash": "dflash",
    "DFLASH": "dflash",  # SGLang's
    "mtp": "mtp",
    "nextn": "mtp",  # SGLang's, as the next
    "NEXTN": "mtp",
    **dict.fromkeys(("gemma4_mtp", "deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp", "qwen3_5_mtp", "mimo_mtp"), "mtp"),
    **dict.fromkeys(("hy3_mtp", "medusa"), None),
}
Share = Literal["user", "all", "off"]
SHARES = ("user", "all", "off")
MODES = ("auto", "off")


@dataclass(frozen=True)
class Speculation:
    """``most``: tokens that a guess has. ``shared``: whose answers are looked up besides a request's own text: of the
    same user, of all, of nobody. ``always``: guess whether it pays or not. ``asked``: a way or a model was named, so
    that runners guess whose last bits depend on what a step has."""

    most: int = MOST
    shared: Share = "user"
    always: bool = False
    asked: bool = False


@named()
@dataclass
class SpeculativeConfig:
    """How tokens are guessed that a step then verifies; LMDeploy's record. ``method``: "lookup" (or "ngram"),
    "draft_model", "eagle3", "eagle", "dflash", "mtp"; ``model``: of all but the first, of "mtp" an assistant, where the
    model has no layer of its own. ``num_speculative_tokens``: that a guess has at most. ``dflash_block_size``: tokens
    that a DFlash draft computes at once, the newest among them; None: as many as it was trained for.
    """

    method: str = "lookup"
    model: str | None = None
    num_speculative_tokens: int = MOST
    dflash_block_size: int | None = None

    def __post_init__(self) -> None:
        check_algorithm("method", self.method)
        number("num_speculative_tokens", self.num_speculative_tokens, 1, MOST_ASKED, whole=True)
        if self.dflash_block_size is not None:
            number("dflash_block_size", self.dflash_block_size, 2, MOST_ASKED, whole=True)

    def fields(self) -> dict[str, Any]:
        """Of an engine config those that say the same."""
        return {
            "speculative_algorithm": self.method,
            "speculative_draft_model": self.model,
            "speculative_num_draft_tokens": self.num_speculative_tokens,
            "speculative_dflash_block_size": self.dflash_block_size,
        }


NOT_YET = "it does not run yet"


def check_algorithm(what: str, name: Any) -> None:
    """Raise UsageError for a way to guess that there is not."""
    known = list(dict.fromkeys(ours for ours in ALGORITHMS.values() if ours is not None))
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise UsageError(f"{what}: expected one of {', '.join(known)}, found {shown(name)}")
    if ALGORITHMS[name] is None:
        raise UsageError(f"{what}: expected one of {', '.join(known)}, found {name!r}: {NOT_YET}")


def check_speculative(config: Any) -> None:
    """Raise UsageError for fields of an engine config that contradict each other."""
    name, model = config.speculative_algorithm, config.speculative_draft_model
    if name is not None:
        check_algorithm("speculative_algorithm", name)
    if model is not None and not (isinstance(model, str) and model.strip()):
        raise UsageError(f"speculative_draft_model: expected a path or hub id, found {shown(model)}")
    method = None if name is None else ALGORITHMS[name]
    if method in ("draft_model", "eagle3", "eagle", "dflash") and model is None:
        raise UsageError(f"speculative_algorithm: {name} needs speculative_draft_model, what guesses")
    if model is not None and method == "lookup":
        raise UsageError(f"speculative_draft_model: {name} takes none; use draft_model or eagle3, or leave it out")
    if config.speculative == "off" and (name or model):
        raise UsageError(
            "speculative: off, but speculative_algorithm or speculative_draft_model asks for it; leave one out"
        )


def speculation_of(config: Any) -> Speculation | None:
    """What an engine config asks for; None: nothing is guessed."""
    if config.speculative == "off":
        return None
    most = config.speculative_num_draft_tokens or MOST
    asked = config.speculative_algorithm is not None or config.speculative_draft_model is not None
    return Speculation(most, config.speculative_shared, asked=asked)
