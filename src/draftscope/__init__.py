"""draftscope finds out why a draft model's tokens get rejected.

    source = draftscope.open("capture/")                  samples or traces, lazily
    source.scan().save(Path("capture.fingerprint"))       their statistics
    found = draftscope.replay(["draft/"], "capture/")      acceptance offline, as `draftscope replay` finds it
    print(found.json_text())
    draftscope.diagnose(train="states/", serve="capture/", draft="draft/", target="target/")

Names are imported when they are used, so that importing the package costs nothing. A type checker sees what they are.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftscope.compare.statistics import compare
    from draftscope.counterfactual import counterfactuals as replay
    from draftscope.diagnose.calling import diagnose
    from draftscope.errors import DraftscopeError, UsageError
    from draftscope.findings import Diagnosis
    from draftscope.opened import open, scan

_PUBLIC = {
    "open": "draftscope.opened:open",
    "scan": "draftscope.scan",
    "compare": "draftscope.compare",
    "diagnose": "draftscope.diagnose",
    "replay": "draftscope.counterfactual:counterfactuals",
    "DraftscopeError": "draftscope.errors:DraftscopeError",
    "UsageError": "draftscope.errors:UsageError",
    "Diagnosis": "draftscope.findings:Diagnosis",
}
"""Where a name is found. Three are rooms of the package, which can be called: see their `__init__`."""

__all__ = ["Diagnosis", "DraftscopeError", "UsageError", "compare", "diagnose", "open", "replay", "scan"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'draftscope' has no attribute {name!r}")
    module, _, attribute = _PUBLIC[name].partition(":")
    imported = importlib.import_module(module)
    value = getattr(imported, attribute) if attribute else imported  # a room that is also a function
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
