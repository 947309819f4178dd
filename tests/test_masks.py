"""Loss masks and renderings against turns in the token ids: what is wrong is told, healthy data of any shape is not."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tiny import tiny_conversations, tiny_prompts, tiny_target

from draftscope.diagnose.case import Text
from draftscope.diagnose.framing import template_facts
from draftscope.diagnose.masks import mask_facts
from draftscope.diagnose.operation import _line_by_line, _missing
from draftscope.faults import fault
from draftscope.faults.facts_data import MaskFacts, OpsFacts, TemplateFacts
from draftscope.faults.measurements import Measurements, SideFacts
from draftscope.pipeline.turns import Markers, kinds, of_requests, of_template, turns

BOS, EOT, NEWLINE, ASSISTANT, USER, SYSTEM, START, THINK, UNTHINK = range(9)
MARKS = Markers(opening=(START, ASSISTANT, NEWLINE), closing=frozenset({EOT}), separators=(NEWLINE,),
                others=((START, USER, NEWLINE),), once=((START, SYSTEM, NEWLINE),))
Pair = tuple[list[int], list[int]]


def words(draw: random.Random, low: int, high: int) -> list[int]:
    return [draw.randrange(20, 400) for _ in range(draw.randint(low, high))]


def conversation(draw: random.Random, turns: int = 1, *, answers: tuple[int, int] = (6, 30), opening: list[int] | None = None,
                 cut: int | None = None, trailing: bool = False) -> Pair:
    ids: list[int] = []
    mask: list[int] = []
    for turn in range(turns):
        prompt = [START, USER, NEWLINE, *words(draw, 3, 20), EOT, NEWLINE, START, ASSISTANT, NEWLINE]
        answer = [*(opening or []), *words(draw, *answers), EOT]
        ids += prompt + answer
        mask += [0] * len(prompt) + [1] * len(answer)
        if turn < turns - 1 or trailing:
            ids.append(NEWLINE)
            mask.append(0)
    return ids[:cut], mask[:cut]


def texts(pairs: list[Pair]) -> list[Text]:
    return [Text(f"hs_{i}", i, torch.tensor(ids), torch.tensor(mask, dtype=torch.bool)) for i, (ids, mask) in enumerate(pairs)]


def measured(pairs: list[Pair], markers: Markers | None = MARKS) -> Measurements:
    m = Measurements()
    m.data.mask = mask_facts(texts(pairs), markers)
    m.train = SideFacts("train", len(pairs), sum(len(ids) for ids, _ in pairs), masked=len(pairs),
                        empty=sum(not any(mask) for _, mask in pairs), answer_tokens=sum(sum(mask) for _, mask in pairs))
    return m


def told(m: Measurements) -> list[tuple[str, str]]:
    return [(s.fault, s.strength) for name in ("lossmask-empty", "lossmask-span") for s in fault(name).recognise(m)]


def last_turn_alone(pair: Pair) -> Pair:
    ids, mask = pair
    edges = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
    return ids, [on if i >= edges[-1] else 0 for i, on in enumerate(mask)]


def after_think(pair: Pair) -> Pair:
    """The mask begins after an empty thinking block that the template writes."""
    ids, mask = pair
    return ids, [0 if on and ids[i] in (THINK, UNTHINK) else on for i, on in enumerate(mask)]


def specforge(pair: Pair) -> Pair:
    """Up to the text's end after the last answer, its separators included."""
    ids, mask = pair
    return ids, [*mask[:-1], 1]


HEALTHY: dict[str, Callable[[random.Random], Pair]] = {
    "one turn": lambda draw: conversation(draw),
    "many turns": lambda draw: conversation(draw, draw.randint(2, 6)),
    "one-token answers": lambda draw: conversation(draw, answers=(1, 1)),
    "no words but the closing": lambda draw: conversation(draw, 2, answers=(0, 1)),
    "cut off": lambda draw: conversation(draw, 3, cut=70),
    "packed": lambda draw: tuple(a + b for a, b in zip(conversation(draw), conversation(draw), strict=True)),  # type: ignore[return-value,arg-type]
    "last turn alone": lambda draw: last_turn_alone(conversation(draw, 4)),
    "thinking block taught": lambda draw: conversation(draw, opening=[THINK, UNTHINK]),
    "thinking block not taught": lambda draw: after_think(conversation(draw, opening=[THINK, UNTHINK])),
    "separator after the last": lambda draw: specforge(conversation(draw, 2, trailing=True)),
    "answers begin alike": lambda draw: conversation(draw, opening=[11]),
}


