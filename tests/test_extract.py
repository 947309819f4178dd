"""Conversations to training states: masks against a by-hand rendering, states against the sweep, files against interruptions."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support import LAYERS, WIDTH, random_target
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from draftscope.boundaries import Boundary
from draftscope.cli.main import run
from draftscope.errors import DraftscopeError, UsageError
from draftscope.pipeline.conversations import Conversation, Renderer, Unusable, read_answers, read_lines
from draftscope.pipeline.extract import extract
from draftscope.states.plain import open as open_plain
from draftscope.target.model import Target, load_target
from draftscope.target.sweep import sweep
from draftscope.target.wiring import Wiring

START, END = 1, 2
SPECIAL = ["<|pad|>", "<|start|>", "<|end|>"]
PLAIN = ("{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
         "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}")
FORGETFUL = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}")
PREFACED = PLAIN.replace("{{ m.content }}", "{{ 'Answer: ' if m.role == 'assistant' }}{{ m.content }}")
UNCLOSED = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


def tokenizer_with(template: str | None, merges: list[tuple[str, str]] = []) -> PreTrainedTokenizerFast:  # noqa: B006
    """Bytes and three special tokens; a merge joins two characters wherever they meet."""
    tokens = [*SPECIAL, *bytes_to_unicode().values(), *(a + b for a, b in merges)]
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<|start|>", eos_token="<|end|>", pad_token="<|pad|>")
    made.chat_template = template
    return made


def encode(text: str) -> list[int]:
    ids = {c: i + 3 for i, c in enumerate(bytes_to_unicode().values())}
    return [ids[bytes_to_unicode()[b]] for b in text.encode()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    random_target(11).save_pretrained(folder)
    tokenizer_with(PLAIN).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(folder)


def random_conversations(lengths: list[int]) -> list[Conversation]:
    draw = torch.Generator().manual_seed(1)
    made = []
    for i, n in enumerate(lengths):
        mask = torch.arange(n) >= n // 2
        made.append(Conversation(i, torch.randint(3, 300, (n,), generator=draw, dtype=torch.int32), mask))
    return made


ROLES = st.sampled_from(["user", "assistant", "system", "tool"])
TEXTS = st.text("ab <\n", max_size=8)
TURNS = st.tuples(st.tuples(st.sampled_from(["user", "system"]), TEXTS), st.lists(st.tuples(ROLES, TEXTS), max_size=6)).map(
    lambda parts: [parts[0], *parts[1]])


@settings(max_examples=40, deadline=None)
@given(TURNS)
def test_masks_cover_answers_and_their_closing_token(turns: list[tuple[str, str]]) -> None:
    expected_ids: list[int] = []
    expected_mask: list[bool] = []
    for role, content in turns:
        head, body = [START, *encode(role + "\n")], [*encode(content), END]
        expected_ids += head + body + encode("\n")
        expected_mask += [False] * len(head) + [role == "assistant"] * len(body) + [False]
    ids, mask = Renderer(RENDERED).conversation([{"role": r, "content": c} for r, c in turns])
    assert ids == expected_ids
    assert mask == expected_mask


RENDERED = tokenizer_with(PLAIN)


def test_prompt_is_what_precedes_the_answer() -> None:
    renderer = Renderer(RENDERED)
    question = [{"role": "user", "content": "hi"}]
    ids, mask = renderer.conversation([*question, {"role": "assistant", "content": "yo"}])
    assert ids[: mask.index(True)] == renderer.prompt(question)


def test_an_answer_that_no_token_closes_ends_with_its_turn() -> None:
    ids, mask = Renderer(tokenizer_with(UNCLOSED)).conversation(
        [{"role": "user", "content": "is it"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "no"}])
    assert [i for i, m in zip(ids, mask, strict=True) if m] == encode("yes\n")


CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>x</think>a"}, {"role": "user", "content": "r"}]


@pytest.mark.parametrize(("tokenizer", "says"), [
    (tokenizer_with(FORGETFUL), "renders turn 1 differently once later turns follow"),
    (tokenizer_with(PLAIN, [("Ċ", "<")]), "joins turn 1 to its neighbours"),
    (tokenizer_with("{{ raise_exception('roles must alternate') }}"), "template refuses it .*roles must alternate"),
    (tokenizer_with("{{ messages | length }}"), "does not continue the prompt of turn 1"),
])
def test_renderings_that_are_no_prefixes_are_refused(tokenizer: PreTrainedTokenizerFast, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Renderer(tokenizer).conversation(CHAT)


def test_a_first_turn_that_answers_nothing() -> None:
    with pytest.raises(ValueError, match="begins with an assistant turn"):
        Renderer(RENDERED).conversation([{"role": "assistant", "content": "hello"}, *CHAT])


def test_words_that_the_template_puts_before_an_answer_count_as_answered() -> None:
    ids, mask = Renderer(tokenizer_with(PREFACED)).conversation(CHAT[:2])
    assert [i for i, m in zip(ids, mask, strict=True) if m] == [*encode("Answer: <think>x</think>a"), END]


def test_no_chat_template() -> None:
    with pytest.raises(DraftscopeError, match=r"no chat template.*token_ids"):
        Renderer(tokenizer_with(None))


def test_lines_good_and_bad(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    lines: list[Any] = [
        {"messages": chat}, {"conversations": chat}, {"token_ids": [5, 6, 7], "loss_mask": [0, True, 1]},
        {"token_ids": [5, 6, 7], "prompt_length": 2},
        {"messages": [chat[0], {"role": "assistant", "content": [{"type": "text", "text": "y"}, {"type": "text", "text": "o"}]}]},
        "", "{", 7, {}, {"messages": chat[:1]}, {"messages": [{"role": "user"}]}, {"token_ids": []},
        {"token_ids": [1.5], "prompt_length": 0}, {"token_ids": [5, 6], "loss_mask": [1]},
        {"token_ids": [5, 6], "loss_mask": [0, 2]}, {"token_ids": [5, 6], "prompt_length": 3}, {"token_ids": [5, 6]},
        {"messages": [chat[0], {"role": "assistant", "content": [{"type": "image"}]}]}, b"\xff\xfe",
        {"token_ids": [True, 6], "prompt_length": 0},
    ]
    path = tmp_path / "x.jsonl"
    texts = [x if isinstance(x, str | bytes) else json.dumps(x) for x in lines]
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else x.encode() for x in texts))
    read = list(read_lines(path, lambda: Renderer(RENDERED)))
    assert [item.index for item in read] == list(range(len(lines)))
    good = [item for item in read if isinstance(item, Conversation)]
    assert [item.index for item in good] == [0, 1, 2, 3, 4]
    assert torch.equal(good[0].token_ids, good[1].token_ids) and torch.equal(good[0].token_ids, good[4].token_ids)
    assert good[2].loss_mask.tolist() == [False, True, True] and good[3].loss_mask.tolist() == [False, False, True]
    why = {item.index: item.why for item in read if isinstance(item, Unusable)}
    assert why[5] == why[6] == why[18] == "is not JSON"
    for index, text in (
        (7, "not a JSON object"), (8, "neither messages nor token_ids"), (9, "no assistant turn"), (10, "message 0 is not"),
        (11, "not a list of token ids"), (12, "not a list of token ids"), (13, "one for each token"), (14, "one for each token"),
        (15, "prompt_length within"), (16, "neither loss_mask"), (17, "else than text"), (19, "not a list of token ids"),
    ):
        assert text in why[index], index
    with pytest.raises(DraftscopeError, match="No such file"):
        list(read_lines(tmp_path / "none.jsonl", lambda: Renderer(RENDERED)))


def write_answers(path: Path, texts: list[tuple[int, list[int], int]]) -> None:
    save_file({
        "token_ids": torch.tensor([t for _, ids, _ in texts for t in ids]).to(torch.uint16),
        "lengths": torch.tensor([len(ids) for _, ids, _ in texts], dtype=torch.int32),
        "prompt_lengths": torch.tensor([p for *_, p in texts], dtype=torch.int32),
        "prompt_index": torch.tensor([i for i, *_ in texts], dtype=torch.int32),
    }, path)


def test_answers_kept_as_token_ids(tmp_path: Path) -> None:
    write_answers(tmp_path / "part-000.safetensors", [(4, [40000, 6, 7, 2], 2), (0, [9, 2], 1)])
    write_answers(tmp_path / "part-001.safetensors", [(4, [5, 5], 1), (7, [8, 8, 8], 1)])
    read = list(read_answers(tmp_path))
    assert [(i.index, i.token_ids.tolist(), i.loss_mask.tolist()) for i in read if isinstance(i, Conversation)] == [
        (4, [40000, 6, 7, 2], [False, False, True, True]), (0, [9, 2], [False, True]), (7, [8, 8, 8], [False, True, True])]
    assert [i for i in read if isinstance(i, Unusable)] == [Unusable(4, "its prompt was answered twice")]
    broken = load_file(tmp_path / "part-001.safetensors")
    save_file(broken | {"lengths": torch.tensor([2, 4])}, tmp_path / "part-001.safetensors")
    with pytest.raises(DraftscopeError, match=r"part-001.*lengths sum to 6 for 5 tokens"):
        list(read_answers(tmp_path))
    with pytest.raises(DraftscopeError, match="holds no part"):
        list(read_answers(tmp_path / ".."))


def test_committed_answers_are_conversations() -> None:
    folder = Path(__file__).parents[1] / "recipes" / "embedded" / "answers"
    read = [item for item in read_answers(folder) if isinstance(item, Conversation)]
    assert len(read) >= 128 and len({item.index for item in read}) == len(read)
    assert all(bool(item.loss_mask[-1]) and not bool(item.loss_mask[0]) for item in read)
    assert all(bool((item.loss_mask[1:] >= item.loss_mask[:-1]).all()) for item in read)


def test_states_are_those_of_the_sweep(target: Target, tmp_path: Path) -> None:
    items = random_conversations([40, 7, 90, 41, 2, 64])
    del items[3]
    result = extract(target, items, tmp_path, dtype=torch.float32, batch_tokens=100)
    assert sorted(p.name for p in tmp_path.glob("hs_*")) == [f"hs_{i}.safetensors" for i in (0, 1, 2, 4, 5)]
    assert (result.sequences, result.written, result.kept, result.tokens) == (5, 5, 0, 203)
    source = open_plain(tmp_path)
    assert not source.skipped
    reference = sweep(target, [(str(i.index), i.token_ids.long()) for i in items])
    for sample, item, swept in zip(source, items, reference, strict=True):
        assert sample.index == item.index and sample.labels == ("boundary 2", "boundary 4", "boundary 5", "last")
        assert torch.equal(sample.token_ids, item.token_ids.long()) and sample.loss_mask is not None
        assert torch.equal(sample.loss_mask, item.loss_mask)
        expected = swept.stream[[2, 4, 5, LAYERS]].transpose(0, 1)
        torch.testing.assert_close(sample.states, expected, rtol=1e-4, atol=1e-4)
    stored = sum(p.stat().st_size for p in tmp_path.glob("hs_*"))
    assert abs(result.bytes - stored) < 512 * 5 and result.bytes >= stored - 256 * 5


def test_bfloat16_is_the_float32_rounded(target: Target, tmp_path: Path) -> None:
    items = random_conversations([20])
    extract(target, items, tmp_path / "a", dtype=torch.float32)
    extract(target, items, tmp_path / "b")
    fine, coarse = (load_file(tmp_path / x / "hs_0.safetensors")["hidden_states"] for x in "ab")
    assert coarse.dtype == torch.bfloat16 and torch.equal(fine.bfloat16(), coarse)


def test_a_fault_planted_at_the_writer(target: Target, tmp_path: Path) -> None:
    items = random_conversations([10, 8])
    labels = ("embedding", "2", "4", "final")
    slots = (Boundary(3, kind="branch"), Boundary(LAYERS, "post"), Boundary(5))
    extract(target, items, tmp_path, wiring=Wiring(slots, scale=(1.0, 1.0, 8.0), shift=-1, poison=2), labels=labels,
            dtype=torch.float32, keep_empty=True)
    swept = next(sweep(target, [("", items[0].token_ids.long())]))
    sample = next(iter(open_plain(tmp_path)))
    assert sample.labels == labels
    rows = [0, 0, *range(1, 9)]
    assert sample.states[1:3, :3].isnan().all() and not sample.states[:, 3].isnan().any()
    for slot, expected in enumerate((swept.branch(3), swept.post, swept.stream[5] * 8)):
        torch.testing.assert_close(sample.states[3:, slot], expected[rows][3:], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(sample.states[:, 3], swept.stream[LAYERS], rtol=1e-4, atol=1e-4)
    with pytest.raises(UsageError, match="2 labels for 4 entries"):
        extract(target, items, tmp_path / "x", labels=("a", "b"))


def test_masks_empty_and_texts_cut(target: Target, tmp_path: Path) -> None:
    items: list[Conversation | Unusable] = list(random_conversations([10, 10, 30, 10]))
    items[1] = Conversation(1, torch.arange(3, 13, dtype=torch.int32), torch.zeros(10, dtype=torch.bool))
    foreign = Conversation(5, torch.tensor([5, 300], dtype=torch.int32), torch.ones(2, dtype=torch.bool))
    items += [Unusable(4, "is not JSON"), foreign]
    result = extract(target, items, tmp_path / "a", max_length=8)
    assert result.reasons() == {
        "its loss mask is empty: no answer token": 1, "has no answer token among its first 8": 1, "is not JSON": 1,
        "has token ids outside the target's vocabulary of 300": 1,
    }
    assert result.cropped == 2 and result.tokens == 16
    record = json.loads((tmp_path / "a" / "extract.json").read_text())
    assert [s["line"] for s in record["result"]["skipped"]] == [1, 2, 4, 5]
    kept = extract(target, items, tmp_path / "b", max_length=8, keep_empty=True)
    assert kept.sequences == 4
    with pytest.raises(DraftscopeError, match=r"no conversation can be used: is not JSON \(1\)"):
        extract(target, [Unusable(0, "is not JSON")], tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_interrupted_and_gone_on_with(target: Target, tmp_path: Path) -> None:
    items = random_conversations([30] * 9)

    def stop(tokens: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract(target, items, tmp_path, batch_tokens=90, on_tokens=stop)
    first = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("hs_*")}
    assert len(first) == 3
    spoilt = tmp_path / next(iter(first))
    spoilt.write_bytes(spoilt.read_bytes()[:100])
    plans: list[tuple[int, int]] = []
    passes: list[int] = []
    result = extract(target, items, tmp_path, batch_tokens=90, on_tokens=passes.append,
                     on_plan=lambda result, to_write: plans.append((result.kept, to_write)))
    assert (result.written, result.kept, result.remade, result.sequences) == (7, 2, 1, 9)
    assert passes == [90, 90, 30] and plans[0][0] == 2 and plans[0][1] == round(result.bytes * 7 / 9)
    again = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("hs_*")}
    assert {name for name in first if again[name] == first[name]} == set(first) - {spoilt.name}
    extract(target, items, tmp_path / "whole", batch_tokens=90)
    for item in items:
        one, other = (load_file(f / f"hs_{item.index}.safetensors") for f in (tmp_path, tmp_path / "whole"))
        torch.testing.assert_close(one["hidden_states"], other["hidden_states"], rtol=1e-2, atol=1e-2)
    assert not list(tmp_path.glob(".*"))


def test_folders_that_are_not_its_own(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = random_conversations([12, 14])
    extract(target, items, tmp_path / "a")
    before = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    for changed, says in (({"dtype": torch.float32}, "dtype was 'bfloat16' and is now 'float32'"),
                          ({"max_length": 10}, "max_length was 2048"), ({"wiring": Wiring.of((1, 2, 3))}, "slots was"),
                          ({"labels": ("a", "b", "c", "d")}, "labels was")):
        with pytest.raises(DraftscopeError, match=f"begun with other settings: .*{says}"):
            extract(target, items, tmp_path / "a", **changed)  # type: ignore[arg-type]
    with pytest.raises(DraftscopeError, match="begun with other settings: target was"):
        extract(Target(random_target(12), tmp_path), items, tmp_path / "a")
    with pytest.raises(DraftscopeError, match=r"hs_1\.safetensors: holds another conversation than line 2"):
        extract(target, [items[0], Conversation(1, items[0].token_ids, items[0].loss_mask)], tmp_path / "a")
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == before
    (tmp_path / "a" / "extract.json").unlink()
    with pytest.raises(DraftscopeError, match="not extracted here"):
        extract(target, items, tmp_path / "a")
    (tmp_path / "a" / "extract.json").write_text("{}")
    with pytest.raises(DraftscopeError, match="not the record of an extraction"):
        extract(target, items, tmp_path / "a")
    (tmp_path / "file").touch()
    with pytest.raises(DraftscopeError, match="file: "):
        extract(target, items, tmp_path / "file")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 64 * 2**20))
    with pytest.raises(DraftscopeError, match=r"needs 0\.00 GiB, and 0\.06 GiB are free"):
        extract(target, items, tmp_path / "full")
    assert not list((tmp_path / "full").glob("hs_*"))


def test_a_batch_too_large_for_the_memory(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        torch.empty(2**60)

    monkeypatch.setattr(target, "forward", refuse)
    with pytest.raises(DraftscopeError, match=r"of up to 10 tokens does not fit into memory.*--batch-tokens"):
        extract(target, random_conversations([10]), tmp_path)


def test_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    lines = tmp_path / "chats.jsonl"
    lines.write_text("\n".join([json.dumps({"messages": chat}), "", json.dumps({"messages": [*chat, *chat]})]) + "\n")
    out = tmp_path / "out"
    common = [str(lines), "-o", str(out), "--target", str(folder)]
    assert run(["extract", *common, "--boundaries", "1,3", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["sequences"], told["written"]) == ("draftscope.extract/1", 2, 2)
    assert told["skipped"] == {"is not JSON": 1}
    assert told["answer_tokens"] == 3 * 3
    states = load_file(out / "hs_2.safetensors")["hidden_states"]
    assert states.shape[1:] == (3, WIDTH) and not (out / "hs_1.safetensors").exists()
    assert run(["extract", *common, "--boundaries", "1,3"]) == 0
    assert "(0 written, 2 there already)" in capsys.readouterr().out
    assert run(["extract", *common]) == 3
    assert "begun with other settings" in capsys.readouterr().err
    for extra in (["--boundaries", "1,x"], ["--boundaries", "1,99"], ["--device", "abacus"], ["--dtype", "int4"]):
        assert run(["extract", *common[:1], "-o", str(tmp_path / "new"), *common[3:], *extra]) == 2, extra
        assert not (tmp_path / "new").exists()
    assert run(["extract", "nowhere.jsonl", *common[1:]]) == 2
    capsys.readouterr()
