"""What of an earlier run stands? Its finished cells, if they are of the same config; else the difference is shown."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments import journal
from experiments.config import MAX_FIT
from experiments.layout import with_batch
from experiments.loading import Config
from experiments.records import JOURNAL, Record, find_records, read_record

FREE = {"resume", "overwrite", "dry_run", "output_dir", "run_id", "tracking"}  # a resumption may differ in these
SHOWN = 6  # differences that an error names


def resumable(configs: list[Config], out: Path) -> list[Record]:
    """Finished records of exactly these configs. Raises ValueError if a record or a journal is of another config."""
    found = {r.cell.method: r for r in map(read_record, find_records(out)) if r.status == "ok"}
    begun = {path.parent: journal.read_config(path.parent) for path in sorted(out.rglob(JOURNAL))}
    kept = []
    for config in configs:
        name = config["method"]["name"]
        for folder, had in begun.items():
            if had is not None and had["method"]["name"] == name:
                hold_equal(config, had, folder)
        if name in found:
            hold_equal(config, found[name].config, out)
            kept.append(found[name])
    return kept


def hold_equal(asked: Config, had: Config, where: Path) -> None:
    """Raises ValueError naming each setting that differs, with both values."""
    if asked["batch"] != MAX_FIT:
        asked = with_batch(asked, asked["batch"])
    old, new = dict(leaves(unsettled(had, asked))), dict(leaves(unsettled(asked, asked)))
    differing = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    if differing:
        shown = [f"{key}: {old.get(key)!r} there, {new.get(key)!r} asked" for key in differing[:SHOWN]]
        more = [f"{len(differing) - SHOWN} more"] if len(differing) > SHOWN else []
        raise ValueError(
            f"{where} holds results of another config ({'; '.join(shown + more)}); "
            "ask for the same, or choose another output_dir"
        )


def unsettled(config: Config, asked: Config) -> Config:
    """A config without what a run settles: the sizes that `asked` leaves to the memory, the window, the engine."""
    kept = {k: v for k, v in config.items() if k not in FREE}
    stated = [k for k, v in asked["engine"].items() if v not in (None, "auto")]
    kept["engine"] = {k: config["engine"].get(k) for k in stated}
    if asked["protocol"]["tokens_per_slot"]:
        kept["protocol"] = {k: v for k, v in kept["protocol"].items() if k != "window_tokens"}
    if asked["batch"] == MAX_FIT:
        source = asked["benchmark"]["source"]
        own = {k: v for k, v in config["benchmark"]["source"].items() if source.get(k) != MAX_FIT}
        kept["benchmark"] = {**config["benchmark"], "source": own}
        del kept["batch"]
    return kept


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is not a mapping with entries."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree
