"""Get the models and data of a set of configs into the cache, and say what was got; what is there stays.

python -m experiments.fetch                      # profile=auto, as `make reproduce-fig1`: paper or embedded
python -m experiments.fetch profile=paper
python -m experiments.fetch model=qwen3_1p7b,qwen3_8b benchmark=aime25,math500
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir

from aspire.model.load import EMBEDDED
from experiments.benchmarks import FileBenchmark
from experiments.config import CONF, check_overrides, choices, nearest, plain, register, script, split
from experiments.fig1 import PROFILES, choose_profile
from experiments.hub import DataFile, commit_of, file_facts
from experiments.layout import make_source
from experiments.loading import Config, local_path


@dataclass(frozen=True)
class Got:
    """What one config group needs. revision: the commit of a Hub snapshot. rows: of data."""

    what: str
    revision: str | None
    files: tuple[DataFile, ...]
    rows: int | None = None

    def lines(self) -> Iterator[str]:
        """The item, then its files: name, bytes and SHA-256 of each."""
        if not self.files:
            yield f"{self.what}: embedded, nothing to fetch"
            return
        rows = "" if self.rows is None else f", {self.rows} rows"
        size = sum(file.size for file in self.files)
        yield f"{self.what}: revision {self.revision or 'none (local)'}{rows}, {len(self.files)} files, {size} bytes"
        for file in self.files:
            yield f"  {file.name}  {file.size} bytes  sha256 {file.sha256}"


def fetch_model(config: Config) -> Got:
    """Weights, config and tokenizer; no weights where they are random. Raises ValueError as the Hub refuses."""
    conf = config["model"]
    name = f"model {conf['name']} ({conf['path']})"
    if conf["path"] in EMBEDDED:
        return Got(name, None, ())
    folder = Path(local_path(conf["path"], conf["revision"], weights=conf["weights"] == "real"))
    if folder.is_file():
        return Got(name, None, (file_facts(folder),))
    files = tuple(file_facts(path, folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return Got(name, commit_of(folder), files)


def fetch_data(config: Config) -> Got:
    """The files of a benchmark, read and counted. Raises ValueError for rows or hashes that are not those stated."""
    source, name = make_source(config), f"benchmark {config['benchmark']['name']}"
    if not isinstance(source, FileBenchmark):
        return Got(name, None, ())
    rows = source.read()
    return Got(f"{name} ({source.path})", rows.revision, rows.files, len(rows.rows))


def wanted(words: list[str]) -> tuple[list[list[str]], list[list[str]]]:
    """Overrides of each model and of each benchmark: those named in the words, else those of a figure's profile.

    Raises ValueError for an unknown name or profile.
    """
    own, rest = split(words, {"profile": "auto", "model": "", "benchmark": ""})
    if own["model"] or own["benchmark"]:
        models = [name for name in own["model"].split(",") if name]
        benchmarks = [name for name in own["benchmark"].split(",") if name]
    else:
        panels = PROFILES[choose_profile(own["profile"])]
        models = list(dict.fromkeys(panel.model for panel in panels))
        benchmarks = list(dict.fromkeys(panel.benchmark for panel in panels))
    for group, names in (("model", models), ("benchmark", benchmarks)):
        for name in names:
            if name not in choices(group):
                raise ValueError(f"unknown {group} {name!r}{nearest(name, choices(group))}")
    check_overrides(rest)
    return [[f"model={name}", *rest] for name in models], [[f"benchmark={name}", *rest] for name in benchmarks]


def main(arguments: list[str]) -> int:
    """Fetch everything; what cannot be got is said and the rest goes on. Returns how many items failed."""
    register()
    failed, total = 0, 0
    with initialize_config_dir(str(CONF), version_base="1.3"):
        models, benchmarks = wanted(arguments)
        jobs = [(fetch_model, words) for words in models] + [(fetch_data, words) for words in benchmarks]
        for fetch, words in jobs:
            try:
                got = fetch(plain(compose("config", [*words, "output_dir=."])))
            except ValueError as error:
                failed += 1
                print(f"failed: {words[0]}: {error}")
                continue
            total += sum(file.size for file in got.files)
            print("\n".join(got.lines()))
    print(f"ok {len(jobs) - failed} / failed {failed}: {total} bytes in place")
    return failed


if __name__ == "__main__":
    script(main)
