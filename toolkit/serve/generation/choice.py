"""What is to be generated for one choice of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.request import Only
from toolkit.messages import GenerationConfig
from toolkit.models.eyes.pictures import Picture
from toolkit.parsers.formats import ReasoningFormat
from toolkit.parsers.thinking import Begun
from toolkit.serve.generation.sampling import choice_config


@dataclass(frozen=True)
class Budget:
    """``tokens`` of a thought that ``form`` marks, in an answer to a prompt that ended as ``begun`` says.

    ``text``, ``token_ids``: what closes it. ``after``: the config of what comes then, whose grammar begins there.
    ``session_len``: tokens that prompt and answer may have.
    """

    tokens: int
    form: ReasoningFormat
    begun: Begun
    text: str
    token_ids: list[int]
    after: GenerationConfig
    session_len: int

    def of_choice(self, index: int) -> Budget:
        """The same for another choice than the first."""
        return replace(self, after=choice_config(self.after, index))


@dataclass(frozen=True)
class Choice:
    """One sequence to generate: number ``index`` of the answer, from prompt number ``prompt``.

    ``adapter``, ``only``, ``priority``, ``session``, ``pictures``, ``second``, ``salt``: as of ``Asked``.
    ``label``: the client's session_id, by which it may be aborted. ``budget``: the limit of its thoughts.
    ``progress``: tell how far the prompt has come. ``prediction``: token ids that much of the answer may be.
    """

    index: int
    prompt: int
    token_ids: list[int]
    config: GenerationConfig
    adapter: str | None = None
    only: Only | None = None
    priority: int = 0
    label: int | str | None = None
    session: str | None = None
    budget: Budget | None = None
    pictures: Sequence[Picture] = ()
    progress: bool = False
    prediction: Sequence[int] = ()
    second: int = 0
    salt: str = ""
