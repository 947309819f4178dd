"""speculators' old torch files, and what no torch file gets to do."""

from __future__ import annotations

import json
import os
import pickle
import random
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from state_files import a_sample, v1_file, write_one

from draftscope.errors import DraftscopeError
from draftscope.states import speculators_v1, torchfile
from draftscope.states.opening import open_source, recognised
from draftscope.states.pickled import Unfolds, names_in
from draftscope.states.torchfile import load_tensors

PERSISTENT = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("shape", ["list", "tuple", "tensor", "named"])
def test_old_torch_files_come_back(shape: str, tmp_path: Path) -> None:
    sample = a_sample()
    entries = [entry.contiguous() for entry in sample.states.unbind(1)]
    named = {f"n{i}": entry for i, entry in enumerate(entries)}
    value = {"list": entries, "tuple": tuple(entries), "tensor": sample.states, "named": named}[shape]
    torch.save({"input_ids": sample.token_ids, "loss_mask": sample.loss_mask, "hidden_states": value}, tmp_path / "data_3.pt")
    (tmp_path / "data_config.json").write_text(json.dumps({"version": "2.0", "hidden_states": {"layer_ids": [2, 30, 58, 60]}}))
    torch.save({"d2t": torch.arange(3)}, tmp_path / "vocab_mapping.pt")
    source = open_source(tmp_path)
    (read,) = source
    assert torch.equal(read.states, sample.states) and torch.equal(read.token_ids, sample.token_ids)
    assert torch.equal(read.loss_mask, sample.loss_mask) and read.index == 3
    assert read.labels == (("n0", "n1", "n2", "n3") if shape == "named" else ("layer 2", "layer 30", "layer 58", "layer 60"))
    assert source.meta["version"] == "2.0"
    assert [(Path(s.path).name, s.cause) for s in source.skipped] == [("vocab_mapping.pt", "foreign")]


def test_a_single_torch_file_keeps_its_own_labels(tmp_path: Path) -> None:
    file = v1_file(tmp_path / "sample.pt", a_sample(), labels=["embed", "layer 3", "layer 31", "layer 59"])
    (read,) = open_source(file)
    assert read.labels == ("embed", "layer 3", "layer 31", "layer 59")
    (tmp_path / "other").mkdir()
    unmasked = {"input_ids": torch.arange(6), "hidden_states": list(a_sample().states.unbind(1))}
    torch.save(unmasked, tmp_path / "other" / "x.pt")
    (bare,) = open_source(tmp_path / "other" / "x.pt")
    assert bare.loss_mask is None


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("open('/tmp/draftscope-trap', 'w').write('sprung')",))


class Balloon:
    def __reduce__(self) -> tuple[object, tuple[int]]:
        return (bytearray, (1 << 42,))


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("planted", [Trap(), Balloon(), OrderedDict(a=Trap()), {1, 2}],
                         ids=["exec", "bytearray", "nested", "set"])
def test_a_pickle_that_names_anything_but_tensors_is_not_executed(planted: object, protocol: int, tmp_path: Path) -> None:
    trap = Path("/tmp/draftscope-trap")
    trap.unlink(missing_ok=True)
    file = v1_file(tmp_path / "data_0.pt", a_sample(), extra=None)
    held = {"input_ids": torch.arange(6), "hidden_states": [torch.ones(6, 2)], "extra": planted}
    torch.save(held, file, pickle_protocol=protocol)
    with pytest.raises(DraftscopeError, match="nothing was executed"):
        open_source(file)
    assert not trap.exists()


def test_other_zip_archives_raw_pickles_and_oversized_entries_are_refused(tmp_path: Path) -> None:
    archive = tmp_path / "data_0.pt"
    with zipfile.ZipFile(archive, "w") as z:
        z.writestr("hello.txt", "hello")
    with pytest.raises(DraftscopeError, match=r"torch\.save"):
        open_source(archive)
    archive.write_bytes(pickle.dumps({"input_ids": [1], "hidden_states": []}))
    with pytest.raises(DraftscopeError, match=r"torch\.save"):
        open_source(archive)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as z:  # a bomb: small file, huge entry
        z.writestr("a/data.pkl", b"\0" * 10**7)
    with pytest.raises(DraftscopeError, match="more data than the file holds"):
        open_source(archive)


