"""When is a selection recomputed, and which layers read everything while drafting?"""

from dataclasses import dataclass

EVENTS = ("prefill", "draft", "verify")


@dataclass(frozen=True)
class Refresh:
    """After which rows a selection is recomputed, and the layers (negative from the end) that stay dense in draft rows.

    ASPIRE: on every event, layer N-2 dense. Vegas: prefill and verify, no dense layer. SnapKV: prefill only.
    """

    on: tuple[str, ...] = ("prefill", "verify")
    dense: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "on", tuple(self.on))  # a config hands over lists
        object.__setattr__(self, "dense", tuple(self.dense))
        for event in self.on:
            if event not in EVENTS:
                raise ValueError(f"refresh event must be one of {EVENTS}, got {event}")

    def due(self, event: str) -> bool:
        return event in self.on

    def dense_layers(self, layers: int) -> tuple[int, ...]:
        """Raises ValueError for a layer that the model does not have."""
        for x in self.dense:
            if not -layers <= x < layers:
                raise ValueError(f"dense layer {x} does not exist in a model of {layers} layers")
        return tuple(sorted({x % layers for x in self.dense}))
