"""``--config FILE`` of ``tool serve api_server``: its options out of a YAML file, as vLLM has it.

They become flags before anything else is read, so that all spellings of the command line hold in the file too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.base.user_path import user_path
from toolkit.commands.app.aliases import of_command
from toolkit.errors import UsageError

if TYPE_CHECKING:
    import yaml

FLAG = "--config"
# What is on unless a flag of its own turns it off: all other flags are left out to be off.
ON = ("enable-prefix-caching",)
_STR, _BOOL, _NULL = (f"tag:yaml.org,2002:{name}" for name in ("str", "bool", "null"))


def expanded(argv: Sequence[str], parameters: Callable[[], Iterable[Any]]) -> list[str]:
    """``argv`` with what the file says in place of its name, before all other flags: of what may stand once, the last
    counts. ``parameters``: the server's. Raises UsageError for a file that cannot be read so."""
    words = list(argv)
    if [word.replace("-", "_") for word in words[:2]] != ["serve", "api_server"]:
        return words
    end = words.index("--") if "--" in words else len(words)
    at = next((i for i, word in enumerate(words[:end]) if word == FLAG or word.startswith(FLAG + "=")), None)
    if at is None:
        return words
    if any(word == FLAG or word.startswith(FLAG + "=") for word in words[at + 1 : end]):
        raise UsageError(f"{FLAG}: expected one file, found another behind it; write all options into one")
    typed = words.pop(at)
    name = typed.partition("=")[2] if "=" in typed else words.pop(at) if at < len(words) else ""
    if not name:
        raise UsageError(f"{FLAG}: expected a file; name it behind it")
    first = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    typed_too = {word.partition("=")[0].replace("_", "-") for word in words[first:] if word.startswith("--")}
    models, flags = _read(user_path(name), typed_too, parameters)
    return [*words[:first], *([] if first > 2 else models), *flags, *words[first:]]


def _read(file: Path, typed: set[str], parameters: Callable[[], Iterable[Any]]) -> tuple[list[str], list[str]]:
    """The models that a file names, and its flags but those that were ``typed`` too."""
    import yaml

    try:
        found = yaml.compose(file.read_text(encoding="utf-8"), yaml.SafeLoader)
    except OSError as error:
        raise UsageError(f"{FLAG} {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{FLAG} {file}: expected YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, yaml.MappingNode) or not all(key.tag == _STR for key, _ in found.value):
        raise UsageError(f"{FLAG} {file}: expected lines such as session-len: 4096, each with an option's name")
    models, flags = [], list[str]()
    for key, value in ((key.value, value) for key, value in found.value):
        option = f"--{key.replace('_', '-')}"
        values = list(_texts(value, f"{FLAG} {file}: {key}"))
        if option == FLAG:
            raise UsageError(f"{FLAG} {file}: {key}: a file names no other; write its options here")
        if key == "model":
            models = [str(one) for one in values]
        elif option in typed:
            continue
        elif values == [False]:
            flags += [f"--no-{option[2:]}"] if option[2:] in ON and f"--no-{option[2:]}" not in typed else []
        elif True in values and option in _with_value(parameters()):
            raise UsageError(f"{FLAG} {file}: {key}: expected a value, found true")
        else:
            flags += [option if one is True else f"{option}={one}" for one in values]
    return models, flags


def _with_value(parameters: Iterable[Any]) -> set[str]:
    """Options that take one: without it, they would take what stands behind them."""
    own = {name for one in parameters if not getattr(one, "is_flag", False) for name in one.opts}
    return own | {other for other, ours in of_command(("serve", "api_server")).items() if ours in own}


def _texts(node: yaml.Node, where: str) -> Iterator[str | bool]:
    """Each value of an option as it is typed: of YAML's own readings, by which off is false and 010 is 8, true, false
    and null alone. Raises UsageError for what nobody can type."""
    import yaml

    for one in node.value if isinstance(node, yaml.SequenceNode) else [node]:
        if isinstance(one, yaml.SequenceNode):
            raise UsageError(f"{where}: expected a value, or a list of them, found a list in a list")
        if isinstance(one, yaml.MappingNode):
            try:
                yield json.dumps(yaml.SafeLoader("").construct_document(one))
            except (yaml.YAMLError, TypeError, ValueError) as error:  # dates, keys that are lists, what holds itself
                raise UsageError(f"{where}: expected what JSON can say: {' '.join(str(error).split())}") from error
        elif one.tag == _BOOL and one.value.lower() in ("true", "false"):
            yield one.value.lower() == "true"
        elif one.tag != _NULL:
            yield one.value
