"""How to generate: ``GenerationConfig``, whose fields are the one table of what a request may ask for.

Flags, ``/set``, HTTP requests and the Python API read names, types, bounds, defaults and help from here
(``PARAMETERS``); how a token is drawn by them is said at ``SamplingBatch`` in ``toolkit/runners/step.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, fields
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.checks import bounded, is_token, list_of, named, only_defaults, shown, switches, words_of
from toolkit.configs.limits import (
    GREEDY_BELOW,
    LOGIT_BIAS,
    MOST,
    SEED_MAX,
    TEMPLATE_STOPS,
    TOKEN_ID,
    WORD_LENGTH,
    Bounds,
)
from toolkit.configs.moving import check_migration
from toolkit.errors import UsageError

# Fields of LMDeploy's GenerationConfig without a counterpart here, and what to do instead.
NOT_GENERATED = {
    "logprob_start_len": "for log-probabilities of the prompt use prompt_logprobs",
    "return_ppl": "use Pipeline.get_ppl",
}


def _told(default: Any, help: str, bounds: Bounds | None = None, **more: Any) -> Any:
    """A field with what ``Parameter`` says of it."""
    return field(default=default, metadata={"help": help, "bounds": bounds, **more})


@named()
@dataclass
class GenerationConfig:
    """How to generate. ``validate()`` raises UsageError that names the field; bounds: in the table of its fields.

    Sampling: ``do_sample=False`` is greedy; then temperature, top_k, top_p and min_p are ignored, penalties are not.
    ``typical_p``, ``top_n_sigma``, ``xtc_…``, ``dynatemp_…``, ``dry_…``: llama.cpp's samplers, by its names; None for
    ``dry_sequence_breakers`` means its own: a line's end, colon, quotation mark, star.
    ``stop_words`` and ``bad_words`` may have any number of tokens. ``random_seed``: one seed a request; choice i of n
    uses ``random_seed + i``. ``response_format``: {"type": "json_schema" | "json_object" | "regex_schema" | "grammar" |
    "choice" | "text", …}. ``logits_processors`` (in process only): callables (token_ids, logits) -> logits.
    ``repetition_ngram_size`` and ``repetition_ngram_threshold``, where both are above 0: the answer ends as soon as its
    last ``size`` tokens stand in it ``threshold`` times. ``shown_special_tokens``: those that stay in the text though
    others are skipped (``skip_special_tokens``). ``return_routed_experts``: which experts each token of prompt
    and answer went to in each layer, of models that have such; no prefix is then taken from the cache. ``with_cache``:
    the answer names the blocks of its prompt (``cache_block_ids``), and an engine of role Prefill lends them to others;
    ``preserve_cache``: they stay in the cache until they are freed, as far as there is room; ``migration_request``: an
    object whose ``remote_engine_id`` is of an engine that lends them, to which this one was connected. ``return_ppl``
    and ``logprob_start_len`` are LMDeploy's for what is not built here: they take their default alone.
    """

    n: int = _told(1, "Choices; choice i draws with seed + i.", Bounds(1, 128, "int32"))
    max_new_tokens: int | None = _told(512, "Longest answer. Default: 512.", Bounds(1, 1 << 30, "int32"), typed=True)
    do_sample: bool = _told(
        False, "Draw tokens, or take the likeliest. Default: the model's.", typed=True, of_model=True
    )
    top_p: float = _told(1.0, "Keep the likeliest tokens of this mass.", Bounds(0, 1), neutral=1.0, draws=True)
    top_k: int = _told(
        50, "Keep this many likeliest tokens; 0 = all.", Bounds(0, 1 << 30, "int32"), neutral=0, draws=True
    )
    min_p: float = _told(
        0.0, "Keep tokens of at least this share of the likeliest one's.", Bounds(0, 1), neutral=0.0, draws=True
    )
    temperature: float = _told(0.8, "0 to 2; 0 is greedy.", Bounds(0, 2), neutral=1.0, draws=True)
    typical_p: float = _told(
        1.0, "Keep the tokens of most typical information with this mass.", Bounds(0, 1), neutral=1.0, draws=True
    )
    top_n_sigma: float = _told(
        0.0,
        "Keep tokens whose logits are at most so many standard deviations below the best; 0 = all.",
        Bounds(-1, 1000),
        neutral=0.0,
        draws=True,
    )
    xtc_probability: float = _told(
        0.0, "How often XTC leaves out the likeliest tokens but one.", Bounds(0, 1), neutral=0.0, draws=True
    )
    xtc_threshold: float = _told(
        0.1, "XTC leaves out tokens of this probability and more.", Bounds(0, 1), neutral=0.1, draws=True
    )
    dynatemp_range: float = _told(
        0.0,
        "The temperature is lower or higher by so much, as the next token is certain.",
        Bounds(0, 2),
        neutral=0.0,
        draws=True,
    )
    dynatemp_exponent: float = _told(
        1.0, "How the temperature rises with uncertainty.", Bounds(0, 100), neutral=1.0, draws=True
    )
    repetition_penalty: float = _told(
        1.0, "Above 1 discourages repeats.", Bounds(0.01, 100), neutral=1.0, typed=True, of_model=True
    )
    ignore_eos: bool = _told(False, "Go on where the model would end its answer.", typed=True)
    random_seed: int | None = _told(  # a negative one stands for its 64 bits
        None, "The same seed draws the same answer.", Bounds(-(1 << 63), SEED_MAX, "uint64"), spelled="seed", typed=True
    )
    stop_words: list[str] | None = _told(None, "Text that ends the answer; repeatable.", spelled="stop", typed=True)
    bad_words: list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_token_ids: list[int] | None = None
    min_new_tokens: int | None = _told(None, "Shortest answer.", Bounds(0, 1 << 30, "int32"), typed=True)
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = _told(None, "", Bounds(0, 1024, "int32"))
    response_format: dict[str, Any] | None = None
    logits_processors: list[Callable[[Any, Any], Any]] | None = None
    output_logits: Literal["all", "generation"] | None = None
    output_last_hidden_state: Literal["all", "generation"] | None = None
    include_stop_str_in_output: bool = False
    presence_penalty: float = _told(
        0.0, "-2 to 2, once for every token used before.", Bounds(-2, 2), neutral=0.0, typed=True
    )
    frequency_penalty: float = _told(
        0.0, "-2 to 2, for every time a token was used before.", Bounds(-2, 2), neutral=0.0, typed=True
    )
    dry_multiplier: float = _told(
        0.0, "DRY: above 0 discourages what would go on with a repeat.", Bounds(0, 100), neutral=0.0, typed=True
    )
    dry_base: float = _told(
        1.75, "DRY: its penalty grows by this with each token of a repeat.", Bounds(1, 100), neutral=1.75, typed=True
    )
    dry_allowed_length: int = _told(
        2, "DRY: shorter repeats are free.", Bounds(1, 1 << 20, "int32"), neutral=2, typed=True
    )
    dry_penalty_last_n: int = _told(
        -1, "DRY: look at so many tokens; -1 = all, 0 = off.", Bounds(-1, 1 << 30, "int32"), neutral=-1, typed=True
    )
    dry_sequence_breakers: list[str] | None = None
    logit_bias: dict[int, float] | None = None
    prompt_logprobs: int | None = _told(None, "", Bounds(0, 1024, "int32"))
    repetition_ngram_size: int = _told(0, "See repetition_ngram_threshold.", Bounds(0, 1 << 20, "int32"))
    repetition_ngram_threshold: int = _told(
        0, "End the answer when its last ngram_size tokens are in it so many times.", Bounds(0, 1 << 30, "int32")
    )
    shown_special_tokens: list[str] | None = None
    return_routed_experts: bool = False
    logprob_start_len: int = -1
    return_ppl: bool = False
    with_cache: bool = False
    preserve_cache: bool = False
    migration_request: Any = None

    def __post_init__(self) -> None:
        self.validate()

    def without_effect(self, unsaid: GenerationConfig | None = None) -> list[str]:
        """A line for every field that says how to sample where ``do_sample`` is False, and so changes nothing.
        ``unsaid``: what holds where nobody says anything, of which nothing is to be said either."""
        if self.do_sample:
            return []
        drawn = {p.name: (getattr(self, p.name), p) for p in PARAMETERS.values() if p.draws}
        # 0 asks for the likeliest token, which is taken, or for nothing
        given = {name: value for name, (value, p) in drawn.items() if value not in (p.default, p.neutral, 0)}
        given = {name: value for name, value in given.items() if unsaid is None or value != getattr(unsaid, name)}
        return [f"{name} {value:g} has no effect: do_sample is off" for name, value in given.items()]

    def validate(self) -> None:
        """Raise UsageError for the first field out of its range."""
        for p in PARAMETERS.values():
            value = getattr(self, p.name)
            if p.bounds is not None and not (value is None and p.optional):
                bounded(p.name, value, p.bounds)
        if self.min_new_tokens is not None and self.max_new_tokens is not None:
            if self.min_new_tokens > self.max_new_tokens:
                most = self.max_new_tokens
                raise UsageError(f"min_new_tokens: at most max_new_tokens ({most}), found {self.min_new_tokens}")
        only_defaults(self, NOT_GENERATED)
        for name, length in WORD_LENGTH.items():
            if isinstance(words := getattr(self, name), str):
                setattr(self, name, [words])
            words_of(name, getattr(self, name), length)
        for name in ("stop_token_ids", "bad_token_ids"):
            list_of(name, getattr(self, name), "token ids", is_token)
        list_of("shown_special_tokens", self.shown_special_tokens, "texts", lambda text: isinstance(text, str))
        list_of("logits_processors", self.logits_processors, "functions", callable)
        switches(self, "do_sample", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens")
        switches(self, "include_stop_str_in_output", "return_routed_experts", "with_cache", "preserve_cache")
        check_migration(self.migration_request)
        for name in ("response_format", "logit_bias"):
            if not isinstance(value := getattr(self, name), dict) and value is not None:
                raise UsageError(f"{name}: expected a dict, found {shown(value)}")
        for name in ("output_logits", "output_last_hidden_state"):
            if getattr(self, name) not in (None, "all", "generation"):
                raise UsageError(f"{name}: expected 'all', 'generation' or None, found {shown(getattr(self, name))}")
        for name, most in MOST.items():
            allowed = most + TEMPLATE_STOPS if name in ("stop_words", "stop_token_ids") else most
            if (count := len(getattr(self, name) or ())) > allowed:
                raise UsageError(f"{name}: expected at most {most} entries, found {count}")
        for key, value in (self.logit_bias or {}).items():
            bounded("logit_bias: token id", key, TOKEN_ID)
            bounded(f"logit_bias[{key}]", value, LOGIT_BIAS)

    @property
    def greedy(self) -> bool:
        """Whether each token is simply the best one: the only place that says from which temperature on."""
        return not self.do_sample or self.temperature < GREEDY_BELOW or self.top_k == 1


@dataclass(frozen=True)
class Parameter:
    """A field of GenerationConfig as those see it who take its value from a user.

    ``type``: bool, int, float or list (of texts); ``optional``: None stands for "not asked for". ``bounds``: of a
    number. ``neutral``: the value that changes nothing about how a token is drawn; None where it is no such field.
    ``draws``: it changes how tokens are drawn at random alone. ``of_model``: a generation_config.json may set it.
    ``typed``: commands have a flag for it and chat a ``/set``, by the name ``spelled``, which HTTP requests use too.
    """

    name: str
    type: type
    optional: bool
    default: Any
    help: str
    bounds: Bounds | None
    neutral: float | None
    draws: bool
    of_model: bool
    typed: bool
    spelled: str


def _parameters() -> dict[str, Parameter]:
    hints, found = get_type_hints(GenerationConfig), {}
    for f in fields(GenerationConfig):
        if (told := f.metadata) and (hint := hints[f.name]):
            kinds = [kind for kind in get_args(hint) if kind is not NoneType] if isinstance(hint, UnionType) else [hint]
            draws = told.get("draws", False)
            found[f.name] = Parameter(
                name=f.name,
                type=get_origin(kinds[0]) or kinds[0],
                optional=isinstance(hint, UnionType),
                default=f.default,
                help=told["help"],
                bounds=told["bounds"],
                neutral=told.get("neutral"),
                draws=draws,
                of_model=draws or told.get("of_model", False),
                typed=draws or told.get("typed", False),
                spelled=told.get("spelled", f.name),
            )
    return found


PARAMETERS = _parameters()  # by name
TYPED = {p.spelled: p for p in PARAMETERS.values() if p.typed}  # by the name that users type
