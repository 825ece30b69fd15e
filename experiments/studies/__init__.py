"""Which questions of the paper can be asked here? One study each; its cells and claims stand in conf/experiment."""

from experiments.studies.claims import At, Difference, Mean, Ratio, Spread, Untestable
from experiments.studies.study import Study
from experiments.studies.sweep import Across, Map, Sweep

__all__ = ["Across", "At", "Difference", "Map", "Mean", "Ratio", "Spread", "Study", "Sweep", "Untestable"]
