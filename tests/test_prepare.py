"""Prompts to conversations: answers against plain decoding, masks against what was answered, interruptions, what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from families import family_target
from safetensors.torch import load_file
from tiny import TARGET, tiny_target
from transformers import GenerationConfig

from draftscope.cli.main import run
from draftscope.eagle3.sampling import Sampling
from draftscope.errors import DraftscopeError
from draftscope.pipeline.answering import Answerer, Asked, by_transformers, own_loop
from draftscope.pipeline.conversations import Renderer
from draftscope.pipeline.prepare import Wanted, answer_all, keep_answers, read_wanted
from draftscope.pipeline.prepared import LINES, Folder, Prepared

ROWS = [
    {"messages": [{"role": "user", "content": "a cat"}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "gone"}, {"role": "user", "content": "b"}]},
    {"prompt": "the dog"},
    {"token_ids": [5, 9, 11, 4]},
    {"id": "named", "conversations": [{"role": "system", "content": "s"}, {"role": "user", "content": "x y"}]},
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join([*map(json.dumps, ROWS), "no json", '{"messages": []}', ""]) + "\n")
    return file


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LINES).read_text().splitlines()]


def prepare(prompts: Path, out: Path, *more: str) -> int:
    return run(["prepare", str(prompts), "-o", str(out), "--target", str(TARGET), "--max-new", "12", *more])


def greedy(ids: Sequence[int], count: int) -> list[int]:
    """Token by token, the whole text through transformers each time."""
    target, said = tiny_target(), list(ids)
    for _ in range(count):
        with torch.inference_mode():
            said.append(int(target.model(torch.tensor([said])).logits[0, -1].argmax()))
        if said[-1] in target.stop_ids:
            break
    return said[len(ids) :]


@pytest.mark.parametrize("by", ["loop", "transformers"])
def test_answers_are_the_targets_own(prompts: Path, tmp_path: Path, by: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare(prompts, tmp_path / "out", "--by", by, "--rows", "2", "--json", str(tmp_path / "p.json")) == 0
    rows = {row["index"]: row for row in lines(tmp_path / "out")}
    assert sorted(rows) == [0, 1, 2, 3, 4] and rows[4]["id"] == "named"
    renderer = Renderer(tiny_target().tokenizer)
    assert rows[3]["token_ids"][:4] == ROWS[3]["token_ids"]
    first = renderer.prompt([{"role": "user", "content": "a cat"}])
    assert rows[0]["token_ids"][: len(first)] == first
    for row in rows.values():
        starts = [t for t in range(1, len(row["token_ids"])) if row["loss_mask"][t] and not row["loss_mask"][t - 1]]
        for start in starts:
            stop = next((t for t in range(start, len(row["token_ids"])) if not row["loss_mask"][t]), len(row["token_ids"]))
            assert row["token_ids"][start:stop] == greedy(row["token_ids"][:start], 12)
    told = json.loads((tmp_path / "p.json").read_text())
    assert told["own_share"] == 1.0 and told["answer_tokens"] == sum(sum(row["loss_mask"]) for row in rows.values())
    assert told["skipped"] == {"is not JSON": 1, "has no user's turn to answer": 1}
    counts = load_file(tmp_path / "out" / "token_counts.safetensors")["counts"]
    answered = torch.tensor([i for row in rows.values() for i, m in zip(row["token_ids"], row["loss_mask"], strict=True) if m])
    assert torch.equal(counts, torch.bincount(answered, minlength=len(counts)))
    assert "100 % of" in capsys.readouterr().out


def test_earlier_answers_of_the_source_are_replaced(prompts: Path, tmp_path: Path) -> None:
    """The second turn is asked after the target's own first answer, as far as that ended by itself."""
    target = tiny_target()
    folder = Folder(tmp_path / "out", {}, target.parts.vocab)

    def scripted(asked: Any, on_answer: Any) -> None:
        for key, ids in asked:
            seen.append(target.tokenizer.decode(ids))
            on_answer(key, [*target.tokenizer.encode("own words", add_special_tokens=False), min(target.stop_ids)])

    seen: list[str] = []
    wanted = read_wanted(prompts, folder.prepared, target.parts.vocab)
    answer_all(folder, wanted, Renderer(target.tokenizer, target.stop_ids), scripted, target.tokenizer.decode, target.stop_ids,
               longest=256)
    folder.close(finished=True)
    asked = [text for text in seen if "own words" in text]
    assert len(asked) == 1 and "gone" not in "".join(seen)
    two = next(row for row in lines(tmp_path / "out") if row["index"] == 1)
    changes = sum(a != b for a, b in zip(two["loss_mask"], two["loss_mask"][1:], strict=False))
    assert changes == 3 and two["loss_mask"][-1] == 1


