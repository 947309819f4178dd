"""config-flag: a switch of the draft is in effect otherwise than it was trained with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftscope.faults.base import Fault, Page, Suspicion, Trace, Undo
from draftscope.faults.checking import HALF, eagle_mode, in_engine, in_file, told
from draftscope.faults.fixes import setting_keys
from draftscope.faults.measurements import GateFacts, Measurements
from draftscope.faults.plant import Plant
from draftscope.findings import Evidence, Fix, Patch
from draftscope.text import reached

LEAST = 0.02
_SERVE = ("Serve with a consumer and version that honour the switch, spelt where it looks for it, or train without it "
          "(`draftscope replay --for` shows what each makes of the checkpoint).")
_NAMES = {"fc_norm": "fc_norm", "norm_before_fc": "norm_before_fc", "fc bias": "fc_bias",
          "norm_before_residual": "norm_before_residual"}
_RECORDED = "--draft, --serve (with fc_output and draft_states)"
PAGE = Page(
    symptom="A draft with norms, biases or an order of its own accepts little in one engine and well in another.",
    traces={
        **{f"engine: {name}": Trace(
            says=f"the engine does not know or not find {_NAMES[name]} and runs without a word", input=_RECORDED, rung="measured",
            shows="the stage behind it is reproduced only with the switch turned")
           for name in ("norm_before_residual", "fc_norm", "norm_before_fc", "fc bias")},
        "engine: EAGLE in place of EAGLE3": Trace(
            says="the server is started with EAGLE: no slots are captured, the target's last state goes in, fc is passed over by "
                 "a test of widths, and the head is the target's", input="--draft, --serve, --target", rung="measured",
            shows="the capture has one slot where the draft takes three, and it is the target's last state"),
        **{f"checkpoint: {name}": Trace(
            says=f"config.json says another {_NAMES[name]} than the draft was trained with", input="--draft, --train, --target",
            rung="trained", shows="on its own training states the draft does well only with the switch turned")
           for name in ("norm_before_residual", "fc_norm", "norm_before_fc")},
        "checkpoint: head_dim": Trace(says="head_dim was inferred as hidden_size / heads", input="--draft", rung="none",
                                      shows="the projections' rows are heads times another head_dim"),
        "checkpoint: converted without a switch": Trace(
            says="a conversion between dialects dropped a switch", input="--draft, --source-draft", rung="trained",
            shows="the source's configuration says otherwise"),
    },
    lookalikes={
        "weight-missing": "no switch gives what the engine gave",
        "recur-state": "the first position is unharmed",
        "residual-missing": "both change the layer alone; each is tried, and one reproduces it",
    },
    unseen={
        "rms_norm_eps of 1e-5 for 1e-6": "changes a state by less than bfloat16 rounds it",
        "norm_output where the first position is sound": "nothing is tried there; recur-state tells it from draft states",
        "no norm before the head": "chooses as a norm whose gain is 1 does: weight-missing names the gain",
        "a switch turned where the draft does well on its training states": "nothing is tried where nothing is amiss",
    },
    reports=("vllm PR #46488", "sglang PR #21272", "Model-Optimizer PR #398"),
)


class ConfigFlag(Fault):
    """A norm before `fc`, per-slot norms, the normed residual: engines know some and pass over others in silence."""

    id = "config-flag"
    title = "a switch not in effect"
    verdict = "wiring"
    variants = (
        "engine: norm_before_residual", "engine: EAGLE in place of EAGLE3", "engine: fc_norm", "engine: norm_before_fc",
        "engine: fc bias",
        "checkpoint: norm_before_residual", "checkpoint: fc_norm", "checkpoint: norm_before_fc",
        "checkpoint: head_dim", "checkpoint: converted without a switch",
    )
    includes = frozenset({"layer-set"})  # in EAGLE mode the one slot does hold another layer
    page = PAGE

    def recognise(self, m: Measurements) -> list[Suspicion]:
        found = self._mode(m) or self._by_source(m) or self._by_training(m) or self._by_file(m) or self._by_stages(m)
        return found or self._by_gate(m) or self._by_facts(m) or self._idle(m)

    def _mode(self, m: Measurements) -> list[Suspicion]:
        """EAGLE in place of EAGLE3: one slot, the last state, and `fc` passed over by a test of widths."""
        if not eagle_mode(m) or m.serve is None:
            return []
        norm = m.serve.slots[0].norm
        return [told(
            self.id, ["config use_aux_hidden_state"],
            f"the server runs a draft of {m.shapes['draft']} slots in EAGLE mode: it receives the target's last state alone, and "
            "no fc", "proven", hypothesis="the server was started with EAGLE in place of EAGLE3",
            prediction="an EAGLE-3 draft receives as many slots as its fc takes, none of them the last state",
            measurement="slots of the capture against the draft's fc; the slot placed among the target's boundaries",
            result=f"one slot, boundary {m.layers} of {m.layers} ({norm}-norm); fc takes {m.shapes['draft']}",
            decides="config-flag if the only slot is the last state; schema-width if it is another",
            figures={"slots": 1, "takes": m.shapes["draft"], "boundary": m.layers, "norm": norm},
            fix="Start SGLang with --speculative-algorithm EAGLE3, vLLM with method eagle3.", recovery="needs-serving",
            runtime=True,
        )]

    def _by_file(self, m: Measurements) -> list[Suspicion]:
        """Any other switch: turned, the draft does well on its training states."""
        found = None if m.checkpoint is None else m.checkpoint.otherwise
        if found is None or "=" not in found.key:
            return []
        name, value = setting_of(found.key)
        if name == "double_norm":
            says = "the draft was trained with the feature normed twice, as no engine does (ModelOpt's trainer)"
            return [in_file(self.id, found, ["config double_norm"], says, "Train again with one norm: no engine runs two.",
                            undo=Undo(switches={name: value}))]
        return [in_file(
            self.id, found, [f"config {name}"],
            f"the checkpoint's configuration is wrong about {name}: the draft was trained with it {_word(value)}",
            f"Set {name} to {_word(value)} in config.json, where the consumer looks for it.",
            undo=Undo(switches={name: value}), patch=Patch(config={name: value}), config=setting_keys(m.consumer, name, value))]

    def _by_stages(self, m: Measurements) -> list[Suspicion]:
        """What the engine recorded comes out only with a switch turned."""
        found = []
        for one in [] if m.checkpoint is None else m.checkpoint.engine:
            name, value = setting_of(one.key) if "=" in one.key else ("", None)
            if name in ("", "residual"):
                continue
            found.append(in_engine(
                self.id, one, [f"config {name}"], f"the engine runs the draft with {name} = {value}, against the checkpoint",
                _SERVE, undo=Undo(settings=True), config=setting_keys(m.consumer, name, not value)))
        return found

    def _by_source(self, m: Measurements) -> list[Suspicion]:
        apart = None if m.checkpoint is None else m.checkpoint.apart
        changed = {} if apart is None else {key: pair for key, pair in apart.settings.items()
                                            if key not in ("boundaries", "layers", "slots")}
        if apart is None or not changed:
            return []
        better = apart.own is not None and apart.source is not None and apart.own - apart.source > LEAST
        words = ", ".join(f"{key}: {theirs} in the source, {now} here" for key, (theirs, now) in changed.items())
        was = {key: theirs for key, (theirs, _) in changed.items()}
        return [told(
            self.id, [f"config {key}" for key in changed], f"the conversion changed what the configuration says ({words})",
            "proven" if better else "supported", hypothesis="the conversion lost or changed a switch",
            prediction="a conversion keeps every switch", measurement="both configurations, as the draft model here reads them",
            result=words + (f"; -log p on training states {apart.own:.2f} here, {apart.source:.2f} with the source"
                            if apart.own is not None and apart.source is not None else ""),
            decides="config-flag if a switch differs and the source does better",
            figures={key: {"source": theirs, "here": now} for key, (theirs, now) in changed.items()},
            fix="Write the source's values.", recovery="bounded", patch=Patch(config=dict(was)), undo=Undo(switches=was),
        )]

    def _idle(self, m: Measurements) -> list[Suspicion]:
        """Tensors of a switch that is off: present, and read by nobody."""
        names = [] if m.checkpoint is None else [n for n in m.checkpoint.idle if "fc_norm." in n or "input_norm." in n
                                                 or "aux_norm_" in n]
        if not names:
            return []
        switch = "norm_before_fc" if any("input_norm" in name for name in names) else "fc_norm"
        return [told(
            self.id, [f"tensor {name}" for name in names[:8]],
            f"{', '.join(names[:3])} is in the file and {switch} is not set: no engine reads it", "suspected",
            hypothesis="the switch was lost between training and export", prediction="every tensor of the file is used",
            measurement="names in the files against the configuration", result=f"{len(names)} tensors without a use",
            decides="config-flag if the draft was trained with them", figures={"idle": names},
            fix=f"Set {switch} to true in config.json if the draft was trained so, else remove the tensors.",
            recovery="needs-serving", caveats=["training states (--train) tell which"],
        )]

    def _by_training(self, m: Measurements) -> list[Suspicion]:
        """The configuration says otherwise than the draft was trained: its own training states tell."""
        found = m.turned
        if found is None:
            return []
        value = str(found.value).lower()
        suspicion = self._suspicion(
            [f"config {found.name}"],
            f"the checkpoint's configuration is wrong about {found.name}: the draft was trained with it {value}",
            measurement="the draft replayed on its training states with the switch as configured and turned",
            result=f"{reached(found.own, found.own_length)} as configured, {reached(found.turned, found.turned_length)} with "
            f"{found.name} = {value}",
            figures={"own": found.own, "turned": found.turned},
            runtime=False,
        )
        if found.next_best is not None and found.next_best > HALF:
            suspicion.strength = "supported"
            suspicion.caveats.append("another reading of the file does nearly as well")
        suspicion.undo = Undo(switches={found.name: found.value})
        suspicion.fix = Fix(says=f"Set {found.name} to {value} in config.json, where the consumer looks for it: the draft was "
                                 "trained so.", patch=Patch(config={found.name: found.value}),
                            config=setting_keys(m.consumer, found.name, found.value))
        return [suspicion]

    def _by_gate(self, m: Measurements) -> list[Suspicion]:
        """The engine's own counts come out only with a switch turned."""
        if m.gate is None or m.gate.passed:
            return []
        passed = [(key, gate) for key, gate in m.gate_with.items() if key.startswith("norm_before_residual=") and gate.passed]
        if not passed:
            return []
        key, gate = passed[0]
        name, _, value = key.partition("=")
        served, measured = m.rungs.get("served"), m.rungs.get("measured")
        if served is not None and measured is not None and (measured.length or 0) - (served.length or 0) > LEAST:
            return [self._wrong_claim(m, name, value, served.length or 0, measured.length or 0, gate)]
        return [
            self._suspicion(
                [f"config {name}"],
                f"the engine runs the draft with {name} = {value}, against the checkpoint",
                measurement="the recorded accepted counts and draft states replayed with the switch as it is and turned",
                result=f"{m.gate.share:.1%} of {gate.steps} steps as the checkpoint says, {gate.share:.1%} with {key}",
                figures={"gate": m.gate.share, "gate_with": gate.share},
                runtime=True,
            )
        ]

    def _wrong_claim(
        self, m: Measurements, name: str, value: str, meant: float, measured: float, gate: GateFacts,
    ) -> Suspicion:
        """The engine runs the switch otherwise, and the draft does better so: it is the checkpoint's word that is wrong."""
        suspicion = self._suspicion(
            [f"config {name}"],
            f"the checkpoint's configuration is wrong about {name}: the engine runs it as {value}, and the draft accepts more so",
            measurement="the recorded counts replayed with the switch turned, and acceptance both ways",
            result=f"{gate.share:.1%} of {gate.steps} steps come out with {name} = {value}; accept length {measured:.2f} so, "
            f"{meant:.2f} as the configuration says",
            figures={"gate_with": gate.share, "length": measured, "length_as_configured": meant},
            runtime=False,
        )
        suspicion.strength, suspicion.recovery, suspicion.undo = "supported", "bounded", None
        suspicion.fix = Fix(
            says=f"Set {name} to {value.lower()} in config.json: it costs nothing in this engine, and would in one that obeys "
            "the file.", patch=Patch(config={name: value == "True"}), config=setting_keys(m.consumer, name, value == "True"),
        )
        return suspicion

    def _by_facts(self, m: Measurements) -> list[Suspicion]:
        """The consumer is known not to honour a switch, and replay without it does worse on the same states."""
        served, as_read = m.rungs.get("served"), m.rungs.get("as_read")
        if not m.changed or served is None or as_read is None or served.length is None or as_read.length is None:
            return []
        if served.length - as_read.length < LEAST:
            return []
        text = ", ".join(f"{name} is {theirs} where the checkpoint means {own}" for name, (own, theirs) in m.changed.items())
        return [
            self._suspicion(
                [f"config {name}" for name in m.changed],
                f"{m.consumer} does not read the checkpoint as it is meant: {text}",
                measurement="the switches that this consumer honours, from its sources, and the draft replayed both ways on the "
                "served states",
                result=f"accept length {served.length:.2f} as meant, {as_read.length:.2f} as {m.consumer} reads it; {text}",
                figures={name: {"checkpoint": own, "consumer": theirs} for name, (own, theirs) in m.changed.items()},
                runtime=False,
            )
        ]

    def _suspicion(
        self, where: list[str], says: str, *, measurement: str, result: str, figures: dict[str, object], runtime: bool
    ) -> Suspicion:
        return Suspicion(
            fault=self.id,
            side="serve",
            where=where,
            says=says,
            strength="proven",
            evidence=[
                Evidence(
                    hypothesis="a switch of the draft is not in effect as it was in training",
                    prediction="the draft with the checkpoint's own switches gives what the engine gives",
                    measurement=measurement,
                    result=result,
                    decides="config-flag if only the turned switch explains the engine, or the consumer is known to ignore it",
                    figures=figures,
                )
            ],
            fix=Fix(says=_SERVE),
            recovery="replayed",
            undo=Undo(settings=True),
            runtime=runtime,
        )

    def why_not(self, m: Measurements) -> str:
        if m.stages is not None and m.stages.layer_error is not None:
            fc = "" if m.stages.fc_error is None else f"fc within {m.stages.fc_error:.2g}, "
            return f"the engine's stages are the checkpoint's with its own switches: {fc}layer within {m.stages.layer_error:.2g}"
        if "trained" in m.rungs:
            return "the draft does as well on its training states with its switches as with any turned, or well enough not to try"
        return "give training states (--train) or draft states (--serve): switches that no tensor betrays show there alone"

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant not in self.variants:
            raise ValueError(f"config-flag has no variant {variant!r}")
        place, _, what = variant.partition(": ")
        if what == "EAGLE in place of EAGLE3":
            return replace(plant, mode="eagle", engine=replace(
                plant.engine, settings={"use_aux_hidden_state": False, "slots": 1}, d2t="zero", altered=("head target first",)))
        if what == "head_dim":
            return replace(plant, config=(*plant.config, ("head_dim", 8)), refused=True)
        if what == "converted without a switch":
            return replace(plant, draft="fc_norm", config=(*plant.config, ("fc_norm", None)), source=True)
        name = _NAMES[what]
        build = {"fc_norm": "fc_norm", "norm_before_fc": "norm_before_fc", "fc_bias": "fc_bias"}.get(name, "")
        plant = replace(plant, draft=build)  # type: ignore[arg-type]
        turned = name == "norm_before_residual"
        if place == "engine":
            return replace(plant, engine=replace(plant.engine, settings={**plant.engine.settings, name: turned}))
        return replace(plant, config=(*plant.config, (name, turned)))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        if plant.mode == "eagle":
            return replace(plant, mode="eagle3", engine=replace(plant.engine, settings={}, d2t="offset", altered=()))
        return replace(plant, engine=replace(plant.engine, settings={}), config=(), refused=False)


def setting_of(key: str) -> tuple[str, Any]:
    """A switch and its value from `NAME=VALUE`."""
    name, _, value = key.partition("=")
    return name, {"True": True, "False": False}.get(value, value)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
