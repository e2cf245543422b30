"""The launches of Triton's kernels that the scripts will make on a GPU, recorded on machines with or without one.

Ops are called on the CPU, models and benchmarks on tensors without memory; ``kernels.triton.launch`` records what they
would launch instead of doing it. So what is compiled beforehand is what is launched afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch

from toolkit.kernels.op import Op, Target
from toolkit.kernels.registry import load
from toolkit.kernels.triton.launch import Launch, recording

META = torch.device("meta")


def of_op(name: str, capability: int, cases: str = "all") -> list[Launch]:
    """Of one op in each dtype. ``cases``: "all", "first" as the smoke stage, or "gate": what the self-test runs before
    an engine uses a kernel.
    """
    op = load()[name]
    implementation = op.implementations["triton"]
    with recording(capability) as found, torch.inference_mode():
        for dtype in op.dtypes:
            made, first = getattr(torch, dtype), True
            for case in op.cases():
                if implementation.unsupported(Target("cuda", dtype, capability, case.traits)) is not None:
                    continue
                if cases == "all" or first or (cases == "gate" and case.label in op.gate):
                    implementation.run(**case.make(made, "cpu", torch.Generator("cpu").manual_seed(0)))
                first = False
    return found


def of_ops(names: list[str] | None, capability: int, cases: str = "all") -> list[Launch]:
    """Of several ops; None: of all that Triton implements."""
    wanted = [n for n, op in load().items() if "triton" in op.implementations and (names is None or n in names)]
    return [launch for name in wanted for launch in of_op(name, capability, cases)]


def of_manifest(capability: int, ops: Collection[str] | None = None) -> list[Launch]:
    """Of every call of the manifest, or of those of ``ops``."""
    from toolkit.kernels.triton.ahead_of_time.manifest import calls

    with recording(capability) as found:
        for call in (call for call in calls() if ops is None or call.op in ops):
            implementation = load()[call.op].implementations["triton"]
            for dtype in call.dtypes:
                target = Target("cuda", dtype, capability, call.traits)
                if implementation.unsupported(target) is None:
                    implementation.run_on(target)(**call.make(getattr(torch, dtype)))
    return found


class _Mark:
    def synchronize(self) -> None:
        """There is nothing to wait for."""


class MetaDevice:
    """A ``GraphDevice`` (``toolkit/runners/tensor/devices``) whose tensors have no memory: a step is its launches."""

    torch, reserved, dense = META, 0, False

    def working(self) -> Any:
        return contextlib.nullcontext()

    def pinned(self, size: int) -> tuple[torch.Tensor, np.ndarray]:
        raw = np.zeros(size, np.uint8)
        return torch.from_numpy(raw), raw

    def put(self, arrays: Any) -> dict[str, torch.Tensor]:
        from toolkit.runners.tensor.step import staging

        return staging.put(arrays, self)

    def fetch(self, tensors: dict[str, torch.Tensor]) -> Any:
        from toolkit.runners.tensor.devices.device import Fetched
        from toolkit.runners.tensor.step import staging

        return Fetched({n: np.zeros(tuple(t.shape), staging._BACK[t.dtype]) for n, t in tensors.items()}, _Mark())

    def mark(self) -> _Mark:
        return _Mark()

    def pool(self) -> None:
        """There is no memory."""

    def capture(self, run: Callable[[], None], pool: None) -> Callable[[], None]:
        run()
        return lambda: None

    def memory(self) -> tuple[int, int]:
        return 130 << 30, 140 << 30

    def trim(self) -> None:
        """Nothing is held."""

    def trouble(self) -> type[Exception]:
        return MemoryError


def _pick(op: Op, target: Target) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """Triton's kernel for a GPU that is not there, where there is none torch's; none where no model of these asks for
    it."""
    families = (op.implementations[f] for f in ("triton", "torch", "reference") if f in op.implementations)
    found = next((x for x in families if not x.unsupported(target)), None)
    return (None, None) if found is None else (found.run_on(target), found.plan)


@contextlib.contextmanager
def meta_runner(
    config: dict[str, Any], capability: int, policy: int, block: int, batch_invariant: bool = False
) -> Iterator[Any]:
    """The runner with graphs and a model of ``config``'s shapes, on tensors without memory. It draws token 0 always."""
    from gpu.models import dummy

    from toolkit.runners.base import RunnerOptions
    from toolkit.runners.tensor import runner
    from toolkit.runners.tensor.layers import linear
    from toolkit.runners.tensor.ops import Ops, ops_by
    from toolkit.runners.weights.dummy import DummyWeights

    def choose_ops(device: torch.device, dtype: torch.dtype, without: Collection[str], **traits: Any) -> Ops:
        return ops_by(_pick, "cuda", dtype, capability, **traits)

    def join(biases: Any, sizes: Any, place: Any) -> torch.Tensor | None:
        some = any(b is not None for b in biases)
        return torch.empty(sum(sizes), dtype=place.dtype, device=META) if some else None

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(DummyWeights, "_generator", lambda *_: None))
        stack.enter_context(mock.patch.object(runner, "choose_ops", choose_ops))
        stack.enter_context(mock.patch.object(linear, "_fuse_biases", join))
        spec, weights = dummy(config, META)
        options = RunnerOptions("cuda", config["dtype"], policy, block, batch_invariant=batch_invariant)
        yield runner.TensorRunner(spec, lambda: weights, options, graphs=MetaDevice())


