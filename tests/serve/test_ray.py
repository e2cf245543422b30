"""Replicas on a real Ray Serve, started as a user starts them: what clients notice where one dies or hangs, or where
their number changes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest

pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1200)]

TOOL = [sys.executable, "-c", "import sys; from toolkit.commands.main import main; main(sys.argv[1:])"]
FLAGS = ["--max-batch-size", "16", "--session-len", "1024", "--cache-max-entry-count", "256"]
FLAGS += ["--health-check-period-s", "1", "--health-check-timeout-s", "4", "--server-port", "0"]
CHAT = "/v1/completions"


@dataclass
class Deployed:
    """``url``; ``process``: of the command."""

    url: str
    process: subprocess.Popen[bytes]

    def replicas(self) -> dict[int, str]:
        """By process: its state, as the system has it."""
        found = {}
        for one in psutil.Process(self.process.pid).children(recursive=True):
            try:
                title = " ".join(one.cmdline())
                if title.startswith("ray::ServeReplica:toolkit:") and ":front" not in title:
                    found[one.pid] = one.status()
            except psutil.Error:
                continue
        return found

    def wait(self, count: int, without: int | None = None, seconds: float = 300) -> dict[int, str]:
        """Until there are so many replicas that answer."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            names = re.findall(r'toolkit:num_requests_running\{replica="(\w+)"\}', self.get("/metrics").text)
            found = self.replicas()
            if len(names) == count == len(found) and without not in found:
                return found
            time.sleep(0.5)
        raise AssertionError(f"expected {count} replicas, found {self.replicas()} after {seconds:g} s")

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, trust_env=False)


@contextmanager
def deployed(model: Path, log: Path, *flags: str, end_by: signal.Signals = signal.SIGTERM) -> Iterator[Deployed]:
    with log.open("wb") as out:
        process = subprocess.Popen([*TOOL, "serve", "ray", str(model), *FLAGS, *flags], stdout=out, stderr=out)
    try:
        end = time.monotonic() + 300
        while not (found := re.search(r"ready at (\S+)", log.read_text())):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        yield Deployed(found[1], process)
    finally:
        left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(end_by)
        try:
            assert process.wait(120) == 0, log.read_text()
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        _, alive = psutil.wait_procs(left, 30)
        assert not alive, alive


@dataclass
class Answer:
    """``end``: "done", or the code of the error that ended it, or the exception."""

    prompt: str
    text: str = ""
    end: str = "nothing"
    replica: str = ""


async def stream(http: httpx.AsyncClient, prompt: str, tokens: int, begun: list[str] | None = None) -> Answer:
    answer = Answer(prompt)
    asked = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    try:
        async with http.stream("POST", CHAT, json=asked) as reply:
            answer.replica = reply.headers.get("x-toolkit-replica", "")
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    answer.end = "done"
                elif line.startswith("data: "):
                    told = json.loads(line[6:])
                    if "error" in told:
                        answer.end = str(told["error"]["code"])
                        continue
                    if begun is not None and not answer.text:
                        begun.append(prompt)
                    answer.text += "".join(choice["text"] for choice in told["choices"])
    except httpx.HTTPError as error:
        answer.end = repr(error)
    return answer


def client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False)


