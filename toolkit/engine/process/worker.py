"""The process that an engine loop runs in; ``process_loop.py`` is its other end.

``child_process.start("toolkit.engine.process.worker", SOCKET)`` speaks ``records.py``'s messages over the socket.
"""

from __future__ import annotations

import gc
import importlib
import logging
import signal
import time
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from toolkit.base import child_process, garbage
from toolkit.base.json_lines import JsonLines
from toolkit.engine.core import INTAKE_SECONDS, EngineCore
from toolkit.engine.load.setup import Setup
from toolkit.engine.load.start import start
from toolkit.engine.process import records
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.eyes.pictures import Picture
from toolkit.runners.base import RunnerLost

log = logging.getLogger(__name__)
# Of nearly every engine on a CPU: imported before it is known what to open, since a process may be started before.
NEEDED = ("toolkit.artifacts.text.tokenizer", "toolkit.runners.choose", "toolkit.artifacts.engine.files")
IDLE_SECONDS = 1.0  # without requests, after which the tokenizer is opened, for those whose answers follow a grammar
STATS_SECONDS = 0.1  # how often an otherwise silent loop sends its figures at most
GATHER_SECONDS = 0.01  # tokens of steps that are shorter go together: on a CPU the front end's work is the steps' loss


def main(fd: int) -> None:
    """Open what the first message says, then run requests until the other end closes."""
    child_process.ignore(signal.SIGINT, signal.SIGTERM)
    garbage.look_seldom()
    with Connection(fd) as pipe, suppress(EOFError, BrokenPipeError, ConnectionResetError):
        for name in NEEDED:
            importlib.import_module(name)
        first, _ = records.unpack(pipe.recv_bytes())
        handler = logging.StreamHandler()
        text = logging.Formatter("%(asctime)s %(levelname)s engine: %(message)s")
        handler.setFormatter(JsonLines() if first["log_json"] else text)
        logging.basicConfig(level=first["log_level"], handlers=[handler])
        core = _open(pipe, first["setup"])
        if core is not None:
            gc.freeze()  # what was loaded stays: to look through it all takes 0.1 s
            try:
                _serve(pipe, core)
            except RunnerLost as e:
                pipe.send_bytes(records.pack_told({"op": "lost", "why": str(e)}))
            finally:
                core.close()


def _open(pipe: Connection, setup: dict[str, Any]) -> EngineCore | None:
    from toolkit.artifacts.text.tokenizer import Tokenizer

    def progress(text: str) -> None:
        pipe.send_bytes(records.pack_told({"op": "progress", "text": text}))

    try:
        what = Setup.from_json(setup)
        core, facts = start(what, partial(Tokenizer.open, what.tokenizer_dir), progress)
    except ToolkitError as e:
        pipe.send_bytes(records.pack_told({"op": "failed", "error": str(e), "usage": isinstance(e, UsageError)}))
        return None
    except Exception as e:
        log.exception("the engine could not be opened")
        pipe.send_bytes(records.pack_told({"op": "failed", "error": f"{type(e).__name__}: {e}", "usage": False}))
        return None
    pipe.send_bytes(records.pack_told({"op": "ready", "facts": facts.to_json()}))
    return core


def _serve(pipe: Connection, core: EngineCore) -> None:
    sent, ready = 0.0, []
    known: set[str] = set()  # requests that have sent a token
    pictures: dict[bytes, Picture] = {}  # of requests that run, by their digests
    prepared = False
    while True:
        until = float("inf")
        rest = core.patience if prepared else IDLE_SECONDS
        while time.monotonic() < until and pipe.poll(0 if core.has_work else rest):
            until = min(until, time.monotonic() + INTAKE_SECONDS)
            message, data = records.unpack(pipe.recv_bytes())
            op = message["op"]
            if op == "add":
                core.add(records.read_request(message, data, pictures))
            elif op == "forget":
                for digest in message["digests"]:
                    del pictures[bytes.fromhex(digest)]
            elif op == "abort":
                core.abort(message["id"])
            elif op == "end_session":
                core.end_session(message["name"])
            elif op == "call":
                pipe.send_bytes(records.pack_told(_called(core, message)))
            elif op == "close":
                return
        if not prepared and not core.has_work:
            core.intake.constraints.prepare()
            prepared = True
        ready += core.step()
        now = time.monotonic()
        wait = GATHER_SECONDS if ready else STATS_SECONDS
        urgent = any(o.finish_reason is not None or o.id not in known for o in ready)  # nobody waits for a first token
        if urgent or now - sent > wait or not core.has_work:
            pipe.send_bytes(records.pack_outputs(ready, core.stats()))
            known |= {o.id for o in ready if o.token_ids}
            known -= {o.id for o in ready if o.finish_reason is not None}
            sent, ready = now, []


def _called(core: EngineCore, message: dict[str, Any]) -> dict[str, Any]:
    """The answer to a call of one of the core's methods."""
    try:
        result = getattr(core, message["name"])(*message["arguments"])
    except Exception as e:
        log.error("%s: %s", message["name"], e)
        text = str(e) if isinstance(e, ToolkitError) else f"{type(e).__name__}: {e}"
        return {"op": "answer", "error": text, "usage": isinstance(e, UsageError)}
    return {"op": "answer", "error": None, "result": result}
