"""Which questions of the paper can be asked here? One study each; its cells and claims stand in conf/experiment."""

from experiments.studies.claims import At, Difference, Mean, Ratio, Spread, Untestable
from experiments.studies.heterogeneity import Heterogeneity
from experiments.studies.oracle import OracleGap
from experiments.studies.recall import MassRecall
from experiments.studies.study import Study
from experiments.studies.sweep import Across, Main, Map, Sweep

__all__ = [
    "Across", "At", "Difference", "Heterogeneity", "Main", "Map", "MassRecall", "Mean", "OracleGap", "Ratio", "Spread",
    "Study", "Sweep", "Untestable",
]  # fmt: skip
