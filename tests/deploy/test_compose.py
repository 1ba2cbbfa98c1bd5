"""docker-compose.yml and its image: against the compose schema, against the package, and run by hand as they stand."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from ods_async.cli.arguments import parser
from ods_async.config import OnlineDataEngineCfg
from ods_async.testing import COUNTING_ID
from tests.cli.programs import run
from tests.deploy.containers import ODS, Contained, contained, eventually, need_namespaces
from tests.deploy.jsonschema_light import faults

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
# The compose specification's own schema (Apache License 2.0, github.com/compose-spec/compose-spec).
SCHEMA = json.loads((Path(__file__).parent / "compose-spec.json").read_text())


# --- as it stands ---------------------------------------------------------------------------------------------------


def test_the_file_fits_the_compose_schema() -> None:
    assert list(faults(COMPOSE, SCHEMA, SCHEMA)) == []


@pytest.mark.parametrize(
    "spoil",
    [
        {"stop_grace": "15s"},
        {"shm_size": []},
        {"healthcheck": {"test": "x", "interval": 3}},
        {"depends_on": {"broker": {"condition": "soon"}}},
        {"cap_drop": ["ALL", "ALL"]},
        {"volumes": [{"source": "keys"}]},
    ],
)
def test_the_schema_check_finds_what_is_wrong(spoil: dict[str, Any]) -> None:
    spoiled = COMPOSE | {"services": SERVICES | {"broker": SERVICES["broker"] | spoil}}
    assert list(faults(spoiled, SCHEMA, SCHEMA))


def entrypoint(service: dict[str, Any]) -> list[str]:
    found: list[str] = service.get("entrypoint") or json.loads(re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.M)[-1])
    return found


@pytest.mark.parametrize("name", SERVICES)
def test_c46_every_service_is_process_1_not_root_and_has_time_to_end(name: str) -> None:
    """C46: lists, so no shell; no init in between; the grace is longer than what the settings let workers have."""
    service = SERVICES[name]
    assert isinstance(service["command"], list)
    assert isinstance(entrypoint(service), list)
    assert service["init"] is False
    assert service["restart"] in ("no", "on-failure", "unless-stopped")
    cfg = OnlineDataEngineCfg.from_file(ROOT / "deploy" / "service.yaml")
    assert float(service["stop_grace_period"].removesuffix("s")) >= cfg.shutdown_timeout + 5.0
    stage = DOCKERFILE.partition(f"AS {service['build']['target']}\n")[2].partition("\nFROM ")[0]
    assert re.findall(r"^USER (\w+)$", stage, re.M)[-1] == "ods"


def test_memory_is_set_and_shared_as_explained() -> None:
    assert SERVICES["broker"]["shm_size"]
    assert SERVICES["broker"]["ipc"] == "shareable"
    assert SERVICES["trainer"]["ipc"] == "service:broker"
    readers = [name for name, service in SERVICES.items() if "keys:/keys:ro" in service["volumes"]]
    assert set(readers) == set(SERVICES) - {"keygen"}


def test_the_services_start_in_the_order_in_which_they_need_each_other() -> None:
    assert SERVICES["broker"]["depends_on"] == {"keygen": {"condition": "service_completed_successfully"}}
    for name in ("worker", "trainer", "events", "dashboard"):
        assert SERVICES[name]["depends_on"] == {"broker": {"condition": "service_healthy"}}


@pytest.mark.parametrize("name", [name for name in SERVICES if entrypoint(SERVICES[name]) == ["ods-async"]])
def test_every_command_is_one_that_the_program_knows(name: str) -> None:
    parser().parse_args(SERVICES[name]["command"])


def test_the_image_has_what_the_package_needs_and_nothing_missing_is_copied() -> None:
    """The service's image goes without torch, which only consumers import."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needs = (*project["dependencies"], *extras["yaml"], *extras["metaworld"], *extras["dashboard"])
    wanted = {re.split(r"[<>=]", need)[0] for need in needs}
    lines = re.findall(r"^RUN pip install .*constraints\.txt (.*)$", DOCKERFILE.replace("\\\n", ""), re.M)
    service, trainer = ({word for word in line.split() if re.fullmatch(r"[a-z][\w-]+", word)} for line in lines)
    assert (service, trainer) == (wanted - {"torch", "tensordict"}, {"torch", "tensordict"})
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.M):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists()
            assert f"!{source}" in kept


# --- run by hand ----------------------------------------------------------------------------------------------------


