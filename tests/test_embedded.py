"""The embedded pair, for real: healthy it is clean, and every fault planted in it is found first.

The healthy pair and three faults run in `make test`; all of them in `make test-embedded`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from draftscope.diagnose.case import Inputs
from draftscope.diagnose.run import diagnose
from draftscope.eagle3.generate import generate
from draftscope.eagle3.generated import divergence, summarise
from draftscope.embedded.pair import BOUNDARIES, DRAFT, spread, training_sample
from draftscope.faults import fault
from draftscope.faults.base import Fault
from draftscope.faults.plant import Plant
from draftscope.faults.rig import Conversation, Rig
from draftscope.findings import Diagnosis
from draftscope.target.embedded import ensure_target
from draftscope.target.model import load_target
from draftscope.target.packed import pack

QUICK = {("layer-set", "embedding in front"), ("layer-offset", "+1"), ("vocab-map", "engine drops it")}
ON_STATES = (
    "nonfinite", "schema-width", "layer-set", "layer-offset", "residual-missing", "final-norm", "scale-mult", "rotated-space",
    "token-shift", "req-mix", "graph-capture", "capture-alias", "parallel-shard",
)
IN_SERVICE = ("weight-missing", "vocab-map", "config-flag", "recur-state", "pos-id", "rope", "attn-mask", "draft-kv", "metric")
IN_TRAINING = ("lossmask-empty", "train-budget")
VARIANTS = [(fault(name), fault(name).variants[0]) for name in (*ON_STATES, *IN_SERVICE, *IN_TRAINING)]
CASES = [
    pytest.param(known, variant, id=f"{known.id}: {variant}",
                 marks=pytest.mark.embedded_quick if (known.id, variant) in QUICK else pytest.mark.embedded)
    for known, variant in dict.fromkeys([*VARIANTS, *((fault(name), variant) for name, variant in sorted(QUICK))])
]
"""The plainest variant of each: tests/test_faults.py has them all on the tiny pair, the drill on this one.

Left out are those that say nothing without texts, logs or checkpoints beside the states, and a target of other precision: weights
packed for speed are not rounded.
"""
WRITTEN = ("train", "last", "loss_mask", "labels", "train_ranks", "rewritten", "texts", "dump")


@pytest.fixture(scope="module")
def rig() -> Rig:
    target = load_target(ensure_target(report=lambda _: None))
    pack(target)
    tokenizer = target.tokenizer
    prompts = [
        list(tokenizer.encode(tokenizer.apply_chat_template(p.messages, tokenize=False, add_generation_prompt=True)))
        for p in spread(8)
    ]
    conversations = [Conversation(*c) for c in training_sample()[:8]]
    return Rig(target, DRAFT, prompts, conversations, max_new=32, rows=8, stop_ids=target.stop_ids)


@pytest.fixture(scope="module")
def healthy_train(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy") / "train"
    rig.write_training(Plant.healthy(BOUNDARIES), folder)
    return folder


def examine(rig: Rig, plant: Plant, folder: Path, healthy_train: Path) -> Diagnosis:
    healthy = Plant.healthy(BOUNDARIES)
    train, draft, serve = healthy_train, folder / "draft", folder / "capture"
    if any(getattr(plant, field) != getattr(healthy, field) for field in WRITTEN):
        train = folder / "train"
        rig.write_training(plant, train)
    rig.write_checkpoint(plant, draft)
    summary = rig.serve(plant, draft, serve)
    metrics = None if plant.reported == "counts" else rig.report(plant, summary, folder)
    return diagnose(Inputs(train=train, serve=serve, draft=draft, target=rig.target.folder, metrics=metrics, max_tokens=1536,
                           source_draft=rig.write_source(plant, folder / "source")))


@pytest.mark.embedded_quick
def test_healthy_pair_is_clean(rig: Rig, tmp_path: Path, healthy_train: Path) -> None:
    found = examine(rig, Plant.healthy(BOUNDARIES), tmp_path, healthy_train)
    assert found.findings == []
    assert found.verdict == "clean", found.next
    assert [p.boundary for p in found.placement.serve] == list(BOUNDARIES)
    assert found.acceptance.as_read is not None
    assert found.acceptance.as_read.length is not None
    assert found.acceptance.as_read.length > 1.2


@pytest.mark.parametrize(("known", "variant"), CASES)
def test_fault_is_found_first(rig: Rig, known: Fault, variant: str, tmp_path: Path, healthy_train: Path) -> None:
    found = examine(rig, known.make(Plant.healthy(BOUNDARIES), variant), tmp_path, healthy_train)
    assert found.findings, (found.verdict, found.next)
    assert found.findings[0].fault == known.id, [(f.fault, f.strength, f.says) for f in found.findings]
    others = [f for f in found.findings[1:] if f.fault not in (known.id, *known.includes) and f.strength == "proven"]
    assert not others, [(f.fault, f.says) for f in others]


@pytest.mark.embedded
def test_text_is_that_of_plain_decoding(rig: Rig) -> None:
    """Held-out prompts of every kind, greedy: token for token, but where the target's two best logits are within 1e-4."""
    from draftscope.eagle3.checkpoint import build_draft, load_checkpoint
    from draftscope.target.wiring import Wiring

    target, tokenizer = rig.target, rig.target.tokenizer
    prompts = [
        list(tokenizer.encode(tokenizer.apply_chat_template(p.messages, tokenize=False, add_generation_prompt=True)))
        for p in spread(16)
    ]
    draft = build_draft(load_checkpoint(DRAFT, target_layers=target.layers), target.parts)
    common = {"wiring": Wiring.of(BOUNDARIES), "max_new": 32, "stop_ids": target.stop_ids, "rows": 16}
    plain = generate(target, None, prompts, **common)  # type: ignore[arg-type]
    drafted = generate(target, draft, prompts, k=3, **common)  # type: ignore[arg-type]
    for prompt, one, other in zip(prompts, plain, drafted, strict=True):
        parted = divergence(target, prompt, one.token_ids, other.token_ids)
        assert parted is None or parted.near_tie, parted
    assert (summarise(drafted, 3).accept_length or 0) > 1.2