def _zip(file: Path, entries: dict[str, bytes]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, held in entries.items():
            archive.writestr(name, held)


ELSE: dict[str, Callable[[Path], object]] = {
    "a random generator": lambda file: torch.save({"python": random.getstate(), "numpy": np.random.get_state()}, file),
    "arguments": lambda file: torch.save(Namespace(lr=1e-4), file),
    "an optimizer": lambda file: torch.save(torch.optim.AdamW([torch.ones(2)]).state_dict(), file),
    "torch before 1.6": lambda file: torch.save({"a": torch.ones(3)}, file, _use_new_zipfile_serialization=False),
    "a pickle": lambda file: file.write_bytes(pickle.dumps({"a": 1})),
    "an archive": lambda file: _zip(file, {"hello.txt": b"hello" * 100}),
    "HDF5": lambda file: file.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100)),
}


@pytest.mark.parametrize("kind", ELSE)
def test_what_is_whole_and_something_else_is_foreign(kind: str, tmp_path: Path) -> None:
    write_one(speculators_v1.NAME, tmp_path, 0)
    file = tmp_path / "data_1.pt"
    ELSE[kind](file)
    source = open_source(tmp_path)
    assert len(list(source)) == 1 and [(Path(s.path), s.cause) for s in source.skipped] == [(file, "foreign")]


