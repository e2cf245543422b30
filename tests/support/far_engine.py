"""An engine whose ranks are on two machines, or that is one process, run by hand: a program, for a machine may be a
network namespace.

    far_engine.py MODEL KIND CONFIG DEEDS

``KIND``: turbomind or pytorch; ``CONFIG``: fields of its engine config, as JSON. ``DEEDS``, as JSON, are done in their
order: ["ask", fields of an EngineRequest], ["load", number, path] and ["unload", number] of adapters, ["renew", path]
of new weights, ["end", session]. It prints a JSON list of what they gave, then figures; on a machine that is not the
first it lends its ranks, and prints what is said.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Any

from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig
from toolkit.engine.core import EngineCore
from toolkit.engine.load.setup import find
from toolkit.engine.load.start import lend, start
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.errors import ToolkitError


def ask(core: EngineCore, fields: dict[str, Any]) -> list[Any]:
    """[tokens, log-probabilities by token as their bits, tokens that were cached]."""
    params = SamplingParams(fields.pop("tokens", 12), logprobs=2, temperature=fields.pop("temperature", 0.0), seed=3)
    core.add(EngineRequest("r", fields.pop("prompt"), params, **fields))
    tokens: list[int] = []
    bits: list[Any] = []
    cached = 0
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            tokens += output.token_ids
            bits += [sorted((token, value.hex()) for token, value in row.items()) for row in output.logprobs]
            cached = max(cached, output.cached_tokens)
    return [tokens, bits, cached]


def do(core: EngineCore, deed: list[Any]) -> Any:
    name, *told = deed
    try:
        if name == "ask":
            return ask(core, told[0])
        if name == "load":
            while not core.read_adapter(*told):
                time.sleep(0.01)
            return core.load_adapter(*told)
        if name == "unload":
            return core.unload_adapter(*told)
        if name == "renew":
            return core.update_weights(told[0], keep=False)
        assert name == "end"
        return core.end_session(told[0])
    except ToolkitError as error:
        return str(error)


def main(model: str, kind: str, config: str, deeds: str) -> None:
    fields = json.loads(config)
    made: Any = {"turbomind": TurbomindEngineConfig, "pytorch": PytorchEngineConfig}[kind](**fields)
    setup = find(model, made, kind if kind == "pytorch" else None)
    if fields.get("node_rank"):
        return lend(setup, print)
    core, facts = start(setup, None, lambda line: print(line, file=sys.stderr))
    if core.speculator is not None:
        core.speculator.options = replace(core.speculator.options, always=True)
    found = [do(core, deed) for deed in json.loads(deeds)]
    stats = core.stats()
    core.close()
    print(json.dumps([found, {"runner": facts.runner, "note": facts.runner_note, **stats}], default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
