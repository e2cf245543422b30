"""The native library through ctypes: loading it, its structures, its errors."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from contextlib import suppress
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.errors import UsageError
from toolkit.runners.native.packing.packed import PackedTensor
from toolkit.runners.step import COLUMNS

VERSION = 45  # tk_version of api.cpp, which says when both are raised
ISA_VARIABLE = "TOOLKIT_CPU_ISA"
# of build.py, best first, that this architecture may have
ISAS = (
    ("i8mm", "dotprod", "neon", "generic")
    if os.uname().machine == "aarch64"
    else ("amx", "avx512vnni", "avxvnni", "avx2", "generic")
)
BUILD = "python -m toolkit.runners.native.build"
LIBRARY_VARIABLE = "TOOLKIT_NATIVE_LIBRARY"  # another build of it, such as the sanitized one


class TensorRecord(Structure):
    """tk::TensorRecord of program.h."""

    _fields_ = (
        ("data", c_void_p),
        ("bytes", c_int64),
        ("rows", c_int64),
        ("cols", c_int64),
        ("perm_size", c_int64),
        ("perm", c_void_p),
        ("kind", c_int32),
        ("dtype", c_int32),
        ("bits", c_int32),
        ("group", c_int32),
        ("minima", c_int32),
        ("turned", c_int32),
        ("trellis", c_int32),
    )


class PackSource(Structure):
    """tk::PackSource of pack_tiles.h."""

    _fields_ = (
        ("codes", c_void_p),
        ("perm", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("ld", c_int64),
        ("ld_scales", c_int64),
        ("repeat", c_int64),
        ("layout", c_int32),
        ("flip", c_int32),
    )


_STEP_FIELDS = (
    "tokens! seqs! rows! groups! axes! token_ids from_previous positions reach types cu_seqlens seq_lens block_tables "
    "table_width slot_mapping rope_set rope_length adapter sample_index logits_size! logits_index hidden_size! "
    "hidden_index aux_size! aux_index aux_sublayers_size! aux_sublayers "
    "target_size! target_index target_ids routes_size! routes_index embeds_size! embeds embed_index "
    "fills! routed_size! routed rows_size! picture_rows "
    "new_size! new_pictures gone_size! gone views_size! views view_ptr seen_size! seen copies_size copies "
    f"{' '.join(COLUMNS)} position history_size! history_ptr history_ids history_count bias_size! bias_ptr bias_ids "
    "bias_values logprobs grammar"
)
_RESULT_FIELDS = "top_width! tokens logprob top_ids top_logprobs logits hidden aux target_logprobs routes bad"


def _fields(names: str) -> list[tuple[str, Any]]:
    return [(n.rstrip("!"), c_int64 if n.endswith("!") else c_void_p) for n in names.split()]


class StepArrays(Structure):
    """tk::StepArrays of step.h."""

    _fields_ = _fields(_STEP_FIELDS)


class StepResults(Structure):
    """tk::StepResults of step.h."""

    _fields_ = _fields(_RESULT_FIELDS)


class TowerArrays(Structure):
    """tk::TowerArrays of tower.h."""

    _fields_ = (
        *_fields("first! last! rows! inputs! outputs! in out"),
        ("segments", c_int64 * 2),
        ("lengths", c_void_p * 2),
        *_fields("cos sin real blank across!"),
    )


class DraftArrays(Structure):
    """tk::DraftArrays of draft_head.h."""

    _fields_ = _fields("rows! texts! words states counts places lengths keys values out best sure")


class RoundRun(Structure):
    """tk::RoundRun of kernels/cpu/ops.h."""

    _fields_ = (
        *_fields("w rows! cols! columns divisors codes scales zeros"),
        ("dtype", c_int32),
        ("bits", c_int32),
        ("group", c_int32),
        ("turned", c_int32),
        *_fields("sizes errors"),
    )


class CodeRun(Structure):
    """tk::CodeRun of kernels/cpu/ops.h."""

    _fields_ = (
        *_fields("x perm factors codes steps rows! cols!"),
        ("factor", c_float),
        ("error", c_float),
        ("dtype", c_int32),
        ("group", c_int32),
    )


class SquaresRun(Structure):
    """tk::SquaresRun of kernels/cpu/ops.h."""

    _fields_ = (*_fields("w rows! cols! sizes out"), ("dtype", c_int32))


class FitRun(Structure):
    """tk::FitRun of kernels/cpu/ops.h."""

    _fields_ = (
        *_fields("x w groups! scales lows"),
        ("group", c_int32),
        ("levels", c_int32),
        ("negative", c_int32),
    )


class TrellisRun(Structure):
    """tk::TrellisRun of kernels/cpu/ops.h."""

    _fields_ = (
        *_fields("x ld! rows! width! table back weights scales ld_scales! first! group! state out keep! tried tries!"),
        ("bits", c_int32),
    )


_PROGRAM = (c_char_p, c_void_p, c_int64, POINTER(TensorRecord), c_int64, c_char_p, c_int64)
_CALLS: dict[str, tuple[Any, ...]] = {  # what each gives, then what it takes
    "tk_error": (c_char_p,),
    "tk_explain_mapped_faults": (None,),
    "tk_isa": (c_char_p, c_char_p),
    "tk_model_create": (c_void_p, *_PROGRAM, c_void_p),
    "tk_model_free": (None, c_void_p),
    "tk_model_join": (c_int, c_void_p, c_int),
    "tk_model_lose": (None, c_void_p),
    "tk_model_lost": (c_int, c_void_p),
    "tk_model_meetings": (c_int64, c_void_p),
    "tk_model_trace": (None, c_void_p, c_int),
    "tk_model_traced": (c_int64, c_void_p, c_void_p, c_int64),
    "tk_bridge_open": (c_void_p, c_int, c_int64, c_int64, c_int64),
    "tk_bridge_wait": (c_int64, c_void_p),
    "tk_bridge_pack": (c_int64, c_void_p, c_void_p),
    "tk_bridge_unpack": (c_int, c_void_p, c_void_p),
    "tk_bridge_arrive": (None, c_void_p),
    "tk_bridge_lose": (None, c_void_p),
    "tk_bridge_close": (None, c_void_p),
    "tk_block_bytes": (c_int64, c_void_p, c_int64),
    "tk_block_export": (c_int, c_void_p, c_int64, c_int64, c_void_p),
    "tk_block_import": (c_int, c_void_p, c_int64, c_int64, c_void_p, c_int64),
    "tk_cache_allocate": (c_int, c_void_p, c_void_p, c_int64),
    "tk_cache_release": (None, c_void_p),
    "tk_cache_discard": (c_int, c_void_p, c_int64, c_void_p, c_int64),
    "tk_adapter_put": (c_int, c_void_p, c_int64, c_void_p, POINTER(TensorRecord), c_int64),
    "tk_adapter_drop": (None, c_void_p, c_int64),
    "tk_step": (c_int, c_void_p, POINTER(StepArrays), POINTER(StepResults)),
    "tk_embed": (c_int, c_void_p, c_void_p, c_int64, c_void_p),
    "tk_pack": (c_int, POINTER(TensorRecord), c_void_p, POINTER(PackSource), c_int64),
    "tk_pack_file": (c_int, POINTER(TensorRecord), c_int, c_int64, POINTER(PackSource), c_int64),
    "tk_tower_create": (c_void_p, *_PROGRAM),
    "tk_tower_free": (None, c_void_p),
    "tk_tower_run": (c_int, c_void_p, POINTER(TowerArrays)),
    "tk_join_create": (c_void_p, *_PROGRAM),
    "tk_join_free": (None, c_void_p),
    "tk_join_run": (c_int, c_void_p, c_void_p, c_int64, c_void_p),
    "tk_draft_create": (c_void_p, *_PROGRAM),
    "tk_draft_free": (None, c_void_p),
    "tk_draft_step": (c_int, c_void_p, POINTER(DraftArrays)),
    "tk_op_round": (c_int, c_char_p, POINTER(RoundRun), c_int64),
    "tk_op_code_rows": (c_int, c_char_p, POINTER(CodeRun), c_int64, c_int64),
    "tk_op_squares": (c_int, c_char_p, POINTER(SquaresRun), c_int64),
    "tk_op_fit_scales": (c_int, c_char_p, POINTER(FitRun), c_int64),
    "tk_op_trellis": (c_int, c_char_p, POINTER(TrellisRun), c_int64),
    "tk_trellis_table": (c_void_p, c_int32),
}


def library_path() -> Path:
    """Where the library lies, or would lie."""
    return Path(os.environ.get(LIBRARY_VARIABLE) or Path(__file__).with_name("_native.so"))


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """The library with its prototypes. OSError where it is missing, or made for another machine or by another version
    of the package."""
    lib = ctypes.CDLL(str(path))
    ask = getattr(lib, "tk_version", None)  # before anything else is called: what it takes may be another thing
    if (found := None if ask is None else ask()) != VERSION:
        raise OSError(
            f"{path}: made by another version of the package (found {found}, expected {VERSION}); "
            f"build it again with {BUILD}"
        )
    for name, (result, *arguments) in _CALLS.items():
        call = getattr(lib, name)
        call.argtypes, call.restype = arguments, result
    lib.tk_explain_mapped_faults()  # whoever has loaded the library maps files
    return lib


def explain_mapped_faults() -> None:
    """From now on, a mapped file that is cut short while it is in use ends this process with one line that names it, in
    place of a bus error. Without the library it stays a bus error."""
    with suppress(OSError):
        load(library_path())


def create(
    call: Any, names: Sequence[str], values: Sequence[float], tensors: Sequence[PackedTensor], threads: int, *more: Any
) -> int | None:
    """What one of the library's ``tk_…_create`` makes of a record and what else it takes; the tensors must outlive it.
    None where it failed (``error``)."""
    numbers = np.asarray(values, np.float64)
    text = "".join(f"{name}\n" for name in names).encode()
    records = tensor_records(tensors)
    made: int | None = call(
        text, numbers.ctypes.data, numbers.size, records, len(tensors), wanted_isa().encode(), threads, *more
    )
    return made


def error(lib: ctypes.CDLL) -> str:
    """What the last failed call of this thread complained about."""
    return str(lib.tk_error().decode(errors="replace"))


def wanted_isa() -> str:
    """``$TOOLKIT_CPU_ISA`` or "" for the best. UsageError for a name that does not exist."""
    name = os.environ.get(ISA_VARIABLE, "")
    if name and name not in ISAS:
        raise UsageError(f"{ISA_VARIABLE}: expected one of {', '.join(ISAS)}, found {name!r}")
    return name


def unloadable() -> str | None:
    """Why the library is not there, or None."""
    path = library_path()
    if not path.exists():
        return f"the native library is not built (no C++ compiler at installation; {BUILD})"
    try:
        load(path)
    except OSError as e:
        return f"the native library does not load: {e}"
    return None


def available() -> str | None:
    """Why the library cannot run here, or None."""
    return unloadable() or isa_unsupported(wanted_isa())


def isa_unsupported(isa: str) -> str | None:
    """Why kernels for ``isa`` ("" is the best there is) cannot run on this processor, or None."""
    lib = load(library_path())
    return error(lib) if lib.tk_isa(isa.encode()) is None else None


def instructions() -> str:
    """Those that are taken here, "" where none can be; with others it may round otherwise."""
    return str((load(library_path()).tk_isa(wanted_isa().encode()) or b"").decode())


def isas() -> list[str]:
    """Instruction sets that this build and this processor both have, best first."""
    lib = load(library_path())
    return [i for i in ISAS if lib.tk_isa(i.encode()) is not None]


def run_op(name: str, runs: Any, *numbers: int) -> None:
    """The library's op ``tk_op_<name>`` on structures of its own, all of whose arrays the caller holds."""
    lib = load(library_path())
    failed = getattr(lib, f"tk_op_{name}")(wanted_isa().encode(), runs, *numbers)
    assert not failed, error(lib)


