"""Every fault that draftscope recognises, in the order in which ties are broken: what voids other figures first."""

from __future__ import annotations

from draftscope.faults.attn_mask import AttnMask
from draftscope.faults.base import Fault
from draftscope.faults.capture_alias import CaptureAlias
from draftscope.faults.config_flag import ConfigFlag
from draftscope.faults.ctx_limit import CtxLimit
from draftscope.faults.data_offpolicy import DataOffpolicy
from draftscope.faults.draft_kv import DraftKv
from draftscope.faults.final_norm import FinalNorm
from draftscope.faults.graph_capture import GraphCapture
from draftscope.faults.layer_offset import LayerOffset
from draftscope.faults.layer_set import LayerSet
from draftscope.faults.leak import Leak
from draftscope.faults.lossmask_empty import LossmaskEmpty
from draftscope.faults.lossmask_span import LossmaskSpan
from draftscope.faults.metric import Metric
from draftscope.faults.nonfinite import NonFinite
from draftscope.faults.parallel_shard import ParallelShard
from draftscope.faults.pos_id import PosId
from draftscope.faults.quant_inherit import QuantInherit
from draftscope.faults.recur_state import RecurState
from draftscope.faults.req_mix import ReqMix
from draftscope.faults.residual_missing import ResidualMissing
from draftscope.faults.rope import Rope
from draftscope.faults.rotated_space import RotatedSpace
from draftscope.faults.run_ops import RunOps
from draftscope.faults.sampler import Sampler
from draftscope.faults.scale_mult import ScaleMult
from draftscope.faults.schema_width import SchemaWidth
from draftscope.faults.target_quant import TargetQuant
from draftscope.faults.template import Template
from draftscope.faults.tied_head import TiedHead
from draftscope.faults.token_shift import TokenShift
from draftscope.faults.train_budget import TrainBudget
from draftscope.faults.vocab_map import VocabMap
from draftscope.faults.weight_missing import WeightMissing

FAULTS: tuple[Fault, ...] = (
    NonFinite(),
    SchemaWidth(),
    ReqMix(),
    GraphCapture(),
    CaptureAlias(),
    ParallelShard(),
    WeightMissing(),
    VocabMap(),
    TiedHead(),
    QuantInherit(),
    ConfigFlag(),
    LayerSet(),
    LayerOffset(),
    ResidualMissing(),
    FinalNorm(),
    ScaleMult(),
    RotatedSpace(),
    TokenShift(),
    TargetQuant(),
    RecurState(),
    PosId(),
    Rope(),
    AttnMask(),
    DraftKv(),
    CtxLimit(),
    Sampler(),
    LossmaskEmpty(),
    LossmaskSpan(),
    Metric(),
    Leak(),
    RunOps(),
    Template(),
    DataOffpolicy(),
    TrainBudget(),
)


def fault(name: str) -> Fault:
    """The fault of this id; KeyError lists the known ones."""
    for candidate in FAULTS:
        if candidate.id == name:
            return candidate
    raise KeyError(f"unknown fault {name!r}; known: {', '.join(f.id for f in FAULTS)}")
