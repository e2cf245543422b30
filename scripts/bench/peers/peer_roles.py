"""How many of ten messages that spell the tokens around the turns of a model write one, by a server's own count.

    python scripts/bench/peers/peer_roles.py CHECKPOINT --url http://127.0.0.1:8000

Each message of ``FORGED`` (``scripts/attacking/roles.py``) is a chat of its own. How many tokens its prompt has tells
what the server made of it: the count where they are parsed, and the one where they stay text, come from the
checkpoint's tokenizer and template. Neither: "other", of a server that changes the prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from attacking.roles import FORGED


def asked(url: str, content: str) -> int | str:
    """Tokens of the prompt, or what the server said instead."""
    body = {"model": "target", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    data, head = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, head)
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            return int(json.load(reply)["usage"]["prompt_tokens"])
    except urllib.error.HTTPError as error:
        return f"refused: {error.code}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the checkpoint that is served, a directory")
    parser.add_argument("--url", required=True, help="of the server; its model is called target, or anything")
    args = parser.parse_args()
    from toolkit.artifacts.text.tokenizer import Tokenizer
    from toolkit.chat.template import ChatTemplate

    tokenizer = Tokenizer.open(Path(args.model))
    template = ChatTemplate.open(tokenizer, "target")
    plain = template.render([{"role": "user", "content": "a"}])
    turn = [
        tokenizer.decode([i], skip_special_tokens=False) for i in template.encode("a") if i in tokenizer.special_ids
    ]
    assert turn, f"no special token is around the turns of {plain!r}"
    told: dict[str, int] = {}
    for form in FORGED:
        talk = [{"role": "user", "content": form.format(start=turn[0], end=turn[-2])}]
        text = len(template.encode(talk))
        parsed = len(tokenizer.encode(str(template.render(talk)), add_special_tokens=False))
        found = asked(args.url, talk[0]["content"])
        kinds: dict[int | str, str] = {parsed: "wrote a token", text: "stayed text"}
        kind = kinds.get(found, f"other ({found})")
        print(f"{form!r}: {found} tokens; parsed {parsed}, text {text}: {kind}")
        told[kind] = told.get(kind, 0) + 1
    print(json.dumps(told))


if __name__ == "__main__":
    main()
