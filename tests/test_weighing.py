"""What is said of a repair that makes things worse, by whatever figures there are: not every text has an accept length."""

from __future__ import annotations

import pytest

from draftscope.diagnose.weighing import not_the_cost, of_the_runtime, worsens
from draftscope.faults.base import Suspicion
from draftscope.findings import Effect, Fix

EFFECTS = {
    "lengths": (Effect(k=3, length_now=2.5, length_if_fixed=2.0, gain=-0.5), "accept length is 2.00 in place of 2.50"),
    "nll": (Effect(k=3, length_now=None, length_if_fixed=None, nll_now=1.5, nll_if_fixed=2.25, gain=-0.5),
            "-log p at the first position is 2.25 in place of 1.50"),
    "gain": (Effect(k=3, length_now=None, length_if_fixed=None, gain=-0.5), "-0.50 tokens are accepted a row"),
    "one length": (Effect(k=3, length_now=2.5, length_if_fixed=None, gain=-0.5), "-0.50 tokens are accepted a row"),
}


def suspicion(fault: str) -> Suspicion:
    return Suspicion(fault=fault, side="serve", where=["slot 0"], says="it is so", strength="proven", evidence=[],
                     fix=Fix(says="mend it"), recovery="replayed")


@pytest.mark.parametrize("figures", EFFECTS)
@pytest.mark.parametrize("fault", ["layer-set", "layer-offset", "weight-missing"])
def test_what_a_repair_would_lose_is_told_by_the_figures_there_are(fault: str, figures: str) -> None:
    effect, said = EFFECTS[figures]
    assert worsens(effect)
    found = suspicion(fault)
    not_the_cost(found, effect)
    assert found.strength == "suspected" and said in found.caveats[0]


@pytest.mark.parametrize("figures", EFFECTS)
@pytest.mark.parametrize("trained", [True, False, None])
def test_what_an_engine_gains_by_it_too(trained: bool | None, figures: str) -> None:
    effect, said = EFFECTS[figures]
    found = suspicion("pos-id")
    of_the_runtime(found, effect, trained)
    assert said in found.caveats[0] and "0.00" not in found.caveats[0]
