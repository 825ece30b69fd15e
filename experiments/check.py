"""Do the records under a folder follow from their requests? `python -m experiments.check DIR`; exit code 1 if not."""

import sys
from pathlib import Path

from experiments.metrics import check
from experiments.records import find_records, pick, read_record
from experiments.studies.study import study_of


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("usage: python -m experiments.check DIR, a folder with records below it", file=sys.stderr)
        return 2
    folders = find_records(arguments[0])
    bad = failed = 0
    for folder in folders:
        try:
            check(folder)
            record = read_record(folder)
            failed += record.status == "failed"
            if name := pick(record.config, "study.name"):
                study_of(name).frame([folder])  # what the study left beside the record can be read
        except ValueError as error:
            bad += 1
            print(error, file=sys.stderr)
    print(f"{len(folders)} records, {bad} that differ, {failed} failed cells")
    return int(bad > 0 or not folders)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
