"""Whose text the training answers are: the target's at any temperature, or another's; and what of it is another domain."""

from __future__ import annotations

import dataclasses
import random
from functools import cache

import pytest
import torch
from tiny import tiny_conversations, tiny_target

from draftscope.boundaries import Boundary
from draftscope.diagnose.authors import domain_facts, policy_facts
from draftscope.diagnose.case import Text
from draftscope.faults import fault
from draftscope.faults.facts_data import DomainFacts, MaskFacts, PolicyFacts
from draftscope.faults.measurements import Measurements, RungFacts
from draftscope.states.types import Sequence


@cache
def states() -> list[torch.Tensor]:
    """Last states before the final norm over the tiny target's own answers."""
    target = tiny_target()
    with torch.inference_mode():
        return [target.forward(torch.tensor([one.token_ids]), [Boundary(target.layers)]).last[0].float().clone()
                for one in tiny_conversations()]


def drawn(temperature: float, *, astray: float = 0.0, seed: int = 0, stored: torch.dtype = torch.bfloat16) -> list[Sequence]:
    """Texts whose every token comes from the target's distribution at the row before, but for a share from another row's."""
    target, found = tiny_target(), []
    draw = torch.Generator().manual_seed(seed)
    for i, last in enumerate(states()):
        logits = target.parts.logits(target.parts.final_norm(last))
        if temperature == 0:
            tokens = logits.argmax(-1)
        else:
            p = (logits / temperature).softmax(-1)
            tokens = torch.multinomial(p, 1, generator=draw).squeeze(1)
            other = torch.rand(len(tokens), generator=draw) < astray
            tokens = torch.where(other, tokens.roll(7), tokens)
        ids = torch.cat([torch.tensor([1]), tokens])
        mask = torch.arange(len(ids)) > 20
        found.append(Sequence(f"hs_{i}", ids[:-1], last[:, None].to(stored), last.to(stored), mask[:-1], torch.arange(len(last))))
    return found


def policy(sequences: list[Sequence], again: dict[str, torch.Tensor] | None = None) -> PolicyFacts:
    found = policy_facts(sequences, tiny_target().parts, normed=False, again=again)
    assert found is not None
    return found[0]


def told(facts: PolicyFacts, mask: MaskFacts | None = None) -> list[tuple[str, str]]:
    m = Measurements()
    m.data.policy, m.data.mask = facts, mask
    return [(s.fault, s.strength) for s in fault("data-offpolicy").recognise(m)]


@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.7, 1.0, 1.3, 1.8])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_targets_own_text_is_its_own_at_any_temperature(temperature: float, seed: int) -> None:
    facts = policy(drawn(temperature, seed=seed))
    assert told(facts) == [], facts
    if 0.5 < temperature < 1.5:
        assert facts.temperature == pytest.approx(temperature, rel=0.25)
        assert facts.tail == pytest.approx(facts.tail_expected, abs=0.02)


@pytest.mark.parametrize("astray", [0.15, 0.4, 0.7])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_anothers_text_is_told(astray: float, temperature: float) -> None:
    sequences = drawn(temperature, astray=astray)
    assert told(policy(sequences)) == [("data-offpolicy", "suspected")]
    again = {one.name: states()[i] for i, one in enumerate(sequences)}
    assert told(policy(sequences, again)) == [("data-offpolicy", "supported")]


def test_states_that_stand_beside_others_are_no_authors_fault() -> None:
    moved = [dataclasses.replace(one, last=torch.roll(one.last, 1, 0)) for one in drawn(0.0)]  # type: ignore[arg-type]
    facts = policy(moved)
    assert facts.lag != 0
    assert told(facts) == []


def test_a_mask_on_other_tokens_is_no_authors_fault() -> None:
    facts = policy(drawn(1.0, astray=0.4))
    assert told(facts, MaskFacts("the target's chat template", samples=9, other_share=0.9)) == []
    assert told(facts, MaskFacts("the target's chat template", samples=9, last_agreement=0.97)) == []


def test_an_older_target_is_told_by_running_the_one_at_hand() -> None:
    """The recorded states choose the recorded tokens; the target's own, run again, do not."""
    parts = tiny_target().parts
    sequences = drawn(1.0, astray=0.5)
    again = {one.name: states()[i] for i, one in enumerate(sequences)}
    lasts = [parts.head[torch.cat([one.token_ids[1:], one.token_ids[:1]])].float() for one in sequences]
    facts = policy([dataclasses.replace(one, last=last) for one, last in zip(sequences, lasts, strict=True)], again)
    assert facts.by == "again"
    assert facts.recorded is not None
    assert facts.again is not None
    assert facts.recorded > facts.again + 0.3
    m = Measurements()
    m.data.policy = facts
    assert "another version of this target" in fault("data-offpolicy").recognise(m)[0].says


def words(draw: random.Random, low: int, high: int, index: int) -> Text:
    ids = torch.tensor([draw.randrange(low, high) for _ in range(60)])
    return Text(f"t{index}", index, ids, torch.ones(60, dtype=torch.bool))


def test_a_domain_that_training_lacks() -> None:
    draw = random.Random(1)
    train = [words(draw, 0, 12, i) for i in range(30)]
    same = domain_facts(train, [words(draw, 0, 12, i) for i in range(12)], [])
    other = domain_facts(train, [words(draw, 8, 20, i) for i in range(12)], [])
    assert isinstance(same, DomainFacts)
    assert isinstance(other, DomainFacts)
    m = Measurements()
    m.data.domain = same
    assert fault("data-offpolicy").recognise(m) == []
    m.data.domain = other
    assert [s.strength for s in fault("data-offpolicy").recognise(m)] == ["suspected"]
    m.rungs = {"trained": RungFacts(3.0, [0.8], 0.5, 1.0, 900), "reference": RungFacts(1.9, [0.5], 1.5, 1.0, 900)}
    assert [s.strength for s in fault("data-offpolicy").recognise(m)] == ["supported"]
    assert domain_facts(train[:3], train, []) is None