@pytest.mark.parametrize("shape", HEALTHY)
@pytest.mark.parametrize("known", [True, False], ids=["template", "separators"])
@pytest.mark.parametrize("count", [3, 40])
def test_healthy_masks_say_nothing(shape: str, known: bool, count: int) -> None:
    draw = random.Random(count)
    assert told(measured([HEALTHY[shape](draw) for _ in range(count)], MARKS if known else None)) == []


def test_texts_without_turns_say_nothing() -> None:
    draw = random.Random(0)
    bare = [(ids := words(draw, 40, 80), [1] * len(ids)) for _ in range(12)]
    assert told(measured(bare)) == []
    assert told(measured(bare, None)) == []


def shifted(pair: Pair, by: int) -> Pair:
    ids, mask = pair
    none = [0] * abs(by)
    return ids, ([*none, *mask[:-by]] if by > 0 else [*mask[-by:], *none])


@pytest.mark.parametrize("by", [-7, -5, -3, -2, -1, 1, 2, 3, 5])
@pytest.mark.parametrize("turns", [1, 3])
def test_a_shift_is_told_with_and_without_a_template(by: int, turns: int) -> None:
    draw = random.Random(turns)
    pairs = [shifted(conversation(draw, turns, trailing=True), by) for _ in range(30)]
    with_template = measured(pairs)
    assert told(with_template) == [("lossmask-span", "proven")]
    says = fault("lossmask-span").recognise(with_template)[0].says
    assert ("early" if by < 0 else "late") in says
    assert ("one token" if abs(by) == 1 else f"{abs(by)} tokens") in says
    assert told(measured(pairs, None)) == [("lossmask-span", "suspected")]


@pytest.mark.parametrize("by", [-30, -12, 12, 30])
def test_a_shift_far_beyond_the_answers_is_told(by: int) -> None:
    """Farther than some answers are long, so that some masks lie wholly in other turns or fall off the text."""
    draw = random.Random(by)
    pairs = [shifted(conversation(draw, 2, trailing=True), by) for _ in range(30)]
    m = measured(pairs)
    assert told(m) == [("lossmask-span", "proven")]
    assert f"{abs(by)} tokens" in fault("lossmask-span").recognise(m)[0].says


def test_a_shift_in_part_of_the_data_is_told() -> None:
    draw = random.Random(4)
    pairs = [conversation(draw, 2) for _ in range(30)]
    pairs[20:] = [shifted(pair, -1) for pair in pairs[20:]]
    (found,) = fault("lossmask-span").recognise(measured(pairs))
    assert found.evidence[0].figures["answers"] == 20


def test_masks_of_other_samples_are_told_from_shifts() -> None:
    draw = random.Random(5)
    pairs = [conversation(draw, draw.randint(1, 3)) for _ in range(24)]
    fitted = [mask[: len(ids)] + [0] * (len(ids) - len(mask))
              for (ids, _), (_, mask) in zip(pairs, pairs[1:] + pairs[:1], strict=True)]
    m = measured([(ids, mask) for (ids, _), mask in zip(pairs, fitted, strict=True)])
    (found,) = fault("lossmask-span").recognise(m)
    assert found.strength == "proven"
    assert found.evidence[0].figures["by"] == 1
    assert "1 further on" in found.says


def test_user_turns_in_a_few_samples_are_told() -> None:
    draw = random.Random(6)
    pairs = [conversation(draw, 2) for _ in range(30)]
    for i in range(0, 30, 6):
        ids, _ = pairs[i]
        kind = kinds(np.array(ids), MARKS)
        pairs[i] = ids, [int(k != 1) for k in kind]
    (found,) = fault("lossmask-span").recognise(measured(pairs))
    assert "user and system turns" in found.says
    whole = [(ids, [1] * len(ids)) for ids, _ in pairs]
    (found,) = fault("lossmask-span").recognise(measured(whole))
    assert "throughout" in found.says
    assert found.strength == "supported"


