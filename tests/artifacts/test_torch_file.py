"""Files of torch.save: what torch.load gives is what is read, nothing in them runs, every spoilt one ends in a line."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.artifacts.weight_files.mapped import map_file, view_tensor
from toolkit.artifacts.weight_files.torch_file import place_tensor, read_torch_headers
from toolkit.artifacts.weight_files.torch_file_job import reading
from toolkit.box.box import Limits
from toolkit.errors import ToolkitError

OLD = {"_use_new_zipfile_serialization": False}
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool),
)
WITHOUT_STORAGES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)


def read(path: Path) -> dict[str, torch.Tensor]:
    mapped = map_file(path)
    return {name: view_tensor(mapped, info) for name, info in read_torch_headers([path])[path].items()}


def in_process(path: Path) -> dict[str, Any]:
    """The same without a box, for many cases a second."""
    entries, _ = reading(None, b"")({"path": str(path)}, b"")
    return {entry[0]: place_tensor(entry, path.stat().st_size) for entry in entries}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].is_contiguous()
        assert found[name].tolist() == tensor.tolist(), name


def refused(path: Path, *words: str, limits: Limits | None = None) -> None:
    with pytest.raises(ToolkitError) as caught:
        read_torch_headers([path], limits) if limits else read_torch_headers([path])
    message = str(caught.value)
    assert "\n" not in message and str(path) in message and len(message) < 600
    for word in words:
        assert word in message, message


def example(dtypes: tuple[torch.dtype, ...] = DTYPES) -> dict[str, torch.Tensor]:
    base = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    found = {str(d): torch.randint(0, 100, (3, 5)).to(d) for d in dtypes}
    return found | {
        "whole": base,
        "tied": base,
        "turned": base.t(),
        "cut": base[1:4, 2:6],
        "empty": torch.zeros(3, 0),
        "number": torch.tensor(3.0),
        "parameter": torch.nn.Parameter(base[2]),
    }


@pytest.mark.parametrize(
    "options", [{}, {"pickle_protocol": 3}, {"pickle_protocol": 4}, {"pickle_protocol": 5}, OLD], ids=str
)
def test_what_torch_load_gives(tmp_path: Path, options: dict[str, Any]) -> None:
    tensors = example() if options == OLD else example(DTYPES + WITHOUT_STORAGES)
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors, path, **options)
    assert_same(read(path), torch.load(path, weights_only=False))  # its own unpickler knows protocol 2 alone


def test_a_module_s_state_dict_and_tensors_with_attributes(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    marked = torch.nn.Parameter(torch.ones(2))
    marked.note = 1  # type: ignore[attr-defined]
    state = OrderedDict(module.state_dict(), marked=marked)
    state._metadata = module.state_dict()._metadata  # type: ignore[attr-defined]
    path = tmp_path / "x.pth"
    torch.save(state, path)
    assert_same(read(path), dict(state))


@given(st.data())
def test_any_view_of_any_storage(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "views.bin"
    dtype = data.draw(st.sampled_from(DTYPES))
    base = torch.arange(data.draw(st.integers(1, 60))).to(dtype)
    tensors = {}
    for i in range(data.draw(st.integers(1, 4))):
        offset = data.draw(st.integers(0, len(base) - 1))
        shape, stride, left = [], [], len(base) - 1 - offset
        for _ in range(data.draw(st.integers(0, 3))):
            step = data.draw(st.integers(1, 7))
            n = data.draw(st.integers(0, left // step + 1))
            left -= max(n - 1, 0) * step
            shape.append(n)
            stride.append(step)
        view = base.as_strided(shape, stride, offset)
        if view.numel() <= len(base):
            tensors[f"t{i}"] = view
    torch.save(tensors, path, **data.draw(st.sampled_from([{}, OLD])))
    mapped = map_file(path)
    assert_same({name: view_tensor(mapped, info) for name, info in in_process(path).items()}, tensors)


class Runs:
    """An object that pickle would unpickle by calling ``function``."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def attacks(mark: Path) -> dict[str, Any]:
    return {
        "system": Runs(os.system, f"touch {mark}"),
        "eval": Runs(eval, f"open({str(mark)!r}, 'w')"),
        "exec": Runs(exec, f"open({str(mark)!r}, 'w')"),
        "open": Runs(open, str(mark), "w"),
        "import": Runs(__import__, "os"),
        "torch": Runs(torch.load, str(mark)),
        "hub": Runs(torch.hub.load_state_dict_from_url, "http://127.0.0.1/"),
    }


