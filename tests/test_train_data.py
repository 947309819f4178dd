"""Where training examples come from: files read as they are needed under a bound, the target itself, and draft vocabularies."""

from __future__ import annotations

import json
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from full_disk import disk_of
from learnable import QUICK, learnable, parts_of, shape
from state_files import specforge_record, torchspec_record
from support import VOCAB, WIDTH, save_target
from torch import Tensor

from draftscope.cli.main import run
from draftscope.eagle3.batches import ahead
from draftscope.eagle3.collate import Collate, Packed
from draftscope.eagle3.corpus import FileCorpus, Held, split, token_counts
from draftscope.eagle3.examples import Example, Fitting, load_examples
from draftscope.eagle3.train import Watch, train
from draftscope.eagle3.vocabmap import coverage, read_map
from draftscope.errors import DraftscopeError
from draftscope.pipeline.conversations import Conversation
from draftscope.pipeline.extract import extract
from draftscope.pipeline.online import OnlineCorpus
from draftscope.states.opening import open_source
from draftscope.states.plain import write_sample
from draftscope.states.types import Sample
from draftscope.target.model import load_target


def write(folder: Path, samples: list[Sample]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i, item in enumerate(samples):
        write_sample(folder / f"hs_{i}.safetensors", item)
    return folder


def corpus_of(folder: Path, kept: Path, parts: Any, **more: Any) -> FileCorpus:
    return FileCorpus.of(open_source(folder, kind="samples"), Fitting(parts, **more), kept)  # type: ignore[arg-type]


class Live:
    """Bytes of tensors alive, and the most there ever were."""

    def __init__(self) -> None:
        self.now = self.most = self.ever = 0
        self._lock = threading.Lock()

    def count(self, tensor: Tensor) -> None:
        size = tensor.nbytes
        with self._lock:
            self.now += size
            self.ever += size
            self.most = max(self.most, self.now)
        weakref.finalize(tensor, self._gone, size)

    def _gone(self, size: int) -> None:
        with self._lock:
            self.now -= size


def test_what_is_made_ahead_comes_in_order_and_within_the_limit() -> None:
    held: list[int] = []
    most = 0
    lock = threading.Lock()

    def make(number: int) -> int:
        nonlocal most
        with lock:
            held.append(number)
            most = max(most, len(held))
        return number

    for made, number in enumerate(ahead(((10, lambda n=n: make(n)) for n in range(40)), 35)):
        assert made == number
        with lock:
            held.remove(number)
    # Three fit, and of these the one handed out is taken off the list here before its room is given back.
    assert most <= 3 and not held


def test_alone_anything_fits_and_what_is_asked_for_no_more_is_not_made() -> None:
    asked: list[int] = []
    made = ahead(((100, lambda n=n: asked.append(n) or n) for n in range(9)), 10)
    assert next(made) == 0
    assert next(made) == 1
    made.close()
    assert asked == [0, 1]
    assert "batches ahead" not in {thread.name for thread in threading.enumerate()}


def test_an_error_comes_where_its_result_would_have() -> None:
    def fail() -> int:
        raise DraftscopeError("cannot be read", where="hs_3")

    made = ahead([(1, lambda: 0), (1, fail), (1, lambda: 2)], 10)
    assert next(made) == 0
    with pytest.raises(DraftscopeError, match="hs_3"):
        next(made)


def test_training_on_files_is_training_on_what_they_hold(tmp_path: Path) -> None:
    """The same losses as from memory, whichever format; several samples a file and others that cannot teach among them."""
    parts, samples = learnable(14)
    nothing = Sample("", samples[0].token_ids, samples[0].states, torch.zeros(24, dtype=torch.bool), ("",) * 4, 0)
    mixed = [*samples[:3], nothing, *samples[3:]]
    quick = replace(QUICK, epochs=2)
    held = train(load_examples(samples, parts), parts, shape(24, 24), None, tmp_path / "held", settings=quick)
    folders = [write(tmp_path / "plain", mixed)]
    for name, record in (("specforge", specforge_record), ("torchspec", None)):
        folder = tmp_path / name
        folder.mkdir()
        for i in range(0, len(mixed), 1 if record else 5):
            some = mixed[i : i + 5]
            torch.save(record(some[0]) if record else torchspec_record(*some, length=30), folder / f"data_{i}.ckpt" if record
                       else folder / f"dump_{i}.pt")
        folders.append(folder)
    for folder in folders:
        corpus = corpus_of(folder, tmp_path / f"{folder.name}-choices", parts)
        assert len(corpus.lengths) == 14 and sum(corpus.lengths) == 14 * 24
        assert torch.equal(token_counts(corpus, 24), token_counts(Held(load_examples(samples, parts)), 24))
        result = train(corpus, parts, shape(24, 24), None, tmp_path / f"{folder.name}-run", settings=quick)
        assert result.losses == held.losses, folder.name


def test_memory_stays_within_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States many times what may be in flight; counted are all that are loaded and all that are packed."""
    parts, samples = learnable(120)
    folder, live = write(tmp_path / "d", samples), Live()
    corpus = corpus_of(folder, tmp_path / "c", parts)
    read, pack = FileCorpus._example, Collate.pack

    def counted(self: FileCorpus, place: Any) -> Example:
        example = read(self, place)
        example.states = example.states.clone()
        live.count(example.states)
        return example

    def packed(self: Collate, *arguments: Any) -> Packed:
        made = pack(self, *arguments)
        live.count(made.features)
        live.count(made.last)
        return made

    monkeypatch.setattr(FileCorpus, "_example", counted)
    monkeypatch.setattr(Collate, "pack", packed)
    # A batch of four sequences costs 4 x 24 x 4 x 64 x (2 x 4 + 4) bytes = 295 kB; three may be in flight.
    limit = 900_000
    settings = replace(QUICK, epochs=2, batch_tokens=96)
    result = train(corpus, parts, shape(24, 24), None, tmp_path / "run", settings=settings, watch=Watch(in_flight=limit))
    assert result.finished and result.steps == 60
    assert live.ever > 10 * limit
    assert 0 < live.most <= limit


def test_choices_are_computed_once_and_a_changed_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, samples = learnable(6)
    folder, told = write(tmp_path / "d", samples), list[int]()

    def again() -> FileCorpus:
        return FileCorpus.of(open_source(folder), Fitting(parts), tmp_path / "c", on_tokens=told.append)  # type: ignore[arg-type]

    corpus = again()
    assert told == [24] * 6
    again()
    assert told == [24] * 6
    expected = load_examples(samples, parts)
    assert all(torch.equal(a.best, b.best) for a, b in zip(corpus.load(range(6)), expected, strict=True))
    first, held = split(corpus, 3)
    assert [first.name(i) for i in range(4)] == [f"hs_{i}.safetensors" for i in (0, 1, 3, 4)]
    assert [e.name for e in held.load([1])] == ["hs_5.safetensors"]
    write_sample(folder / "hs_2.safetensors", replace_states(samples[2]))
    again()
    assert told == [24] * 7
    write_sample(folder / "hs_2.safetensors", Sample("", samples[2].token_ids[:9], samples[2].states[:9], None, ("",) * 4, 2))
    with pytest.raises(DraftscopeError, match=r"hs_2.safetensors: is no longer what it was"):
        corpus.load([2])
    (folder / "hs_2.safetensors").unlink()
    with pytest.raises(DraftscopeError, match=r"hs_2.safetensors"):
        corpus.load([2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_states_are_taken_as_stored_and_those_after_the_norm_too(dtype: torch.dtype, tmp_path: Path) -> None:
    parts, samples = learnable(4)
    for item in samples:
        item.states[:, -1] = parts.final_norm(item.states[:, -1])
        item.states = item.states.to(dtype)
    corpus = corpus_of(write(tmp_path / "d", samples), tmp_path / "c", parts)
    assert corpus.normed == 4 and corpus.itemsize == 2
    collate = Collate.of(parts, torch.arange(24), QUICK)
    packed = collate.pack(corpus.load(range(4)))
    assert packed.features.dtype == packed.last.dtype == dtype
    batch = collate.finish(packed)
    assert batch.features.dtype == batch.teacher.dtype == torch.float32
    assert torch.equal(batch.features, torch.stack([item.states[:, :-1] for item in samples]).float())
    row = int(batch.teacher_row[2, 15])
    logits = samples[2].states[15, -1].float() @ parts.head.T
    torch.testing.assert_close(batch.teacher[row], logits.log_softmax(-1))
    result = train(corpus, parts, shape(24, 24), None, tmp_path / "run", settings=replace(QUICK, epochs=2, precision="bfloat16"))
    assert result.finished and result.losses[-1] < result.losses[0]


def test_a_full_disk_while_choices_are_kept_loses_none_of_them(tmp_path: Path) -> None:
    parts, samples = learnable(60)
    folder = write(tmp_path / "d", samples)
    with disk_of(3000), pytest.raises(DraftscopeError, match="the target's choices cannot be kept"):
        corpus_of(folder, tmp_path / "c", parts)  # 60 x 24 x 4 bytes
    told: list[int] = []
    FileCorpus.of(open_source(folder), Fitting(parts), tmp_path / "c", on_tokens=told.append)  # type: ignore[arg-type]
    assert 20 < len(told) < 40
    corpus, expected = corpus_of(folder, tmp_path / "c", parts), load_examples(samples, parts)
    assert all(torch.equal(a.best, b.best) for a, b in zip(corpus.load(range(60)), expected, strict=True))


def replace_states(item: Sample) -> Sample:
    return Sample("", item.token_ids, item.states + 1, item.loss_mask, item.labels, item.index)


def test_samples_of_two_kinds_and_of_none_are_refused(tmp_path: Path) -> None:
    parts, samples = learnable(3)
    narrow = Sample("", samples[1].token_ids, samples[1].states[:, 1:], samples[1].loss_mask, ("",) * 3, 1)
    with pytest.raises(DraftscopeError, match=r"hs_1.safetensors: states hold 3 entries of width 64, those before it 4"):
        corpus_of(write(tmp_path / "two", [samples[0], narrow]), tmp_path / "c", parts)
    with pytest.raises(DraftscopeError, match="64 wide, the target 32"):
        corpus_of(write(tmp_path / "one", samples), tmp_path / "c", parts_of(1, 24, 32))
    assert corpus_of(tmp_path / "one", tmp_path / "c", parts_of(1, 24, 32), skip_bad=True).lengths == []


def conversations(count: int, seed: int = 0) -> list[Conversation]:
    draw = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        length = int(torch.randint(10, 22, (1,), generator=draw))
        ids = torch.randint(3, VOCAB, (length,), generator=draw, dtype=torch.int32)
        found.append(Conversation(i, ids, torch.arange(length) >= 5))
    return found


def test_online_gives_the_losses_of_files(tmp_path: Path) -> None:
    """The target run as batches ask for it, in float32, against float32 files; batches differ, so sums round differently."""
    target = load_target(save_target(tmp_path / "target"))
    extract(target, conversations(18), tmp_path / "states", dtype=torch.float32)
    online = OnlineCorpus.of(target, conversations(18), batch_tokens=64)
    files = corpus_of(tmp_path / "states", tmp_path / "c", target.parts)
    assert online.lengths == files.lengths and online.shape == files.shape
    for one, two in zip(online.load([4, 0, 17]), files.load([4, 0, 17]), strict=True):
        assert all(torch.equal(getattr(one, name), getattr(two, name)) for name in ("token_ids", "best", "answer"))
        torch.testing.assert_close(one.states, two.states, rtol=1e-4, atol=1e-4)
    settings = replace(QUICK, epochs=2, batch_tokens=64)
    config = shape(VOCAB)
    runs = []
    for corpus, name in ((online, "online"), (files, "files")):
        rest, held = split(corpus, 6)
        runs.append(train(rest, target.parts, config, None, tmp_path / name, settings=settings, heldout=held))
    assert runs[0].losses[0] == pytest.approx(runs[1].losses[0], rel=1e-6)
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-3), "differences grow with the steps"
    assert runs[0].heldout is not None and runs[1].heldout is not None
    assert runs[0].heldout.rows == runs[1].heldout.rows


def test_the_command_trains_online(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_target(tmp_path / "target")
    lines = [json.dumps({"token_ids": c.token_ids.tolist(), "prompt_length": 5}) for c in conversations(12)]
    (tmp_path / "c.jsonl").write_text("\n".join(["no JSON", *lines]))
    arguments = ["train", str(tmp_path / "c.jsonl"), "--online", "--target", str(target), "--out", str(tmp_path / "run"),
                 "--draft-vocab", "90", "--epochs", "1", "--heldout", str(tmp_path / "c.jsonl"), "--json", "-"]
    assert run(arguments) == 0
    out, told = capsys.readouterr()
    assert json.loads(out)["samples"] == 12 and "1 lines passed over, the first: line 1: is not JSON" in told
    assert not (tmp_path / "run" / "choices").exists()
    (tmp_path / "c.jsonl").write_text("no JSON\n")
    assert run(arguments) == 3
    assert "no conversation can be used: is not JSON (1)" in capsys.readouterr().err


def maps(folder: Path, d2t: Tensor, t2d: Tensor) -> list[Path]:
    folder.mkdir()
    torch.save({"d2t": d2t, "t2d": t2d}, folder / "vocab_mapping.pt")
    np.save(folder / "d2t-40.npy", d2t.numpy())
    np.save(folder / "t2d-40.npy", t2d.numpy())
    return [folder / "vocab_mapping.pt", folder / "d2t-40.npy"]


def test_a_draft_vocabulary_made_elsewhere(tmp_path: Path) -> None:
    ids = torch.arange(40) * 3
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    d2t = ids - torch.arange(40)
    for path in maps(tmp_path / "good", d2t, t2d):
        assert torch.equal(read_map(path, VOCAB), d2t)
        for vocab, said in ((90, "names target ids 0..117, the target knows 0..89"), (VOCAB + 1, f"a vocabulary of {VOCAB}")):
            with pytest.raises(DraftscopeError, match=said):
                read_map(path, vocab)
    for name, wrong, map_, said in (
        ("absolute", ids, t2d, "names target ids"), ("twice", torch.cat([d2t[:1], d2t[:-1] - 1]), t2d, "do not ascend"),
        ("other", d2t, ~t2d, "name different tokens"),
    ):
        for path in maps(tmp_path / name, wrong, map_):
            with pytest.raises(DraftscopeError, match=said):
                read_map(path, 150 if name == "absolute" else VOCAB)
    counts = torch.zeros(VOCAB)
    counts[ids[:30]] = 5
    assert coverage(d2t, counts, "map") == 1.0
    with pytest.raises(DraftscopeError, match=r"map: covers 0.0% of the data's .* 40 most frequent of them 100.0%"):
        coverage(d2t, counts.roll(1), "map")
    for name, content in (("none.safetensors", b"x"), ("text.txt", b"x"), ("array.npy", b"x")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DraftscopeError):
            read_map(tmp_path / name, VOCAB)
    with pytest.raises(DraftscopeError, match="does not exist"):
        read_map(tmp_path / "nowhere.pt", VOCAB)


def test_the_command_takes_a_map_and_refuses_anothers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_target(tmp_path / "target")
    draw = torch.Generator().manual_seed(1)
    samples = [Sample("", torch.randint(0, 40, (16,), generator=draw), torch.randn(16, 4, WIDTH, generator=draw),
                      torch.arange(16) >= 4, ("",) * 4, i) for i in range(5)]
    folder = write(tmp_path / "d", samples)
    for first, code in ((0, 0), (200, 3)):
        ids = torch.arange(first, first + 40)
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[ids] = True
        (path, _) = maps(tmp_path / f"map{first}", ids - torch.arange(40), t2d)
        out = tmp_path / f"run{first}"
        assert run(["train", str(folder), "--target", str(target), "--out", str(out), "--vocab-map", str(path), "--epochs", "1",
                    "--json", "-"]) == code
        said = capsys.readouterr()
        assert (json.loads(said.out)["coverage"] == 1.0) if code == 0 else "made for another tokenizer" in said.err
        assert (out / "training.safetensors").exists() == (code == 0)
