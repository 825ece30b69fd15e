"""What is a method? A selection, a speculation and a refresh, each chosen freely."""

from dataclasses import dataclass, field, replace

from aspire.policies.refresh import Refresh
from aspire.policies.selection import Everything, Selection
from aspire.policies.speculation import ClosedForm, CostModel, Fixed, Speculation


@dataclass(frozen=True)
class Method:
    """One decoding method. The default is autoregressive decoding."""

    name: str = "autoregressive"
    selection: Selection = field(default_factory=Everything)
    speculation: Speculation = field(default_factory=lambda: Fixed(0))
    refresh: Refresh = field(default_factory=Refresh)

    def check(self, layers: int) -> None:
        """Raises ValueError where the parts do not fit each other or a model of `layers` layers."""
        dense = self.refresh.dense_layers(layers)
        probe = self.selection.probe
        if probe is None:
            return
        lost = set(probe.at(layers)) - set(dense)
        if self.refresh.due("draft") and lost:
            raise ValueError(
                f"method {self.name}: refresh on draft needs scores of layers {sorted(lost)}, which draft rows do not "
                f"read in full; add them to refresh.dense or drop 'draft' from refresh.on"
            )
        if self.selection.scope == "request" and len(probe.at(layers)) != 1:
            raise ValueError(f"method {self.name}: one set per request needs a probe of exactly one layer")

    @property
    def needs_cost_model(self) -> bool:
        return isinstance(self.speculation, ClosedForm) and self.speculation.cost is None

    def with_cost_model(self, cost: CostModel) -> "Method":
        assert isinstance(self.speculation, ClosedForm)
        return replace(self, speculation=replace(self.speculation, cost=cost))
