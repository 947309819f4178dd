"""Diagnoses as reports receive them: the case, a clean one, one that cannot tell, and one whose strings are hostile."""

from __future__ import annotations

from itertools import pairwise

from draftscope.diagnose.norms import AT
from draftscope.findings import (
    Absorbed,
    Applied,
    Diagnosis,
    Effect,
    Evidence,
    Finding,
    Fix,
    Ladder,
    Mended,
    Norms,
    Patch,
    Placed,
    Placement,
    RowNorms,
    Rung,
    SlotNorms,
)
from draftscope.views import Breakdown, Learning, Part, Request, SlotChannels, SlotComponents, Status, Views

HOSTILE = "</style></script><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m\u202eevil\n[bold red]{{7*7}}\x00"
LONG = (HOSTILE + "/") * 120
"""A name of more than 10 kB."""


def rung(length: float, joint: list[float], *, held_out: bool | None = None, interval: tuple[float, float] | None = None) -> Rung:
    conditional: list[float | None] = [joint[0]]
    conditional += [b / a if a else None for a, b in pairwise(joint)]
    return Rung(k=len(joint), length=length, interval=interval, joint=joint, conditional=conditional, nll=1.9, coverage=0.98,
                rounds=812, rows=2204, readout="walk", held_out=held_out)


def placed(slot: int, label: str, boundary: int, margin: float, *, layers: int = 30) -> Placed:
    errors = [1e-7 if b == boundary else 0.1 + 0.02 * abs(b - boundary) for b in range(layers + 1)]
    return Placed(slot=slot, label=label, boundary=boundary, norm="pre", kind="stream", margin=margin, error=1e-7, lag=0,
                  scale=1.0, candidates=[boundary], share=1.0, errors=errors,
                  lag_errors=[1.31, 1.22, 1e-7, 1.24, 1.3])


def slot_norms(slot: int, size: float, *, names: tuple[str, ...] = ("first", "sink", "prompt", "answer")) -> SlotNorms:
    """Norms spread by a third about `size`; first tokens and sinks a hundred times that."""
    def rows(factor: float, count: int) -> RowNorms:
        return RowNorms(rows=count, quantiles=[size * factor * (0.7 + 0.6 * q) for q in AT])

    figures = {"first": rows(100, 64), "sink": rows(90, 3)}
    return SlotNorms(slot=slot, classes={name: figures.get(name, rows(1, 900)) for name in names})


def proven() -> Finding:
    """An embedding put in front of the slots on the serving side."""
    return Finding(
        fault="layer-set", where=["slot 0", "slot 1", "slot 2"],
        says="serving slots hold boundaries [0, 2, 15] where the draft was trained on [2, 15, 27]: the embedding was put in "
             "front, everything moved up one slot, and the last state dropped out",
        strength="proven", recovery="replayed",
        acceptance=Effect(k=3, length_now=1.31, length_if_fixed=2.24, interval=(2.17, 2.31), nll_now=2.9, nll_if_fixed=1.8,
                          left_in=1.31, all_fixed=2.24, gain=0.93, gain_interval=(0.85, 1.0)),
        evidence=[
            Evidence(
                hypothesis="the states served come from other layers than the draft was trained on",
                prediction="slots hold boundaries 2, 15, 27 (as the training files do) if the wiring is right",
                measurement="each slot held against every boundary of the target, re-run over the same tokens",
                result="slot 0 holds the embedding, wanted boundary 2 (error 1e-07, margin 1.00); slot 1 holds boundary 2, "
                       "wanted boundary 15; slot 2 holds boundary 15, wanted boundary 27",
                decides="layer-set: the displacement differs between slots; layer-offset would be one common step of one",
                figures={"slot 0": {"holds": 0, "wanted": 2, "error": 1e-7}, "slot 1": {"holds": 2, "wanted": 15, "error": 3e-7}},
            ),
            Evidence(
                hypothesis="slot 0 is the embedding", prediction="each row equals its token's embedding row up to one factor",
                measurement="same token, same vector, against the target's embedding", result="1,804 of 1,804 rows, factor 1.000",
                decides="boundary 0, without running the target",
            ),
        ],
        fix=Fix(
            says="Do not capture the embedding: the training data does not hold it, whatever its labels say.",
            config={"sglang@0.5.23": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}},
                    "vllm@0.32": {"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}},
        ),
        caveats=["acceptance after the fix is replayed, not served"],
    )


def suspected() -> Finding:
    return Finding(
        fault="template", where=[], says="the served prompts carry a system turn that no training sample has",
        strength="suspected", recovery="needs-serving", fix=Fix(says="Serve with the chat template of the training data"),
        evidence=[Evidence(hypothesis="h", prediction="p", measurement="m", result="0 of 64 against 64 of 64", decides="d")],
    )