@pytest.mark.parametrize("options", [{}, OLD], ids=("zip", "old"))
@pytest.mark.parametrize("name", list(attacks(Path())))
def test_code_never_runs(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    path, mark = tmp_path / "pytorch_model.bin", tmp_path / "ran"
    torch.save({"a": torch.zeros(2), "b": attacks(mark)[name]}, path, **options)
    refused(path, "names ", "could run code")
    assert not mark.exists()
    with pytest.raises(ValueError, match="could run code"):
        in_process(path)  # what keeps it from running is no limit of the box
    assert not mark.exists()


def archive(path: Path, pickled: bytes, storages: dict[str, bytes] | None = None, **how: Any) -> Path:
    """An archive as torch.save makes one, around any pickle."""
    with zipfile.ZipFile(path, "w", how.get("compression", zipfile.ZIP_STORED)) as file:
        file.writestr(f"{how.get('root', 'm')}/data.pkl", pickled)
        file.writestr("m/byteorder", how.get("order", "little"))
        for key, content in (storages or {}).items():
            file.writestr(f"m/data/{key}", content)
    return path


def tensor_pickle(
    shape: tuple[int, ...] = (2, 3), stride: tuple[int, ...] = (3, 1), offset: int = 0, count: int = 6, key: str = "0"
) -> bytes:
    """The pickle of {"w": a float32 tensor}, by hand."""
    file = io.BytesIO()

    class By(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", torch.FloatStorage, key, "cpu", count) if obj is marker else None

    marker = object()
    By(file, 2).dump({"w": Runs(torch._utils._rebuild_tensor_v2, marker, offset, shape, stride, False, OrderedDict())})
    return file.getvalue()


def test_the_file_by_hand_is_one(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.bin", tensor_pickle(), {"0": struct.pack("<6f", *range(6))})
    assert read(path)["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "fields",
    [
        {"offset": 1},
        {"offset": -1},
        {"offset": 1 << 61},
        {"shape": (1 << 40, 1 << 40)},
        {"shape": (2, -3)},
        {"stride": (-3, 1)},
        {"stride": (3, 2)},
        {"stride": (1 << 61, 1)},
        {"stride": (3,)},
        {"shape": (7,), "stride": (0,)},  # one number as many
        {"shape": (1,) * 9, "stride": (1,) * 9},
        {"count": 1 << 40},
        {"count": 5},
        {"count": -6},
        {"key": "1"},
        {"key": "../../etc/passwd"},
        {"shape": (1 << 70,), "stride": (1,)},
        {"shape": ("2", 3)},
        {"shape": (True, 3)},
    ],
    ids=str,
)
def test_numbers_that_do_not_fit(tmp_path: Path, fields: dict[str, Any]) -> None:
    refused(archive(tmp_path / "x.bin", tensor_pickle(**fields), {"0": bytes(24)}))


PICKLES = {
    "nothing": (b"", "pickle"),
    "no tensors": (pickle.dumps([1, 2], 2), "expected tensors by name, found a list"),
    "a number": (pickle.dumps({"step": 3}, 2), "step: expected a tensor, found a int"),
    "inside": (pickle.dumps({"model": {"w": 1}}, 2), "model: expected a tensor, found a dict"),
    "keys": (pickle.dumps({3: 1}, 2), "a key that is int"),
    "a set": (pickle.dumps({"w": {1}}, 4), "pickle instruction EMPTY_SET"),
    "a huge memo": (b"\x80\x02}r\xff\xff\xff\xff.", None),
    "a memo that is not there": (b"\x80\x02h\x09.", "refers to what is not there"),
    "deep": (b"\x80\x02" + b"(" * 500_000 + b"t" * 500_000 + b".", "expected tensors by name"),
    "deep lists": (b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".", "expected tensors by name"),
    "empty stack": (b"\x80\x02RR.", "refers to what is not there"),
    "marks": (b"\x80\x02(((.", "expected one value"),
    "a huge string": (b"\x80\x04\x8d" + (1 << 60).to_bytes(8, "little") + b"x.", "expected 1152921504606846976 bytes"),
    "a billion laughs": (b"\x80\x02](" + b"h\0" * 9 + b"q\0" * 9 + b"e.", None),
    "text instructions": (b"cos\nsystem\n(S'true'\ntR.", "names os.system"),
    "extension codes": (b"\x80\x02\x82\x01.", "pickle instruction EXT1"),
    "an object": (b"\x80\x02\x8c\x02os\x8c\x06system\x93)\x81.", "names os.system"),
    "junk": (bytes(range(256)) * 8, None),
}


@pytest.mark.parametrize("name", list(PICKLES))
def test_spoilt_pickles(tmp_path: Path, name: str) -> None:
    content, words = PICKLES[name]
    path = archive(tmp_path / "x.bin", content)
    if name == "a huge memo":  # says nothing, harms nothing
        assert read_torch_headers([path]) == {path: {}}
        return
    refused(path, *([words] if words else []))


def test_archives_that_are_none_of_torch_s(tmp_path: Path) -> None:
    good, data = tensor_pickle(), {"0": bytes(24)}
    path = tmp_path / "x.bin"
    refused(archive(path, good, data, compression=zipfile.ZIP_DEFLATED), "is compressed")
    refused(archive(path, good, data, order="big"), "big-endian")
    refused(archive(path, good, data, root="a/b"), "zip archive of something else")
    refused(archive(path, good), "the storage 0 is missing")
    refused(archive(path, good, {"0": bytes(20)}), "expected a storage of 24 bytes, found 20")
    archive(path, bytes(1 << 28), data, compression=zipfile.ZIP_DEFLATED)  # a bomb of 256 MiB in as many KiB
    refused(path, "is compressed")
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "w") as file:
        for content in (good, good):
            file.writestr("m/data.pkl", content)
    refused(path, "two entries have one name")
    raw = bytearray(archive(path, good, data).read_bytes())
    listed = raw.index(b"PK\1\2")
    raw[listed + 8] |= 1
    path.write_bytes(raw)
    refused(path, "is encrypted")
    raw[listed + 8] &= 0xFE
    raw[listed + 42 : listed + 46] = (7).to_bytes(4, "little")  # its entry elsewhere
    path.write_bytes(raw)
    refused(path, "is not where")
    raw[listed + 42 : listed + 46] = bytes(4)
    for field in (20, 24):  # both its sizes
        raw[listed + field : listed + field + 4] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(raw)
    refused(path, "expected at most")
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))
    refused(path, "TorchScript")


