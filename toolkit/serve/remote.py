"""A model behind a server, as the chat in the terminal wants it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.chat import settings
from toolkit.configs.generation import TYPED, GenerationConfig
from toolkit.errors import ToolkitError
from toolkit.messages import FinishReason, Response
from toolkit.serve.client import APIClient
from toolkit.vision.images import as_url
from toolkit.vision.videos import video_url


class RemoteModel:
    """``name``: the one to talk to, None for the server's first. Raises ToolkitError if it does not serve that."""

    def __init__(self, client: APIClient, name: str | None = None) -> None:
        served = client.available_models
        if name is not None and name not in served:
            raise ToolkitError(f"{client.url}: --model-name {name}: found {', '.join(served) or 'no models'} there")
        if name is None and not served:
            raise ToolkitError(f"{client.url}: found no models there")
        self.client = client
        self.name = name or served[0]

    def stream_infer(
        self, prompts: list[dict[str, Any]], *, gen_config: GenerationConfig | None = None
    ) -> Iterator[Response]:
        """Deltas of one answer, thoughts in <think> tags as models write them. Token counts are those of pieces until
        the server has told its own at the end."""
        fields = {} if gen_config is None else as_fields(gen_config)
        ended: FinishReason | None = None
        pieces, usage, thinks = 0, {"include_usage": True}, False
        for chunk in self.client.chat_completions_v1(self.name, prompts, True, stream_options=usage, **fields):
            counts = chunk.get("usage") or {}
            for choice in chunk.get("choices") or []:
                delta = choice.get("delta", {})
                text, thought = delta.get("content") or "", delta.get("reasoning_content") or ""
                if thought and not thinks:
                    text, thinks = f"<think>\n{thought}", True
                elif thought:
                    text = thought
                elif thinks and text:
                    text, thinks = f"\n</think>\n\n{text}", False
                pieces += bool(text)
                reason = choice.get("finish_reason")
                if reason:
                    ended = "length" if reason == "length" else "stop"
                if text or reason:
                    yield Response(text=text, generate_token_len=pieces, finish_reason=ended)
            if counts:
                total, prompt = counts.get("completion_tokens", pieces), counts.get("prompt_tokens", 0)
                yield Response(generate_token_len=total, input_token_len=prompt, finish_reason=ended)

    def checked_image(self, source: str) -> str:
        """The URL by which messages may name the picture in a file or at a URL: of a file one that holds it. Raises
        UsageError where it cannot be read."""
        return as_url(source)

    def checked_video(self, source: str) -> str:
        """Likewise of a video, which is not decoded yet."""
        return video_url(source)

    def context(self, messages: list[dict[str, Any]]) -> None:
        """What a conversation takes there is not known here: the server itself says where it is too long."""

    def longer(self) -> str:
        """What the server said."""
        return ""


def as_fields(config: GenerationConfig) -> dict[str, Any]:
    """The fields of a chat request that mean the same; of sampling none where nothing was said of it, so that the
    server's own default holds, else all."""
    hidden = {"do_sample", *(p.spelled for p in TYPED.values() if p.of_model and settings.is_open(config))}
    fields = {name: getattr(config, p.name) for name, p in TYPED.items() if name not in hidden}
    if config.greedy and "temperature" in fields:
        fields["temperature"] = 0.0
    fields["max_tokens"] = fields.pop("max_new_tokens")
    return {name: value for name, value in fields.items() if value is not None}
