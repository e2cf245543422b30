"""From a model's name and an engine config to an engine loop's body that is ready to run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from toolkit.artifacts.cache_cost import read_cost
from toolkit.artifacts.engine.adapters import packed_adapters
from toolkit.artifacts.recipe import open_recipe
from toolkit.base import extras
from toolkit.base.record import read
from toolkit.configs.engine import AUTO, EngineConfig, PytorchEngineConfig, TurbomindEngineConfig
from toolkit.configs.option import read_size
from toolkit.engine.core import EngineCore
from toolkit.engine.drafts.draft import Draft
from toolkit.engine.load import ranks
from toolkit.engine.load.draft import DraftFiles, OpenDraft, find_draft, means_head, open_draft
from toolkit.engine.load.head import OpenHead, open_head
from toolkit.engine.load.kept import adapter_digests, open_shelf
from toolkit.engine.load.memory_plan import MemoryPlan, Wishes, plan
from toolkit.engine.load.moving import open_moving
from toolkit.engine.load.mtp import OpenMtp, open_mtp_layer
from toolkit.engine.load.verify import verify_tensors
from toolkit.engine.options import EngineOptions
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.pictures import most_patches
from toolkit.models.positions import stretched_from
from toolkit.models.registry import from_files
from toolkit.models.spec import DecoderSpec
from toolkit.models.vision import VisionSpec
from toolkit.runners.base import Backend, Runner, RunnerError, RunnerOptions

if TYPE_CHECKING:
    from toolkit.artifacts.text.tokenizer import Tokenizer
    from toolkit.parallel.model import Model

log = logging.getLogger(__name__)
Progress = Callable[[str], None]
# A model's path → where its weights are to be read, and the lock that keeps them there, held until the engine ends.
Packed = Callable[[Path], tuple[Path, IO[bytes] | None]]
CONFIGS: dict[str, type[TurbomindEngineConfig] | type[PytorchEngineConfig]] = {
    "turbomind": TurbomindEngineConfig,
    "pytorch": PytorchEngineConfig,
}


@dataclass(frozen=True)
class Setup:
    """What to open. ``path``: local directory or .gguf file with the weights; ``backend`` None: what runs here.

    ``lock``: open as long as ``path`` is to stay; not told to another process. ``pictures_together``: as of
    ``EngineOptions``. ``source``: the model that ``path`` is a packed copy of, else ``path`` too. ``updated``: where
    the weights are that have taken the place of the model's. ``loaded``: adapters that have come since by their
    numbers, ``unloaded``: those that have gone. ``sources``: the engines that lend, by their ids: where, and whether
    they speak TLS. ``draft``: the model that guesses.
    """

    path: Path
    tokenizer_dir: Path
    config: EngineConfig
    backend: Backend | None
    lock: IO[bytes] | None = None
    pictures_together: int = 1
    source: Path | None = None
    updated: Path | None = None
    loaded: dict[int, str] = field(default_factory=dict)
    unloaded: tuple[int, ...] = ()
    sources: dict[str, tuple[str, bool]] = field(default_factory=dict)
    draft: DraftFiles | None = None

    @property
    def locks(self) -> list[IO[bytes]]:
        """Those of all that is read."""
        found = (self.lock, None if self.draft is None else self.draft.lock)
        return [lock for lock in found if lock is not None]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for another process."""
        kind = "pytorch" if isinstance(self.config, PytorchEngineConfig) else "turbomind"
        return {
            "path": str(self.path),
            "tokenizer_dir": str(self.tokenizer_dir),
            "kind": kind,
            "config": asdict(self.config),
            "backend": self.backend,
            "pictures_together": self.pictures_together,
            "source": None if self.source is None else str(self.source),
            "updated": None if self.updated is None else str(self.updated),
            "loaded": list(self.loaded.items()),
            "unloaded": list(self.unloaded),
            "sources": {engine: list(at) for engine, at in self.sources.items()},
            "draft": None if self.draft is None else self.draft.to_json(),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Setup:
        config = read(CONFIGS[data["kind"]], data["config"])
        paths = Path(data["path"]), Path(data["tokenizer_dir"])
        source, updated = (None if data[name] is None else Path(data[name]) for name in ("source", "updated"))
        adapters = {int(number): str(where) for number, where in data["loaded"]}, tuple(data["unloaded"])
        sources = {engine: (str(at), bool(secure)) for engine, (at, secure) in data["sources"].items()}
        together = data["pictures_together"]
        draft = None if data["draft"] is None else DraftFiles.from_json(data["draft"])
        return Setup(*paths, config, data["backend"], None, together, source, updated, *adapters, sources, draft)


def set_up_after(name: str, arguments: list[Any], setup: Setup) -> Setup:
    """What an engine is to be opened with again once its core's method ``name`` has been called."""
    if name == "update_weights":
        return replace(setup, updated=Path(arguments[0]))
    if name == "load_adapter":
        return replace(setup, loaded=setup.loaded | {arguments[0]: arguments[1]})
    if name == "unload_adapter":
        return replace(setup, unloaded=(*setup.unloaded, arguments[0]))
    if name == "use_source":
        return replace(setup, sources=setup.sources | {arguments[0]: (arguments[1], arguments[2])})
    if name == "drop_source":
        return replace(setup, sources={engine: at for engine, at in setup.sources.items() if engine != arguments[0]})
    return setup


def _load_adapters(setup: Setup, core: EngineCore) -> None:
    """Those that had come when an engine before this one ended."""
    for number in setup.unloaded:
        core.unload_adapter(number)
    for number, path in setup.loaded.items():
        if number not in setup.unloaded:
            try:
                core.load_adapter(number, path)
            except ToolkitError as e:
                log.error("adapter %s is gone: %s", path, e)


def _use_sources(setup: Setup, core: EngineCore) -> None:
    """Engines that lent when an engine before this one ended."""
    for engine, (address, secure) in setup.sources.items():
        with suppress(ToolkitError):  # it is gone
            core.use_source(engine, address, secure)


@dataclass(frozen=True)
class Facts:
    """What a front end wants to know of an opened engine. ``runner_why``: why the model runs otherwise than was asked
    for or is fastest, "" if it does not; ``runner_note``: what else is worth knowing of the runner. ``blind``: pictures
    are not taken, whatever the model. ``engine_id``: of this start; ``lends_at``: where others ask for blocks, "" =
    nowhere, by TLS or not; ``in_common``: what two engines must have in common to hand blocks over, by name, {} where
    this one does not."""

    plan: MemoryPlan
    runner_why: str
    runner_note: str
    runner: str
    backend: Backend
    device: str
    dtype: str
    vocab_size: int
    blind: bool = False
    engine_id: str = ""
    lends_at: str = ""
    lends_by_tls: bool = False
    in_common: dict[str, str] = field(default_factory=dict)

    def alone(self) -> Facts:
        """Of an engine that hands no blocks over."""
        return replace(self, engine_id="", lends_at="", lends_by_tls=False, in_common={})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Facts:
        return read(Facts, data)


def find(model: str, config: EngineConfig | None, backend: Backend | None, packed: Packed | None = None) -> Setup:
    """Resolve MODEL (fetching it where needed) and settle the backend. ``packed``: where a model at a path lies packed.
    Raises ToolkitError or UsageError."""
    from toolkit.artifacts.source import resolve_model

    if config is None:
        config = PytorchEngineConfig() if backend == "pytorch" else TurbomindEngineConfig()
    elif not isinstance(config, (TurbomindEngineConfig, PytorchEngineConfig)):
        wanted = "a TurbomindEngineConfig or PytorchEngineConfig"
        raise UsageError(f"backend_config: expected {wanted}, found {type(config).__name__}")
    elif backend is None:
        backend = "pytorch" if isinstance(config, PytorchEngineConfig) else "turbomind"
    ranks.check(config)
    path = resolve_model(model, revision=config.revision, download_dir=config.download_dir)
    held = packed_adapters(path)
    if config.adapters or held:
        asked = {
            name: where for name, where in (config.adapters or {}).items() if held.get(name) is None or where != name
        }
        found = {name: str(_adapter_path(name, where)) for name, where in asked.items()}
        order = dict.fromkeys([*(config.adapters or {}), *held])  # those asked for first: chats take the first
        config = replace(config, adapters={name: (held | found)[name] for name in order})
    weights, lock = (path, None) if packed is None else packed(path)
    draft = find_draft(config, tokenizer_dir, packed)
    return Setup(weights, tokenizer_dir(path), config, backend, lock, source=path, draft=draft)


def _adapter_path(name: str, where: str) -> Path:
    """The local directory of an adapter, fetched from the hub where it is no path."""
    from toolkit.artifacts.source import is_hub_id, resolve_model

    if not Path(where).expanduser().exists() and not is_hub_id(where):
        raise UsageError(f"adapters: {name}: {where}: no such directory, and not a hub id (owner/name)")
    try:
        path = resolve_model(where)
    except ToolkitError as e:
        raise type(e)(f"adapters: {name}: {e}") from e
    if not path.is_dir():
        raise UsageError(f"adapters: {name}: expected a directory or hub id, found the file {where}")
    return path


def tokenizer_dir(path: Path) -> Path:
    """Where the tokenizer of a model lies: its directory; for a GGUF file what was extracted from it."""
    from toolkit.artifacts.checkpoint import check_directory, open_checkpoint

    if path.is_dir():
        check_directory(path)  # before anything says that a directory of another kind lacks a tokenizer
        return path
    return open_checkpoint(path).tokenizer_dir


@extras.named()
def start(setup: Setup, open_tokenizer: Callable[[], Tokenizer] | None, progress: Progress) -> tuple[EngineCore, Facts]:
    """Open the runner, plan memory, load weights, allocate the cache. Raises ToolkitError or UsageError, one line."""
    with ExitStack() as opened:
        started = _start(setup, open_tokenizer, progress, opened)
        opened.pop_all()
    return started


def _start(
    setup: Setup, open_tokenizer: Callable[[], Tokenizer] | None, progress: Progress, opened: ExitStack
) -> tuple[EngineCore, Facts]:
    """``opened``: gets what is to be closed where this fails."""
    config, empty = setup.config, setup.config.empty_init and setup.updated is None
    runner, why = _open(setup, progress)
    opened.callback(runner.close)
    read = partial(_new_weights, setup, runner.spec)
    drafts: list[Draft] = []
    try:
        draft = _open_draft(setup, runner)
        if draft is not None:
            opened.callback(draft.close)
        try:
            memory = _plan(setup, runner, draft)
        except ToolkitError as e:
            if not isinstance(draft, OpenMtp) or draft.asked:
                raise
            progress(f"{e}; the model runs without it")
            draft, memory = None, _plan(setup, runner, None)
        for notice in memory.notices:
            progress(notice)
        trained = stretched_from(runner.spec)
        if trained is not None and memory.session_len > trained:
            progress(f"requests of more than {trained} tokens are turned by dynamic NTK (docs/how-to/long-prompts.md)")
        if config.kv_window is not None:
            kept = f"the first {config.kv_sinks} tokens and the last {config.kv_window}"
            progress(f"a text sees keys and values of {kept} alone (docs/how-to/endless-texts.md)")
        if setup.updated is not None:
            runner.use_weights(read(setup.updated))
        if not empty:
            _load(runner, memory, progress)
        if draft is not None:
            progress(draft.told)
            drafts.append(draft.load(memory))
    except MemoryError as e:
        raise ToolkitError(f"{setup.path}: out of memory while loading ({e}); close other programs or quantize") from e
    except RunnerError as e:
        advice = "a smaller --cache-max-entry-count or --session-len may help"
        raise ToolkitError(f"{setup.path}: the {runner.name} runner cannot start: {e}; {advice}") from e
    shelf, moving = open_shelf(setup, runner, progress), open_moving(setup, runner, progress)
    adapters = () if shelf is None and moving is None else adapter_digests(setup)
    core = EngineCore(
        runner,
        EngineOptions(
            session_len=memory.session_len,
            max_batch_size=memory.max_batch_size,
            max_prefill_token_num=memory.max_prefill_token_num,
            num_blocks=memory.num_blocks,
            target_step_ms=memory.target_step_ms,
            prefix_caching=config.enable_prefix_caching,
            lookahead=None if getattr(config, "async_", 1) else False,
            pictures_together=setup.pictures_together,
            unmasking=config.unmasking,
            speculation=config.speculation,
            check=log.isEnabledFor(logging.DEBUG),
        ),
        open_tokenizer,
        read_weights=read,
        empty=empty,
        shelf=shelf,
        adapters=adapters,
        moving=moving,
        drafts=drafts,
    )
    _load_adapters(setup, core)
    _use_sources(setup, core)
    if not empty and setup.updated is None:
        verify_tensors(setup.path, core.tell_damage)
    named = runner.name, runner.backend, runner.device, runner.dtype
    moves = () if moving is None else (moving.id, moving.address, moving.tls is not None, moving.in_common)
    return core, Facts(memory, why, "; ".join(runner.notes), *named, runner.spec.vocab_size, config.blind, *moves)


def lend(setup: Setup, progress: Progress) -> None:
    """Run this machine's ranks for the first of several machines, until that one has ended. Raises ToolkitError where
    it is not there, or turns them away."""
    from toolkit.parallel.nodes import serve

    layout = ranks.layout_of(setup.config)
    nodes = ranks.nodes_of(setup.config, layout)
    assert nodes is not None
    serve(_to_split(setup), layout, nodes, progress)


def _open(setup: Setup, progress: Progress) -> tuple[Runner, str]:
    """The runner, without weights, and why it is another than was asked for or is fastest."""
    from toolkit.runners.choose import open_runner

    config, layout = setup.config, ranks.layout_of(setup.config)
    if layout.world > 1:
        from toolkit.parallel.choose import open_ranks

        return open_ranks(_to_split(setup), layout, setup.backend, ranks.nodes_of(config, layout))
    options, how = _read_by(setup)
    families = from_files(getattr(config, "family_files", ()))
    try:
        return open_runner(setup.path, backend=setup.backend, options=options, **how, families=families)
    except UsageError as error:
        if isinstance(config, PytorchEngineConfig) and str(error).startswith("device:"):
            raise UsageError(f"device_type:{str(error).removeprefix('device:')}") from error
        raise


def _to_split(setup: Setup) -> Model:
    from toolkit.parallel.model import Model

    options, how = _read_by(setup)
    files = tuple(getattr(setup.config, "family_files", ()))
    return Model(str(setup.path), replace(options, device="cpu"), how, files)


def _read_by(setup: Setup) -> tuple[RunnerOptions, dict[str, Any]]:
    """A runner's options, and the arguments by which a model is opened for it."""
    config = setup.config
    policy, layers, told = cache_policy(setup.path, config)
    options = RunnerOptions(
        device=config.device,
        dtype=config.dtype,
        quant_policy=policy,
        kv_layers=layers,
        block_size=config.block_size,
        threads=config.threads or 0,
        adapters=tuple((config.adapters or {}).items()),
        adapter_memory=0 if config.adapter_memory is None else read_size("adapter_memory", config.adapter_memory),
        eager=config.eager_mode,
    )
    if told:
        log.info("%s", told)
    how: dict[str, Any] = {
        "use_logn_attn": getattr(config, "use_logn_attn", False),
        "session_len": config.session_len,
        "dynamic_rope": config.dynamic_rope,
        "kv_window": config.kv_window,
        "kv_sinks": config.kv_sinks,
        "model_format": config.model_format,
        "empty": config.empty_init,
        **_reading(config),
    }
    return options, how


def cache_policy(path: Path, config: EngineConfig) -> tuple[int, tuple[int, ...], str]:
    """``RunnerOptions.quant_policy`` and ``kv_layers`` by what was measured of the model, and a line on what they cost,
    "" where nothing is rounded. Raises UsageError for "auto" without a measure."""
    asked, known = config.quant_policy, read_cost(path) if config.quant_policy in (AUTO, 4, 44) else None
    if asked != AUTO:
        cost = None if known is None else known.of(int(asked))
        return int(asked), (), "" if cost is None else f"KV cache at quant_policy {asked}: {cost.told()}"
    if known is None or not known.layers:
        raise UsageError(
            f"quant_policy auto: what {path} bears has not been measured; `tool convert MODEL --quant-policy auto "
            "--dst-path DIR` does that, or give 0, 8 or 4"
        )
    found = known.least(config.kv_loss)
    if found is None:
        return 0, (), f"KV cache: no rounding of this model stays within {config.kv_loss:g} %: none"
    return 0, found.policies, f"KV cache by layer: {found.told()}"


def _reading(config: EngineConfig) -> dict[str, Any]:
    """How a checkpoint is read, be it the model's own or new weights for it."""
    return {
        "hf_overrides": _overrides(config),
        "rope_scaling_factor": getattr(config, "rope_scaling_factor", 0.0),
        "load_format": config.load_format,
        "blind": config.blind,
    }


def _new_weights(setup: Setup, spec: DecoderSpec, files: Path) -> Callable[[], Mapping[str, Any]]:
    """What a runner of ``spec`` is to load in place of the model's weights. Raises ToolkitError where it cannot be."""
    from toolkit.runners.weights.new import open_new_weights

    families = from_files(getattr(setup.config, "family_files", ()))
    return open_new_weights(setup.source or setup.path, files, spec, **_reading(setup.config), families=families)


def _open_draft(setup: Setup, runner: Runner) -> OpenDraft | OpenHead | OpenMtp | None:
    files = setup.draft
    if files is None:
        families = from_files(getattr(setup.config, "family_files", ()))
        return open_mtp_layer(setup.path, setup.config, runner, families)
    if means_head(setup.config, files.path):
        return open_head(files.path, runner)
    return open_draft(files, runner, setup.tokenizer_dir, setup.config, setup.backend)


def _plan(setup: Setup, runner: Runner, draft: OpenDraft | OpenHead | OpenMtp | None) -> MemoryPlan:
    """How memory is shared out. Raises UsageError for blocks that do not fill the cache's, ToolkitError where a picture
    that is computed whole does not fit."""
    config, spec = setup.config, runner.spec
    _check_blocks(spec, config, config.block_size)
    patches = _patches(setup, spec.vision)
    longest = spec.max_position
    if spec.encoder is not None:  # a text of as many tokens as it reads leaves no place for one that is drawn
        longest += 1
        if (asked := config.session_len or 0) > longest:
            raise UsageError(
                f"session_len: found {asked}, expected at most {longest}: this model reads {longest - 1} tokens"
            )
    share_out = partial(
        plan,
        block_size=config.block_size,
        vocab_size=spec.vocab_size,
        max_position=longest,
        device=runner.device,
        guessed=spec.block,
        wishes=Wishes(
            config.session_len,
            config.max_batch_size,
            max(config.max_prefill_token_num, spec.together, spec.max_position if spec.mutual else 0),
            _kv_wish(config),
            config.target_step_ms,
            setup.pictures_together * patches,
            EngineOptions.pictures_kept * patches,
        ),
    )
    need, groups = runner.memory(), spec.cache_groups
    memory = share_out(need, groups) if draft is None else draft.plan(need, groups, share_out)
    if memory.max_prefill_token_num < spec.together:
        found = f"{memory.max_prefill_token_num} prompt tokens a step fit, a picture of this model has {spec.together}"
        raise ToolkitError(f"not enough memory: {found}; free some memory or use a smaller max_batch_size")
    return memory


def _load(runner: Runner, memory: MemoryPlan, progress: Progress) -> None:
    progress(f"loading weights with the {runner.name} runner on {runner.device}")
    runner.load_weights()
    runner.allocate_cache(memory.num_blocks)
    if runner.device != "cpu":
        progress(f"preparing steps of up to {memory.max_batch_size} requests")
    runner.warm_up(memory.max_batch_size, memory.session_len, memory.max_prefill_token_num)


def _overrides(config: EngineConfig) -> dict[str, Any] | None:
    """Changes of the model's config.json, the length of the blocks that it guesses among them."""
    length = config.dllm_block_length
    return config.hf_overrides if length is None else {**(config.hf_overrides or {}), "block_size": length}


def _check_blocks(spec: DecoderSpec, config: EngineConfig, size: int) -> None:
    """Blocks of tokens that are guessed together must fill those of the cache; without such no option is for them."""
    given = [(f.name, getattr(config, f.name)) for f in fields(config) if f.name.startswith("dllm_")]
    odd = next(((name, value) for name, value in given if value != getattr(PytorchEngineConfig, name)), None)
    if odd is not None and spec.mask_token is None:
        raise UsageError(f"{odd[0]}={odd[1]}: this model draws one token after another; leave it out")
    if size % spec.block:
        found = f"found {size}, expected a multiple of the {spec.block} tokens that this model guesses together"
        raise UsageError(f"cache_block_seq_len (block_size): {found}")


def _patches(setup: Setup, vision: VisionSpec | None) -> int:
    """Of a picture, at most."""
    recipe = None if vision is None else open_recipe(setup.path)
    return 0 if vision is None or recipe is None else most_patches(recipe, vision.merge)


def _kv_wish(config: EngineConfig) -> float | int:
    """Blocks where a number of them is given, else the share of memory."""
    return getattr(config, "num_gpu_blocks", 0) or config.cache_max_entry_count