def test_a_storage_that_ends_behind_the_file(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.bin", tensor_pickle(count=1 << 28), {"0": bytes(24)})
    raw = bytearray(path.read_bytes())
    listed = raw.rindex(b"PK\1\2")
    for field in (20, 24):
        raw[listed + field : listed + field + 4] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(raw)
    refused(path, "tensor w: truncated")


def test_what_is_no_file_of_torch_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    for content in (b"", b"\x80", b"GGUF" + bytes(100), b"PK\3\4", bytes(1000), pickle.dumps(5), os.urandom(1000)):
        path.write_bytes(content)
        refused(path)
    path.unlink()
    refused(path, "cannot be read: No such file")


def test_a_pickle_that_takes_all_memory_or_time_is_ended(tmp_path: Path) -> None:
    small = Limits(memory=256 << 20, cpu_seconds=0.5, seconds=20)
    many = archive(tmp_path / "many.bin", b"\x80\x02" + b"]" * (40 << 20) + b".")
    refused(many, "its list of tensors cannot be read: it takes more than", limits=small)


@pytest.mark.parametrize("options", [{}, OLD], ids=("zip", "old"))
def test_flipped_and_cut_bytes(tmp_path: Path, options: dict[str, Any]) -> None:
    """Whatever is left is refused in words, or names places inside the file."""
    path = tmp_path / "x.bin"
    torch.save(
        {"a": torch.ones(4, 5), "b": torch.ones(3).t(), "c": torch.ones(8, dtype=torch.bfloat16)}, path, **options
    )
    whole, chance = path.read_bytes(), random.Random(0)
    read_well = 0
    for _ in range(3000):
        raw = bytearray(whole)
        for _ in range(chance.choice((1, 1, 1, 2, 8))):
            raw[chance.randrange(len(raw))] = chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256)))
        path.write_bytes(raw[: chance.choice((len(raw), len(raw), chance.randrange(len(raw))))])
        try:
            infos = in_process(path)
        except ValueError:
            continue
        read_well += 1
        size, mapped = path.stat().st_size, map_file(path)
        for info in infos.values():
            assert 0 <= info.start <= info.end <= size
            assert view_tensor(mapped, info).shape == info.shape
    assert 0 < read_well < 3000


def test_the_index_cannot_lead_out_of_the_directory(tiny_models: Any, tmp_path: Path) -> None:
    from toolkit.artifacts.checkpoint import open_checkpoint

    (tmp_path / "config.json").write_text((tiny_models("llama") / "config.json").read_text())
    for name in ("../x.bin", "/etc/passwd", "a/b.bin", "x.safetensors", 3):
        index = tmp_path / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(ToolkitError, match=r"expected a \.bin file name"):
            open_checkpoint(tmp_path)
