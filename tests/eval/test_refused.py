"""What evaluations say of options and models that cannot be: the whole line."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.refused import refusing
from toolkit.commands.main import main
from toolkit.errors import ToolkitError, UsageError
from toolkit.eval import harness
from toolkit.eval.haystack import Asked, Grid, search
from toolkit.eval.tasks import TASKS
from toolkit.measure import compare
from toolkit.serve.client import APIClient

refused = refusing(UsageError)
OURS = ", ".join(harness.OURS + name for name in TASKS)


@pytest.mark.parametrize(
    ("lengths", "depths", "told"),
    [
        ((), (50,), "--lengths: expected numbers of tokens, found "),
        ((0, 5), (50,), "--lengths: expected numbers of tokens, found 0, 5"),
        ((64,), (50, 101), "--depths: expected percent, 0 to 100, found 50, 101"),
    ],
)
def test_a_grid_of_passkeys(lengths: tuple[int, ...], depths: tuple[float, ...], told: str) -> None:
    assert refused(lambda: Grid(lengths, depths)) == told


def words(text: str) -> list[int]:
    return list(range(len(text.split())))


def asked(template: int) -> Asked:
    """A model whose template takes ``template`` tokens of prompts of more than one word, 3 of others."""

    def answer(prompts: list[str], most: int) -> list[tuple[str, int]]:
        return [("?", len(words(p)) + (template if len(words(p)) > 1 else 3)) for p in prompts]

    return Asked(words, answer)


def test_a_length_without_room_for_a_question() -> None:
    told = refused(lambda: list(search("passkey", asked(3), Grid((20,), (50,)))))
    assert told.startswith("--lengths 20: expected ") and told.endswith(
        "tokens or more, of prompt, template and answer"
    )


def test_a_template_that_grows_with_the_prompt() -> None:
    told = "--lengths 400: the chat template takes more than it took of a short prompt"
    assert refused(lambda: list(search("passkey", asked(300), Grid((400,), (50,)))), ToolkitError) == told


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda name: object())


def test_lm_eval_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    assert refused(harness.check_installed) == (
        'tool eval lm_eval: lm-eval is not installed; pip install "lm-eval[api]"'
    )


@pytest.mark.usefixtures("there")
def test_a_task_of_ours_that_there_is_not() -> None:
    told = f"--tasks toolkit_odd: expected one of {OURS}"
    assert refused(lambda: harness.run_lm_eval("http://x", "m", ["toolkit_odd"], chat=False)) == told


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("chat", [False, True])
def test_a_task_of_ours_the_other_way(chat: bool) -> None:
    name = next(name for name, task in TASKS.items() if (task.judge is not None) != chat)
    told = f"--tasks toolkit_{name}: {'leave --chat out' if chat else 'add --chat'} for this one"
    assert refused(lambda: harness.run_lm_eval("http://x", "m", [f"toolkit_{name}"], chat=chat)) == told


@pytest.mark.usefixtures("there")
def test_lm_eval_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=3))
    told = "lm-eval ended with code 3; what it wrote above says why"
    assert refused(lambda: harness.run_lm_eval("http://x", "m", ["arc_easy"], chat=False), ToolkitError) == told


@pytest.mark.usefixtures("there")
def test_what_is_lm_eval_s_goes_to_it_as_it_spells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str]) -> SimpleNamespace:
        ran.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(APIClient, "available_models", ["m"])
    given = ["--num_fewshot", "5", "--gen_kwargs=max-gen-toks=8", "--log-samples", "-f", "a-b"]
    with pytest.raises(SystemExit) as left:
        main(["eval", "lm_eval", "http://x", "--tasks", "arc_easy", *given])
    assert left.value.code == 0
    assert ran[0][-6:] == ["--num_fewshot", "5", "--gen_kwargs=max-gen-toks=8", "--log_samples", "-f", "a-b"]


def test_models_that_cannot_be_compared(tmp_path: Any, tiny_models: Any) -> None:
    text = tmp_path / "text.txt"
    text.write_text("x")
    model = str(tiny_models("llama"))
    assert (
        refused(lambda: compare.compare(model, model, text, window=1)) == "--window: expected 2 or more tokens, found 1"
    )