@pytest.fixture(scope="module")
def two(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    log = tmp_path_factory.mktemp("ray") / "two.log"
    with deployed(packed, log, "--replicas", "2", "--adapter-dir", str(log.parent)) as found:
        found.wait(2)
        yield found


@pytest.mark.parametrize("address", ["auto", "127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_that_is_gone_is_not_waited_for(address: str, packed: Path, tmp_path: Path) -> None:
    """First of all here: "auto" finds what runs, too."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text("127.0.0.1:1")  # what "auto" finds
    command = [*TOOL, "serve", "ray", str(packed), *FLAGS, "--ray-address", address]
    env = {**os.environ, "RAY_TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 1 and f"--ray-address {address}: no cluster of Ray answers there" in done.stderr


def test_it_answers_as_one_server_does(two: Deployed, packed: Path) -> None:
    async def go() -> None:
        async with client(two.url) as http:
            found = await asyncio.gather(*(stream(http, f"prompt {i}", 8) for i in range(16)))
            assert Counter(one.end for one in found) == {"done": 16}
            again = await asyncio.gather(*(stream(http, f"prompt {i}", 8) for i in range(16)))
            assert [one.text for one in again] == [one.text for one in found]
            assert len({one.replica for one in (*found, *again)}) == 2

    asyncio.run(go())
    (card,) = two.get("/v1/models").json()["data"]
    assert card["id"] == packed.name and card["max_model_len"] == 1024
    assert two.get("/health").json() == {"status": "healthy"}
    text = two.get("/metrics").text
    done = re.findall(r'vllm:request_success_total\{.*finished_reason="length".*replica="(\w+)"\} (\S+)', text)
    assert len(done) == 2 and sum(float(count) for _, count in done) == 32
    refused = httpx.post(two.url + CHAT, json={"prompt": "a", "mystery": 1}, timeout=60, trust_env=False)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "mystery"


def test_a_session_and_a_long_beginning_stay_where_they_are(two: Deployed) -> None:
    async def go() -> None:
        async with client(two.url) as http:
            for fields in ({"prompt": "a", "prompt_cache_key": "one"}, {"prompt": "b" * 600}):
                found = set()
                for i in range(8):
                    asked = fields | {"max_tokens": 1, "prompt": fields["prompt"] + "c" * i}
                    reply = await http.post(CHAT, json=asked)
                    found.add(reply.headers["x-toolkit-replica"])
                assert len(found) == 1

    asyncio.run(go())


def test_the_death_of_a_replica_costs_what_it_was_sending(two: Deployed) -> None:
    victim = min(two.wait(2))

    async def go() -> list[Answer]:
        async with client(two.url) as http:
            begun: list[str] = []
            tasks = [asyncio.create_task(stream(http, f"{i} prompt", 400, begun)) for i in range(32)]
            while len(begun) < 24 and not all(task.done() for task in tasks):
                await asyncio.sleep(0.01)
            os.kill(victim, signal.SIGKILL)
            found = await asyncio.gather(*tasks)
            right = await asyncio.gather(*(stream(http, one.prompt, 400) for one in found))
            for one, other in zip(found, right, strict=True):
                assert other.end == "done"
                assert one.text == other.text if one.end == "done" else other.text.startswith(one.text)
            return list(found)

    found = asyncio.run(go())
    ends = Counter(one.end for one in found)
    assert set(ends) == {"done", "node_lost"}, ends
    lost = {one.replica for one in found if one.end == "node_lost"}
    assert len(lost) == 1 and not lost & {one.replica for one in found if one.end == "done" and len(one.text) == 0}
    two.wait(2, without=victim)


def test_a_replica_that_hangs_is_replaced(two: Deployed) -> None:
    victim = min(two.wait(2))
    os.kill(victim, signal.SIGSTOP)
    began = time.monotonic()

    async def go() -> list[Answer]:
        async with client(two.url) as http:
            return list(await asyncio.gather(*(stream(http, f"still {i}", 8) for i in range(8))))

    ends = Counter(one.end for one in asyncio.run(go()))
    assert set(ends) <= {"done", "node_lost"} and ends["done"] >= 4, ends
    two.wait(2, without=victim)
    assert time.monotonic() - began < 240


def test_no_request_is_lost_while_their_number_changes(packed: Path, tmp_path: Path) -> None:
    scaling = ["--replicas", "1:3", "--target-ongoing-requests", "2"]
    scaling += ["--upscale-delay-s", "1", "--downscale-delay-s", "3"]
    with deployed(packed, tmp_path / "scaled.log", *scaling, end_by=signal.SIGINT) as found:

        async def go() -> tuple[Counter[str], int]:
            most, ends, stop = 1, Counter[str](), asyncio.Event()
            async with client(found.url) as http:

                async def ask(i: int) -> None:
                    while not stop.is_set():
                        ends[(await stream(http, f"load {i}", 300)).end] += 1

                tasks = [asyncio.create_task(ask(i)) for i in range(12)]
                end = time.monotonic() + 240
                while most < 3 and time.monotonic() < end:
                    await asyncio.sleep(0.5)
                    most = max(most, len(found.replicas()))
                stop.set()
                await asyncio.gather(*tasks)
                stop.clear()  # one goes on while they become fewer
                tasks = [asyncio.create_task(ask(0))]
                while len(found.replicas()) > 1 and time.monotonic() < end + 240:
                    await asyncio.sleep(0.5)
                stop.set()
                await asyncio.gather(*tasks)
            return ends, most

        ends, most = asyncio.run(go())
        assert most == 3 and len(found.replicas()) == 1
        assert set(ends) == {"done"}, ends
    assert "Warning" not in (tmp_path / "scaled.log").read_text()


def test_an_engine_that_starts_again_is_asked_for_nothing_meanwhile(two: Deployed) -> None:
    """It refuses at once, so that it always has least to do: it would get most requests of all."""
    victim = min(two.wait(2))
    engine = max(psutil.Process(victim).children(), key=lambda one: one.memory_info().rss)

    async def go() -> Counter[str]:
        ends = Counter[str]()
        async with client(two.url) as http:
            engine.kill()
            end = time.monotonic() + 20
            while time.monotonic() < end:
                found = await asyncio.gather(*(stream(http, f"meanwhile {i}", 4) for i in range(4)))
                ends.update(one.end for one in found)
        return ends

    ends = asyncio.run(go())
    done = ends.pop("done")
    assert ends.total() <= 4 < done / 10, ends  # those that found it ending, in the first round
    two.wait(2)


def test_a_config_file_deploys_the_same(packed: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    subprocess.run([*TOOL, "serve", "ray", str(packed), *FLAGS[:-2], "--write-config", str(file)], check=True)
    from toolkit.serve.ray import build

    (application,) = json.loads(file.read_text())["applications"]
    assert build(application["args"])._bound_deployment.name == "front"
    spoiled = json.loads(json.dumps(application["args"]))
    spoiled["models"][0]["fingerprint"] = "0" * 64
    log = tmp_path / "spoiled.log"
    code = "import json,sys; from toolkit.serve.ray.plan import Plan; from toolkit.serve.ray.run import serve\n"
    code += "try: serve(Plan.of_json(json.loads(sys.argv[1])), print, print)\n"
    code += "except Exception as e: print('SAID', type(e).__name__, e)"
    with log.open("wb") as out:
        subprocess.run([sys.executable, "-c", code, json.dumps(spoiled)], stdout=out, stderr=out, timeout=300)
    assert "SAID ToolkitError" in log.read_text() and "fingerprint" in log.read_text()


def test_a_port_in_use_is_said_before_anything_starts(two: Deployed, packed: Path) -> None:
    port = two.url.rpartition(":")[2]
    flags = [*FLAGS[:-2], "--server-port", port]
    done = subprocess.run([*TOOL, "serve", "ray", str(packed), *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and f"--server-port {port}: in use" in done.stderr


def test_gpus_that_are_not_there_are_not_waited_for(packed: Path) -> None:
    flags = [*FLAGS, "--gpus", "4000"]
    done = subprocess.run([*TOOL, "serve", "ray", str(packed), *flags], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "--gpus: expected 4000 GPUs" in done.stderr