@pytest.mark.parametrize("kind", ["arguments", "an archive"])
def test_what_is_cut_short_is_broken_whatever_it_was(kind: str, tmp_path: Path) -> None:
    write_one(speculators_v1.NAME, tmp_path, 0)
    file = tmp_path / "data_1.pt"
    ELSE[kind](file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    source = open_source(tmp_path)
    assert len(list(source)) == 1 and [(Path(s.path), s.cause) for s in source.skipped] == [(file, "broken")]


def _lists(levels: int) -> Any:
    """Bytes by the hundred that unfold to 8 ** levels values."""
    held: Any = ()
    for _ in range(levels):
        held = [held] * 8
    return held


def _tuples(levels: int) -> Any:
    held: Any = ()
    for _ in range(levels):
        held = (held,) * 8
    return held


def _ring() -> list[Any]:
    held: list[Any] = []
    held.append([held])
    return held


def _deep() -> list[Any]:
    held: list[Any] = []
    for _ in range(100):
        held = [held]
    return held


UNFOLDING = {"lists": lambda: _lists(8), "tuples": lambda: _tuples(8), "dicts": lambda: {"a": {"b": _lists(7), "c": _lists(8)}},
             "a key": lambda: {_tuples(3): 1}, "itself": _ring, "depth": _deep, "a number": lambda: {10**5000: 1}}


@pytest.mark.parametrize("kind", UNFOLDING)
def test_a_pickle_that_would_unfold_is_refused_before_anything_is_made(kind: str, tmp_path: Path) -> None:
    write_one(speculators_v1.NAME, tmp_path, 0)
    file = tmp_path / "data_1.pt"
    torch.save({"input_ids": torch.arange(6), "hidden_states": [torch.ones(6, 2)], "extra": UNFOLDING[kind]()}, file)
    assert file.stat().st_size < 10_000
    source = open_source(tmp_path)
    assert len(list(source)) == 1 and [(Path(s.path), s.cause) for s in source.skipped] == [(file, "foreign")]
    with pytest.raises(DraftscopeError, match=r"its pickle .*nothing was executed"):
        open_source(file)


def test_lists_filled_after_they_were_put_into_others_are_counted() -> None:
    def get(at: int) -> bytes:
        return b"h" + bytes([at])

    made = b"".join(b"]q" + bytes([at]) for at in range(14))
    filled = b"".join(get(at) + b"(" + get(at - 1) * 8 + b"e0" for at in range(13, 0, -1))
    with pytest.raises(Unfolds, match="many times over"):
        names_in(b"\x80\x02" + made + filled + b".")


def test_what_files_of_states_hold_does_not_unfold(tmp_path: Path) -> None:
    same = torch.ones(2)
    held = {"ids": list(range(5000)), "views": [same] * 100, "by name": OrderedDict(a=same), 3: (), (1, 2): {"size": same.shape},
            "parameter": torch.nn.Parameter(same), "number": [1.5, None, True, "text"]}
    torch.save(held, tmp_path / "x.pt")
    assert list(load_tensors(tmp_path / "x.pt")) == list(held)


def test_views_that_declare_more_than_they_hold_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "data_0.pt"
    torch.save({"input_ids": torch.arange(1).expand(10**9), "hidden_states": [torch.ones(1, 1).expand(10**9, 7168)] * 4}, file)
    with pytest.raises(DraftscopeError, match="more values than the file holds"):
        open_source(file)


WRONG_V1 = {
    "no states": ({"input_ids": torch.arange(3)}, "hidden_states", "layout"),
    "no ids": ({"hidden_states": [torch.ones(3, 2)]}, "input_ids", "layout"),
    "unequal rows": ({"input_ids": torch.arange(3), "hidden_states": [torch.ones(3, 2), torch.ones(2, 2)]}, r"\[1\]", "rows"),
    "unequal widths": ({"input_ids": torch.arange(3), "hidden_states": [torch.ones(3, 2), torch.ones(3, 4)]}, r"\[1\]", "layout"),
    "ids too few": ({"input_ids": torch.arange(2), "hidden_states": [torch.ones(3, 2)]}, "3 rows", "rows"),
    "numbers": ({"input_ids": torch.arange(3), "hidden_states": [1, 2]}, "int", "layout"),
    "flat": ({"input_ids": torch.arange(3), "hidden_states": torch.ones(3, 6)}, r"\[3, 6\]", "layout"),
    "empty": ({"input_ids": torch.arange(3), "hidden_states": []}, "no list", "layout"),
    "a list": ([1, 2], "dict", "foreign"),
    "text ids": ({"input_ids": ["a", "b", "c"], "hidden_states": [torch.ones(3, 2)]}, "input_ids", "layout"),
}


@pytest.mark.parametrize("case", WRONG_V1)
def test_torch_files_that_do_not_fit(case: str, tmp_path: Path) -> None:
    held, says, cause = WRONG_V1[case]
    write_one(speculators_v1.NAME, tmp_path, 0)
    file = tmp_path / "data_1.pt"
    torch.save(held, file)
    source = open_source(tmp_path)
    assert len(list(source)) == 1 and [(Path(s.path), s.cause) for s in source.skipped] == [(file, cause)]
    with pytest.raises(DraftscopeError, match=says):
        open_source(file)


def test_a_folder_is_recognised_with_one_load_of_a_file_and_nothing_is_kept_of_it(tmp_path: Path,
                                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        write_one("specforge", tmp_path, number)
    loaded: list[Path] = []
    load = torchfile._load
    monkeypatch.setattr(torchfile, "_load", lambda path, named: loaded.append(path) or load(path, named))
    found = recognised(tmp_path)
    assert found is not None and (found.name, found.files) == ("specforge", 5)
    assert len(loaded) == len(set(loaded)) == 5
    first, again = load_tensors(loaded[-1]), load_tensors(loaded[-1])
    assert first is not again


def test_a_file_that_changed_while_formats_look_is_loaded_anew(tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    with torchfile.loading_once():
        for number in range(3):
            torch.save({"a": number}, file)
            os.utime(file, ns=(number, number))
            assert load_tensors(file) == {"a": number} and load_tensors(file) is load_tensors(file)
