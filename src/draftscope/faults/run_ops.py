"""run-ops: writing the training data, or resuming the training, went wrong as an operation."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from draftscope.faults.base import Fault, Page, Suspicion, Trace
from draftscope.faults.facts_data import OpsFacts, Restart
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Dump, Plant
from draftscope.findings import Evidence, Fix, Strength
from draftscope.text import count

TWICE = 0.1
"""Share of samples from which copies count."""
MISSING, ENDED = 0.05, 0.1
JUMP, SPREADS, SAID = 0.08, 3.0, 2.0
GIB = 2**30
DUMPS = {"written twice": "written twice", "part missing": "part missing", "in another order": "other order",
         "of other conversations": "of other conversations"}


class RunOps(Fault):
    """Optimizer state lost, samples twice or missing, a cache of other data, no room, a state for one rank of many."""

    id = "run-ops"
    title = "an operation that went wrong"
    verdict = "data"
    variants = ("optimizer state lost", *DUMPS)
    page = Page(
        symptom="a training that jumps back at a resume, a dump that is smaller than its input, or stops when the disk is full",
        traces={
            "optimizer state lost": Trace("a resume restores weights and not the optimizer's moments", "--log",
                                          "the loss jumps where the run goes on", "trained"),
            "written twice": Trace("a shard of the data is written again after a restart", "--train",
                                   "samples with the tokens of another sample", "none"),
            "part missing": Trace("a rank, or a full disk, drops a run of samples", "--train, --conversations",
                                  "usable conversations without a sample, one after the other", "none"),
            "in another order": Trace("samples are numbered after a line was dropped that others still count",
                                      "--train, --conversations", "each sample holds the tokens of a neighbouring line", "none"),
            "of other conversations": Trace("a cache keyed by its name, not by its input, is used again",
                                            "--train, --conversations", "no sample holds its line's conversation", "none"),
        },
        lookalikes={
            "template": "the same contents in other tokens",
            "leak": "held-out samples that are training samples: copies across two folders, not within one",
            "req-mix": "rows of a sample that belong to another one; here tokens and states go together",
        },
        unseen={
            "a disk that was full and is not any more": "what it left behind is: samples missing, files cut short",
            "one state file for many ranks": "told where the run's folder (--log) has the ranks' files or names their number",
        },
        reports=("SpecForge PR #587", "SpecForge PR #37", "SafeAILab/EAGLE issue #30"))

    def recognise(self, m: Measurements) -> list[Suspicion]:
        ops, template, curve = m.data.ops, m.data.template, m.data.curve
        found: list[Suspicion | None] = []
        if curve is not None:
            found += [_restarted(restart, curve.format) for restart in curve.restarts]
        if template is not None and template.compared >= 4:
            found.append(_conversations(template.compared, template.moved_lines, template.moved_by, template.contents_differ))
        if ops is not None:
            found += [_broken(ops), _missing(ops), _ended(ops), _twice(ops), _room(ops), _ranks(ops)]
        return [one for one in found if one is not None]

    def why_not(self, m: Measurements) -> str:
        told, ops, curve = [], m.data.ops, m.data.curve
        if ops is not None:
            told.append(f"{count(ops.samples, 'sample')}, {ops.twice} of them twice, {count(ops.broken, 'file')} cut short")
        if curve is not None:
            told.append(f"the log has {len(curve.restarts)} restarts or jumps of the loss")
        return "; ".join(told) or "takes the training data (--train), its conversations (--conversations) or the log (--log)"

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant == "optimizer state lost":
            return replace(plant, training="optimizer state lost")
        if variant not in DUMPS:
            raise ValueError(f"run-ops has no variant {variant!r}")
        return replace(plant, dump=cast(Dump, DUMPS[variant]))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, dump="", training="")


def _restarted(restart: Restart, format: str) -> Suspicion | None:
    rise = restart.loss_after - restart.loss_before
    # The mean of some records scatters less than they do; where nothing is said of a resume, the place was chosen for its height.
    if rise < max(JUMP * restart.loss_before, (SAID if restart.said else SPREADS) * restart.spread):
        return None
    rates = "" if restart.rate_before is None or restart.rate_after is None else (
        f"; learning rate {restart.rate_before:.2e} before, {restart.rate_after:.2e} after")
    warmed = restart.rate_before is not None and restart.rate_after is not None and restart.rate_after < 0.5 * restart.rate_before
    said = f" ({restart.said})" if restart.said else ""
    return _suspicion(
        [], f"the loss jumps from {restart.loss_before:.2f} to {restart.loss_after:.2f} at step {restart.step}"
        + (", where the run was resumed" if restart.said else ""), "supported" if restart.said else "suspected",
        hypothesis="the run was resumed without the optimizer's state" + (", or its schedule's" if warmed else ""),
        prediction="after a resume the loss goes on where it was",
        measurement=f"the losses of the {format} log round step {restart.step}{said}",
        result=f"{restart.loss_before:.2f} ± {restart.spread:.2f} before, {restart.loss_after:.2f} after{rates}",
        decides="run-ops where a resume is followed by a jump; a spike without one is of the data or the rate",
        fix="Resume with weights, optimizer and schedule together (SpecForge: every training_state_rank file beside "
            "training_state.pt; speculators: optimizer_state_dict.pt and scheduler_state_dict.pt), from the checkpoint before "
            "the "
            "jump.",
        figures={"step": restart.step, "before": restart.loss_before, "after": restart.loss_after, "spread": restart.spread})


def _conversations(compared: int, moved: int, by: int | None, others: int) -> Suspicion | None:
    if moved >= max(4, 0.5 * compared) and by is not None:
        return _suspicion(
            ["train:samples"], f"{moved} of {compared} samples hold the conversation of line {by:+d}: samples and lines are out "
            "of step", "proven", hypothesis="samples are numbered otherwise than the lines they are made from",
            prediction="sample i holds the conversation of line i",
            measurement="token ids of samples against the conversations, rendered by the target's template",
            result=f"{moved} of {compared} samples equal the line {by:+d} from their own, to the token",
            decides="run-ops where lines have moved; template where the same contents have other tokens",
            fix="Number samples by their line, and write the data again: labels and masks that go by number belong to others.",
            figures={"moved": moved, "by": by, "of": compared})
    if others >= max(4, 0.5 * compared) and not moved:
        return _suspicion(
            ["train:samples"], f"{others} of {compared} samples hold other conversations than those given: a cache of other "
                               "data, "
            "perhaps", "supported", hypothesis="the training data was not made from these conversations",
            prediction="a sample holds the contents of its line",
            measurement="contents of samples against the conversations",
            result=f"{others} of {compared} samples share no contents with their line, or any other",
            decides="run-ops, if these are the conversations that were meant; else they are the wrong file",
            fix="Delete the cache (SpecForge's cache_dir is keyed by a name, not by the data) and write the data again.",
            figures={"others": others, "of": compared})
    return None


def _broken(ops: OpsFacts) -> Suspicion | None:
    if not ops.broken:
        return None
    return _suspicion(
        ["train:files"], f"{count(ops.broken, 'file')} of the training data {'is' if ops.broken == 1 else 'are'} cut short",
        "proven",
        hypothesis="the writer was interrupted, or the disk was full", prediction="every file is whole",
        measurement="the headers of the files against their lengths", result=f"{ops.broken} cut short; {ops.first_broken}",
        decides="run-ops: the file itself shows it",
        fix="Delete these files and let the writer go on; have it write under another name and rename.",
        figures={"broken": ops.broken})


def _missing(ops: OpsFacts) -> Suspicion | None:
    if ops.expected is None or ops.missing < max(2, MISSING * ops.expected):
        return None
    where = "" if ops.gap is None else f"; the longest run of them is {ops.gap[1]} from {ops.gap[0]} on"
    return _suspicion(
        ["train:samples"], f"{ops.missing} of {ops.expected} usable conversations have no sample", "supported",
        hypothesis="part of the data was not written", prediction="every usable line has a sample",
        measurement="numbers of the samples against the lines of the conversations",
        result=f"{ops.missing} are missing{where}",
        decides="run-ops, unless they were left out on purpose (too long, filtered)",
        fix="Extract the missing lines; the same command goes on from what is there.",
        figures={"missing": ops.missing, "expected": ops.expected, "gap": ops.gap})


def _ended(ops: OpsFacts) -> Suspicion | None:
    if ops.expected is None or ops.behind < max(4, ENDED * (ops.expected + ops.behind)):
        return None
    return _suspicion(
        ["train:samples"], f"the training data ends {ops.behind} usable conversations before its input does", "suspected",
        hypothesis="the writer stopped early (a full disk, a rank that ended), or is still writing",
        prediction="the last usable line has a sample, or one near it",
        measurement="the highest number of a sample against the lines of the conversations",
        result=f"{ops.behind} of {ops.expected + ops.behind} usable lines lie behind the last sample",
        decides="run-ops, unless so few were asked for",
        fix="If all of them were meant: extract the missing lines; the same command goes on from what is there.",
        figures={"behind": ops.behind, "usable": ops.expected + ops.behind})


def _twice(ops: OpsFacts) -> Suspicion | None:
    if ops.twice < max(2, TWICE * ops.samples):
        return None
    return _suspicion(
        ["train:samples"], f"{ops.twice} of {ops.samples} training samples have the tokens of another one", "supported",
        hypothesis="part of the data was written twice", prediction="samples differ",
        measurement="token ids of all samples against each other", result=f"{ops.twice} of {ops.samples} are copies, to the "
                                                                          "token",
        decides="run-ops where copies are not meant: they count several times over",
        fix="Keep one of each, unless they were repeated on purpose.", figures={"twice": ops.twice, "samples": ops.samples})


def _room(ops: OpsFacts) -> Suspicion | None:
    needed = ops.bytes_per_token * ops.tokens_needed
    if ops.free is None or needed <= ops.free:
        return None
    return _suspicion(
        ["train:disk"], f"{needed / GIB:,.1f} GiB are still to be written, {ops.free / GIB:,.1f} GiB are free", "proven",
        hypothesis="the disk will be full before the data is written", prediction="what is to be written fits",
        measurement="bytes a token of the samples there are, times the tokens of the conversations without one",
        result=f"{ops.tokens_needed:,} tokens of {ops.bytes_per_token:,} bytes", decides="run-ops",
        fix="Write elsewhere, in fewer bits, fewer conversations, or train online.",
        figures={"bytes_needed": needed, "bytes_free": ops.free})


def _ranks(ops: OpsFacts) -> Suspicion | None:
    if not ops.ranks:
        return None
    world = max(ops.world or 0, max(ops.ranks) + 1)
    lacking = sorted(set(range(world)) - set(ops.ranks))
    if not lacking:
        return None
    return _suspicion(
        ["run:state"], f"state files of {len(ops.ranks)} of {world} ranks are there", "supported",
        hypothesis="ranks were resumed from another one's optimizer state, or from none",
        prediction="one state file for each rank", measurement=f"training_state_rank files in {ops.where}",
        result=f"there are ranks {list(ops.ranks)}; lacking: {lacking[:8]}",
        decides="run-ops where the state is each rank's own (FSDP); replicated state is saved once",
        fix="Let every rank save its own state, and resume with as many "
            "ranks.", figures={"ranks": list(ops.ranks), "world": world})


def _suspicion(where: list[str], says: str, strength: Strength, *, hypothesis: str, prediction: str, measurement: str,
               result: str, decides: str, fix: str, figures: dict[str, object]) -> Suspicion:
    return Suspicion(
        fault=RunOps.id, side="train", where=where, says=says, strength=strength,
        evidence=[Evidence(hypothesis=hypothesis, prediction=prediction, measurement=measurement, result=result, decides=decides,
                           figures=figures)],
        fix=Fix(says=fix), recovery="needs-retraining")
