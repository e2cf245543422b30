"""New weights over HTTP: in parts or from a file, where the operator allows it, and what is refused."""

from __future__ import annotations

import base64
import json
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save, save_file

from tests.serve.asking import ask
from toolkit import TurbomindEngineConfig
from toolkit.engine.process.frontend import AsyncEngine

ALL = {"enable_weight_updates": True}


def part(*names: str, **more: Any) -> dict[str, Any]:
    data = save({name: torch.ones(2) for name in names})
    return {"serialized_named_tensors": base64.b64encode(data).decode(), **more}


def update(server: Any, body: Any) -> tuple[int, str]:
    status, told = ask(server.url, "/update_weights", body)
    return status, told["error"]["message"] if "error" in told else json.dumps(told)


def test_parts_come_one_after_the_other(start: Any) -> None:
    server = start(**ALL)
    assert update(server, part("a")) == (200, '{"updated": false, "tensors": 1}')
    assert update(server, {**part("b"), "serialized_named_tensors": [part("b")["serialized_named_tensors"]]})[0] == 200
    assert not server.engine.weights.updates
    assert update(server, part("c", finished=True, mode="keep")) == (200, '{"updated": true, "tensors": 3}')
    assert server.engine.weights.updates == [({"a", "b", "c"}, "keep")]
    assert update(server, part("a", finished=True))[0] == 200 and server.engine.weights.updates[1] == ({"a"}, "wait")


def test_what_is_wrong_drops_all_parts(start: Any, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    server = start(**ALL)
    hostile = base64.b64encode(pickle.dumps(Bomb())).decode()
    wrong: list[tuple[Any, str]] = [
        (part("a"), "a is there already"),
        ({"serialized_named_tensors": hostile}, "pickle"),
        ({"serialized_named_tensors": "?"}, "base64"),
        ({"serialized_named_tensors": ""}, "safetensors"),
        ({"serialized_named_tensors": []}, "one entry"),
        (part("b", path="/etc"), "either it or path"),
        ({"finished": True}, "either it or path"),
        (part("b", load_format="flattened_bucket"), "load_format"),
        (part("b", mode="soon"), "mode"),
        ({"path": str(tmp_path)}, "other parts have come before"),
        (part("wrong", finished=True), "tensor wrong"),
    ]
    for body, match in wrong:
        update(server, part("a"))
        status, told = update(server, body)
        assert status == 400 and match in told, told
        assert update(server, part("x", finished=True))[0] == 200
    assert not (tmp_path / "ran").exists()
    late = {"either it or path", "load_format", "mode"}  # a body that is none drops nothing
    kept = [{"a", "x"} if match in late else {"x"} for _, match in wrong]
    assert [names for names, _ in server.engine.weights.updates if names != {"wrong", "a"}] == kept


def test_files_only_below_the_folder(start: Any, tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside, inside / "linked"):
        folder.mkdir()
        save_file({"a": torch.ones(2)}, folder / "m.safetensors")
    (inside / "link").symlink_to(outside)
    (inside / "linked" / "n.safetensors").symlink_to(outside / "m.safetensors")
    server = start(**ALL, weight_updates_path=inside)
    for good in (inside, inside / "m.safetensors"):
        assert update(server, {"path": str(good)})[0] == 200
    for bad in (outside, outside / "m.safetensors", f"{inside}/../out", inside / "link", inside / "linked", "/", "a"):
        status, told = update(server, {"path": str(bad)})
        assert status == 400 and f"below {inside}" in told, told
    assert update(server, {"path": str(inside / "nothing")})[0] == 400
    assert server.engine.weights.updates == [({"a"}, "wait")] * 2


def test_not_unless_the_operator_allows_it(start: Any, tmp_path: Path) -> None:
    status, told = update(start(**ALL), {"path": str(tmp_path)})
    assert status == 400 and "--weight-updates-path" in told
    status, told = update(start(), part("a", finished=True))
    assert status == 403 and "--enable-weight-updates" in told


def test_it_waits_for_requests_and_refuses_new_ones(start: Any) -> None:
    server = start(engine={"held": True}, **ALL)
    told: list[Any] = []
    body = {"model": "echo", "prompt": "x" * 20}
    running = threading.Thread(target=lambda: told.append(ask(server.url, "/v1/completions", body)))
    running.start()
    server.wait(lambda: bool(server.engine.running))
    trainer = threading.Thread(target=lambda: told.append(update(server, part("a", finished=True))))
    trainer.start()
    server.wait(lambda: bool(server.app.state.server.draining))
    assert (
        ask(server.url, "/v1/completions", body)[1]["error"]["code"] == "updating" and not server.engine.weights.updates
    )
    server.engine.held = False
    running.join(60)
    trainer.join(60)
    assert [status for status, _ in told] == [200, 200] and server.engine.weights.updates == [({"a"}, "wait")]
    assert ask(server.url, "/v1/completions", body)[0] == 200


def test_a_trainer_in_another_process(server_on: Any, tiny_models: Any, tmp_path: Path) -> None:
    """A server that began without weights, and a whole model in two parts, as LMDeploy's users send it."""
    model = tiny_models("llama")
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = {k: v for file in model.glob("*.safetensors") for k, v in load_file(file).items()}
    body = {"model": "echo", "prompt": [5, 77, 200, 13], "max_tokens": 8, "ignore_eos": True, "logprobs": 2}
    options: dict[str, Any] = {"device": "cpu", "session_len": 200}
    with AsyncEngine.open(model, backend_config=TurbomindEngineConfig(**options)) as engine:
        with server_on(engine) as server:
            status, wanted = ask(server.url, "/v1/completions", body)
            assert status == 200, wanted
    config = TurbomindEngineConfig(empty_init=True, **options)
    with AsyncEngine.open(bare, backend_config=config, process=True) as engine, server_on(engine, **ALL) as server:
        assert ask(server.url, "/health")[1] == {"status": "sleeping"}
        status, told = ask(server.url, "/v1/completions", body)
        assert status == 503 and "/update_weights" in told["error"]["message"]
        names = sorted(tensors)
        for half in (names[::2], names[1::2]):
            data = base64.b64encode(save({name: tensors[name] for name in half})).decode()
            sent = {"serialized_named_tensors": data, "finished": half[0] != names[0]}
            status, told = ask(server.url, "/update_weights", sent)
            assert status == 200, told
        assert told == {"updated": True, "tensors": len(names)}
        for _ in range(2):
            status, found = ask(server.url, "/v1/completions", body)
            assert status == 200 and found["choices"] == wanted["choices"], found
            status, message = update(server, part("a", finished=True))
            assert status == 400 and "tensor" in message and "is missing" in message
