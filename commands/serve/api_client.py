"""``tool serve api_client``: talk to a running server."""

from __future__ import annotations

from typing import Annotated

import typer

from toolkit.commands.options import with_lmdeploy_flags
from toolkit.commands.sampling_options import SamplingFlags, with_answer_flags

SERVERS = "the server's sampling"


@with_lmdeploy_flags("serve api_client")
@with_answer_flags
def run(
    sampling: SamplingFlags,
    url: Annotated[
        str, typer.Argument(help="The server: scheme, host and port, with or without /v1.")
    ] = "http://127.0.0.1:23333",
    api_key: Annotated[str | None, typer.Option(help="Key that the server asks for.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Over HTTPS, whatever certificate the server has.")
    ] = False,
    model_name: Annotated[str | None, typer.Option(help="Which of its models. Default: the first.")] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Answer this and leave; the answer alone is on stdout.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System text, instead of the chat template's own.")] = None,
) -> None:
    """Talk to a running server in the terminal. /help shows the commands, exit or Ctrl-D leaves.

    Example: tool serve api_client http://127.0.0.1:23333
    """
    from toolkit.chat import settings
    from toolkit.chat.conversation import Conversation
    from toolkit.commands.chat import answer_once, converse, read_question
    from toolkit.serve.client import APIClient
    from toolkit.serve.remote import RemoteModel

    question = read_question(prompt)
    config = settings.change(settings.GREEDY, **sampling.given())
    model = RemoteModel(APIClient(url, api_key, insecure=insecure), model_name)
    talk = Conversation(config, system)
    if question is not None:
        answer_once(model, talk, question, SERVERS)
    else:
        converse(model, f"{model.name} at {url}", talk, sampling=SERVERS)
