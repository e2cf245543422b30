"""The target of torch.save's files, in both of their layouts: what is read of a pickle, and what must not run."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import warnings
import zipfile
import zlib
from pathlib import Path
from random import Random

from fuzzing.harness import Case, Found, Run, Target, fast_folder
from fuzzing.models import Models
from fuzzing.mutate import spoil_bytes

# Instructions of pickles: calls of what would run, and what no file of tensors needs or could fill the memory with.
_SHELL = b"(S'touch \"$FUZZ_RAN\"'\ntR"
PICKLED = (
    b"cposix\nsystem\n" + _SHELL, b"cos\nsystem\n" + _SHELL,
    b"cbuiltins\neval\n(S'open(__import__(\"os\").environ[" b"\"FUZZ_RAN\"],\"w\")'\ntR",
    b"csubprocess\nPopen\n" + _SHELL, b"ctorch\nload\n(S'x'\ntR", b"(S'x'\nios\nsystem\n",
    b"\x8c\x05posix\x8c\x06system\x93", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n", b"}", b"(",
    b"]", b")", b"t", b"R", b"b", b"\x81", b"\x82\x01", b"Q", b"P1\n", b"0", b"2", b"1", b"e", b"u", b"s", b"d", b"l",
    b"N", b"h\x00", b"j\xff\xff\xff\xff", b"r\xff\xff\xff\x7f", b"q\x00", b"\x94", b"\x8a\xff" + b"\xff" * 255,
    b"J\xff\xff\xff\xff", b"M\xff\xff", b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f", b"X\xff\xff\xff\x7f",
    b"\x95\xff\xff\xff\xff\xff\xff\xff\xff", b".", b"\x80\x02", b"\x80\x05", b"I" + b"9" * 5000 + b"\n", b"L-1L\n",
    b"F1e999\n", b"\x96\xff\xff\xff\xff\xff\x00\x00\x00",
)  # fmt: skip


def pickled(models: Models) -> Target:
    seeds = [{"pytorch_model.bin": file.read_bytes()} for file in models.pickled]

    def spoil(rng: Random, case: Case) -> Case:
        raw = case["pytorch_model.bin"]
        if raw[:2] != b"PK":
            return {"pytorch_model.bin": _spoil_pickle(rng, raw)}
        if rng.random() < 0.7 and (spoilt := _spoil_zip(rng, raw)) is not None:
            return {"pytorch_model.bin": spoilt}
        cut = max(0, len(raw) - rng.choice((30, 300, 3000)))  # a zip archive's list of files is its end
        spoilt = raw[:cut] + spoil_bytes(rng, raw[cut:]) if rng.random() < 0.6 else spoil_bytes(rng, raw, within=4000)
        return {"pytorch_model.bin": spoilt}

    def start() -> Run:
        home = Path(tempfile.mkdtemp(prefix="fuzz-", dir=fast_folder()))
        os.environ["TOOLKIT_HOME"] = str(home / "home")
        os.environ["FUZZ_RAN"] = str(home / "ran")  # what a pickle in a case makes once it runs
        (home / "model").mkdir()
        shutil.copyfile(models.checkpoint / "config.json", home / "model" / "config.json")

        def run(case: Case) -> str:
            (home / "model" / "pytorch_model.bin").write_bytes(case["pytorch_model.bin"])
            try:
                return _read_pickled(home / "model")
            finally:
                if (home / "ran").exists():
                    raise Found("a pickle ran", "")

        return run

    return Target("pickled", seeds, spoil, start)


def _spoil_zip(rng: Random, raw: bytes) -> bytes | None:
    """The archive with its pickle, its names or how they are stored changed; None for what is no archive."""
    out = io.BytesIO()
    warnings.filterwarnings("ignore", "Duplicate name", UserWarning)
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(out, "w") as new:
            entries = [(info.filename, old.read(info)) for info in old.infolist()]
            odd = rng.randrange(len(entries)) if rng.random() < 0.3 else -1
            for i, (name, data) in enumerate(entries):
                data = _spoil_pickle(rng, data) if name.endswith("data.pkl") and odd != i else data
                if i == odd:
                    name = rng.choice((name, name + "x", "../" + name, entries[0][0], name.upper()))
                    data = rng.choice((data, b"", data[: len(data) // 2], data * 2))
                    if rng.random() < 0.2:
                        continue
                new.writestr(
                    name, data, zipfile.ZIP_DEFLATED if i == odd and rng.random() < 0.3 else zipfile.ZIP_STORED
                )
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, zlib.error):
        return None
    return out.getvalue()


def _spoil_pickle(rng: Random, raw: bytes) -> bytes:
    """Some of its instructions changed, moved or added, those among them that call."""
    if rng.random() < 0.4:
        return spoil_bytes(rng, raw, within=4000)
    at = rng.randrange(min(len(raw), 4000) + 1)
    told = rng.choice(PICKLED) if rng.random() < 0.7 else rng.choice(PICKLED) * rng.choice((2, 40, 4000))
    return raw[:at] + told + raw[at + rng.choice((0, 0, 1, len(told))) :]


def _read_pickled(folder: Path) -> str:
    from toolkit.artifacts.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(folder)
    total = sum(float(checkpoint.tensor(name).double().nan_to_num().sum()) for name in checkpoint.names())
    return f"read {len(checkpoint.names())} of {total:.0e}"