class Place:
    """Where the containers' paths and names are on this machine."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            two.bind(("127.0.0.1", 0))
            self.port, self.web = one.getsockname()[1], two.getsockname()[1]
        self._paths = {"/keys": str(folder / "keys"), "/etc/ods": str(folder / "etc")}
        shutil.copytree(ROOT / "deploy", folder / "etc", ignore=shutil.ignore_patterns("__pycache__"))
        small = yaml.safe_load((folder / "etc" / "service.yaml").read_text()) | {
            "buffer_size": 4,
            "max_episode_steps": 40,
            "gym_config": {
                "id": COUNTING_ID,
                "imports": ["ods_async.testing"],
                "kwargs": {"min_length": 20, "max_length": 30},
            },
        }
        (folder / "etc" / "service.yaml").write_text(yaml.safe_dump(small))
        blocked = folder / "no-torch" / "torch"
        blocked.mkdir(parents=True)
        (blocked / "__init__.py").write_text("raise ImportError('the image of this service holds no torch')\n")
        self.no_torch = str(blocked.parent)

    def here(self, word: str) -> str:
        for path, real in self._paths.items():
            if word == path or word.startswith(f"{path}/"):
                return real + word.removeprefix(path)
        return (
            word.replace("tcp://broker:", "tcp://127.0.0.1:")
            .replace(":5555", f":{self.port}")
            .replace(":8555", f":{self.web}")
        )

    def command(self, name: str) -> list[str]:
        words = [self.here(word) for word in (*entrypoint(SERVICES[name]), *SERVICES[name]["command"])]
        return self.program(words)

    @staticmethod
    def program(words: list[str]) -> list[str]:
        return [*ODS, *words[1:]] if words[0] == "ods-async" else [sys.executable, *words[1:]]

    def start(self, name: str, hostname: str = "box") -> contextlib.AbstractContextManager[Contained]:
        extra = {}
        if SERVICES[name]["image"] == "ods-async":
            from ods_async.supervise.children import import_path

            extra["PYTHONPATH"] = f"{self.no_torch}:{import_path()}"
        return contained(*self.command(name), hostname=hostname, **extra)

    def healthy(self, name: str, program: Contained) -> bool:
        kind, *words = SERVICES[name]["healthcheck"]["test"]
        if kind == "CMD":
            command = self.program([self.here(word) for word in words])
        else:
            assert kind == "CMD-SHELL"
            # Docker turns $$ into $; the program's name and the paths are this machine's.
            text = " ".join(self.here(word) for word in words[0].replace("$$", "$").split(" "))
            command = ["sh", "-c", text.replace("ods-async ", f"{' '.join(ODS)} ", 1)]
        return program.inside(command).returncode == 0


@pytest.fixture
def place(tmp_path: Path) -> Place:
    need_namespaces()
    return Place(tmp_path)


@pytest.mark.slow
def test_the_services_run_as_the_file_has_them(place: Place, tmp_path: Path) -> None:
    """Each as process 1 in a pid namespace, two workers, with the keys that keygen made; torch for the trainer only."""
    with place.start("keygen") as keygen:
        assert keygen.end(60.0)[0] == 0, keygen.said
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(place.start("broker"))
        broker.hear("broker listens")
        eventually(lambda: place.healthy("broker", broker), "a healthy broker")
        trainer = stack.enter_context(place.start("trainer"))
        events = stack.enter_context(place.start("events"))
        dashboard = stack.enter_context(place.start("dashboard"))
        workers = [stack.enter_context(place.start("worker", hostname=f"w{number}")) for number in range(2)]
        for worker in workers:
            eventually(lambda worker=worker: place.healthy("worker", worker), "a healthy worker")
        events.hear('"kind": "generation_completed"')
        trainer.hear("batches over shared_memory")
        assert place.healthy("trainer", trainer)
        eventually(lambda: place.healthy("dashboard", dashboard), "a healthy dashboard")
        for program in (dashboard, events, *workers):
            program.signal(signal.SIGTERM)
            code, seconds = program.end(20.0)
            assert (code, seconds < 5.0) == (0, True), program.said
        assert place.healthy("broker", broker)  # it tolerates that
        for program in (trainer, broker):
            program.signal(signal.SIGTERM)
            code, seconds = program.end(20.0)
            assert (code, seconds < 15.0) == (0, True), program.said
            assert "Traceback" not in program.said


def test_a_health_check_tells_an_unknown_worker_and_a_service_that_is_gone(place: Place) -> None:
    with place.start("keygen") as keygen:
        assert keygen.end(60.0)[0] == 0, keygen.said
    look = ["stats", f"tcp://127.0.0.1:{place.port}", "--keys", place.here("/keys/watcher.key"), "--check"]
    with place.start("broker") as broker:
        broker.hear("broker listens")
        done = run(*look, "--worker", "w9-1")
        assert (done.returncode, "worker w9-1 is not known" in done.stderr) == (1, True)
        broker.signal(signal.SIGTERM)
        assert broker.end(20.0)[0] == 0
    assert run(*look, "--timeout", "0.5").returncode == 1
