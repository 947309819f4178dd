"""config-flag: a switch of the draft is in effect otherwise than it was trained with."""

from __future__ import annotations

from dataclasses import replace

from draftscope.faults.base import Fault, Suspicion, Undo
from draftscope.faults.measurements import GateFacts, Measurements
from draftscope.faults.plant import Plant
from draftscope.findings import Evidence, Fix

LEAST = 0.02


class ConfigFlag(Fault):
    """A norm before `fc`, per-slot norms, the normed residual: engines know some and pass over others in silence."""

    id = "config-flag"
    title = "a switch not in effect"
    verdict = "wiring"
    variants = ("engine: norm_before_residual", "checkpoint: norm_before_residual")

    def recognise(self, m: Measurements) -> list[Suspicion]:
        return self._by_training(m) or self._by_gate(m) or self._by_facts(m)

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
            result=f"-log p {found.own:.2f} and accept length {found.own_length or 0:.2f} as configured, {found.turned:.2f} and "
            f"{found.turned_length or 0:.2f} with {found.name} = {value}",
            figures={"own": found.own, "turned": found.turned},
            runtime=False,
        )
        suspicion.undo = Undo(switches={found.name: found.value})
        suspicion.fix = Fix(says=f"Set {found.name} to {value} in config.json, where the consumer looks for it: the draft was "
                                 "trained so.")
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
            return [self._wrong_claim(name, value, served.length or 0, measured.length or 0, gate)]
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

    def _wrong_claim(self, name: str, value: str, meant: float, measured: float, gate: GateFacts) -> Suspicion:
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
            "the file."
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
            fix=Fix(
                says="Serve with a consumer and version that honour the switch, spelt where it looks for it, or train without it "
                "(`draftscope replay --for` shows what each makes of the checkpoint)."
            ),
            recovery="replayed",
            undo=Undo(settings=True),
            runtime=runtime,
        )

    def make(self, plant: Plant, variant: str) -> Plant:
        if variant == "checkpoint: norm_before_residual":
            return replace(plant, config=(("norm_before_residual", True),))
        if variant != "engine: norm_before_residual":
            raise ValueError(f"config-flag has no variant {variant!r}")
        return replace(plant, engine=replace(plant.engine, settings={"norm_before_residual": True}))

    def mend(self, plant: Plant, boundaries: tuple[int, ...]) -> Plant | None:
        return replace(plant, engine=replace(plant.engine, settings={}), config=())
