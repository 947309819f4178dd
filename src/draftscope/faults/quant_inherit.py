"""quant-inherit: the draft is read, or was converted, under the target's quantisation."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Page, Suspicion, Trace
from draftscope.faults.checking import in_engine, told, trained_badly
from draftscope.faults.measurements import Measurements
from draftscope.faults.plant import Plant
from draftscope.findings import Patch, Strength

_WORDS = {
    "fp8": "e4m3 without a scale", "int8": "8 bits with a scale a row", "int4": "4 bits with a scale for each group of a row",
    "codes": "the 8-bit codes, their scales lost",
}
_KEEP = ("Keep the draft out of the target's quantisation: vLLM takes the draft's own quantization_config alone (PR #25883); "
         "SGLang needs --speculative-draft-model-quantization unquant.")


class QuantInherit(Fault):
    """An engine that quantises what it loads as the target is, or a converter that did not leave the draft out."""

    id = "quant-inherit"
    title = "the draft under the target's quantisation"
    verdict = "wiring"
    variants = (
        "engine: fp8 without scales", "engine: int8", "engine: int4", "engine: scales lost",
        "checkpoint: fp8 without scales", "checkpoint: int8", "checkpoint: int4", "checkpoint: one scale lost",
        "checkpoint: altered by a conversion", "checkpoint: packed", "checkpoint: the target's quantization_config",
    )
    page = Page(
        symptom="The server fails with a missing scale, or starts and accepts less, or nothing, with a quantised target.",
        traces={
            "engine: fp8 without scales": Trace(
                says="the loader casts the draft's matrices to e4m3 as it does the target's, without a scale",
                input="--draft, --serve (with fc_output and draft_states)", rung="measured",
                shows="fc and layer depart by a few percent, and agree once the checkpoint's matrices are cast so"),
            "engine: int8": Trace(
                says="the loader rounds the draft's matrices to 8 bits by row", rung="measured",
                input="--draft, --serve (with fc_output and draft_states)",
                shows="fc and layer depart by less than a percent, and agree to rounding once the matrices are rounded so"),
            "engine: int4": Trace(
                says="the loader rounds the draft's matrices to 4 bits by groups", rung="measured",
                input="--draft, --serve (with fc_output and draft_states)",
                shows="fc and layer depart by a tenth, and agree once the matrices are rounded so"),
            "engine: scales lost": Trace(
                says="a scale's name is not found: the codes are run as if they were the weights", rung="measured",
                input="--draft, --serve (with fc_output and draft_states)",
                shows="fc departs by far, and agrees once its matrix is its own codes"),
            "checkpoint: fp8 without scales": Trace(
                says="the exporter cast the draft with the target", input="--draft", rung="trained",
                shows="every value of the matrices is one that e4m3 has"),
            "checkpoint: int8": Trace(says="the exporter rounded the draft to 8 bits and wrote it back as bfloat16",
                                      input="--draft", rung="none", shows="each row lies on 255 steps of its own"),
            "checkpoint: int4": Trace(says="the exporter rounded the draft to 4 bits and wrote it back as bfloat16",
                                      input="--draft", rung="trained", shows="each group of 32 lies on 15 steps of its own"),
            "checkpoint: one scale lost": Trace(
                says="one matrix was written as its codes", input="--draft", rung="trained",
                shows="the matrix holds whole numbers up to 127"),
            "checkpoint: altered by a conversion": Trace(
                says="the conversion of the target touched the draft's block", input="--draft, --source-draft", rung="trained",
                shows="tensors differ from the source's and lie on a format's grid"),
            "checkpoint: packed": Trace(says="a matrix is stored two values a byte", input="--draft", rung="none",
                                        shows="whole bytes in place of floats, with half the columns"),
            "checkpoint: the target's quantization_config": Trace(
                says="the target's quantization_config was copied over plain weights", input="--draft", rung="none",
                shows="config.json says that the draft is quantised; its tensors are plain, and no scale is there"),
        },
        lookalikes={
            "weight-missing": "weights that are others, not rounded, do not agree once the checkpoint's are rounded",
            "target-quant": "there the states received depart, and the draft's stages over them are the checkpoint's",
            "train-budget": "a grid in the file is exact, whatever was learned",
        },
        unseen={"a draft trained for its quantisation": "the file then lies on a grid and does well: said, but only as a hint"},
        reports=("vllm PR #25883", "vllm issue #25882", "sglang PR #28196", "vllm issue #43455", "vllm issue #43472"),
    )

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return self._in_engine(m) or self._in_file(m)

    def _in_engine(self, m: Measurements) -> list[Suspicion]:
        found: dict[str, list[str]] = {}
        suspicions: dict[str, Suspicion] = {}
        for one in [] if m.checkpoint is None else m.checkpoint.engine:
            kind = one.key.split()[1] if one.key.startswith("altered ") else ""
            if kind not in _WORDS:
                continue
            part = {"fc": "fc.weight", "layer": "midlayer", "head": "lm_head.weight"}[one.part]
            found.setdefault(kind, []).append(f"tensor {part}")
            made = in_engine(self.id, one, found[kind], f"the engine runs the draft's matrices as {_WORDS[kind]}", _KEEP)
            if kind in suspicions:
                suspicions[kind].evidence += made.evidence
            else:
                suspicions[kind] = made
        return list(suspicions.values())

    def _in_file(self, m: Measurements) -> list[Suspicion]:
        facts = m.checkpoint
        if facts is None or not facts.grids:
            return []
        apart = facts.apart
        altered = [name for name in facts.grids if apart is not None and name in apart.differing]
        lost = [name for name, how in facts.grids.items() if how == "codes"]
        kinds = {how for how in facts.grids.values() if how != "codes"}
        names = altered or lost or list(facts.grids)
        better = apart is not None and apart.own is not None and apart.source is not None and apart.own > apart.source
        if altered:
            says = f"a conversion altered the draft: {_some(altered)} differ from the source and lie on the grid of " \
                   + ", ".join(_WORDS[how] for how in sorted({facts.grids[name] for name in altered}))
        elif lost:
            says = f"{_some(lost)} holds whole numbers: the codes of a quantised matrix without their scale"
        else:
            says = f"the matrices lie on the grid of {', '.join(_WORDS[how] for how in sorted(kinds))}: the draft was rounded " \
                   "when it was exported"
        cost = f"; -log p on training states {apart.own:.2f} here, {apart.source:.2f} with the source" \
            if apart is not None and apart.own is not None and apart.source is not None else ""
        # A grid alone may be meant: it is a hint where the draft does well with it.
        strength: Strength = "supported" if altered or trained_badly(m) else "suspected"
        if lost or (altered and better):
            strength = "proven"
        return [told(
            self.id, [f"tensor {name}" for name in names[:8]], says, strength,
            hypothesis="the draft was converted with the target, under its quantisation",
            prediction="trained matrices use all the values that their format has",
            measurement="every matrix against the grids of e4m3, of 8 bits by row and of 4 bits by group"
                        + ("; the checkpoint against its source" if apart is not None else ""),
            result="; ".join(f"{name}: {facts.grids[name]}" for name in list(facts.grids)[:8]) + f" (of {facts.matrices})" + cost,
            decides="quant-inherit if matrices lie on a grid that training does not leave",
            figures={"grids": dict(facts.grids), "matrices": facts.matrices},
            fix=f"Export the draft's block as it was trained (byte-identical to the source). {_KEEP}",
            recovery="bounded", patch=Patch(tensors=dict.fromkeys(names, "from source")),
            caveats=[] if lost or altered else ["a draft may have been rounded on purpose; its source (--source-draft) shows "
                                                "what it costs"],
        )]

    def why_not(self, m: Measurements) -> str:
        if m.checkpoint is None:
            return "give the draft (--draft): its matrices were not looked at"
        error = None if m.stages is None else m.stages.fc_error
        return f"none of {m.checkpoint.matrices} matrices lies on a grid of e4m3, 8 or 4 bits" + (
            "" if error is None else f"; the engine's fc is the file's within {error:.2g}")

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant not in self.variants:
            raise ValueError(f"quant-inherit has no variant {variant!r}")
        place, _, what = variant.partition(": ")
        kind = {"fp8 without scales": "fp8", "int8": "int8", "int4": "int4", "scales lost": "codes"}.get(what)
        if place == "engine":
            prefixes = ("fc.",) if kind == "codes" else ("fc.", "midlayer.", "lm_head.")
            return replace(plant, engine=replace(plant.engine, altered=tuple(f"{kind} {prefix}" for prefix in prefixes)))
        if what == "packed":
            return replace(plant, export=("packed midlayer.mlp.down_proj.weight",), refused=True)
        if what == "the target's quantization_config":
            copied = ("quantization_config", {"quant_method": "awq", "bits": 4})
            return replace(plant, config=(*plant.config, copied), refused=True)
        if what == "one scale lost":
            return replace(plant, export=("codes midlayer.self_attn.o_proj.",))
        if what == "altered by a conversion":
            return replace(plant, export=("int4 midlayer.mlp.",), source=True)
        return replace(plant, export=(f"{kind} ",))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, engine=replace(plant.engine, altered=()), export=(), refused=False,
                       config=tuple(pair for pair in plant.config if pair[0] != "quantization_config"))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
