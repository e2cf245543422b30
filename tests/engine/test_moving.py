"""Blocks that go from the engine that has computed a prompt to another one: its answers are those of an engine alone,
whoever dies, lies or stands still at the other end."""

from __future__ import annotations

import random
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig
from toolkit.configs.generation import GenerationConfig
from toolkit.engine.cache.kept import moving as module
from toolkit.engine.cache.kept import peer, wire
from toolkit.engine.cache.kept.folder import FILE
from toolkit.engine.cache.kept.moving import Moving
from toolkit.engine.cache.kept.peer import Peer
from toolkit.engine.cache.kept.port import split
from toolkit.engine.core import EngineCore
from toolkit.engine.process.peers import Peers
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.errors import ToolkitError, UsageError
from toolkit.messages import EngineRole, MigrationBackend

SECRET = bytes(range(32))
WINDOWS = [(None,), (None, 6), (None, "state"), (None, 6, "state"), (6,), ((6, 5),)]
SIZE = 4  # of blocks
PEM = Path(__file__).parents[1] / "serve" / "localhost.pem"


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where engines of a test lend."""
    monkeypatch.setattr(module, "shared_memory", lambda: tmp_path / "memory")
    return tmp_path / "memory"


def hand(windows: tuple[Any, ...] = (None,), *, lends: bool = True, **more: Any) -> Moving:
    sizes = [16 if w == "state" else 16 * SIZE for w in windows]
    port = {"port_at": "127.0.0.1:0"} if lends else {}
    fields = {"facts": {"weights": "fake"}, "secret": SECRET, "backends": ("tcp",), **port} | more
    return Moving(sizes=sizes, lends=lends, takes=not lends, **fields)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(61), k=length)


def ask(fake: Any, core: EngineCore, tokens: list[int], n: int = 6, **more: Any) -> list[int]:
    core.add(EngineRequest("r", tokens, SamplingParams(n), **more))
    found: list[int] = fake.tokens_of(fake.run(core)["r"])
    return found


def answer(fake: Any, windows: tuple[Any, ...], tokens: list[int]) -> list[int]:
    core = fake.make_core(windows)
    found = ask(fake, core, tokens)
    core.close()
    return found


@pytest.fixture
def pair(fake: Any) -> Iterator[Callable[..., tuple[EngineCore, EngineCore]]]:
    """``pair(windows, **of_the_taker)``: an engine that lends and one that takes from it."""
    cores: list[EngineCore] = []

    def make(windows: tuple[Any, ...] = (None,), lending: Any = None, **more: Any) -> tuple[EngineCore, EngineCore]:
        first = fake.make_core(windows, moving=hand(windows, **(lending or {})))
        second = fake.make_core(windows, moving=hand(windows, lends=False, **more))
        cores.extend((first, second))
        assert first.moving is not None
        second.use_source(first.moving.id, first.moving.address, first.moving.tls is not None)
        return first, second

    yield make
    for core in cores:
        core.close()


@pytest.mark.parametrize("backends", [("tcp",), ("shm",)])
@pytest.mark.parametrize("windows", WINDOWS)
def test_another_engine_goes_on(fake: Any, pair: Any, windows: tuple[Any, ...], backends: tuple[str, ...]) -> None:
    first, second = pair(windows, backends=backends)
    for length in (40, 41, 43, 44, 6, 100):  # at a border of blocks, behind one, before one
        tokens = prompt(length, length)
        core = first.runner.tokens_computed
        drawn = ask(fake, first, tokens, 1, lend=True)
        assert first.runner.tokens_computed - core >= length
        before = second.runner.tokens_computed
        found = ask(fake, second, tokens, source=first.moving.id)
        assert found == answer(fake, windows, tokens) and found[:1] == drawn
        assert second.runner.tokens_computed - before == length - (length - 1) // SIZE * SIZE + 6 - 1
    assert second.stats()["moved_tokens"] == 36 + 40 + 40 + 40 + 4 + 96 and first.stats()["lent_bytes"]


def test_a_long_answer_finds_the_prompt_of_a_model_with_two_sets_of_frequencies(fake: Any, pair: Any) -> None:
    """The prompt alone would be turned by the short ones."""
    first, second = pair()
    for core in (first, second):
        core.intake._long_from = 50
    tokens = prompt(41)
    drawn = ask(fake, first, tokens, 1, lend=True, room=20)
    before = second.runner.tokens_computed
    assert ask(fake, second, tokens, 20, source=first.moving.id)[:1] == drawn
    assert second.runner.tokens_computed - before == 41 - 40 + 20 - 1


@settings(max_examples=25)
@given(
    windows=st.sampled_from(WINDOWS),
    runs=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 1), st.booleans()), min_size=1, max_size=6),
    blocks=st.integers(24, 60),
    asynchronous=st.booleans(),
    backends=st.sampled_from([("tcp",), ("shm",)]),
)
def test_whatever_is_asked_of_either(
    fake: Any, windows: Any, runs: Any, blocks: int, asynchronous: bool, backends: tuple[str, ...]
) -> None:
    few = {"blocks": blocks, "asynchronous": asynchronous, "session_len": 70, "max_batch_size": 4}
    first = fake.make_core(windows, moving=hand(windows), **few)
    second = fake.make_core(windows, moving=hand(windows, lends=False, backends=backends), **few)
    try:
        second.use_source(first.moving.id, first.moving.address, False)
        for length, seed, lent in runs:
            if lent:
                ask(fake, first, prompt(length, seed), 1, lend=True)
        for i, (length, seed, _) in enumerate(runs):
            params = SamplingParams(6)
            second.add(EngineRequest(str(i), prompt(length, seed), params, source=first.moving.id))
        found = fake.run(second)
        for i, (length, seed, _) in enumerate(runs):
            assert fake.tokens_of(found[str(i)]) == answer(fake, windows, prompt(length, seed))
    finally:
        first.close()
        second.close()


def test_blocks_are_named_and_lent_again_though_they_were_cached(fake: Any, pair: Any, memory: Path) -> None:
    first, second = pair()
    tokens = prompt(41)
    core = first
    core.add(EngineRequest("r", tokens, SamplingParams(1), lend=True))
    ids = fake.run(core)["r"][-1].block_ids
    assert len(ids) == 10 and all(len(bytes.fromhex(name)) == 32 for name in ids)
    for file in memory.rglob("*.kv"):
        file.unlink()
    core.add(EngineRequest("r", [*tokens, 5], SamplingParams(1), lend=True))
    assert fake.run(core)["r"][-1].block_ids == ids
    assert ask(fake, second, tokens, source=first.moving.id) == answer(fake, (None,), tokens)
    assert second.stats()["moved_tokens"] == 40
    assert ask(fake, first, prompt(20, 3), 1) and len(list(memory.rglob("*.kv"))) == 10  # nobody asked for those


def test_over_tls_with_a_certificate_that_is_trusted(
    fake: Any, pair: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    tokens = prompt(41)
    first, second = pair(lending={"tls": context, "port_at": "localhost:0"})
    ask(fake, first, tokens, 1, lend=True)
    assert ask(fake, second, tokens, source=first.moving.id) == answer(fake, (None,), tokens)
    assert second.stats()["moved_tokens"] == 0 and "CERTIFICATE_VERIFY_FAILED" in caplog.text
    monkeypatch.setenv("SSL_CERT_FILE", str(PEM))
    first, second = pair(lending={"tls": context, "port_at": "localhost:0"})
    ask(fake, first, tokens, 1, lend=True)
    assert ask(fake, second, tokens, source=first.moving.id) == answer(fake, (None,), tokens)
    assert second.stats()["moved_tokens"] == 40


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"secret": bytes(32)}, "another kv_transfer_key"),
        ({"facts": {"weights": "others"}}, "another model"),
    ],
)
def test_other_keys_and_models_get_nothing(
    fake: Any, pair: Any, other: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = prompt(41)
    for backends in (("tcp",), ("shm",)):
        first, second = pair(backends=backends, **other)
        ask(fake, first, tokens, 1, lend=True)
        assert ask(fake, second, tokens, source=first.moving.id) == answer(fake, (None,), tokens)
        assert second.stats()["moved_tokens"] == 0
    assert told in caplog.text


# -- the other end dies, lies or stands still -------------------------------------------------------


class Liar:
    """A port in front of a real one that knows the secret: what passes back is spoilt as ``way`` says, from byte
    ``start`` of what the other end says behind its greeting on."""

    def __init__(self, address: str, way: str, start: int) -> None:
        self._to, self._way, self._start = split("to", address), way, start
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._sock.getsockname()[1]}"
        self._rng = random.Random(start)
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._sock.accept()
                far = socket.create_connection(self._to)
                self._ends += [near, far]
                threading.Thread(target=self._pass, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, back: bool) -> None:
        greeting = wire.NONCE + wire.MAC + 1
        seen = 0
        with suppress(OSError):
            while data := source.recv(4096):
                clean = max(0, min(len(data), greeting + self._start - seen)) if back else len(data)
                seen += len(data)
                if clean:
                    target.sendall(data[:clean])
                if spoilt := data[clean:]:
                    if self._way == "cut":
                        break
                    if self._way == "hang":
                        time.sleep(30)
                    if self._way == "drip":
                        for byte in spoilt:
                            target.sendall(bytes([byte]))
                            time.sleep(0.2)
                    target.sendall(
                        self._rng.randbytes(len(spoilt)) if self._way == "garbage" else b"\xff" * len(spoilt)
                    )
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in (self._sock, *self._ends):
            sock.close()


@pytest.mark.parametrize("way", ["cut", "garbage", "hang", "drip", "ones"])
@pytest.mark.parametrize("start", [0, 5, 10, 11, 18, 40, 400, 900])
def test_a_peer_that_lies_changes_no_answer(
    fake: Any, pair: Any, way: str, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "ANSWER_SECONDS", 0.2)
    first, second = pair()
    tokens = prompt(41, start)
    ask(fake, first, tokens, 1, lend=True)
    liar = Liar(first.moving.address, way, start)
    try:
        second.use_source(first.moving.id, liar.address, False)
        begun = time.monotonic()
        assert ask(fake, second, tokens, source=first.moving.id) == answer(fake, (None,), tokens)
        assert time.monotonic() - begun < 25, "it waited for a peer that hangs"
        assert start > 40 or second.stats()["moved_tokens"] < 40  # beyond, each new connection brings some blocks more
        assert not second.keeper.reading
        assert second.blocks.usage() == 0
    finally:
        liar.close()


def test_a_block_that_was_changed_is_dropped_and_told(fake: Any, pair: Any, memory: Path, caplog: Any) -> None:
    """One bit of each is another. The next prompt is asked for nowhere: the other engine is left alone for a while."""
    first, second = pair()
    ask(fake, first, prompt(41), 1, lend=True)
    for file in (path for path in (memory / first.moving.id).rglob("*") if FILE.fullmatch(path.name)):
        found = bytearray(file.read_bytes())
        found[-1] ^= 1
        file.write_bytes(found)
    ask(fake, first, prompt(41, 3), 1, lend=True)
    for tokens in (prompt(41), prompt(41, 3)):
        assert ask(fake, second, tokens, source=first.moving.id) == answer(fake, (None,), tokens)
    assert second.stats().get("moved_tokens", 0) == 0
    assert caplog.text.count("lends nothing now: a block is not as it was sealed") == 1


@pytest.mark.parametrize("backends", [("tcp",), ("shm",)])
def test_an_engine_that_ends_leaves_others_to_compute(fake: Any, pair: Any, backends: tuple[str, ...]) -> None:
    first, second = pair(backends=backends)
    tokens = prompt(41)
    ask(fake, first, tokens, 1, lend=True)
    first.close()
    assert ask(fake, second, tokens, source=first.moving.id) == answer(fake, (None,), tokens)
    assert ask(fake, second, prompt(30, 1), source="0" * 32) == answer(fake, (None,), prompt(30, 1))  # of no engine
    assert second.stats().get("moved_tokens", 0) == 0


def test_an_aborted_request_leaves_nothing_held(fake: Any, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair()
    tokens = prompt(41)
    ask(fake, first, tokens, 1, lend=True)
    gate = threading.Event()
    read = Peer.read
    monkeypatch.setattr(Peer, "read", lambda self, block: gate.wait(5) and read(self, block))
    second.add(EngineRequest("r", tokens, SamplingParams(4), source=first.moving.id))
    for _ in range(20):
        second.step()
    assert second.keeper.reading
    second.abort("r")
    gate.set()
    fake.run(second)
    second.step()
    assert not second.keeper.reading and second.blocks.usage() == 0


def test_two_that_lose_their_common_beginning_while_they_ask_do_not_wait_for_each_other(
    fake: Any, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = pair()
    second = fake.make_core((None,), moving=hand(lends=False), blocks=40)
    second.use_source(first.moving.id, first.moving.address, False)
    gate = threading.Event()
    which = Peer.which
    monkeypatch.setattr(Peer, "which", lambda self, blocks: which(self, blocks) if gate.wait(5) else frozenset())
    ask(fake, second, prompt(20), 1)
    tokens = {name: [*prompt(20), *[i] * 12] for i, name in enumerate("ab")}
    for name in tokens:
        second.add(EngineRequest(name, tokens[name], SamplingParams(6), source=first.moving.id))
    second.step()
    second.add(EngineRequest("long", prompt(140, 2), SamplingParams(15)))  # takes all blocks, the cached ones too
    while "long" in second.sequences:
        second.step()
    gate.set()
    found = fake.run(second)
    assert all(fake.tokens_of(found[name]) == answer(fake, (None,), tokens[name]) for name in tokens)
    second.close()


# -- who speaks at the port -------------------------------------------------------------------------


def hello(address: str) -> socket.socket:
    sock = socket.create_connection(split("to", address), 5)
    sock.settimeout(8)
    return sock


def ended(sock: socket.socket) -> bool:
    with suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


@settings(max_examples=40, deadline=None)
@given(data=st.one_of(st.binary(max_size=400), st.binary(min_size=40, max_size=200).map(lambda b: wire.MAGIC + b)))
def test_strangers_get_nothing(data: bytes) -> None:
    lending = _lending()
    with hello(lending.address) as sock:
        got = b""
        with suppress(OSError):  # it has been cut off already
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while part := sock.recv(4096):
                got += part
        assert len(got) in (0, wire.NONCE + wire.MAC)


_OPEN: list[Moving] = []


def _lending() -> Moving:
    if not _OPEN:
        _OPEN.append(hand())
    return _OPEN[0]


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    for lending in _OPEN:
        lending.close()


@pytest.mark.parametrize(
    "data",
    [
        b"X",
        wire.WHICH + wire.COUNT.pack(wire.MOST_NAMES + 1),
        wire.WHICH + wire.COUNT.pack(0xFFFFFFFF),
        b"\x00" * 100,
    ],
)
def test_who_knows_the_secret_and_asks_nonsense_is_cut_off(fake: Any, pair: Any, data: bytes) -> None:
    first, second = pair()
    with hello(first.moving.address) as sock:
        line = wire.Line(sock)
        wire.greet(line, SECRET, first.moving.model)
        line.send([wire.READ + wire.NAME.pack(bytes(32), 0xFFFF)], 1)
        assert bytes(line.receive(8, 1)) == bytes(8)  # there is no such block
        sock.sendall(data)
        assert ended(sock)
    tokens = prompt(20)
    ask(fake, first, tokens, 1, lend=True)
    assert ask(fake, second, tokens, source=first.moving.id) == answer(fake, (None,), tokens)
    assert second.stats()["moved_tokens"] == 16


def test_strangers_that_wait_shut_nobody_out_for_long(fake: Any, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HELLO_SECONDS", 0.5)
    monkeypatch.setattr(peer, "PAUSE_SECONDS", 0.0)
    first, second = pair()
    waiting = [hello(first.moving.address) for _ in range(80)]
    try:
        time.sleep(1.0)
        tokens = prompt(20)
        ask(fake, first, tokens, 1, lend=True)
        assert ask(fake, second, tokens, source=first.moving.id) == answer(fake, (None,), tokens)
        assert second.stats()["moved_tokens"] == 16
    finally:
        for sock in waiting:
            sock.close()


def test_a_mac_is_of_no_use_again() -> None:
    lending = _lending()
    with hello(lending.address) as sock:
        mine = bytes(32)
        sock.sendall(wire.MAGIC + mine)
        said = sock.recv(64, socket.MSG_WAITALL)
        theirs, mac = said[:32], said[32:]
        assert mac == wire._mac(SECRET, b"lends", mine, theirs)
        sock.sendall(mac + lending.model)  # sent back as it came
        assert ended(sock)
    with hello(lending.address) as sock:
        sock.sendall(wire.MAGIC + mine)
        assert sock.recv(64, socket.MSG_WAITALL)[:32] != theirs


# -- options, folders -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"role": "reader"}, "role: expected one of Hybrid, Prefill, Decode"),
        ({"role": "decode", "migration_backend": "NIXL"}, "migration_backend: NIXL is not built in"),
        ({"role": "decode", "migration_backend": "Mooncake"}, "mooncake-transfer-engine"),
        ({"role": "prefill", "migration_backend": "tcp"}, "give kv_transfer_address too"),
        ({"role": "prefill", "kv_transfer_address": "a:1"}, "expected kv_transfer_key"),
        ({"role": "decode", "kv_transfer_address": "a:1", "kv_transfer_key": "k"}, "only with role prefill"),
        ({"kv_transfer_key": "k"}, "only with role prefill or decode"),
        ({"role": "prefill", "kv_transfer_key": "k", "kv_transfer_cert": "c"}, "only with kv_transfer_address"),
        ({"role": "prefill", "enable_prefix_caching": False}, "prefix cache"),
        ({"role": "prefill", "kv_transfer_memory": "much"}, "kv_transfer_memory: expected a size"),
        ({"role": "prefill", "empty_init": True}, "empty_init"),
    ],
)
def test_options_that_cannot_be(given: dict[str, Any], told: str) -> None:
    for kind in (TurbomindEngineConfig, PytorchEngineConfig):
        with pytest.raises(UsageError, match=told):
            kind(**given)


def test_what_is_lent_has_room_for_a_block() -> None:
    hand(most=16 * SIZE).close()
    with pytest.raises(UsageError, match="kv_transfer_memory: expected at least 64 bytes"):
        hand(most=16 * SIZE - 1)


def test_names_as_lmdeploy_writes_them() -> None:
    for role in ("prefill", "Prefill", EngineRole.Prefill):
        assert PytorchEngineConfig(role=role).role == "Prefill"
    assert TurbomindEngineConfig(migration_backend=MigrationBackend.DLSlime).migration_backend == "DLSlime"  # no role
    with pytest.raises(UsageError, match="migration_request: expected an object with remote_engine_id"):
        GenerationConfig(migration_request={"remote_session_id": 1})
    assert GenerationConfig(migration_request={"remote_engine_id": "x", "remote_session_id": 1}).migration_request


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:x", "host:70000", "host:-1", "[::1:3"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(UsageError, match="expected HOST:PORT"):
        split("kv_transfer_address", address)


def test_a_port_in_use_is_told(memory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ToolkitError, match=r"kv_transfer_address: cannot listen at .*: Address already in use"):
            hand(port_at=f"127.0.0.1:{taken.getsockname()[1]}")
    assert not list(memory.iterdir())  # nothing is left behind


def test_what_a_killed_engine_leaves_goes_with_the_next_start(memory: Path) -> None:
    code = (
        "import sys, os, signal; from pathlib import Path; from toolkit.engine.cache.kept import moving as m; "
        "m.shared_memory = lambda: Path(sys.argv[1]); m.Moving({}, [1], None, True, False); os.kill(os.getpid(), 9)"
    )
    memory.mkdir(mode=0o700)
    subprocess.run([sys.executable, "-c", code, str(memory)], check=False, timeout=60)
    left = list(memory.iterdir())
    assert len(left) == 1
    first, second = hand(), hand()
    assert sorted(path.name for path in memory.iterdir()) == sorted((first.id, second.id))
    first.close()
    second.close()
    assert not list(memory.iterdir())


def test_a_source_that_could_not_be_dropped_is_dropped_when_it_is_asked_again() -> None:
    down, called = True, []

    def call(name: str, arguments: list[Any]) -> Future[None]:
        if name == "drop_source" and down:
            raise ToolkitError("the engine is down")
        called.append(name)
        (done := Future[None]()).set_result(None)
        return done

    facts = SimpleNamespace(in_common={"model": "x"})
    peers = Peers(TurbomindEngineConfig(role="Decode"), SimpleNamespace(call=call), lambda: facts)  # type: ignore
    peers.connect("0" * 32, "", False, {"model": "x"})
    with pytest.raises(ToolkitError, match="the engine is down"):
        peers.drop("0" * 32)
    down = False
    peers.drop("0" * 32)
    peers.drop("0" * 32)
    assert called == ["use_source", "drop_source"]


def test_a_source_that_the_engine_takes_late_can_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.engine.process.peers.WAIT_SECONDS", 0.01)
    called: list[str] = []

    def call(name: str, arguments: list[Any]) -> Future[None]:
        called.append(name)
        done = Future[None]()
        if name == "drop_source":
            done.set_result(None)
        return done  # the engine is in a step

    facts = SimpleNamespace(in_common={"model": "x"})
    peers = Peers(TurbomindEngineConfig(role="Decode"), SimpleNamespace(call=call), lambda: facts)  # type: ignore
    with pytest.raises(ToolkitError, match=r"has not answered for 0\.01 s; ask again"):
        peers.connect("0" * 32, "", False, {"model": "x"})
    peers.drop("0" * 32)
    assert called == ["use_source", "drop_source"]


def test_engines_without_a_way_to_each_other_say_so(fake: Any) -> None:
    core = fake.make_core(moving=hand(lends=False, secret=None, backends=("shm", "tcp")))
    with pytest.raises(ToolkitError, match="not in this machine's memory, and no kv_transfer_key is given here"):
        core.use_source("0" * 32, "127.0.0.1:1", False)
    with pytest.raises(ToolkitError, match="it lends at no address"):
        core.use_source("0" * 32, "", False)
    with pytest.raises(ToolkitError, match="expected 32 hexadecimal digits"):
        core.use_source("../../etc", "", False)
    core.close()
    for backend, told in (
        ("shm", "it is not in this machine's memory, and by migration_backend no address is asked here"),
        ("tcp", "it lends at no address"),
    ):
        core = fake.make_core(moving=hand(lends=False, secret=None, backends=(backend,)))
        with pytest.raises(ToolkitError, match=f"cannot be reached: {told}$"):
            core.use_source("0" * 32, "127.0.0.1:1" if backend == "shm" else "", False)
        core.close()