def views() -> Views:
    """Every figure: slot 0 holds something else, the others what they were trained on; channel 5 of slot 1 stands out."""
    cloud = [(float(i % 5 - 2), float(i // 5 - 2)) for i in range(25)]
    channels = [0.5 + 0.01 * c for c in range(16)]
    standing = [*channels[:5], 60.0, *channels[6:]]
    status: list[Status] = ["prompt", "prompt", "own", "accepted", "accepted", "instead", *["accepted"] * 3, "bonus"]
    text = ["<|im_start|>", "user\n", "The", " cat", " sat", " down", " and", " then", " it", " slept"]

    def broken_down(by: str, names: list[str], rung: str, lengths: list[float]) -> Breakdown:
        parts = [Part(name=name, rounds=120 - 30 * i, sequences=12, length=length, interval=(length - 0.1, length + 0.1),
                      first=0.5) for i, (name, length) in enumerate(zip(names, lengths, strict=True))]
        return Breakdown(by=by, rung=rung, k=3, parts=parts)  # type: ignore[arg-type]

    return Views(
        channels=[
            SlotChannels(slot=0, width=4096, train_rows=900, serve_rows=800, channel=list(range(16)), train=channels,
                         serve=[2 * c for c in channels], alike=0.02, correlation=0.4),
            SlotChannels(slot=1, width=4096, train_rows=900, serve_rows=800, channel=list(range(16)), train=standing,
                         serve=standing, outliers=[5], alike=0.99, correlation=1.0),
        ],
        components=[
            SlotComponents(slot=0, explained=(0.4, 0.1), train=cloud, serve=[(x + 9, y) for x, y in cloud]),
            SlotComponents(slot=1, explained=(0.3, 0.2), train=cloud, serve=[(y, x) for x, y in cloud]),
        ],
        requests=[Request(
            name="request-007.safetensors", why="the request nearest to the accept length of all", recorded=True, first=30,
            cut=12, length=2.0, rounds=9, ids=list(range(100, 110)), text=text, status=status,
            drafted=[-1] * 5 + [77] + [-1] * 4, drafted_text=[""] * 5 + [" up"] + [""] * 4,
            cosines=[[0.1 * i for i in range(10)], [0.99] * 9 + [None]], places=["boundary 2", "boundary 15"],
        )],
        breakdowns=[
            broken_down("context", ["0 to 99", "100 to 300"], "trained", [2.3, 2.3]),
            broken_down("context", ["0 to 99", "100 to 300"], "measured", [1.9, 1.2]),
            broken_down("kind", ["code", "question"], "trained", [2.6, 2.1]),
            broken_down("kind", ["code", "question"], "measured", [1.31, 1.3]),
        ],
        learning=Learning(format="SpecForge", records=500, step=[10 * i for i in range(1, 51)],
                          loss=[8 - 0.1 * i for i in range(50)], rate=[1e-4] * 50, uniform=10.4, held_what="accuracy",
                          held_step=[100, 300, 500], held=[0.4, 0.55, 0.5], restarts=[250]),
    )


def case() -> Diagnosis:
    """The case this project starts from, on a target of 30 layers; figures invented, of a plausible size."""
    return Diagnosis(
        verdict="wiring",
        findings=[proven(), suspected()],
        placement=Placement(
            train=[placed(0, "embed", 2, 0.71), placed(1, "layer 3", 15, 0.44), placed(2, "layer 31", 27, 0.52)],
            serve=[placed(0, "2", 0, 1.0), placed(1, "30", 2, 0.7), placed(2, "58", 15, 0.41)],
        ),
        norms=Norms(at=list(AT), train=[slot_norms(0, 8.0), slot_norms(1, 20.0), slot_norms(2, 55.0), slot_norms(-1, 90.0)],
                    serve=[slot_norms(0, 1.0), slot_norms(1, 8.0), slot_norms(2, 20.0)]),
        acceptance=Ladder(
            trained=rung(2.31, [0.66, 0.41, 0.24], held_out=True, interval=(2.22, 2.4)),
            served=rung(1.31, [0.22, 0.07, 0.02], interval=(1.27, 1.35)), as_read=rung(1.31, [0.22, 0.07, 0.02]),
            measured=rung(1.30, [0.21, 0.07, 0.02]),
        ),
        matched={"serve": {"requests": 64, "rows": 9120, "rows without a token": 12}, "train": {"samples": 40}},
        power={"smallest_effect": 0.06, "sequences": 64},
        steps=["states cast from bfloat16 to float32", "12 rejected rows left out of 9,132"],
        next=["reference: the target was given as parts only; give a folder with weights"],
        provenance={"draftscope": "0.1.0", "serve": {"path": "capture/", "engine": "sglang", "engine_version": "0.5.23"}},
        views=views(),
    )


def mended() -> Diagnosis:
    """The case with all that can be asked for besides: the order of repair, a corrected copy, a folded draft, an explanation."""
    diagnosis = case()
    diagnosis.findings[0].fix.patch = Patch(config={"norm_output": False}, tensors={"fc.weight": "transpose"})
    diagnosis.repair = [Mended(fault="layer-set", where=["slot 0"], length=2.24, nll=1.8),
                        Mended(fault="template", where=[], length=None, nll=None)]
    diagnosis.applied = Applied(folder="fixed/", changes=["config norm_output: true to false"], left=["template: not a file"],
                                says="1 change, replayed at 2.20")
    diagnosis.absorbed = Absorbed(folder="folded/", says="folded exactly", exact=True, length_before=1.31, length_after=2.19)
    diagnosis.explained = {"layer-offset": "Not named: the slots moved by 2, 13 and 12 boundaries."}
    return diagnosis


def clean() -> Diagnosis:
    return Diagnosis(
        verdict="clean", acceptance=Ladder(trained=rung(2.31, [0.66, 0.41, 0.24]), as_read=rung(2.3, [0.66, 0.41, 0.23])))


def undecided() -> Diagnosis:
    return Diagnosis(verdict="undecided", next=["capture.bin: cannot be read"])


def large() -> Diagnosis:
    """A target of 61 layers and a draft of five slots."""
    diagnosis = case()
    boundaries = (2, 15, 30, 45, 58)
    last = placed(-1, "last", 61, 0.3, layers=61)
    diagnosis.placement = Placement(
        train=[*(placed(i, f"layer {b}", b, 0.4, layers=61) for i, b in enumerate(boundaries)), last],
        serve=[*(placed(i, str(b - 1), b - 1, 0.4, layers=61) for i, b in enumerate(boundaries)), last],
    )
    sizes = [slot_norms(i, 4.0 + b) for i, b in enumerate(boundaries)]
    diagnosis.norms = Norms(at=list(AT), train=[*sizes, slot_norms(-1, 300.0)], serve=[*sizes, slot_norms(-1, 300.0)])
    return diagnosis


def hostile() -> Diagnosis:
    """The case with every string that a file can hold replaced."""
    diagnosis = mended()
    for finding in diagnosis.findings:
        finding.says = finding.fix.says = HOSTILE
        finding.where, finding.caveats = [HOSTILE], [HOSTILE]
        finding.fix.config = {HOSTILE: {HOSTILE: HOSTILE}}
        finding.evidence = [Evidence(hypothesis=HOSTILE, prediction=HOSTILE, measurement=HOSTILE, result=HOSTILE, decides=HOSTILE,
                                     figures={HOSTILE: {HOSTILE: [HOSTILE]}})]
    for slot in diagnosis.placement.train + diagnosis.placement.serve:
        slot.label = HOSTILE
    diagnosis.matched = diagnosis.power = diagnosis.provenance = {HOSTILE: {HOSTILE: HOSTILE}}
    diagnosis.findings[1].fault = HOSTILE
    diagnosis.next = diagnosis.steps = [HOSTILE]
    shown, curve = diagnosis.views.requests[0], diagnosis.views.learning
    shown.name = shown.why = LONG
    shown.text = [HOSTILE, "\x00\u202e", "", *[HOSTILE] * (len(shown.ids) - 3)]
    shown.drafted_text, shown.places = [HOSTILE] * len(shown.ids), [HOSTILE, HOSTILE]
    assert curve is not None
    curve.format = curve.held_what = HOSTILE
    for one in diagnosis.views.breakdowns:
        one.rung = HOSTILE
        for part in one.parts:
            part.name = HOSTILE
    diagnosis.explained = {HOSTILE: HOSTILE}
    diagnosis.findings[0].fix.patch = Patch(config={HOSTILE: HOSTILE}, tensors={HOSTILE: HOSTILE})
    diagnosis.repair = 2 * [Mended(fault=HOSTILE, where=[HOSTILE], length=None, nll=None)]
    diagnosis.applied = Applied(folder=HOSTILE, changes=[HOSTILE], left=[HOSTILE], says=HOSTILE)
    diagnosis.absorbed = Absorbed(folder=HOSTILE, says=HOSTILE, faults=[HOSTILE], fit={HOSTILE: 1.0}, changed=[HOSTILE])
    return diagnosis