def test_interrupted_and_gone_on_with(prompts: Path, tmp_path: Path) -> None:
    assert prepare(prompts, tmp_path / "whole") == 0
    assert prepare(prompts, tmp_path / "parts", "--tokens", "10", "--rows", "1") == 0
    some = lines(tmp_path / "parts")
    assert 0 < len(some) < len(ROWS)
    with (tmp_path / "parts" / LINES).open("ab") as file:
        file.write(b'{"index": 3, "token_ids": [1, 2')
    assert prepare(prompts, tmp_path / "parts", "--rows", "1") == 0
    key = lambda row: row["index"]  # noqa: E731
    assert sorted(lines(tmp_path / "parts"), key=key) == sorted(lines(tmp_path / "whole"), key=key)
    before = (tmp_path / "parts" / LINES).read_bytes()
    assert run(["prepare", str(prompts), "-o", str(tmp_path / "parts"), "--target", str(TARGET), "--max-new", "9"]) == 3
    assert (tmp_path / "parts" / LINES).read_bytes() == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("x")
    assert prepare(prompts, tmp_path / "other") == 3 and (tmp_path / "other" / "mine.txt").read_text() == "x"


def test_answers_that_are_there_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    chat = [{"role": "user", "content": "a cat"}, {"role": "assistant", "content": "sat here"}]
    file.write_text(json.dumps({"messages": chat}) + "\n" + json.dumps({"messages": chat[:1]}) + "\n")
    assert prepare(file, tmp_path / "out", "--keep-answers", "--json", str(tmp_path / "p.json")) == 0
    (row,) = lines(tmp_path / "out")
    answered = [i for i, m in zip(row["token_ids"], row["loss_mask"], strict=True) if m]
    assert "sat here" in tiny_target().tokenizer.decode(answered)
    told = json.loads((tmp_path / "p.json").read_text())
    best = 0
    ids = row["token_ids"]
    for t in range(1, len(ids)):
        best += bool(row["loss_mask"][t]) and greedy(ids[:t], 1)[0] == ids[t]
    assert told["own_share"] == pytest.approx(best / len(answered)) and told["own_share"] < 1


