"""Answers as llama.cpp's own routes have them: one object, or one for each piece and a last one with everything."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from time import perf_counter
from typing import Any

from toolkit.configs.generation import GenerationConfig
from toolkit.messages import Response
from toolkit.serve.generation.plain import Plain
from toolkit.serve.generation.running import running
from toolkit.serve.llama_cpp.fields import Generation
from toolkit.serve.llama_cpp.sampling import SEEDLESS
from toolkit.serve.openai.logprobs import chat_logprobs


def settings(config: GenerationConfig, session_len: int) -> dict[str, Any]:
    """How tokens are drawn by ``config``, as llama.cpp calls it."""
    return {
        "n_ctx": session_len,
        "n_predict": -1 if config.max_new_tokens is None else config.max_new_tokens,
        "temperature": 0.0 if config.greedy else config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "min_p": config.min_p,
        "repeat_penalty": config.repetition_penalty,
        "repeat_last_n": -1,
        "presence_penalty": config.presence_penalty,
        "frequency_penalty": config.frequency_penalty,
        "seed": SEEDLESS if config.random_seed is None else config.random_seed,
        "stop": config.stop_words or [],
        "ignore_eos": config.ignore_eos,
        "n_probs": config.logprobs or 0,
    }


class Told:
    """The answer that ``run`` gives to what was ``asked``."""

    def __init__(self, asked: Generation, run: Plain) -> None:
        self._asked = asked
        self._run = run
        self._began = self._first = perf_counter()

    async def _deltas(self) -> AsyncGenerator[Response, None]:
        run, begun = self._run, False
        async with running(run) as stream:
            async for _, delta, _ in stream:
                if not begun and (delta.token_ids or delta.finish_reason):  # else it tells how far the prompt is
                    begun, self._first = True, perf_counter()
                yield delta

    async def whole(self) -> dict[str, Any]:
        answer = Response()
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                answer.extend(delta)
        tokens = answer.token_ids if self._asked.return_tokens else []
        return self._end(answer, self._run.answers[0].content, tokens) | self._probabilities(answer)

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        last = Response()
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                last = delta
                progress = delta.prompt_progress
                if delta.text or delta.token_ids or progress is not None:
                    more = {} if progress is None else {"prompt_progress": vars(progress)}
                    yield self._head(delta.text, delta.token_ids) | {"stop": False} | self._probabilities(delta) | more
        yield self._end(last, "", [])

    def _head(self, content: str, tokens: Sequence[int]) -> dict[str, Any]:
        usage = self._run.usage
        counts = {"tokens_predicted": usage.generated, "tokens_evaluated": usage.prompt}
        return {"index": 0, "content": content, "tokens": list(tokens), "id_slot": -1, **counts}

    def _probabilities(self, response: Response) -> dict[str, Any]:
        if not self._asked.n_probs or not response.logprobs:
            return {}
        tokenizer = self._run.state.engine.tokenizer
        found = chat_logprobs(tokenizer, response.token_ids, response.logprobs, self._asked.n_probs, ids=True)
        return {"completion_probabilities": found}

    def _end(self, last: Response, content: str, tokens: Sequence[int]) -> dict[str, Any]:
        run, reason = self._run, last.stop_reason
        state, choice = run.state, run.choices[0]
        word = reason if isinstance(reason, str) and reason in (run.request.stop or ()) else ""
        asked = run.request.prompt[0]
        prompt = asked if isinstance(asked, str) else state.engine.tokenizer.decode(asked, False)
        return self._head(content, tokens) | {
            "stop": True,
            "model": run.request.model,
            "tokens_cached": run.usage.cached,
            "generation_settings": settings(choice.config, state.engine.session_len),
            "prompt": prompt,
            "has_new_line": "\n" in run.answers[0].content,
            "truncated": False,
            "stop_type": "limit" if last.finish_reason == "length" else "word" if word else "eos",
            "stopping_word": word,
            "timings": self._timings(),
        }

    def _timings(self) -> dict[str, float]:
        usage, ended = self._run.usage, perf_counter()
        read, written = usage.prompt - usage.cached, usage.generated
        return {
            "cache_n": usage.cached,
            **_rates("prompt", read, self._first - self._began),
            **_rates("predicted", written, ended - self._first),
        }


def _rates(what: str, tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{what}_n": tokens,
        f"{what}_ms": seconds * 1e3,
        f"{what}_per_token_ms": seconds * 1e3 / max(tokens, 1),
        f"{what}_per_second": tokens / max(seconds, 1e-9),
    }
