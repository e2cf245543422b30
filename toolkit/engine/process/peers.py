"""What a front end tells other engines of its own, and has it do with them, as LMDeploy's ``/distserve`` has it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from toolkit.configs.engine import EngineConfig
from toolkit.configs.moving import EngineRole
from toolkit.engine.load.setup import Facts
from toolkit.engine.process.loop import Loop
from toolkit.errors import ToolkitError, UsageError

MOST_SOURCES = 256  # engines that lend; the oldest goes for the next one
MOST_PRESERVED = 1024  # requests whose blocks stay
PRESERVED = "\0preserved "  # how the session of one begins; no user's has such a name
WAIT_SECONDS = 30.0  # for the engine's thread


class _Late(ToolkitError):
    """The engine may yet do what it was told."""


class Peers:
    """``role``: of this engine; ``facts``: of its present start."""

    def __init__(self, config: EngineConfig, loop: Loop, facts: Callable[[], Facts]) -> None:
        self.role = EngineRole(config.role)
        self._ranks = {"tp_size": config.tp, "pp_size": config.pp, "dp_size": config.dp, "ep_size": config.ep}
        self._loop, self._facts = loop, facts
        self._sources: OrderedDict[str, None] = OrderedDict()
        self._preserved: OrderedDict[str, None] = OrderedDict()

    def info(self) -> dict[str, Any]:
        """What another engine, or a proxy, wants to know: JSON values, LMDeploy's names of sizes."""
        facts = self._facts()
        return {
            "engine_id": facts.engine_id,
            "role": self.role.value,
            "address": facts.lends_at,
            "tls": facts.lends_by_tls,
            "in_common": facts.in_common,
            **self._ranks,
            "dp_rank": 0,
            "block_size": facts.plan.block_size,
            "num_gpu_blocks": sum(facts.plan.num_blocks),
            "num_cpu_blocks": 0,
        }

    def differences(self, other: dict[str, str]) -> list[str]:
        """By name what another engine must have in common with this one and has not, a line each."""
        own = self._facts().in_common
        names = sorted(own.keys() | other.keys())
        return [
            f"{name}: {own.get(name, 'nothing')!s:.64} here, {other.get(name, 'nothing')!s:.64} there"
            for name in names
            if own.get(name) != other.get(name)
        ]

    def connect(self, engine_id: str, address: str, secure: bool, in_common: dict[str, str]) -> None:
        """Take blocks from the engine that lends them. Blocks for the engine's thread. Raises UsageError where this one
        takes none, ToolkitError where the two have not in common what they must, or cannot reach each other."""
        if self.role != EngineRole.Decode:
            raise UsageError("p2p_connect: this engine takes no blocks over; start it with --role decode")
        if not self._facts().in_common:
            raise ToolkitError("p2p_connect: this engine hands nothing over; its log says why")
        if told := self.differences(in_common):
            raise ToolkitError("the engines differ, and blocks of one are of no use to the other: " + "; ".join(told))
        try:
            self._tell("use_source", engine_id, address, secure)
        except _Late:
            self._sources[engine_id] = None  # to be dropped by whoever does not ask again
            raise
        self._sources[engine_id] = None
        self._sources.move_to_end(engine_id)
        while len(self._sources) > MOST_SOURCES:
            self.drop(next(iter(self._sources)))

    def drop(self, engine_id: str) -> None:
        """Take nothing from that engine any more. Unknown ids are ignored. Raises ToolkitError where this engine is
        down, or too long in a step."""
        if engine_id in self._sources:
            self._tell("drop_source", engine_id)
            self._sources.pop(engine_id, None)  # not before: who is told that it is not done asks again

    def _tell(self, what: str, *arguments: Any) -> None:
        try:
            self._loop.call(what, [*arguments]).result(WAIT_SECONDS)
        except TimeoutError:
            raise _Late(f"the engine has not answered for {WAIT_SECONDS:g} s; ask again") from None

    def preserve(self, request_id: str) -> str:
        """The session under which a request's blocks stay in the cache until ``free``."""
        name = PRESERVED + request_id
        self._preserved[name] = None
        while len(self._preserved) > MOST_PRESERVED:
            self._loop.end_session(self._preserved.popitem(last=False)[0])
        return name

    def free(self, request_id: str) -> int:
        """Let blocks go that were preserved for a request, or for all choices of an answer; how many that were."""
        before = len(self._preserved)
        names = [name for name in self._preserved if name.removeprefix(PRESERVED).rpartition("-")[0] == request_id]
        for name in (PRESERVED + request_id, *names):
            if self._preserved.pop(name, self) is None:
                self._loop.end_session(name)
        return before - len(self._preserved)