def of_check(family: str, policy: int, capability: int) -> list[Launch]:
    """Of ``checking.runner.check_runner``."""
    from gpu.checking.runner import STEPS_BLOCK, drive, driver_of
    from gpu.models import CONFIGS

    with recording(capability) as found, meta_runner(CONFIGS[family], capability, policy, STEPS_BLOCK) as runner:
        for _ in drive(driver_of(runner, family), family):
            pass
    return found


def of_alike(family: str, capability: int) -> list[Launch]:
    """Of ``checking.alike.check_alike``."""
    from gpu.checking.alike import BLOCK, LENGTHS, LONGEST, NEW, answers, requests
    from gpu.models import CONFIGS

    with recording(capability) as found, meta_runner(CONFIGS[family], capability, 0, BLOCK, True) as runner:
        runner.load_weights()
        asked = requests(LENGTHS, NEW, runner.spec.vocab_size)
        for together, tokens in ((asked[:2], LONGEST), (asked, LONGEST), (asked, 33)):
            answers(runner, together, tokens)
    return found


def of_case(case: Any, capability: int) -> list[Launch]:
    """Of ``engine.measure``: starting the engine, and its loads. All layers are alike, so one is enough."""
    from gpu.measuring.engine import WARM, engine_config, feed

    from toolkit.engine.core import EngineCore
    from toolkit.engine.options import EngineOptions

    wishes = engine_config(case, "turbomind", "cuda")
    block = wishes.cache_block_seq_len
    config = case.config | {"num_hidden_layers": 1}
    with recording(capability) as found, meta_runner(config, capability, case.quant_policy, block) as runner:
        runner.load_weights()
        blocks = wishes.max_batch_size * -(-wishes.session_len // block)
        runner.allocate_cache(tuple(blocks for _ in runner.spec.cache_groups))
        runner.warm_up(wishes.max_batch_size, wishes.session_len, wishes.max_prefill_token_num)
        sizes = (wishes.session_len, wishes.max_batch_size, wishes.max_prefill_token_num)
        options = EngineOptions(*sizes, tuple(blocks for _ in runner.spec.cache_groups), prefix_caching=False)
        core = EngineCore(runner, options, None)
        for load_ in case.loads:
            feed(core, load_, case.config["vocab_size"], WARM)
            while core.has_work:
                core.step()
    return found


def once(runs: Any, device: str, most: int | None = None) -> float:
    """In the place of ``timing.seconds``: each of the first ``most`` runs, nothing is timed."""
    for run in runs[:most]:
        run()
    return 1.0


def of_kernels(capability: int) -> list[Launch]:
    """Of the parts of bench_gpu that measure kernels."""
    from gpu.measuring import kept, kernels

    where, size = kernels.meta(capability), kernels.Size()
    parts = (kernels.linears(size, where), kernels.attention(size, where), kernels.row_wise(size, where))
    with recording(capability) as found, mock.patch.object(kernels, "seconds", partial(once, most=1)):
        for row in (row for part in (*parts, kept.kept(where)) for row in part):
            assert "error" not in row or "w4 cuda" in row["name"], row
    return found


def of_tuning(capability: int) -> list[Launch]:
    """Of every choice that ``tune`` measures."""
    from gpu.measuring import kernels, tune

    with recording(capability) as found, mock.patch.object(kernels, "seconds", once):
        for job in tune.jobs(kernels.Size(), kernels.meta(capability)):
            _, key = job.tried({})
            for choice in tune.candidates(job.kernel, key, capability):
                job.tried(choice)
    return found
