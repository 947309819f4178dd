"""The public names as a type checker sees them; `make lint` reads this file, nothing runs it."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import draftscope
from draftscope.compare.statistics import Comparison
from draftscope.counterfactual import Replays
from draftscope.findings import Diagnosis
from draftscope.opened import Opened
from draftscope.scan.fingerprint import Fingerprint

source = draftscope.open("capture/")
assert_type(source, Opened)
assert_type(source.scan(), Fingerprint)
assert_type(draftscope.scan(Path("states")), Fingerprint)
assert_type(draftscope.scan(source, shard=(0, 4)), Fingerprint)
assert_type(draftscope.compare(source.scan(), "states/"), Comparison)
assert_type(draftscope.replay(["draft/"], "capture/", sets=["shift=-1"]), Replays)
found = draftscope.diagnose(serve="capture/", draft=Path("draft"), logs=["log.jsonl"])
assert_type(found, Diagnosis)
assert_type(found.findings[0].fault, str)
assert_type(found.json_text(), str)
try:
    draftscope.open("nothing/")
except draftscope.DraftscopeError as error:
    assert_type(error.remedy, str)