def test_a_mask_that_would_be_empty_is_refused_with_the_marker(tmp_path: Path) -> None:
    """A template that writes another marker into prompts than into conversations."""
    tokenizer = tiny_target().tokenizer
    kept = tokenizer.chat_template
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[answer]{% endif %}")
    try:
        folder = Folder(tmp_path / "out", {}, 300)
        wanted = Wanted(0, "0", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        keep_answers(folder, [wanted], Renderer(tokenizer))
        folder.close(finished=True)
    finally:
        tokenizer.chat_template = kept
    assert not folder.prepared.conversations
    assert any("its marker '[answer]' is not in the rendered text" in why for why in folder.prepared.skipped)


def test_nothing_to_learn_from_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    assert prepare(file, tmp_path / "out", "--keep-answers") == 3


def test_longest_prompts_are_skipped_and_counted(tmp_path: Path) -> None:
    target = tiny_target()
    prepared = Folder(tmp_path / "out", {}, target.parts.vocab)
    wanted = [Wanted(0, "0", prompt_ids=[5] * 40), Wanted(1, "1", prompt_ids=[5, 6])]
    answerer = own_loop(target, Asked(max_new=4), rows=2, longest=32)
    answer_all(prepared, wanted, None, answerer, str, target.stop_ids, longest=32)
    prepared.close(finished=True)
    assert prepared.prepared.conversations == 1 and "is longer than 32 tokens" in prepared.prepared.skipped


def answered(answerer: Answerer, prompts: Sequence[tuple[int, Sequence[int]]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    answerer(iter(prompts), found.__setitem__)
    return found


def test_sampled_answers_follow_the_seed() -> None:
    target = tiny_target()
    prompts = [(i, [5, 9, 11, 4 + i]) for i in range(6)]
    for make in (own_loop, by_transformers):
        more: dict[str, Any] = {"longest": 64} if make is own_loop else {}
        answerer = {seed: make(target, Asked(8, Sampling(1.0, seed=seed)), rows=4, **more) for seed in (3, 4)}
        first = answered(answerer[3], prompts)
        assert answered(answerer[3], prompts) == first != answered(answerer[4], prompts)
        # Another turn of the same conversations has draws of its own.
        assert answered(answerer[3], [(key, [6, *ids]) for key, ids in prompts]) != first
    one_by_one = {key: answered(own_loop(target, Asked(8, Sampling(1.0, seed=3)), rows=1, longest=64), [(key, ids)])[key]
                  for key, ids in prompts[::-1]}
    assert one_by_one == answered(own_loop(target, Asked(8, Sampling(1.0, seed=3)), rows=4, longest=64), prompts)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "granite", "mistral", "qwen3"])
def test_every_family_answers_in_its_own_words(family: str, tmp_path: Path) -> None:
    """Masks, windows, caches and what is done to logits are the target's, whoever answers."""
    target = family_target(family, tmp_path)
    draw = torch.Generator().manual_seed(1)
    prompts = [(key, torch.randint(3, target.parts.vocab, (5 + 3 * key,), generator=draw).tolist()) for key in range(5)]
    alone = {key: answered(by_transformers(target, Asked(24), rows=1), [(key, ids)])[key] for key, ids in prompts}
    assert answered(own_loop(target, Asked(24), rows=3, longest=128), prompts) == alone


def test_what_generation_config_says_is_not_what_was_asked(tmp_path: Path) -> None:
    target = tiny_target()
    prompts = [(key, [5, 9, 11, 4 + key]) for key in range(4)]
    plain = answered(by_transformers(target, Asked(12), rows=4), prompts)
    own = target.model.generation_config
    target.model.generation_config = GenerationConfig(repetition_penalty=5.0, top_k=1, do_sample=True)
    try:
        assert answered(by_transformers(target, Asked(12), rows=4), prompts) == plain
        hot = Asked(1, Sampling(50.0, seed=1))
        many = [(key, [5, 9, 11, 4]) for key in range(400)]
        for make in (by_transformers(target, hot, rows=400), own_loop(target, hot, rows=400, longest=16)):
            # Nearly even draws: far more different tokens than a cut at 50 or 200 of them would leave.
            assert len({ids[0] for ids in answered(make, many).values()}) > min(0.6 * target.parts.vocab, 205)
    finally:
        target.model.generation_config = own


def test_other_prompts_of_the_same_name_are_not_taken_for_those_answered(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(prompts, tmp_path / "out") == 0
    kept = (tmp_path / "out" / LINES).read_bytes()
    other = tmp_path / "elsewhere" / prompts.name
    other.parent.mkdir()
    other.write_text(prompts.read_text().replace("the dog", "the fox"))
    assert prepare(other, tmp_path / "out") == 3
    assert "another conversation than line 3 of the prompts" in capsys.readouterr().err
    longer = tmp_path / "longer" / prompts.name
    longer.parent.mkdir()
    longer.write_text(prompts.read_text() + '{"prompt": "one more"}\n')
    assert prepare(longer, tmp_path / "out") == 0
    assert (tmp_path / "out" / LINES).read_bytes().startswith(kept) and len(lines(tmp_path / "out")) == 6


@pytest.mark.parametrize("spoilt", [b'{"index": 1}', b"[1]", b"nothing",
                                    b'{"index":1,"token_ids":[1,2],"loss_mask":[1],"ended":1}',
                                    b'{"index":1,"token_ids":[-4],"loss_mask":[1],"ended":true}'])
def test_a_bad_line_in_the_middle_is_told_and_costs_none_behind_it(
    spoilt: bytes, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(prompts, tmp_path / "out") == 0
    file = tmp_path / "out" / LINES
    whole = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([whole[0], spoilt + b"\n", *whole[2:]]))
    before = file.read_bytes()
    assert prepare(prompts, tmp_path / "out") == 3
    assert "line 2 is no conversation" in capsys.readouterr().err
    assert file.read_bytes() == before
    file.write_bytes(b"".join(whole)[:-7])  # the last one half written
    assert prepare(prompts, tmp_path / "out") == 0
    assert sorted(row["index"] for row in lines(tmp_path / "out")) == [0, 1, 2, 3, 4]


class Fake(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that answers with the prompt's own tokens, turned round."""

    with_ids = True

    def log_message(self, format: str, *args: Any) -> None: ...

    def reply(self, held: Any, code: int = 200) -> None:
        body = json.dumps(held).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        known = {"/v1/models": {"data": [{"id": "m", "max_model_len": 128}]}, "/version": {"version": "0.32.0"}}
        self.reply(known.get(self.path, {}), 200 if self.path in known else 404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = asked["prompt"][::-1][: asked["max_tokens"]]
        choice: dict[str, Any] = {"text": tiny_target().tokenizer.decode(ids), "finish_reason": "stop", "stop_reason": None}
        self.reply({"choices": [choice | ({"token_ids": ids} if self.with_ids else {})]})


@pytest.fixture
def served() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("with_ids", [True, False])
def test_a_server_answers(prompts: Path, tmp_path: Path, served: str, with_ids: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fake, "with_ids", with_ids)
    assert prepare(prompts, tmp_path / "out", "--server", served, "--rows", "2") == 0
    row = next(row for row in lines(tmp_path / "out") if row["index"] == 3)
    prompt = ROWS[3]["token_ids"]
    assert isinstance(prompt, list) and row["token_ids"][:4] == prompt
    assert row["token_ids"][-1] in tiny_target().stop_ids and row["ended"]
    if with_ids:
        assert row["token_ids"][4:-1] == prompt[::-1]


def test_a_server_that_is_not_there(prompts: Path, tmp_path: Path, served: str, capsys: pytest.CaptureFixture[str]) -> None:
    port = served.rpartition(":")[2]
    assert prepare(prompts, tmp_path / "a", "--server", "nonsense") == 2
    assert prepare(prompts, tmp_path / "b", "--server", f"http://127.0.0.1:{port}/nowhere") == 3
    assert "/nowhere/v1/models: answers 404" in capsys.readouterr().err


def test_lines_that_are_nothing_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b"[1]\n\xff\xfe\n" + b"[" * 100_000 + b'\n{"token_ids": [-1]}\n{"messages": 3}\n{"token_ids": [9, 10]}\n')
    prepared = Prepared(tmp_path)
    assert not list(read_wanted(file, prepared, 10))
    assert sum(count for count, _ in prepared.skipped.values()) == 6
    with pytest.raises(DraftscopeError, match="No such file"):
        list(read_wanted(tmp_path / "none", prepared, 10))


def test_a_server_s_target_is_not_loaded(prompts: Path, tmp_path: Path, served: str, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("draftscope.target.model.load_target", refuse)
    assert prepare(prompts, tmp_path / "out", "--server", served) == 0
    assert "was not measured: a server wrote them" in capsys.readouterr().out
