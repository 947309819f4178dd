"""What a repair's effect says of the suspicion: whether it is the recording, the configuration, or a fault without cost."""

from __future__ import annotations

from typing import TypeGuard

from draftscope.faults.base import Suspicion
from draftscope.findings import Effect, Fix


def worsens(effect: Effect | None) -> TypeGuard[Effect]:
    """Whether undoing makes acceptance worse, beyond chance; without a paired gain by the lengths alone."""
    if effect is None:
        return False
    if effect.gain is None:
        return effect.length_now is not None and (effect.length_if_fixed or 0) < effect.length_now - 0.02
    return effect.gain < -0.02 if effect.gain_interval is None else effect.gain_interval[1] < 0


def changes(effect: Effect) -> str:
    """What undoing brings, by the figures that there are: text of another's writing has no accept length."""
    if effect.length_now is not None and effect.length_if_fixed is not None:
        return f"accept length is {effect.length_if_fixed:.2f} in place of {effect.length_now:.2f}"
    if effect.nll_now is not None and effect.nll_if_fixed is not None:
        return f"-log p at the first position is {effect.nll_if_fixed:.2f} in place of {effect.nll_now:.2f}"
    if effect.gain is not None:
        return f"{effect.gain:+.2f} tokens are accepted a row"
    return "acceptance is worse"


def blame_the_recording(suspicion: Suspicion) -> None:
    """The engine's `fc` gave out what the right states give: not it, but the note of what it received is wrong."""
    suspicion.strength, suspicion.recording, suspicion.undo = "supported", True, None
    suspicion.says += (
        "; but the engine's fc gave out what it gives on the right states, so that it is the recording of its input that is wrong"
    )
    suspicion.fix = Fix(says="Mend what records fc_input (order of slots, row against row) and capture again: the engine itself "
                        "was fed rightly.")


def of_the_runtime(suspicion: Suspicion, effect: Effect, trained: bool | None) -> None:
    """What the engine does is known from its own rounds; that it departs from the training is not, where the draft likes it."""
    cost = f"undone, {changes(effect)} on these requests"
    if trained is None:
        suspicion.strength = "suspected"
        suspicion.caveats.append(f"{cost}: the draft may have been trained so; training states (--train) tell")
    elif trained:
        suspicion.strength = "suspected"
        suspicion.caveats.append(f"{cost}, and the draft does better so on its training states, too: it was trained so, and the "
                                 "engine does as it should")
    else:
        suspicion.caveats.append(f"{cost}: it costs nothing here; on its training states the draft does not do better so")


def not_the_cost(suspicion: Suspicion, effect: Effect) -> None:
    """The draft does better with it than without: whatever it is, it does not cost acceptance."""
    suspicion.strength = "suspected"
    if suspicion.fault in ("layer-set", "layer-offset"):
        suspicion.says += "; but the draft does better on what is served, so that it is the configuration that is wrong"
        suspicion.fix = Fix(
            says="Leave the engine as it is. Correct the configuration, which another engine or version would obey, and confirm "
            "with training states (--train) what the draft was trained on."
        )
        suspicion.caveats.append(f"with the slots as the configuration says, {changes(effect)}")
    elif suspicion.fault == "weight-missing":
        suspicion.caveats.append(
            f"the engine accepts more than this checkpoint would (with the checkpoint's weights {changes(effect)}): perhaps the "
            "checkpoint given here is not the one that it serves"
        )
    else:
        suspicion.caveats.append("undoing it makes acceptance worse here: it is not what costs acceptance, or not alone")
