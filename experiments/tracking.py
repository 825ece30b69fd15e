"""Where else do records go? To Weights & Biases, if asked: a sink fed from records, one W&B run a record.

Results live on disk; a failure here is a warning and never fails a cell. `mode: disabled` imports nothing.
"""

import warnings
from typing import Any

from experiments.records import Record


def numbers(record: Record) -> dict[str, float]:
    """What is plotted: every number of the tokens, timing and metrics sections."""
    flat: dict[str, float] = {}
    for section in ("tokens", "timing", "metrics"):
        for key, value in getattr(record, section).model_dump().items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                flat[f"{section}/{key}"] = value
    return flat


def track(record: Record, tracking: dict[str, Any], group: str) -> None:
    """Send one record; its W&B run is opened and closed here, so that cells never share one."""
    if tracking["mode"] == "disabled":
        return
    try:
        import wandb

        run = wandb.init(
            project=tracking["project"], entity=tracking["entity"], group=tracking["group"] or group,
            name=record.cell_id, mode=tracking["mode"], config=record.config, reinit="finish_previous",
        )  # fmt: skip
        run.summary.update(numbers(record) | {"status": record.status})
        run.finish(exit_code=0 if record.status == "ok" else 1)
    except Exception as error:
        warnings.warn(f"tracking {record.cell_id} failed, the record on disk is complete: {error}", stacklevel=2)
