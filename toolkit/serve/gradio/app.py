"""The chat: what Gradio shows, and how it asks a server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from toolkit.chat import settings
from toolkit.configs.engine import EngineConfig
from toolkit.errors import ToolkitError
from toolkit.messages import ChatTemplateConfig
from toolkit.serve.client import APIClient
from toolkit.serve.remote import RemoteModel

logger = logging.getLogger("toolkit.serve")
SPACE = "huggingface-space"  # as a server_name: where Gradio itself is told to listen
THOUGHTS = "Reasoning"  # the title that Gradio gives to what stands between reasoning_tags
SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k")


def run(
    model_path_or_server: str,
    server_name: str = "127.0.0.1",
    server_port: int = 6006,
    backend: str = "turbomind",
    backend_config: EngineConfig | None = None,
    chat_template_config: ChatTemplateConfig | str | None = None,
    model_name: str | None = None,
    api_key: str | None = None,
    share: bool = False,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Chat with a model (a server of it runs in a process of its own), or through the server at a URL, until Ctrl-C.

    ``model_name``: which of the server's models, its first by default. ``ready`` gets the URL once it can be opened,
    which else is logged; where Gradio itself chooses the address (``share``) it prints that. Raises ToolkitError or
    UsageError for whatever keeps it from starting.
    """
    from toolkit.serve.background import serve

    show = _prepare(server_name, server_port, share, ready or _log)
    if model_path_or_server.startswith(("http://", "https://")):
        show(RemoteModel(APIClient(model_path_or_server, api_key), model_name))
        return
    with serve(
        model_path_or_server, model_name, backend, backend_config, chat_template_config, server_port=0
    ) as server:
        show(RemoteModel(server))


def build(model: RemoteModel) -> Any:
    """Gradio's interface to ``model``, not launched yet. Raises ModuleNotFoundError without Gradio."""
    import gradio

    def answer(message: str, history: list[dict[str, Any]], system: str, *sampling: float | None) -> Iterator[str]:
        given = {name: value for name, value in zip(SAMPLING, sampling, strict=True) if value is not None}
        whole = {name: int(v) if name in ("max_new_tokens", "top_k") else v for name, v in given.items()}
        messages: list[dict[str, Any]] = [*([{"role": "system", "content": system}] if system else []), *said(history)]
        text = ""
        try:
            config = settings.change(settings.GREEDY, **whole)
            for piece in model.stream_infer([*messages, {"role": "user", "content": message}], gen_config=config):
                text += piece.text
                yield text
        except ToolkitError as error:
            raise gradio.Error(str(error)) from error

    inputs: Any = [gradio.Textbox(label="System text"), *(gradio.Number(value=None, label=name) for name in SAMPLING)]
    chatbot = gradio.Chatbot(reasoning_tags=[("<think>", "</think>")], height="70vh")
    return gradio.ChatInterface(
        answer, chatbot=chatbot, additional_inputs=inputs, title=model.name, analytics_enabled=False, api_name="chat"
    )


def said(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns of Gradio's history without the thoughts, which it keeps as messages of their own."""
    spoken = [turn for turn in history if (turn.get("metadata") or {}).get("title") != THOUGHTS]
    return [{"role": turn["role"], "content": _text(turn["content"])} for turn in spoken]


def _text(content: Any) -> str:
    """What was said, of a text or of Gradio's list of parts."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _log(url: str) -> None:
    logger.warning("the chat is ready at %s", url)


def _prepare(host: str, port: int, share: bool, ready: Callable[[str], None]) -> Callable[[RemoteModel], None]:
    """What shows the chat until Ctrl-C. A port that is in use is found before a model is loaded. Raises ToolkitError.

    Gradio's own ``launch`` takes a server that needs more than five seconds to start for one whose port is in use; so
    it runs only where Gradio itself is to choose the address, or to give a public one.
    """
    if share or host == SPACE:
        where: dict[str, Any] = {} if host == SPACE else {"server_name": host, "server_port": port}

        def launch(model: RemoteModel) -> None:
            try:
                build(model).queue().launch(share=share, **where)
            except OSError as error:
                raise ToolkitError(f"--server-port {port}: Gradio did not begin to listen ({error})") from error

        return launch
    from toolkit.serve.gradio.listen import listen
    from toolkit.serve.run import bind

    sock = bind(host, port)
    return lambda model: listen(build(model), sock, ready)