def trellis_table(bits: int) -> bytes:
    """The 256 int8 values that trellis codes of so many bits look up here."""
    return ctypes.string_at(load(library_path()).tk_trellis_table(bits), 256)


def tensor_records(tensors: Sequence[PackedTensor]) -> Any:
    """An array of what the library reads them by; they stay the caller's."""
    return (TensorRecord * max(len(tensors), 1))(*map(_record, tensors))


def _record(tensor: PackedTensor) -> TensorRecord:
    m, perm, data = tensor.meta, tensor.perm, address(tensor.data)
    part = tensor.data.nbytes < m.nbytes and data is not None  # of a rank, which reads no other tiles (rank_files.py)
    return TensorRecord(
        data=data - tensor.first * m.tile_bytes if part and data is not None else data,
        bytes=m.nbytes if part else tensor.data.nbytes,
        rows=m.rows,
        cols=m.cols,
        perm_size=0 if perm is None else perm.size,
        perm=address(perm),
        kind=m.kind,
        dtype=m.dtype,
        bits=m.bits,
        group=m.group,
        minima=int(m.minima),
        turned=int(m.turned),
        trellis=m.trellis,
    )


def address(array: np.ndarray[Any, Any] | None) -> int | None:
    """Address of an array's first element (None where it is empty or absent)."""
    if array is None or array.size == 0:
        return None
    return int(array.__array_interface__["data"][0])
