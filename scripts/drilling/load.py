"""What clients ask a fleet for, and what came of it, against what one undisturbed server has answered."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx

WORDS = "the river keeper of seven lights wrote down every ship that came past his small grey island in spring".split()
PATIENCE_S = 90.0  # of a client, for a whole answer
ID = "x-request-id"
NEVER = 1 << 20  # tokens that an answer would have to repeat: it ends before


@dataclass(frozen=True)
class Question:
    """A chat, and how it is to be answered."""

    text: str
    max_tokens: int
    stream: bool
    sampling: dict[str, Any]

    @staticmethod
    def some(count: int, seed: int) -> list[Question]:
        """Some begin alike, some are drawn by a seed, some come as streams."""
        draw = random.Random(seed)
        starts = [" ".join(draw.choices(WORDS, k=40)) for _ in range(4)]
        return [
            Question(
                f"{draw.choice(starts)} {' '.join(draw.choices(WORDS, k=draw.randint(4, 12)))}",
                draw.choice((8, 16, 32, 64)),
                draw.random() < 0.7,
                {"temperature": 0} if i % 2 else {"temperature": 0.8, "seed": i},
            )
            for i in range(count)
        ]

    def body(self, model: str, number: int) -> dict[str, Any]:
        """``number``: sets it apart from all others, in a field that changes no answer of ours: an engine refuses what
        ran both times when it died, known by all that is asked for but the seed."""
        talk = [{"role": "user", "content": self.text}]
        asked = {"model": model, "messages": talk, "max_tokens": self.max_tokens, "stream": self.stream}
        apart = {"repetition_ngram_size": NEVER, "repetition_ngram_threshold": number}
        return asked | self.sampling | apart | {"ignore_eos": True}


@dataclass
class Visit:
    """One request. ``outcome``: right, wrong, or how it was lost: "error event", "refused" (a status before any of the
    answer), "broken off" (half an answer that nothing says is one), "no connection", "patience"; ``detail``: which
    error. ``at``: where it was answered, as far as the answer says."""

    id: str
    began: float
    ended: float = 0.0
    outcome: str = ""
    detail: str = ""
    at: str = ""

    @property
    def lost(self) -> bool:
        return self.outcome not in ("right", "wrong")

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass
class Load:
    """``clients`` ask one question after the other until ``stop``. ``where``: the header of an answer that says by whom
    it is."""

    url: str
    model: str
    questions: list[Question]
    seed: int = 0
    where: str = ""
    key: str | None = None
    visits: list[Visit] = field(default_factory=list)
    under_way: set[str] = field(default_factory=set)
    _asked: int = 0

    async def run(self, clients: int, stop: asyncio.Event) -> None:
        expected = self.expected
        async with self._http() as http:

            async def client(number: int) -> None:
                draw = random.Random(f"{self.seed} {number}")
                count = 0
                while not stop.is_set():
                    count += 1
                    i = draw.randrange(len(self.questions))
                    visit = Visit(f"drill-{number}-{count}", time.monotonic())
                    self.visits.append(visit)
                    text = await self._ask(http, self.questions[i], visit)
                    if text is not None:
                        visit.outcome = "right" if text == expected[i] else "wrong"
                        visit.detail = "" if text == expected[i] else f"{text!r:.200}, expected {expected[i]!r:.200}"
                    visit.ended = time.monotonic()
                    if visit.lost:
                        await asyncio.sleep(draw.uniform(0.1, 0.5))  # as clients do

            await asyncio.gather(*(client(number) for number in range(clients)))

    async def learn(self) -> float:
        """Ask every question once of an undisturbed fleet; how long the slowest took. Raises SystemExit."""
        self.expected: list[str] = []
        longest = 0.0
        async with self._http() as http:
            for i, question in enumerate(self.questions):
                visit = Visit(f"learn-{i}", time.monotonic())
                text = await self._ask(http, question, visit)
                if text is None:
                    raise SystemExit(f"before anything was disturbed: {visit.outcome} ({visit.detail})")
                self.expected.append(text)
                longest = max(longest, time.monotonic() - visit.began)
        return longest

    def _http(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.AsyncClient(timeout=PATIENCE_S, limits=limits, trust_env=False, headers=headers)

    async def _ask(self, http: httpx.AsyncClient, question: Question, visit: Visit) -> str | None:
        """The answer's text; None where it is lost, and then ``visit`` says how."""
        self.under_way.add(visit.id)
        self._asked += 1
        number = self._asked
        try:
            async with asyncio.timeout(PATIENCE_S):
                asked = question.body(self.model, number)
                url = f"{self.url}/v1/chat/completions"
                async with http.stream("POST", url, json=asked, headers={ID: visit.id}) as reply:
                    visit.at = reply.headers.get(self.where, "") if self.where else ""
                    if reply.status_code != 200:
                        told = (await reply.aread()).decode(errors="replace")
                        visit.outcome, visit.detail = "refused", f"{reply.status_code} {told:.300}"
                        return None
                    if question.stream:
                        return await _streamed(reply, visit)
                    return str(json.loads(await reply.aread())["choices"][0]["message"]["content"])
        except TimeoutError:
            visit.outcome, visit.detail = "patience", f"no whole answer within {PATIENCE_S:g} s"
        except httpx.ConnectError as error:
            visit.outcome, visit.detail = "no connection", str(error)
        except (httpx.HTTPError, ValueError, LookupError) as error:
            visit.outcome, visit.detail = "broken off", f"{type(error).__name__}: {error}"
        finally:
            self.under_way.discard(visit.id)
        return None


async def _streamed(reply: httpx.Response, visit: Visit) -> str | None:
    parts, whole = [], False
    async for line in reply.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            whole = True
            break
        told = json.loads(line.removeprefix("data: "))
        if "error" in told:
            error = told["error"]
            visit.outcome, visit.detail = "error event", f"{error.get('code')}: {error.get('message', '')}"
            return None
        parts += [choice["delta"].get("content") or "" for choice in told["choices"]]
    if not whole:
        visit.outcome, visit.detail = "broken off", "the stream ended without [DONE]"
        return None
    return "".join(parts)
