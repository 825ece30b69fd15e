"""How do finished records get to Weights & Biases later? A new W&B run a record; nothing sent before is changed.

python -m experiments.upload runs/mine
python -m experiments.upload runs/mine project=aspire entity=me group=again mode=offline timeout_s=60
"""

from pathlib import Path

from experiments.config import TrackingConf, script, split
from experiments.records import find_records
from experiments.tracking import MODES, track


def main(arguments: list[str]) -> int:
    """Returns how many were not sent. Raises ValueError for a folder without records."""
    given = TrackingConf(mode="online")
    defaults = {"project": given.project, "entity": "", "group": "", "mode": given.mode, "timeout_s": "60"}
    own, rest = split(arguments, defaults)
    if len(rest) != 1 or own["mode"] not in MODES or not own["timeout_s"].isdigit():
        raise ValueError(f"give one FOLDER with records, mode one of {', '.join(MODES)}, timeout_s in whole seconds")
    folders = find_records(rest[0])
    if not folders:
        raise ValueError(f"no records in {rest[0]}; give the folder of a run")
    tracking = {**own, "entity": own["entity"] or None, "timeout_s": int(own["timeout_s"])}
    sent = sum(track(folder, tracking, Path(rest[0]).resolve().name) for folder in folders)
    print(f"sent {sent} of {len(folders)} records of {rest[0]}")
    return len(folders) - sent


if __name__ == "__main__":
    script(main)
