"""Lint: a checkpoint read the way its consumers read it, in seconds, without states, GPU or target weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftscope.consumers import ask, everybody
from draftscope.eagle3.checkpoint import Checkpoint
from draftscope.errors import DraftscopeError
from draftscope.findings import Finding
from draftscope.linting.consumed import consumed
from draftscope.linting.finding import ranked
from draftscope.linting.opening import open_checkpoint, widest
from draftscope.linting.report import Lint
from draftscope.linting.target import TargetFacts, head_facts, know, same_embedding, target_findings
from draftscope.linting.values import checkpoint_values
from draftscope.linting.vocabulary import FREQUENCIES, coverage, is_sorted, map_facts, map_findings, read_frequencies
from draftscope.states.places import Place, model_folder, place

ALL = "all"


def lint(
    folder: Place | str, consumers: Sequence[str] = (), *, target_config: Place | None = None, target: Place | None = None,
    token_freq: Path | None = None,
) -> Lint:
    """What consumers make of a draft checkpoint, and what is wrong with it whoever reads it.

    Args:
        folder: config.json and weights of the draft.
        consumers: `NAME[@VERSION][:VARIANT]` each, or `all`; () = the checkpoint alone.
        target_config: folder of the target's config.json; target: of its embedding and head too.
        token_freq: counts of the tokens in the text, for the share that the draft's vocabulary covers; without it a
            `token_freq.pt` beside the weights is taken.

    Raises:
        UsageError: no such consumer.
        DraftscopeError: a file that can't be read.
    """
    named, folder = place(folder), model_folder(folder)
    asked = [name for given in consumers for name in (everybody() if given == ALL else [given])]
    for name in asked:
        ask(name)
    facts = None
    if target is not None or target_config is not None:
        facts = know(place(target or target_config or ""), weights=target is not None)
    opened = open_checkpoint(folder, None if facts is None else facts.layers)
    result = Lint(schema="draftscope.lint/1", checkpoint=str(named), target=None if facts is None else str(facts.folder))
    result.findings = list(opened.findings)
    checkpoint = opened.checkpoint
    if checkpoint is not None:
        result.facts = _facts(checkpoint, facts)
        result.findings += checkpoint_findings(checkpoint)
        if facts is not None:
            result.findings += target_findings(checkpoint, facts)
        _covered(result, checkpoint, folder, token_freq)
        result.readings = [consumed(checkpoint, name, facts) for name in asked]
        if len(result.readings) == 1:
            result.findings += result.readings[0].findings
        result.unknown = _unknown(checkpoint, facts, result)
    else:
        result.next.append("what the consumers make of it can be said once configuration and weights agree")
    result.findings = ranked(result.findings)
    if not result.findings and (len(result.readings) < 2 or any(r.as_trained for r in result.readings if r.kind == "engine")):
        result.verdict = "clean"
    return result


def checkpoint_findings(checkpoint: Checkpoint) -> list[Finding]:
    """What is wrong with a checkpoint, whoever reads it and whatever its target."""
    return ranked([*checkpoint_values(checkpoint), *map_findings(checkpoint)])


def _facts(checkpoint: Checkpoint, target: TargetFacts | None) -> dict[str, Any]:
    config = checkpoint.config
    facts: dict[str, Any] = {
        "dialect": config.dialect, "hidden_size": config.hidden_size, "target_hidden_size": config.target_hidden_size,
        "slots": config.slots, "vocab_size": config.vocab_size, "draft_vocab_size": config.draft_vocab_size,
        "layer_ids": None if checkpoint.layer_ids is None else list(checkpoint.layer_ids),
        "layer_ids_key": checkpoint.layer_ids_key or None,
        "boundaries": None if config.boundaries is None else list(config.boundaries),
        "dtype": str(widest(checkpoint)).removeprefix("torch."), "map": map_facts(checkpoint).stored,
        "own_embedding": "embed_tokens.weight" in checkpoint.tensors,
    }
    if "d2t" in checkpoint.tensors:
        facts["map_ascending"] = is_sorted(checkpoint)
    if target is not None:
        facts["target"] = {"model_type": target.model_type, "layers": target.layers, "hidden_size": target.width,
                           "vocab_size": target.vocab, "max_position_embeddings": target.positions, "rope_theta": target.theta,
                           "quantised": target.quantised or None}
        if target.parts is not None:
            heads = head_facts(checkpoint, target.parts.head)
            facts["head_rows_of_target"] = None if heads is None else heads.shares
            facts["embedding_of_target"] = same_embedding(checkpoint, target.parts)
    return facts


def _covered(result: Lint, checkpoint: Checkpoint, folder: Path, given: Path | None) -> None:
    path = given or folder / FREQUENCIES
    if given is None and not path.is_file():
        return
    try:
        counts = read_frequencies(path, checkpoint.config.vocab_size)
    except DraftscopeError as error:
        if given is not None:
            raise
        result.unknown.append(f"coverage: {error}")
        return
    result.facts["coverage"] = round(coverage(checkpoint, counts), 6)
    result.facts["coverage_from"] = str(path)


def _unknown(checkpoint: Checkpoint, target: TargetFacts | None, result: Lint) -> list[str]:
    """What these inputs leave open."""
    config, said = checkpoint.config, list(result.unknown)
    grouped: dict[str, list[str]] = {}
    for reading in result.readings:
        for line in reading.unknown:
            names = grouped.setdefault(line, [])
            names += [reading.consumer] if reading.consumer not in names else []
    for line, names in grouped.items():
        shown = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
        said.append(f"{shown}: {line}")
    if target is None:
        said.append("width, vocabulary, depth and longest context of the target (--target-config DIR)")
    elif target.parts is None:
        said.append("whether head and embedding are the target's rows (--target DIR)")
    if "d2t" in checkpoint.tensors and "coverage" not in result.facts:
        said.append("how much of the text the draft's vocabulary covers (--token-freq FILE)")
    if "d2t" in checkpoint.tensors and not is_sorted(checkpoint):
        said.append("the map is not ascending: whoever selects the target's logits with t2d (SpecForge, speculators) gets "
                    "another order than the head's")
    theta = float(config.rope_parameters.get("rope_theta", 10000.0))
    if config.dialect == "native" and theta != 10000.0:
        said.append(f"rope theta is {theta:g}; SafeAILab/EAGLE's EAGLE-3 trainer uses 10000 whatever config.json says: if it "
                    "trained this draft, write 10000")
    if config.rope_parameters.get("rope_type") == "yarn":
        said.append("rope is yarn: ModelOpt adds such a block at export to drafts trained without it; known by its factor 32 and "
                    "original length 2048")
    said.append("what the draft was trained on is known from its training states alone (draftscope diagnose --train)")
    return said
