"""Where a consumer takes the slots, and how that stands to what the checkpoint means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftscope.boundaries import default_boundaries
from draftscope.consumers.facts import Consumer, IdRule, LayerIds
from draftscope.consumers.points import Point, at, listed
from draftscope.eagle3.checkpoint import Checkpoint
from draftscope.findings import Strength

IDS = "eagle_aux_hidden_state_layer_ids"
PLACES = (IDS, f"eagle_config.{IDS}", "eagle_config.layer_ids")
Boundaries = tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Placed:
    """Boundaries in effect: under the runner asked for, and under each.

    Attributes:
        taken: None = the consumer's default, and the target's depth is not known.
        refused: whether the ids end in an error.
    """

    taken: Boundaries
    key: str
    runners: dict[str, Boundaries]
    points: tuple[Point, ...]
    refused: bool = False


def place(known: Consumer, runner: str, checkpoint: Checkpoint, layers: int | None, model_type: str | None) -> Placed:
    """The boundaries that a consumer captures for a checkpoint."""
    if not known.captures:
        point = Point(
            "boundaries", (), _meant(checkpoint, layers), "flag",
            "started with the EAGLE flag, the target hands over its final state alone: nothing is captured, fc is passed over, "
            "the target's head takes the place of the draft's and the vocabulary map is not set",
            known.flag_source, "config-flag", where=("config --speculative-algorithm",),
        )
        return Placed((), "flag", {}, (point,))
    rule = known.rule(model_type)
    entries = sorted(known.layer_ids, key=lambda entry: entry.runner != runner) if runner else list(known.layer_ids)
    found = [_look_up(entry, rule, checkpoint.raw, layers) for entry in entries]
    first = found[0]
    points = [_point(known, entries[0], rule, checkpoint, first, layers, model_type)]
    if len({one.taken for one in found}) > 1:
        points.append(Point(
            "other runner", found[1].taken, first.taken, found[1].key,
            f"the {entries[1].runner} model runner takes boundaries {listed(found[1].taken)} instead, from {found[1].key}",
            entries[1].source,
        ))
    runners = {entry.runner: one.taken for entry, one in zip(entries, found, strict=True) if entry.runner}
    return Placed(first.taken, first.key, runners, tuple(points), bool(first.refused))


@dataclass(frozen=True, slots=True)
class _Found:
    taken: Boundaries
    key: str
    ids: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    refused: str = ""


def _look_up(entry: LayerIds, rule: IdRule, raw: dict[str, Any], layers: int | None) -> _Found:
    for key in entry.keys:
        ids = at(raw, key)[1]
        if not ids:
            continue
        ids = tuple(int(i) for i in ids)
        asked = rule.to_boundaries(ids, layers)
        taken = tuple(sorted({b for b in asked if b >= 0 and (layers is None or b < layers + rule.last_boundary)}))
        refused = rule.refuses(ids, layers)
        if not refused and rule.beyond_raises and layers is not None and max(asked) >= layers:
            refused = f"boundary {max(asked)} is past the last layer"
        return _Found(taken, key, ids, tuple(sorted(set(asked) - set(taken))), refused)
    return _Found(None if layers is None else rule.default(layers), "default")


def _meant(checkpoint: Checkpoint, layers: int | None) -> Boundaries:
    if checkpoint.config.boundaries is not None:
        return checkpoint.config.boundaries
    return None if layers is None else default_boundaries(layers)


def _point(known: Consumer, entry: LayerIds, rule: IdRule, checkpoint: Checkpoint, found: _Found, layers: int | None,
           model_type: str | None) -> Point:
    meant = _meant(checkpoint, layers)
    unread = [key for key in PLACES if at(checkpoint.raw, key)[1] and key not in entry.keys]
    says, source = "", rule.source
    if found.refused:
        says = f"{known.id} refuses {found.key} {list(found.ids)}: {found.refused}"
    elif found.key == "default":
        source = entry.source
        if unread:
            says = f"{' and '.join(unread)} is not read: the default boundaries are taken"
        elif layers is not None and rule.default(layers) != default_boundaries(layers):
            says, source = f"the default boundaries of this target are {listed(found.taken)} here", rule.source
    else:
        asked = rule.to_boundaries(found.ids, layers)
        if found.taken != asked:
            why = f"; {listed(found.lost)} can't be captured" if found.lost else ", each once and ascending"
            says = f"{found.key} {list(found.ids)} comes to boundaries {listed(found.taken)}{why}"
        elif meant is not None and found.taken != meant:
            says = (f"{found.key} {list(found.ids)} comes to boundaries {listed(found.taken)} here ({rule.says}), where the "
                    f"checkpoint's dialect means {listed(meant)}")
    fault = _fault(found, meant)
    if not fault and found.refused:
        fault = "layer-set"
    key = found.key if found.key != "default" else (checkpoint.layer_ids_key or "default")
    if fault and not says:
        says = f"boundaries {listed(found.taken)} are taken where the checkpoint means {listed(meant)}"
    return Point("boundaries", found.taken, meant, found.key, says, source, fault,
                 _strength(checkpoint, found, meant, layers, model_type),
                 tuple(f"slot {i}" for i in _moved(found.taken, meant)) or (f"config {key}",))


def _moved(taken: Boundaries, meant: Boundaries) -> list[int]:
    if taken is None or meant is None:
        return []
    if len(taken) != len(meant):
        return [i for i, b in enumerate(meant) if b not in taken]
    return [i for i, (a, b) in enumerate(zip(taken, meant, strict=True)) if a != b]


def _fault(found: _Found, meant: Boundaries) -> str:
    """layer-offset: every slot that moved is displaced by the same one boundary; anything else is layer-set."""
    if found.taken is None or meant is None or found.taken == meant:
        return ""
    if len(found.taken) == len(meant):
        steps = {a - b for a, b in zip(found.taken, meant, strict=True) if a != b}
        if steps in ({1}, {-1}):
            return "layer-offset"
    return "layer-set"


def _strength(checkpoint: Checkpoint, found: _Found, meant: Boundaries, layers: int | None, model_type: str | None) -> Strength:
    """What configured ids mean is the writer's claim, and a doubtful one where they read as the other convention's default."""
    if found.refused or found.lost:
        return "proven"
    ids = checkpoint.layer_ids
    if meant is not None and list(meant) != sorted(set(meant)):
        return "suspected"
    if ids is None or layers is None:
        return "supported"
    default = default_boundaries(layers)
    nested = checkpoint.layer_ids_key.startswith("eagle_config.")
    other = default if nested else tuple(b - 1 for b in default)
    return "suspected" if ids == other else "supported"
