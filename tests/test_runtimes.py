"""Wrong runtimes of the draft: served by the drafter as they would be by hand, replayed as served, and told from each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from serving import K, Server, served, small_draft
from tiny import tiny_rig
from torch import Tensor

from draftscope.diagnose.case import Inputs
from draftscope.diagnose.cutting import head
from draftscope.diagnose.likeness import Recorded, likeness
from draftscope.diagnose.run import Examination, diagnose
from draftscope.diagnose.shape import by_context
from draftscope.diagnose.verdict import Judged, _weigh
from draftscope.eagle3.acceptance import Likelihood
from draftscope.eagle3.checkpoint import build_draft
from draftscope.eagle3.drafter import Drafter
from draftscope.eagle3.habits import Shared, new_drafter
from draftscope.eagle3.model import Draft
from draftscope.eagle3.reading import Reading, Runtime
from draftscope.eagle3.replay import replay
from draftscope.eagle3.replayed import Outcome, Replay, Replayed
from draftscope.eagle3.sampling import Sampling
from draftscope.eagle3.tree import TreeShape
from draftscope.engines.counted import Counters
from draftscope.errors import UsageError
from draftscope.faults import fault
from draftscope.faults.base import Suspicion, verdict_of
from draftscope.faults.facts_runtime import LengthFacts, Likeness, Part, RuntimeFacts, SamplerFacts, ShapeFacts, Stretch, Tried
from draftscope.faults.measurements import GateFacts, Measurements, RungFacts
from draftscope.faults.plant import Plant
from draftscope.faults.rig import Rig
from draftscope.faults.runtimes import runs_otherwise
from draftscope.findings import Diagnosis, Effect

HEALTHY = Plant.healthy((2, 4, 5))


BY_HAND = {
    "ahead": Runtime(ahead=1), "behind": Runtime(ahead=-1), "still": Runtime(still=True), "after": Runtime(after_prompt=1),
    "restart": Runtime(restart=True), "padded": Runtime(padded_to=16), "table": Runtime(table=7), "target": Runtime(fed="target"),
    "target first": Runtime(fed="target", fed_first=True), "previous": Runtime(fed="previous"), "branch": Runtime(fed="branch"),
    "warm": Runtime(warm=3), "unrefreshed": Runtime(unrefreshed=0), "later": Runtime(unrefreshed=2),
    "unrewound": Runtime(unrewound="all"), "counted": Runtime(unrewound="all", counted=True), "chunk": Runtime(chunk=3),
}


class ByHand(Server):
    """The same habits token by token, over lists of keys that grow and are cut: no slots, no batches, no masks."""

    def __init__(self, draft: Draft, habits: Runtime) -> None:
        super().__init__(draft)
        self.habits, self.round, self.extra, self.prompt = habits, 0, 0, 0
        self.drafted: list[tuple[Tensor, Tensor]] = []

    def position(self, place: int) -> Tensor:
        """Of what stands at a place of the text, as this engine counts."""
        habits = self.habits
        counted = place + (self.extra if habits.counted else 0)
        if place >= self.prompt:
            counted += habits.after_prompt - (self.prompt if habits.restart else 0)
            counted += (-self.prompt) % habits.padded_to if habits.padded_to else 0
        return torch.tensor([[counted if habits.table is None else min(counted, habits.table - 1)]])

    def run(self, state: Tensor, token: int, position: Tensor) -> tuple[Tensor, Tensor]:
        embeds = self.draft.embed(torch.tensor([[token]]))
        stream, added = self.draft.halves(state[None, None], embeds, position, self.cache)
        return stream[0, 0] + added[0, 0], added[0, 0]

    @torch.no_grad()
    def propose(self, features: Tensor, tokens: Tensor, t: int, k: int) -> list[int]:
        draft, habits = self.draft, self.habits
        first = self.rows
        if not first:
            self.prompt = t + 1
        elif habits.unrefreshed is not None and self.round > habits.unrefreshed:
            for key, value in self.drafted[: t - first]:
                self.cache.k[0].append(key)
                self.cache.v[0].append(value)
                first += 1
        for row in range(first, t + 1):
            if row < self.prompt - (habits.warm or self.prompt):
                continue
            chunk_ends = habits.chunk and row + 1 < self.prompt and (row + 1) % habits.chunk == 0
            given = draft.project(features[row])
            out, added = self.run(given, int(tokens[self.prompt - 1 if chunk_ends else row + 1]), self.position(row))
        self.rows, length = t + 1, len(self.cache.k[0])
        self.states, found = [out], [int(draft.target_ids[draft.logits(out).argmax()])]
        for step in range(1, k):
            fed = self.states[-1]
            if not (habits.fed_first and self.round):
                fed = {"own": fed, "target": given if step == 1 else fed, "previous": self.states[max(step - 2, 0)],
                       "branch": added}[habits.fed]
            out, added = self.run(fed, found[-1], self.position(t + (1 if habits.still else step)) + habits.ahead)
            self.states.append(out)
            found.append(int(draft.target_ids[draft.logits(out).argmax()]))
        self.drafted = list(zip(self.cache.k[0][length:], self.cache.v[0][length:], strict=True))
        self.round += 1
        if habits.unrewound == "all":
            self.extra += k - 1
        else:
            self.cache.cut(length)
        return found


@pytest.mark.parametrize("name", BY_HAND)
def test_the_drafter_runs_a_habit_as_it_would_be_run_by_hand(name: str) -> None:
    draft = small_draft()
    habits = BY_HAND[name]
    sequences = [served(draft, seed, prompt=5 + seed, server=ByHand(draft, habits)) for seed in range(3)]
    recorded = Recorded(draft, sequences, None, K, None)
    other = likeness(recorded.rounds(draft), K)
    found = likeness(recorded.rounds(draft.view(habits, {})), K)
    assert (found.rounds, found.states, found.ids) == (24, 1.0, 1.0) and max(found.errors) < 1e-9
    assert other.states is not None and other.states < 1.0


def test_hidden_rows_change_drafted_steps_alone() -> None:
    draft = small_draft()
    recorded = Recorded(draft, [served(draft, seed) for seed in range(3)], None, K, None)
    for habits in (Runtime(blind_to_prompt=True), Runtime(blind_to_drafted=True)):
        found = likeness(recorded.rounds(draft.view(habits, {})), K)
        first, second, third = found.off
        assert (first, second > 0, third > 0) == (0.0, habits.blind_to_prompt, True), habits


def test_rows_that_see_each_other_count_in_deeper_drafts_alone() -> None:
    for layers, alike in ((1, True), (2, False)):
        draft = small_draft(layers=layers)
        found = Recorded(draft, [served(draft, 1)], None, K, None).rounds(draft.view(Runtime(two_way=True), {}))
        assert (likeness(found, K).off[0] == 0) is alike


def test_a_prefix_is_shared_in_whole_blocks_and_never_to_the_last_row() -> None:
    shared = Shared(4)
    asked = [shared.rows(list(range(10))), shared.rows([*range(9), 77]), shared.rows(list(range(8))), shared.rows([9, 1])]
    assert asked == [0, 8, 4, 0]
    assert Shared(0).rows([1, 2]) == 0


def test_replay_of_a_wrong_runtime_walks_and_steps() -> None:
    draft = small_draft()
    habits = Runtime(fed="target")
    sequences = [served(draft, seed, server=ByHand(draft, habits)) for seed in range(4)]
    found = replay(draft.view(habits, {}), sequences, k=K)
    gate = found.gate()
    assert gate is not None and (gate.share, gate.steps, gate.left_out) == (1.0, 32, 0)
    right = replay(draft, sequences, k=K).gate()
    assert right is not None and right.share < 1
    walked = found.sequences[0].walk
    assert walked is not None and list(walked.rows[1:]) == list(walked.rows[:-1] + walked.accepted[:-1] + 1)
    assert found.rung().nll is None


def test_trees_refuse_habits_that_are_not_known_of_them() -> None:
    draft = small_draft()
    with pytest.raises(UsageError, match="unrefreshed"):
        new_drafter(draft.view(Runtime(unrefreshed=0), {}), 4, 1, 40, shape=TreeShape(2, 2, 5))
    assert type(new_drafter(draft, 3, 1, 40)) is Drafter


# -- rules, on figures ------------------------------------------------------------------------------------------------------

EXACT = Likeness(40, 1.0, 1.0, 1.0, (1e-7, 1e-7, 1e-7), (0.0, 0.0, 0.0), 0.0)
OFF = Likeness(40, 0.6, 0.7, 0.4, (1e-7, 0.5, 0.5), (0.0, 1.0, 1.0), 0.6)
COUNTS = Likeness(40, 0.97, None, None)
PASSED = GateFacts(1.0, 40, 0, 0)


def explained(*several: tuple[tuple[str, str], ...], as_read: Likeness = OFF, like: Likeness = EXACT) -> Measurements:
    """Measurements in which these combinations of (fault, trial) explain the engine equally well."""
    tried = [Tried(tuple(n for _, n in one), tuple(f for f, _ in one), tuple(f"does {n}" for _, n in one),
                   tuple((n.partition("=")[0],) for _, n in one), like, PASSED) for one in several]
    return Measurements(gate=GateFacts(0.6, 40, 0, 0), runtime=RuntimeFacts(as_read, 50, explains=tried))


def suspicions(m: Measurements) -> dict[str, Suspicion]:
    names = ("recur-state", "pos-id", "rope", "attn-mask", "draft-kv", "ctx-limit")
    return {s.fault: s for name in names for s in fault(name).recognise(m)}


def test_one_trial_that_explains_alone_is_proven_and_undone() -> None:
    found = suspicions(explained((("pos-id", "ahead=+1"),), (("pos-id", "ahead=+2"),)))
    assert list(found) == ["pos-id"]
    one = found["pos-id"]
    assert (one.strength, one.undo.habits, one.runtime) == ("proven", ("ahead",), True)
    assert "ahead=+2" in one.caveats[0] and "0.6" in one.evidence[0].result + str(one.evidence[0].figures)


def test_trials_of_two_faults_that_explain_as_well_prove_neither() -> None:
    found = suspicions(explained((("pos-id", "ahead=+1"),), (("recur-state", "fed=target"),)))
    assert {name: one.strength for name, one in found.items()} == {"pos-id": "supported", "recur-state": "supported"}
    assert all("tell them apart" in one.caveats[0] for one in found.values())


def test_counts_alone_prove_nothing_where_few_of_them_differ() -> None:
    near = explained((("draft-kv", "warm=1"),), as_read=COUNTS, like=replace(COUNTS, counts=1.0))
    assert suspicions(near)["draft-kv"].strength == "supported"
    far = explained((("draft-kv", "warm=1"),), as_read=replace(COUNTS, counts=0.6), like=replace(COUNTS, counts=1.0))
    assert suspicions(far)["draft-kv"].strength == "proven"


def test_two_at_once_are_both_named() -> None:
    found = suspicions(explained((("rope", "rope_parameters=x"), ("recur-state", "fed=branch"))))
    assert {name: one.strength for name, one in found.items()} == {"recur-state": "proven", "rope": "proven"}
    assert found["rope"].undo.unset == ("rope_parameters",) and found["recur-state"].undo.habits == ("fed",)


SAMPLED = SamplerFacts(
    temperature=1.0, doubted=None, drafts=600, best=0.5, kept=0.65, expected_rejection=0.65, expected_equality=0.4,
    for_rejection=-200.0, for_equality=-300.0, impossible=0, overlap=0.66, draft_temperature=1.0, temperature_gain=0.0,
    over_chance=900.0, length=2.3, length_rejection=2.3, length_overlap=2.35)
STRICT = replace(SAMPLED, kept=0.4, for_rejection=-900.0, for_equality=-350.0, impossible=80, length=1.6)


@pytest.mark.parametrize(("facts", "strength"), [
    (SAMPLED, None), (STRICT, "proven"), (replace(STRICT, doubted=0.7), None), (replace(STRICT, kept=0.55), None),
    (replace(SAMPLED, best=1.0, kept=0.55, length=2.0), "supported"), (replace(SAMPLED, best=1.0, length=2.3), None),
    (replace(SAMPLED, draft_temperature=0.5, temperature_gain=90.0), "supported"),
    (replace(SAMPLED, draft_temperature=3.3, temperature_gain=90.0, over_chance=-40.0), None),  # another head's, at any
])
def test_what_stood_tells_the_rule(facts: SamplerFacts, strength: str | None) -> None:
    found = fault("sampler").recognise(Measurements(sampler=facts))
    assert [one.strength for one in found] == ([] if strength is None else [strength])


# -- whole diagnoses --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rig() -> Rig:
    return tiny_rig(10, 40)


def examine(rig: Rig, plant: Plant, folder: Path, *without: str) -> Diagnosis:
    """Diagnosed with all files of a run, the capture stripped of some of its tensors."""
    run = rig.run(plant, folder)
    for path in run.serve.glob("*.safetensors") if without else ():
        with safe_open(path, "pt") as opened:
            kept = {name: opened.get_tensor(name) for name in opened.keys() if name not in without}  # noqa: SIM118
        save_file(kept, path)
    return diagnose(Inputs(train=run.train, serve=run.serve, draft=run.draft, target=rig.target.folder))


def test_two_at_once_in_the_engine(rig: Rig, tmp_path: Path) -> None:
    found = examine(rig, runs_otherwise(HEALTHY, fed="target", ahead=1), tmp_path)
    assert {f.fault for f in found.findings if f.strength == "proven"} == {"recur-state", "pos-id"}


def test_a_wrong_layer_beside_a_cold_cache(rig: Rig, tmp_path: Path) -> None:
    plant = fault("layer-offset").make(runs_otherwise(HEALTHY, warm=1), fault("layer-offset").variants[0])
    found = examine(rig, plant, tmp_path)
    assert {f.fault for f in found.findings if f.strength == "proven"} == {"layer-offset", "draft-kv"}


@pytest.mark.parametrize("without", [("draft_states",), ("draft_states", "fc_output", "draft_token_ids")], ids=["ids", "counts"])
def test_without_draft_states_nothing_else_is_proven(rig: Rig, tmp_path: Path, without: tuple[str, ...]) -> None:
    found = examine(rig, runs_otherwise(HEALTHY, fed="target"), tmp_path, *without)
    assert found.verdict == "runtime"
    assert found.findings[0].fault == "recur-state"
    assert {f.fault for f in found.findings if f.strength == "proven"} <= {"recur-state"}


def test_drawn_drafts_of_a_right_engine_raise_no_alarm(rig: Rig, tmp_path: Path) -> None:
    found = examine(rig, replace(HEALTHY, sampling=Sampling(1.0, draft="probabilistic")), tmp_path)
    assert (found.findings, found.verdict) == ([], "clean"), found.next


@pytest.mark.parametrize("warm", [0.35, 1.7, 3.0])
def test_drafts_at_another_temperature_are_not_proven_another_heads(rig: Rig, tmp_path: Path, warm: float) -> None:
    """Far above the request's they are seldom the draft's best, as those of another head."""
    found = examine(rig, replace(HEALTHY, sampling=Sampling(1.0, draft="probabilistic", draft_temperature=warm)), tmp_path)
    assert found.findings[0].fault == "sampler"
    assert {f.fault for f in found.findings if f.strength == "proven"} <= {"sampler"}


def test_drawn_drafts_do_not_hide_a_wrong_state(rig: Rig, tmp_path: Path) -> None:
    plant = runs_otherwise(replace(HEALTHY, sampling=Sampling(1.0, draft="probabilistic")), after_prompt=2)
    found = examine(rig, plant, tmp_path)
    assert [f.fault for f in found.findings if f.strength == "proven"] == ["pos-id"]


# -- shapes, recorded inputs, other precisions ------------------------------------------------------------------------------


def counted(accepted: tuple[int, ...], steps: int = 400) -> Measurements:
    return Measurements(counters=Counters(steps, accepted, sum(accepted), "a page"))


@pytest.mark.parametrize(("m", "suspected"), [
    (counted((280, 12, 0)), True), (counted((280, 190, 120)), False), (counted((40, 2, 0)), False),
    (counted((28, 1, 0), 40), False),
])
def test_a_curve_that_dies_after_its_first_position_is_suspect_at_most(m: Measurements, suspected: bool) -> None:
    found = fault("recur-state").recognise(m)
    assert [one.strength for one in found] == ["suspected"] * suspected


def test_a_draft_that_never_learned_a_second_step_is_not_suspect() -> None:
    m = counted((280, 12, 0))
    m.rungs["trained"] = RungFacts(1.8, [0.7, 0.05, 0.0], 1.0, 1.0, 100)
    assert not fault("recur-state").recognise(m)
    m.rungs["trained"] = RungFacts(2.3, [0.7, 0.45, 0.2], 1.0, 1.0, 100)
    assert fault("recur-state").recognise(m)


def shaped(first: float, later: float, short: float, long: float, recorded: tuple[float, ...]) -> Measurements:
    parts = [Part(name, 50, share, 0.8, 0.8) for name, share in
             (("first round", first), ("later rounds", later), ("context up to 60", short), ("context beyond 60", long))]
    return Measurements(gate=GateFacts(0.8, 100, 0, 0), runtime=RuntimeFacts(OFF, tried=52),
                        shape=ShapeFacts(tuple(parts), (0.8, 0.8, 0.8), recorded))


@pytest.mark.parametrize(("m", "name"), [
    (shaped(0.8, 0.8, 0.8, 0.8, (0.8, 0.2, 0.1)), "recur-state"), (shaped(1.0, 0.7, 0.8, 0.8, (0.8, 0.75, 0.7)), "draft-kv"),
    (shaped(0.9, 0.8, 1.0, 0.6, (0.8, 0.75, 0.7)), "attn-mask"), (shaped(0.8, 0.8, 0.8, 0.8, (0.8, 0.75, 0.7)), None),
])
def test_where_nothing_explains_the_shape_is_a_hint(m: Measurements, name: str | None) -> None:
    assert {fault: one.strength for fault, one in suspicions(m).items()} == ({} if name is None else {name: "suspected"})
    m.gate_with["d2t=zero"] = PASSED
    assert not suspicions(m)


def test_tokens_given_at_chunk_ends_are_read_from_the_capture(rig: Rig, tmp_path: Path) -> None:
    run = rig.run(runs_otherwise(HEALTHY, chunk=16), tmp_path)
    for path in run.serve.glob("*.safetensors"):
        tensors = load_file(path)
        accepted = tensors["accepted"].bool()
        ids, prompt = tensors["token_ids"], int((tensors["phase"] == 0).sum())
        given = tensors["verified_ids"].clone()
        given[: prompt - 1] = ids[1:prompt]
        given[15 : prompt - 1 : 16] = ids[prompt - 1]
        save_file({**tensors, "draft_input_ids": torch.where(accepted, given, -1).clamp(min=0)}, path)
    found = diagnose(Inputs(train=run.train, serve=run.serve, draft=run.draft, target=rig.target.folder))
    assert [(f.fault, f.strength) for f in found.findings] == [("draft-kv", "proven")]
    assert found.findings[0].evidence[0].figures["chunk"] == 16
    assert any("in 100.0% of" in step for step in found.steps if step.startswith("gate"))


def test_a_long_sequence_keeps_its_inputs_and_trees_when_cut() -> None:
    whole = served(small_draft(), 1)
    assert whole.steps is not None
    parents = torch.tensor([[-1, 0, 1]]).expand(len(whole.steps.start), -1)
    whole = replace(whole, inputs=whole.token_ids[1:] + 0, steps=replace(whole.steps, parents=parents))
    cut = head(whole, 12)
    assert cut.rows == 12 and cut.steps is not None and cut.steps.parents is not None
    assert torch.equal(cut.draft_inputs(11), whole.token_ids[1:12])
    assert len(cut.steps.start) == len(cut.steps.parents) == int((whole.steps.start < 11).sum())


def test_a_right_engine_in_bfloat16_raises_no_alarm(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(*given: object) -> Draft:
        draft = build_draft(*given).bfloat16()  # type: ignore[arg-type]
        assert draft.embedding is not None
        draft.embedding = draft.embedding.bfloat16()
        return draft

    monkeypatch.setattr("draftscope.faults.rig.build_draft", rounded)
    found = examine(rig, HEALTHY, tmp_path)
    assert found.findings == [], [(f.fault, f.strength, f.says) for f in found.findings]


def test_trees_of_a_right_engine_and_of_one_at_wrong_positions(rig: Rig, tmp_path: Path) -> None:
    trees = replace(rig, tree=TreeShape(3, 3, 8), prompts=rig.prompts[:6])
    assert examine(trees, HEALTHY, tmp_path / "right").findings == []
    found = examine(trees, runs_otherwise(HEALTHY, ahead=-1), tmp_path / "wrong")
    assert [f.fault for f in found.findings if f.strength == "proven"] == ["pos-id"]


def test_a_fall_beyond_the_training_length_is_named_as_what_it_is() -> None:
    within, beyond = Stretch(0, 512, 300, 0.75, 2.8), Stretch(512, 4000, 300, 0.4, 1.6)
    m = Measurements(gate=PASSED, lengths=LengthFacts(512, within, beyond, (within, beyond)))
    (found,) = fault("ctx-limit").recognise(m)
    assert (found.strength, found.recovery, found.runtime) == ("supported", "needs-retraining", False)
    assert "not at fault" in found.says
    assert verdict_of(fault("ctx-limit"), found) == "training"
    few, near = replace(beyond, rounds=20), replace(beyond, first=0.7)
    for gate, other in ((GateFacts(0.6, 100, 0, 0), beyond), (PASSED, near), (PASSED, few)):
        assert not fault("ctx-limit").recognise(replace(m, gate=gate, lengths=LengthFacts(512, within, other, ())))


def test_counts_are_pooled_by_the_position_that_their_round_starts_from() -> None:
    sequences = [served(small_draft(), seed) for seed in range(3)]
    facts = by_context(sequences, 12)
    assert facts is not None and facts.within is not None and facts.beyond is not None
    starts = torch.cat([s.steps.start for s in sequences if s.steps is not None])
    accepted = torch.cat([s.steps.accepted for s in sequences if s.steps is not None])
    assert facts.beyond.length == pytest.approx(1 + float(accepted[starts >= 12].double().mean()))
    assert facts.within.rounds + facts.beyond.rounds == sum(one.rounds for one in facts.stretches) == len(starts)


# -- what an engine does against what the draft likes ------------------------------------------------------------------------


def walked(accepted: list[list[int]]) -> Replay:
    """A replay of own text in which walks accepted so many tokens, sequence by sequence."""
    def one(i: int, lead: list[int]) -> Replayed:
        rows = np.arange(len(lead))
        outcome = Outcome(rows, np.array(lead), np.full(len(lead), K), K)
        return Replayed(f"hs_{i}", "own", 1.0, len(lead), "pre", outcome, outcome, None, Likelihood())
    return Replay(K, [one(i, lead) for i, lead in enumerate(accepted)])


def examined(better: bool | None) -> Examination:
    """An engine that runs drafted steps one position too high; on its training states the draft does better so, or does not."""
    likes, dislikes = walked([[2, 2, 3]] * 12), walked([[1, 1, 2]] * 12)
    by_ahead = {1: likes if better else dislikes, 0: dislikes if better else likes}
    ladder = SimpleNamespace(case=SimpleNamespace(train=None if better is None else True, heldout=None),
                             trained=lambda repair: by_ahead[repair.reading.runtime.ahead])
    return SimpleNamespace(m=Measurements(), ladder=ladder, as_read=Reading(runtime=Runtime(ahead=1)), rungs={"trained": None},  # type: ignore[return-value]
                           case=SimpleNamespace(inputs=SimpleNamespace(seed=0)))


@pytest.mark.parametrize(("better", "strength"), [(False, "proven"), (True, "suspected"), (None, "suspected")])
def test_an_engine_that_a_draft_likes_is_only_right_if_the_draft_was_trained_so(better: bool | None, strength: str) -> None:
    trial = Tried(("ahead=+1",), ("pos-id",), ("runs draft steps one too high",), (("ahead",),), EXACT, PASSED)
    (found,) = fault("pos-id").recognise(Measurements(gate=PASSED, runtime=RuntimeFacts(OFF, tried=9, explains=[trial])))
    worse = Effect(k=K, length_now=3.2, length_if_fixed=3.0, gain=-0.2, gain_interval=(-0.3, -0.1))
    _weigh(Judged(found, worse), examined(better))
    assert (found.strength, len(found.caveats)) == (strength, 1)
