"""What does a pass cost here? Timed passes -> non-negative least squares -> a `CostModel` with a key that is checked.

The profiling run drafts with a stepped length (ASPIRE-FSM needs no cost model), so tokens and KV reads of its passes
differ enough to tell the three coefficients apart. KV tokens are those really read: a dense layer's full read counts,
where the published code takes a constant for every draft row.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aspire.engine import PassRecord
from aspire.policies.method import Method
from aspire.policies.speculation import CostModel, Stepped

Key = dict[str, Any]


@dataclass(frozen=True)
class Calibration:
    """A fitted cost model and how far to trust it. mape: mean absolute error of a pass's time, as a share of it."""

    cost: CostModel
    rank: int
    mape: float
    passes: int
    key: Key


def profiling_method(method: Method) -> Method:
    """The method to time passes with: the same selection and refresh, draft lengths stepped."""
    longest = max(1, method.speculation.longest)
    return Method(f"{method.name}_profile", method.selection, Stepped(longest=longest), method.refresh)


def fit(passes: Sequence[PassRecord], layers: int, dense_layers: int, key: Key) -> Calibration:
    """Least squares of pass milliseconds on [1, tokens, KV tokens], coefficients >= 0.

    Every pass weighs by the inverse of its time, so that the relative error is what is minimised. Raises ValueError
    if the passes are too few or too alike to tell the coefficients apart.
    """
    features = np.array([[1.0, p.tokens, p.kv_tokens] for p in passes])
    ms = np.array([p.seconds * 1e3 for p in passes])
    scale = np.abs(features).max(0, initial=1e-9)
    rank = int(np.linalg.matrix_rank(features / scale)) if len(passes) else 0
    if rank < 3:
        raise ValueError(f"{len(passes)} timed passes have rank {rank}, 3 is needed: profile longer, with more slots")
    weighted = features / scale / ms[:, None]
    from scipy.optimize import nnls  # here: its import takes half a second

    coefficients = nnls(weighted, np.ones_like(ms))[0] / scale
    mape = float(np.abs(features @ coefficients / ms - 1).mean())
    model, mlp, attn = map(float, coefficients)
    return Calibration(CostModel(model, mlp, attn, layers, dense_layers), rank, mape, len(passes), key)


def save(calibration: Calibration, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(calibration), indent=2, sort_keys=True) + "\n")


def load(path: Path, key: Key) -> Calibration:
    """Read a cost model for `key`. Raises ValueError if it was fitted for something else, saying what differs."""
    content = json.loads(path.read_text())
    found = content.pop("key")
    differing = [
        f"{k}: file {found.get(k)!r}, here {key.get(k)!r}" for k in sorted({*found, *key}) if found.get(k) != key.get(k)
    ]
    if differing:
        raise ValueError(
            f"{path} was calibrated for another set-up ({'; '.join(differing)}); delete it to calibrate anew"
        )
    return Calibration(CostModel(**content.pop("cost")), key=key, **content)
