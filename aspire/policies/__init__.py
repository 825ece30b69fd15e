"""Decoding methods as small frozen policies over `SlotState`."""

from aspire.policies.method import Method
from aspire.policies.refresh import Refresh
from aspire.policies.selection import Everything, Probe, Selected, Selection, TopBlocks
from aspire.policies.speculation import ClosedForm, CostModel, Fixed, Speculation, Stepped

__all__ = [
    "ClosedForm", "CostModel", "Everything", "Fixed", "Method", "Probe", "Refresh", "Selected", "Selection",
    "Speculation", "Stepped", "TopBlocks",
]  # fmt: skip
