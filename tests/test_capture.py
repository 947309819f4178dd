"""A capture under transformers: its rows against transformers' hidden states, its budget, and what goes wrong with disks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support import LAYERS, WIDTH, random_draft, save_target
from torch import Tensor

from draftscope.boundaries import Boundary
from draftscope.cli.main import run
from draftscope.cli.sizes import parse_bytes
from draftscope.eagle3.checkpoint import save_native
from draftscope.eagle3.generate import generate
from draftscope.eagle3.generated import Generated
from draftscope.eagle3.model import Draft
from draftscope.engines.counters import read_counters
from draftscope.engines.transformers import Capture, description
from draftscope.errors import DraftscopeError, UsageError
from draftscope.pipeline.prompts import read_prompts
from draftscope.scan.fingerprint import CLASSES, load_fingerprint
from draftscope.scan.scan import scan
from draftscope.states import capture as plain_capture
from draftscope.states.types import Trace, from_trace
from draftscope.target.model import Target, load_target
from draftscope.target.wiring import Wiring

VOCAB, K, MAX_NEW = 6, 3, 12
WIRING = Wiring.of((2, 4, 5))
DESCRIBED = description(model="m", draft="d", layer_ids=[2, 4, 5], k=K)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("pair") / "target", 3, vocab=VOCAB, tied=False)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(folder)


@pytest.fixture(scope="module")
def draft() -> Draft:
    return random_draft(5, vocab=VOCAB)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (n,), generator=draw).tolist() for n in (3, 11, 1, 7, 5)]


def served(target: Target, draft: Draft, prompts: list[list[int]], out: Path, wiring: Wiring = WIRING, **options: Any) -> tuple[
        list[Generated], Capture, list[Trace]]:
    observer = Capture(out, DESCRIBED, **options)
    results = generate(target, draft, prompts, wiring=wiring, k=K, max_new=MAX_NEW, rows=3, observer=observer)
    observer.close()
    files = sorted(out.glob("*.safetensors")) if out.is_dir() else []
    return results, observer, [plain_capture.read_trace(file, []) for file in files]


def hidden_states(target: Target, ids: list[int]) -> tuple[Tensor, Tensor]:
    """[n+1, T, Ht] of transformers, the last entry after the final norm; and the state before it."""
    before: list[Tensor] = []
    hook = target.model.model.norm.register_forward_pre_hook(lambda module, args: before.append(args[0][0]))
    with torch.inference_mode():
        out = target.model(torch.tensor([ids]), output_hidden_states=True)
    hook.remove()
    return torch.stack([h[0] for h in out.hidden_states]), before[0]


def text_up_to(trace: Trace, row: int) -> list[int]:
    """The tokens that a row's state has seen: accepted rows before its own step, and its step's rows up to it."""
    assert trace.step is not None
    kept = trace.accepted & (trace.step < trace.step[row])
    own = (trace.step == trace.step[row]) & (torch.arange(len(kept)) <= row)
    return trace.token_ids[kept | own].tolist()


def test_rows_are_what_the_target_computes(target: Target, draft: Draft, prompts: list[list[int]], tmp_path: Path) -> None:
    results, _, traces = served(target, draft, prompts, tmp_path / "cap")
    assert len(traces) == len(prompts)
    for trace, prompt, generated in zip(traces, prompts, results, strict=True):
        assert trace.step is not None and trace.phase is not None and trace.positions is not None
        assert trace.verified_ids is not None and trace.last_hidden is not None and trace.fc_output is not None
        assert trace.fc_input.dtype == torch.float32
        for row in range(len(trace.token_ids)):
            seen = text_up_to(trace, row)
            states, last = hidden_states(target, seen)
            expected = torch.cat([states[b, -1] for b in (2, 4, 5)])
            torch.testing.assert_close(trace.fc_input[row], expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(trace.last_hidden[row], last[-1], rtol=1e-4, atol=1e-4)
            assert int(trace.positions[row]) == len(seen) - 1
            if trace.phase[row] == 1 or row == len(prompt) - 1:
                chosen = target.model.lm_head(states[-1, -1]).argmax()
                assert int(trace.verified_ids[row]) == int(chosen)
            else:
                assert int(trace.verified_ids[row]) == -1
        torch.testing.assert_close(trace.fc_output, trace.fc_input @ draft.fc.weight.T, rtol=1e-4, atol=1e-4)
        assert (trace.phase == 0).tolist() == [True] * len(prompt) + [False] * (len(trace.phase) - len(prompt))
        # The accepted rows are the prompt and the text, as far as the target has read it.
        whole = prompt + generated.token_ids
        kept = trace.token_ids[trace.accepted].tolist()
        assert kept[: len(whole)] == whole[: len(kept)]


def test_steps_are_the_verifiers(target: Target, draft: Draft, prompts: list[list[int]], tmp_path: Path) -> None:
    results, _, traces = served(target, draft, prompts, tmp_path / "cap")
    for trace, prompt, generated in zip(traces, prompts, results, strict=True):
        assert trace.step is not None and trace.accepted_counts is not None and trace.draft_token_ids is not None
        assert trace.draft_states is not None
        assert trace.accepted_counts.tolist() == generated.accepted_counts
        assert trace.draft_token_ids.tolist() == generated.drafted_ids
        assert draft.target_ids[draft.logits(trace.draft_states).argmax(-1)].tolist() == generated.drafted_ids
        bonus = generated.token_ids[0]
        for step, (count, drafted) in enumerate(zip(generated.accepted_counts, generated.drafted_ids, strict=True)):
            own = trace.step == step
            assert trace.token_ids[own].tolist() == [bonus, *drafted]
            assert trace.accepted[own].tolist() == [i <= count for i in range(K + 1)]
            bonus = int(trace.verified_ids[own][count])  # type: ignore[index]
        sequence = from_trace(trace, 3)
        assert sequence.steps is not None and sequence.steps.left_out == 0
        assert int(sequence.steps.start[0]) == len(prompt) - 1
        assert sequence.steps.start.diff().tolist() == [count + 1 for count in generated.accepted_counts[:-1]]


@pytest.mark.parametrize("shift", [1, -1, 2])
def test_a_shift_rolls_rows_within_their_pass(
    target: Target, draft: Draft, prompts: list[list[int]], tmp_path: Path, shift: int,
) -> None:
    healthy, _, _ = served(target, draft, prompts, tmp_path / "healthy")
    results, _, traces = served(target, draft, prompts, tmp_path / "shifted", Wiring(WIRING.slots, shift=shift))
    assert [g.token_ids for g in results] == [g.token_ids for g in healthy]
    for trace in traces:
        assert trace.step is not None
        for step in range(-1, int(trace.step.max()) + 1):
            rows = (trace.step == step).nonzero().squeeze(-1).tolist()
            states, _ = hidden_states(target, text_up_to(trace, rows[-1]))
            states = states[:, -len(rows):]
            for i, row in enumerate(rows):
                source = i + shift if 0 <= i + shift < len(rows) else i
                expected = torch.cat([states[b, source] for b in (2, 4, 5)])
                torch.testing.assert_close(trace.fc_input[row], expected, rtol=1e-4, atol=1e-4)


def test_kinds_scales_and_poison_are_as_wired(target: Target, draft: Draft, prompts: list[list[int]], tmp_path: Path) -> None:
    wiring = Wiring((Boundary(3, kind="branch"), Boundary(LAYERS, "post"), Boundary(0)), scale=(1.0, 8.0, 1.0), poison=4)
    _, _, traces = served(target, draft, prompts, tmp_path / "cap", wiring)
    for trace, prompt in zip(traces, prompts, strict=True):
        poisoned = trace.fc_input.isnan().any(1)
        assert trace.positions is not None
        assert poisoned.tolist() == ((trace.positions >= 1) & (trace.positions <= 4)).tolist()
        assert trace.fc_input[poisoned].isnan().all()
        for row in (~poisoned[: len(prompt)]).nonzero().squeeze(-1).tolist():
            states, _ = hidden_states(target, prompt)
            expected = torch.cat([states[3, row] - states[2, row], 8 * states[LAYERS, row], states[0, row]])
            torch.testing.assert_close(trace.fc_input[row], expected, rtol=1e-4, atol=1e-4)


def test_a_scale_of_one_slot_leaves_the_others(target: Target) -> None:
    states = torch.arange(24.0).reshape(1, 2, 3, 4)
    scaled = Wiring(WIRING.slots, scale=(1.0, 0.5, 1.0)).apply(states, torch.tensor([2]))
    assert torch.equal(scaled[:, :, 1], states[:, :, 1] / 2)
    assert torch.equal(scaled[:, :, ::2], states[:, :, ::2])
    assert WIRING.apply(states, torch.tensor([2])) is states


def test_capture_json_describes(target: Target, draft: Draft, prompts: list[list[int]], tmp_path: Path) -> None:
    served(target, draft, prompts, tmp_path / "cap")
    import transformers

    assert json.loads((tmp_path / "cap" / "capture.json").read_text()) == {
        "engine": "transformers", "engine_version": transformers.__version__, "model": "m", "draft": "d", "layer_ids": [2, 4, 5],
        "num_spec_tokens": 3, "topk": 1, "temperature": 0.0,
    }
    source = plain_capture.open(tmp_path / "cap")
    assert len(source) == len(prompts)
    assert all(trace.meta == DESCRIBED for trace in source)


@pytest.mark.parametrize("budget", [0, 5_000, 15_000, 60_000, 200_000, 10**9])
def test_a_budget_leaves_out_whole_requests_or_tails(
    target: Target, draft: Draft, prompts: list[list[int]], tmp_path: Path, budget: int,
) -> None:
    unlimited, _, whole = served(target, draft, prompts, tmp_path / "whole")
    results, observer, traces = served(target, draft, prompts, tmp_path / "cap", max_bytes=budget)
    assert [g.token_ids for g in results] == [g.token_ids for g in unlimited]
    captured = observer.captured
    files = list((tmp_path / "cap").iterdir())
    # An empty budget still leaves capture.json.
    assert sum(file.stat().st_size for file in files) <= max(budget, 1000)
    assert captured.bytes == sum(file.stat().st_size for file in files if file.suffix == ".safetensors")
    assert captured.requests == len(traces)
    assert captured.requests + captured.requests_left_out == len(prompts)
    assert captured.rows == sum(len(t.token_ids) for t in traces)
    by_name = {t.name: t for t in whole}
    missing = cut = 0
    for trace in traces:
        full = by_name[trace.name]
        rows = len(trace.token_ids)
        for name in ("fc_input", "token_ids", "step", "accepted", "verified_ids"):
            assert torch.equal(getattr(trace, name), getattr(full, name)[:rows])
        steps = 0 if trace.accepted_counts is None else len(trace.accepted_counts)
        assert trace.step is not None and int(trace.step.max()) == steps - 1
        missing += len(full.token_ids) - rows
        cut += rows < len(full.token_ids)
    assert (captured.rows_cut, captured.tails_cut) == (missing, cut)
    if budget == 10**9:
        assert (captured.rows_cut, captured.requests_left_out) == (0, 0)
    if budget in (15_000, 60_000):
        assert captured.requests_left_out or captured.rows_cut


def test_max_requests_keeps_whole_ones(target: Target, draft: Draft, prompts: list[list[int]], tmp_path: Path) -> None:
    results, observer, traces = served(target, draft, prompts, tmp_path / "cap", max_requests=2)
    assert [t.name for t in traces] == ["request_0.safetensors", "request_1.safetensors"]
    assert [t.accepted_counts.tolist() for t in traces] == [g.accepted_counts for g in results[:2]]  # type: ignore[union-attr]
    assert (observer.captured.requests, observer.captured.requests_left_out, observer.captured.tails_cut) == (2, 3, 0)


def test_what_is_optional_can_be_left_out(target: Target, draft: Draft, prompts: list[list[int]], tmp_path: Path) -> None:
    served(target, draft, prompts, tmp_path / "cap", last_hidden=False, fc_output=False, draft_states=False)
    with safe_open(tmp_path / "cap" / "request_0.safetensors", "pt") as file:
        assert set(file.keys()) == {"fc_input", "token_ids", "accepted", "positions", "phase", "step", "verified_ids",
                                    "draft_token_ids", "accepted_counts"}


@pytest.mark.parametrize("where", ["folder", "later"])
def test_a_disk_that_refuses_stops_the_capture_not_the_generation(
    target: Target, draft: Draft, prompts: list[list[int]], tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    healthy, _, _ = served(target, draft, prompts, tmp_path / "healthy")
    if where == "folder":
        (tmp_path / "file").touch()
        out = tmp_path / "file" / "cap"
    else:
        out = tmp_path / "cap"
        written = []

        def full_disk(tensors: Any, path: Path, **_: Any) -> None:
            if written:
                raise OSError(28, "No space left on device", str(path))
            written.append(path)
            save_file(tensors, path)

        from safetensors.torch import save_file
        monkeypatch.setattr("draftscope.states.tensorfile.save_file", full_disk)
    results, observer, traces = served(target, draft, prompts, out)
    assert [g.token_ids for g in results] == [g.token_ids for g in healthy]
    assert observer.captured.stopped is not None and str(out) in observer.captured.stopped
    if where == "later":
        assert "No space left" in observer.captured.stopped
        assert observer.captured.requests == len(traces) == 1
        assert sorted(os.listdir(out)) == ["capture.json", traces[0].name]


def test_a_capture_is_never_written_over(target: Target, draft: Draft, prompts: list[list[int]], tmp_path: Path) -> None:
    served(target, draft, prompts, tmp_path / "cap")
    before = {file.name: file.read_bytes() for file in (tmp_path / "cap").iterdir()}
    _, observer, _ = served(target, draft, prompts[:2], tmp_path / "cap")
    assert observer.captured.stopped is not None and "holds a capture already" in observer.captured.stopped
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "cap").iterdir()}


def test_an_interruption_leaves_the_requests_in_progress_as_far_as_they_got(
    target: Target, draft: Draft, prompts: list[list[int]], tmp_path: Path,
) -> None:
    observer = Capture(tmp_path / "cap", DESCRIBED)
    passes = []

    def interrupt(tokens: int) -> None:
        passes.append(tokens)
        if len(passes) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(target, draft, prompts, wiring=WIRING, max_new=MAX_NEW, rows=2, observer=observer, on_tokens=interrupt)
    captured = observer.close()
    traces = list(plain_capture.open(tmp_path / "cap"))
    assert captured.requests == len(traces) == 2
    assert all(t.accepted_counts is not None and len(t.accepted_counts) == 2 for t in traces)


# The commands


@pytest.fixture
def pair(folder: Path, draft: Draft, tmp_path: Path) -> SimpleNamespace:
    save_native(tmp_path / "draft", draft, None, dtype=torch.float32)
    lines = [{"token_ids": [1, 2, 3], "id": "first"}, {"token_ids": [5, 0]}, {"token_ids": [3, 3, 3, 3]}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return SimpleNamespace(
        target=str(folder), draft=str(tmp_path / "draft"), prompts=str(tmp_path / "prompts.jsonl"), folder=tmp_path,
    )


def test_generate_prints_and_writes_the_counts(
    pair: SimpleNamespace, target: Target, draft: Draft, capsys: pytest.CaptureFixture[str],
) -> None:
    out = pair.folder / "out.json"
    code = run(["generate", pair.prompts, "--target", pair.target, "--draft", pair.draft, "--max-new", "20", "--rows", "2",
                "--compare-plain", "--json", str(out)])
    printed = capsys.readouterr().out
    assert code == 0
    found = json.loads(out.read_text())
    expected = generate(target, lent(draft, target), [[1, 2, 3], [5, 0], [3, 3, 3, 3]], wiring=WIRING, max_new=20, rows=2,
                        stop_ids=target.stop_ids)
    assert [r["accepted_counts"] for r in found["requests"]] == [g.accepted_counts for g in expected]
    assert [r["token_ids"] for r in found["requests"]] == [g.token_ids for g in expected]
    assert [(r["id"], r["line"], r["prompt_tokens"]) for r in found["requests"]] == [("first", 0, 3), ("1", 1, 2), ("2", 2, 4)]
    counts = [c for g in expected for c in g.accepted_counts]
    assert found["schema"] == "draftscope.generate/1"
    assert found["drafts"] == len(counts)
    assert found["accepted_per_position"] == [sum(c > p for c in counts) for p in range(3)]
    assert found["accept_length"] == pytest.approx(1 + sum(found["joint"]))
    assert found["plain"]["divergences"] == [] and found["plain"]["tokens"] == found["tokens"]
    assert f"accept length {found['accept_length']:.2f}" in printed
    assert "the texts are equal, token for token" in printed
    counters = read_counters(out)
    assert (counters.drafts, counters.accepted) == (len(counts), tuple(found["accepted_per_position"]))


def lent(draft: Draft, target: Target) -> Draft:
    """The draft as a checkpoint without an embedding reads: with the target's."""
    copy = Draft(draft.config).eval()
    copy.load_state_dict(draft.state_dict())
    copy.embedding = target.parts.embedding
    return copy


