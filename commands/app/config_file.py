"""``--config FILE`` of ``tool serve api_server``: its options out of a YAML file, as vLLM has it.

They become flags before anything else is read, so that all spellings of the command line hold in the file too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from toolkit.base.user_path import user_path
from toolkit.errors import UsageError

FLAG = "--config"
# What is on unless a flag of its own turns it off: all other flags are left out to be off.
ON = ("enable-prefix-caching",)


def expanded(argv: Sequence[str]) -> list[str]:
    """``argv`` with what the file says in place of its name, before all other flags: of what may stand once, the last
    counts. Raises UsageError for a file that cannot be read so."""
    words = list(argv)
    if [word.replace("-", "_") for word in words[:2]] != ["serve", "api_server"]:
        return words
    end = words.index("--") if "--" in words else len(words)
    at = next((i for i, word in enumerate(words[:end]) if word == FLAG or word.startswith(FLAG + "=")), None)
    if at is None:
        return words
    typed = words.pop(at)
    name = typed.partition("=")[2] if "=" in typed else words.pop(at) if at < len(words) else ""
    if not name:
        raise UsageError(f"{FLAG}: expected a file; name it behind it")
    first = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    typed_too = {word.partition("=")[0].replace("_", "-") for word in words[first:] if word.startswith("--")}
    models, flags = _read(user_path(name), typed_too)
    return [*words[:first], *([] if first > 2 else models), *flags, *words[first:]]


def _read(file: Path, typed: set[str]) -> tuple[list[str], list[str]]:
    """The models that a file names, and its flags but those that were ``typed`` too."""
    import yaml

    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{FLAG} {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{FLAG} {file}: expected YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise UsageError(f"{FLAG} {file}: expected lines such as session-len: 4096, each with an option's name")
    models, flags = [], list[str]()
    for key, value in found.items():
        option = f"--{key.replace('_', '-')}"
        values = list(_texts(value, f"{FLAG} {file}: {key}"))
        if option == FLAG:
            raise UsageError(f"{FLAG} {file}: {key}: a file names no other; write its options here")
        if key == "model":
            models = [str(one) for one in values]
        elif option in typed:
            continue
        elif value is False:
            flags += [f"--no-{option[2:]}"] if option[2:] in ON and f"--no-{option[2:]}" not in typed else []
        else:
            flags += [option if one is True else f"{option}={one}" for one in values]
    return models, flags


def _texts(value: Any, where: str) -> Iterator[str | bool]:
    """Each value of an option as it is typed. Raises UsageError for what nobody can type."""
    for one in value if isinstance(value, list) else [] if value is None else [value]:
        if isinstance(one, list):
            raise UsageError(f"{where}: expected a value, or a list of them, found a list in a list")
        yield one if isinstance(one, bool) else json.dumps(one) if isinstance(one, dict) else str(one)
