"""The files of packaging/: linters accept them, their commands exist, every party is confined."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from atoll.core.errors import ConfigError
from atoll.deploy.kits import CLASSES, provision, state_folder
from tests.docs.pages import parse

ROOT = Path(__file__).resolve().parents[2]
PACKAGING = ROOT / "packaging"
UNITS = sorted(PACKAGING.glob("*.service"))
SERVICES = yaml.safe_load((PACKAGING / "compose.yaml").read_text())["services"]


def lint(name: str, *words: str | Path) -> str:
    """Run a linter that must not complain. Skip the test if the linter is missing."""
    beside = Path(sys.executable).with_name(name)
    tool = str(beside) if beside.exists() else shutil.which(name)
    if tool is None:
        pytest.skip(f"{name} is not installed")
    done = subprocess.run([tool, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_dockerfile_passes_its_linter() -> None:
    assert lint("hadolint", PACKAGING / "Dockerfile") == ""


def test_the_image_needs_no_root_and_copies_only_what_the_ignore_file_lets_in() -> None:
    text = (PACKAGING / "Dockerfile").read_text()
    assert re.findall(r"^USER (.*)$", text, re.M) == ["10001:10001"]
    assert "-c constraints.txt" in text
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY")]
    sources = {source for line in copied for source in line if "--from" not in line[0]}
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for unit in UNITS:
        name = unit.name.replace("@", "@bank-a")  # an instance of a template
        text = unit.read_text().replace("/opt/atoll/bin/atoll", sys.executable)
        (tmp_path / name).write_text(text)
        assert lint("systemd-analyze", "verify", "--man=no", tmp_path / name) == ""


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_runs_a_command_that_exists_and_writes_only_to_its_kit(unit: Path) -> None:
    lines = [line.partition("=") for line in unit.read_text().splitlines()]
    values = {name: value for name, _, value in lines}
    words = values["ExecStart"].replace("${METRICS}", "9464").replace("$OPTIONS", "").split()
    assert words[0] == "/opt/atoll/bin/atoll"
    kit = str(parse(["atoll", *words[1:]]).params["kit"])
    assert values["ReadWritePaths"] == kit
    assert values["User"] == "atoll"
    expected = {"ProtectSystem": "strict", "NoNewPrivileges": "yes", "Restart": "on-failure"}
    assert expected.items() <= values.items()
    assert values["CapabilityBoundingSet"] == ""


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_runs_a_command_that_exists_and_is_confined(name: str) -> None:
    service = SERVICES[name]
    found = parse(["atoll", *service["command"]]).params
    health = re.search(r"127\.0\.0\.1:(\d+)/health", (PACKAGING / "Dockerfile").read_text())
    assert health is not None
    assert found["metrics"] == int(health.group(1))
    assert service["read_only"] is True
    assert service["user"] == "10001:10001"
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pids_limit"] > 0
    assert service["mem_limit"]
    mounts = dict(mount.split(":", 1) for mount in service["volumes"])
    kit = mounts.pop(f"./kits/{name}")
    assert kit == str(found["kit"])
    assert all(mount.endswith(":ro") for mount in mounts.values())
    inside = {mount.removesuffix(":ro") for mount in mounts.values()}
    assert inside == {str(found[key]) for key in ("data", "policy") if found.get(key)}


def test_the_compose_file_follows_the_schema_of_compose() -> None:
    schema = ("--builtin-schema", "vendor.compose-spec")
    assert "ok" in lint("check-jsonschema", *schema, PACKAGING / "compose.yaml")


RUNTIMES = {
    "docker": {"parent": {"docker_image": "atoll"}},
    "k8s": {"parent": {"docker_image": "atoll", "parent_port": 8103}},
    "slurm": {
        "job_launcher": {"sandbox": "none", "internal_port": 8103, "python_path": sys.executable}
    },
}


def prepare(kit: Path, runtime: str, out: Path) -> Path:
    """FLARE's own preparation of a kit for a runtime."""
    config = out.with_suffix(".yaml")
    config.write_text(json.dumps({"runtime": runtime, **RUNTIMES[runtime]}))  # JSON is YAML
    words = ["deploy", "prepare", str(kit), "--output", str(out), "--config", str(config)]
    command = [sys.executable, "-m", "nvflare.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_kit_prepared_for_a_runtime_stays_narrow_and_has_to_name_its_state(runtime, tmp_path):
    kits = provision(tmp_path / "kits", ["bank-a"])
    for name, kind in (("server", "server"), ("bank-a", "site")):
        assert state_folder(kits[name]) == kits[name] / "atoll"
        prepared = prepare(kits[name], runtime, tmp_path / f"{name}-{runtime}")
        found = json.loads((prepared / "local" / "resources.json.default").read_text())
        assert not (prepared / "local" / "resources.json").exists()
        assert found["class_allow_list"] == CLASSES[kind]
        assert found["class_list_enforcement_mode"] == "enforce"
        assert found["allow_log_streaming"] is False
        assert f"{runtime}_launcher" in {part["id"] for part in found["components"]}
        assert not any("log" in part["id"] for part in found["components"])
        rights = json.loads((prepared / "local" / "authorization.json").read_text())
        assert rights["permissions"]["project_admin"]["byoc"] == "none"
        with pytest.raises(ConfigError, match="name a folder that outlives a job"):
            state_folder(prepared)
        (prepared / "local" / "atoll.json").write_text('{"state": "/state"}')
        assert state_folder(prepared) == Path("/state")