def test_samples_cut_before_the_answer_are_told_from_a_lost_marker() -> None:
    draw = random.Random(7)
    pairs = [conversation(draw) for _ in range(20)]
    long = [([START, USER, NEWLINE, *words(draw, 200, 200)][:50], [0] * 50) for _ in range(10)]
    m = measured(pairs[:20] + long)
    assert m.data.mask is not None
    m.data.mask.longest = 50
    (found,) = fault("lossmask-empty").recognise(m)
    assert "hold no answer" in found.says or "cut at" in found.says
    lost = [(ids, [0] * len(ids)) for ids, _ in pairs]
    (found,) = fault("lossmask-empty").recognise(measured(lost))
    assert "though their tokens hold answers" in found.says


def test_the_template_tells_its_markers() -> None:
    target = tiny_target()
    marks = of_template(target.tokenizer)
    assert marks is not None
    text = target.tokenizer.decode(list(marks.opening))
    assert text == "<|im_start|>assistant\n"
    assert marks.closing == {2}
    assert marks.generation is False
    for one in tiny_conversations():
        (turn,) = turns(np.array(one.token_ids), marks)
        assert turn.start == one.prompt_length
        assert turn.end == len(one.token_ids)


def test_served_requests_tell_the_same_markers() -> None:
    target = tiny_target()
    prompts = [np.array(p) for p in tiny_prompts()["heldout"][:16]]
    answers = [np.array([30, 40, 2]) for _ in prompts]
    from_requests = of_requests(prompts, answers)
    template = of_template(target.tokenizer)
    assert from_requests is not None
    assert template is not None
    assert from_requests.closing == template.closing
    assert from_requests.opening[-len(template.opening) :] == template.opening
    assert of_requests([np.array(words(random.Random(i), 9, 9)) for i in range(9)], answers[:9]) is None


def test_a_token_at_which_a_budget_cut_is_no_marker() -> None:
    prompts = [np.array(p) for p in tiny_prompts()["heldout"][:2]]
    assert of_requests(prompts, [np.array([30, 40, 35, 40]), np.array([31, 32, 40])]) is None


def frames(train: list[Pair], serve: list[Pair]) -> TemplateFacts:
    return template_facts(texts(train), texts(serve), MARKS, None)


def differs(facts: TemplateFacts) -> list[tuple[str, str]]:
    m = Measurements()
    m.data.template = facts
    return [(s.says, s.strength) for s in fault("template").recognise(m)]


def before(ids: list[int], pair: Pair) -> Pair:
    return ids + pair[0], [0] * len(ids) + pair[1]


@pytest.mark.parametrize("same", [
    lambda draw: conversation(draw), lambda draw: conversation(draw, 3), lambda draw: before([BOS], conversation(draw)),
    lambda draw: before([START, SYSTEM, NEWLINE, 50, 51, EOT, NEWLINE], conversation(draw, 2)),
    lambda draw: conversation(draw, opening=[THINK, UNTHINK])], ids=["plain", "turns", "first token", "system", "thinking"])
def test_equal_renderings_of_different_contents_say_nothing(same: Callable[[random.Random], Pair]) -> None:
    draw = random.Random(8)
    served = [same(draw) for _ in range(12)]
    assert differs(frames([same(draw) for _ in range(30)], served)) == []
    # Served questions that all begin alike are contents, no frame.
    alike = [([*ids[:3], 99, 98, 97, *ids[3:]], mask[:3] + [0] * 3 + mask[3:]) for ids, mask in
             (conversation(draw) for _ in range(12))]
    assert differs(frames([conversation(draw) for _ in range(30)], alike)) == []


def test_mixed_system_prompts_in_training_say_nothing() -> None:
    draw = random.Random(9)
    train = [conversation(draw) for _ in range(30)]
    train[::2] = [before([START, SYSTEM, NEWLINE, *words(draw, 3, 9), EOT, NEWLINE], pair) for pair in train[::2]]
    assert differs(frames(train, [conversation(draw) for _ in range(12)])) == []