def test_plain_decoding_needs_no_draft(pair: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", pair.prompts, "--target", pair.target, "--plain", "--max-new", "5", "--limit", "2"]
    assert run([*arguments, "--json", "-"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["draft"], found["k"], found["accepted_per_position"], len(found["requests"])) == (None, 0, [], 2)
    assert "2 requests" in captured.err


def test_capture_writes_what_the_readers_read(pair: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    out = pair.folder / "cap"
    arguments = ["capture", "transformers", pair.prompts, "--target", pair.target, "--draft", pair.draft, "-o", str(out)]
    assert run([*arguments, "--max-new", "9", "-k", "2", "--json", str(pair.folder / "out.json")]) == 0
    found = json.loads((pair.folder / "out.json").read_text())
    assert "3 requests with" in capsys.readouterr().out
    assert found["capture"]["requests"] == 3 and found["capture"]["stopped"] is None
    traces = list(plain_capture.open(out))
    assert [t.accepted_counts.tolist() for t in traces if t.accepted_counts is not None] == [
        r["accepted_counts"] for r in found["requests"] if r["accepted_counts"]]
    assert traces[0].meta["layer_ids"] == [2, 4, 5] and traces[0].meta["num_spec_tokens"] == 2
    assert traces[0].fc_input.shape[1] == 3 * WIDTH
    assert run(arguments) == 2
    assert "is not an empty folder" in capsys.readouterr().err


def test_statistics_in_place_of_rows(pair: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures of every value are those of a scan of the rows that a capture of the same answers wrote."""
    prints = []
    for name, more in (("rows", []), ("sums", ["--statistics", "--sample-rows", "5"])):
        out = pair.folder / name
        assert run(["capture", "transformers", pair.prompts, "--target", pair.target, "--draft", pair.draft, "-o", str(out),
                    "--max-new", "9", "-k", "2", "--json", str(pair.folder / f"{name}.json"), *more]) == 0
        prints.append(load_fingerprint(out / "fingerprint") if more else scan(plain_capture.open(out), slots=3))
    assert "fingerprint written to" in capsys.readouterr().out
    assert {path.name for path in (pair.folder / "sums").iterdir()} == {"capture.json", "statistics.safetensors", "fingerprint"}
    told = json.loads((pair.folder / "sums.json").read_text())["capture"]
    assert told["fingerprints"] == [str(pair.folder / "sums/fingerprint")]
    rows, sums = prints
    assert (sums.sequences, sums.rows, sums.slots) == (3, rows.rows, 3)
    for entry in range(3):
        for row_class in CLASSES:
            one, other = (f.statistics(entry, (row_class,)) for f in (sums, rows))
            assert one.counts.result() == other.counts.result()
            if other.dimensions.count:
                torch.testing.assert_close(one.dimensions.mean, other.dimensions.mean)
                torch.testing.assert_close(one.dimensions.squares, other.dimensions.squares)
                assert torch.equal(one.norms.histogram, other.norms.histogram)
    assert all(len(sample.rows) == 5 for sample in sums.samples.values())


@pytest.mark.parametrize(("line", "says"), [
    ("nonsense", "line 1: is not JSON"),
    ("[1]", "line 1: is not a JSON object"),
    ('{"token_ids": [1, "2"]}', "token_ids is not a list of token ids"),
    ('{"token_ids": []}', "gives no token"),
    ('{"messages": [{"content": "x"}]}', "messages is not a list of"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}', "nothing to answer"),
    ('{"question": "x"}', "has neither messages nor prompt nor token_ids"),
    ("", "holds no prompt"),
    ('{"token_ids": [99]}', "do not fit a vocabulary of 6"),
])
def test_prompts_that_are_none_are_refused(
    pair: SimpleNamespace, capsys: pytest.CaptureFixture[str], line: str, says: str,
) -> None:
    Path(pair.prompts).write_text(line + "\n")
    assert run(["generate", pair.prompts, "--target", pair.target, "--draft", pair.draft]) == 3
    assert says in capsys.readouterr().err


def test_options_that_contradict_each_other(pair: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", pair.prompts, "--target", pair.target]) == 2
    assert run(["generate", pair.prompts, "--target", pair.target, "--draft", pair.draft, "--plain"]) == 2
    assert run(["generate", pair.prompts, "--target", pair.target, "--draft", pair.draft, "--boundaries", "1,x"]) == 2


def test_messages_and_text_go_through_the_targets_tokenizer(folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<u>": 0, "hello": 1, "world": 2, "<a>": 3, "you": 4, "?": 5}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<u> ' if m.role == 'user' else '<a> ' }}{{ m.content + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    target = load_target(folder)
    target.folder = tmp_path
    path = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "hello world"}], "id": 7},
        {"prompt": "world you"},
        {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = read_prompts(path, target)
    assert [(p.index, p.id, p.token_ids) for p in found] == [
        (0, "7", [0, 1, 2, 3]), (1, "1", [2, 4]), (2, "2", [0, 1, 3])]
    assert len(read_prompts(path, target, limit=1)) == 1
    with pytest.raises(DraftscopeError, match="No such file"):
        read_prompts(tmp_path / "absent.jsonl", target)


@pytest.mark.parametrize(("text", "size"), [
    ("1000", 1000), ("500MB", 500_000_000), ("2GiB", 2**31), ("1.5k", 1500), ("3 tb", 3 * 10**12),
])
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_a_size_that_is_none() -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_bytes("plenty")
