"""``tool check_env``: what this machine has and what runs on it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from toolkit.commands.output import say, stderr, stdout, table, write_json
from toolkit.errors import ToolkitError


def run(
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write the report as JSON to this file; - is standard output.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="All versions, every kernel and why it does not run, every test.")
    ] = False,
) -> None:
    """Show what this machine has, run a self-test of every kernel and of the engine, and say what to do.

    Takes about ten seconds. Paste the output with --verbose into a bug report. Exit code 1 when a self-test fails.
    """
    from toolkit.artifacts.output.result_file import check_json
    from toolkit.check_env.advice import advice
    from toolkit.check_env.report import report

    check_json("--json", json_file, ("versions", "self_test"))
    with stderr().status("Looking") as status:
        found = report(lambda step: status.update(step))
    write_json(json_file, found)
    if json_file != "-":
        (_print if verbose else _summarise)(found)
        for line in advice(found):
            say(line, stdout())
    if failed := [test["name"] for test in found["self_test"] if not test["passed"]]:
        raise ToolkitError(f"self-test failed: {'; '.join(failed)}")


def _summarise(found: dict[str, Any]) -> None:
    """One screen."""
    versions = (
        f"{name} {found['versions'][name] or 'not installed'}"
        for name in ("toolkit", "python", "torch", "transformers")
    )
    chosen = next((row["isa"] for row in found["native"] if row["chosen"]), "none")
    runs, tests = [row for row in found["kernels"] if row["runs"]], found["self_test"]
    passed = sum(test["passed"] for test in tests)
    rows = [
        *_machine(found),
        ("versions", ", ".join(versions)),
        *found["environment"].items(),
        ("native runner", chosen + _lacking(found)),
    ]
    if not found["no_torch"]:
        which = "(--verbose: which, and why not the others)"
        rows += [
            ("kernels", f"{len(runs)} of {len(found['kernels'])} run here {which}"),
            ("self-test", f"{passed} of {len(tests)} passed in {sum(test['seconds'] for test in tests):.0f} s"),
        ]
    stdout().print(table("This machine", ("", "found"), rows))


def _print(found: dict[str, Any]) -> None:
    out = stdout()
    versions = [(name, value or "not installed") for name, value in found["versions"].items()]
    out.print(table("Versions", ("", "version"), [*versions, *found["environment"].items()]))
    out.print(table("Machine", ("", "found"), _machine(found)))
    if found["gpus"]:
        support = [(f"cuda:{row['gpu']}", row["what"], row["here"]) for row in found["gpu_support"]]
        out.print(table("On GPUs", ("", "what", "here"), support))
    if found["gpu_topology"]:
        out.print(found["gpu_topology"], markup=False)
    speeds = [(row["name"], "up" if row["up"] else "down", row["mbit_per_s"] or "not told") for row in found["links"]]
    out.print(table("Links", ("", "", "Mbit/s"), speeds))
    out.print(
        table(
            "Ranks of a model speak by",
            ("", "here"),
            [(x["name"], x["why_not"] or x["between"]) for x in found["ranks"]],
        )
    )
    variants = [(row["isa"], _here(row)) for row in found["native"]]
    out.print(table("Native runner", ("TOOLKIT_CPU_ISA", "on this CPU"), variants))
    refused = list(found["native_refuses"].items())
    out.print(table("Families that pytorch runs in its place", ("model_type", "why"), refused))
    if found["no_torch"]:
        return
    kernels = [(row["op"], row["implementation"], _here(row)) for row in found["kernels"]]
    out.print(table("Kernels", ("op", "implementation", "here"), kernels))
    tests = [("passed" if t["passed"] else "FAILED", t["name"], t["detail"], t["seconds"]) for t in found["self_test"]]
    out.print(table("Self-test", ("", "test", "detail", "s"), tests))


def _machine(found: dict[str, Any]) -> list[tuple[str, str]]:
    cpu, memory, bandwidth = found["cpu"], found["memory"], found["memory_bandwidth"]
    rows = [
        ("CPU", cpu["model"]),
        ("cores", f"{cpu['cores']} cores, {cpu['threads']} threads, {cpu['usable']} usable here"),
        ("features", ", ".join(cpu["features"]) or "none that kernels ask for"),
        ("memory", f"{memory['total_gib']} GiB, {memory['free_gib']} GiB free"),
        ("read bandwidth", f"{bandwidth['gb_per_s']} GB/s with {bandwidth['threads']} threads"),
    ]
    for gpu in found["gpus"]:
        size = f"{gpu['total_gib']} GiB, {gpu['free_gib']} GiB free"
        rows.append((f"GPU {gpu['index']}", f"{gpu['name']}, capability {gpu['capability']}, {size}"))
    for device in found["devices"]:
        size = f"{device['total_gib']} GiB, {device['free_gib']} GiB free; pytorch runs models on it"
        rows.append((f"device {device['device']}", f"{device['what']}: {device['why_not'] or size}"))
    if not found["gpus"]:
        rows += [(row["what"], row["here"]) for row in found["gpu_support"]]
    return rows


def _lacking(found: dict[str, Any]) -> str:
    families = ", ".join(found["native_refuses"])
    return f"; pytorch runs {families} (--verbose: why)" if families else ""


def _here(row: dict[str, Any]) -> str:
    return "chosen" if row["chosen"] else "runs" if row["runs"] else row["why_not"]
