"""Conversations are told from states, and what `extract` would take of them is what inspect says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from draftscope.errors import DraftscopeError
from draftscope.inspecting.conversations import inspect_conversations
from draftscope.inspecting.inspect import inspect_path
from draftscope.pipeline import conversations
from draftscope.pipeline.conversations import Conversation, Renderer, read_lines

ROWS = [
    b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
    b'{"token_ids": [1, 2, 3, 4], "prompt_length": 3}',
    b'{"token_ids": [1, 2], "loss_mask": [0, 0]}',
    b'{"token_ids": [1, 2]}',
    b'{"messages": [{"role": "user", "content": "a"}]}',
    b"[" * 100_000,
    b"\xff\xfe{",
    b"7",
    b"",
]


class Plain(Renderer):
    def __init__(self) -> None: ...

    def conversation(self, messages: object, tools: object = None) -> tuple[list[int], list[bool]]:
        return [1, 2], [False, True]


def test_what_is_usable_is_what_extract_takes(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(b"\n".join(ROWS) + b"\n")
    taken = [item for item in read_lines(file, Plain) if isinstance(item, Conversation)]
    report = inspect_path(file).report
    assert report.what == "conversations"
    assert report.facts["lines"] == len(ROWS) and report.facts["usable"] == len(taken) == 3
    given = [item for item in taken if item.index]
    assert report.facts["tokens"] == sum(len(item.token_ids) for item in given)
    assert report.facts["answer tokens"] == sum(int(item.loss_mask.sum()) for item in given)
    assert report.facts["empty masks"] == 1
    assert {group.cause: group.files for group in report.skipped}["is not JSON"] == 3
    assert any("1 lines are prompts" in note for note in report.notes)


@pytest.mark.parametrize("read", [lambda file: list(read_lines(file, Plain)), inspect_conversations])
def test_a_line_without_an_end_is_refused_by_whoever_reads_it(read: Callable[[Path], object], tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "LINE", 1 << 10)
    file = tmp_path / "data.jsonl"
    file.write_bytes(ROWS[1] + b"\n" + b'{"token_ids": [' + b"1, " * 1000)
    with pytest.raises(DraftscopeError, match=r"data\.jsonl: line 2 is longer than"):
        read(file)


def test_lines_of_something_else_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    assert inspect_conversations(file) is None
    with pytest.raises(DraftscopeError, match=r"log\.jsonl: is JSON without a server's responses"):
        inspect_path(file)


@pytest.mark.parametrize("name", ["notes.md", "archive.zip"])
def test_a_file_of_no_known_kind_is_not_called_safetensors(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("# notes")
    with pytest.raises(DraftscopeError, match="is no file that holds states"):
        inspect_path(tmp_path / name)