def test_renderings_that_differ_are_named() -> None:
    draw = random.Random(10)
    train = [conversation(draw) for _ in range(30)]
    system = [before([START, SYSTEM, NEWLINE, 50, EOT, NEWLINE], conversation(draw)) for _ in range(12)]
    doubled = [before([START], conversation(draw)) for _ in range(12)]
    bare = [([*words(draw, 9, 9), 60], [0] * 9 + [1]) for _ in range(12)]
    kinds_of = ((system, "system turn", "supported"), (doubled, "twice", "proven"), (bare, "no marker", "proven"))
    for served, word, strength in kinds_of:
        ((says, sure),) = differs(frames(train, served))
        assert word in says
        assert sure == strength


def lines(pairs: list[Pair]) -> dict[int, np.ndarray]:  # type: ignore[type-arg]
    return {i: np.array(ids) for i, (ids, _) in enumerate(pairs)}


def against(held: dict[int, np.ndarray], given: dict[int, np.ndarray]) -> tuple[TemplateFacts, OpsFacts]:  # type: ignore[type-arg]
    facts, ops = TemplateFacts(), OpsFacts(samples=len(held))
    _line_by_line(held, given, facts, None)
    _missing(held, given, ops)
    return facts, ops


def about(facts: TemplateFacts, ops: OpsFacts) -> list[str]:
    m = Measurements()
    m.data.template, m.data.ops = facts, ops
    return [s.fault for name in ("template", "run-ops") for s in fault(name).recognise(m)]


def test_samples_against_their_conversations() -> None:
    draw = random.Random(11)
    given = lines([conversation(draw, 2) for _ in range(40)])
    assert about(*against(given, given)) == []
    assert about(*against({i: ids[:60] for i, ids in given.items()}, given)) == []  # cut at a length
    assert about(*against({i: given[i] for i in range(0, 40, 5)}, given)) == []  # a selection
    assert about(*against({i: given[i] for i in range(20)}, given)) == []  # not done yet
    facts, ops = against({i: given[i + 1] for i in range(39)}, given)
    assert facts.moved_by == 1
    assert about(facts, ops) == ["run-ops"]
    assert about(*against({i: ids for i, ids in given.items() if not 10 <= i < 18}, given)) == ["run-ops"]
    assert about(*against(lines([conversation(draw, 2) for _ in range(40)]), given)) == ["run-ops"]
    rendered = {i: np.concatenate([[77, 78], ids[3:]]) for i, ids in given.items()}
    assert about(*against(rendered, given)) == ["template"]


@pytest.mark.parametrize(("broken", "says"), [(1, "1 file of the training data is cut short"),
                                              (1200, "1,200 files of the training data are cut short")])
def test_files_cut_short_are_counted(broken: int, says: str) -> None:
    m = Measurements()
    m.data.ops = OpsFacts(samples=4, broken=broken, first_broken="hs_1: is not whole")
    (found,) = fault("run-ops").recognise(m)
    assert found.says == says


def test_room_on_the_disk() -> None:
    m = Measurements()
    m.data.ops = OpsFacts(samples=4, bytes_per_token=32_768, tokens_needed=40_000_000, free=200 * 2**30)
    (found,) = fault("run-ops").recognise(m)
    assert "1,220.7 GiB" in found.says
    assert "200.0 GiB" in found.says
    m.data.ops.tokens_needed = 1_000_000
    assert fault("run-ops").recognise(m) == []


def test_ranks_without_a_state() -> None:
    m = Measurements()
    m.data.ops = OpsFacts(ranks=(0,), world=8)
    (found,) = fault("run-ops").recognise(m)
    assert "1 of 8" in found.says
    m.data.ops = OpsFacts(ranks=(0, 1, 2, 3))
    assert fault("run-ops").recognise(m) == []


def test_every_turn_taught_is_a_fault_only_where_the_earlier_are_not_the_targets() -> None:
    m = measured([conversation(random.Random(i), 3) for i in range(20)])
    assert m.data.mask is not None
    m.data.mask.first_agreement, m.data.mask.last_agreement = 0.95, 0.97
    assert told(m) == []
    m.data.mask.first_agreement = 0.4
    assert told(m) == [("lossmask-span", "supported")]


def test_mask_facts_without_masks_are_none() -> None:
    assert mask_facts([Text("a", 0, torch.tensor([1, 2]), None)], MARKS) is None
    assert isinstance(mask_facts(texts([conversation(random.Random(1))]), MARKS), MaskFacts)
