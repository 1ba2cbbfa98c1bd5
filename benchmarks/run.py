"""Measure everything, print a table, write JSON: ``python benchmarks/run.py [--quick] [--only S,I,…] [--out FILE]``."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bars import BARS  # noqa: E402
from benchmarks.children import Child  # noqa: E402
from benchmarks.workloads import WORKLOADS  # noqa: E402
from ods_async.core.copying import COMPILED  # noqa: E402
from ods_async.core.requests import GetStats, Stats, WaitReady  # noqa: E402
from ods_async.testing.peers import RawConsumer  # noqa: E402

AHEAD = 8
FAR_AHEAD = 32  # of small batches: fewer questions, and still only 15 MB
CLIENTS = ("blocking", "asyncio", "prefetch", "asyncio_prefetch")
_RAW = (("batches_s", "rate"), ("gb_s", "gb_s"))
Row = dict[str, Any]


class Bench:
    """Collects rows; every group of cases is measured in turn, round after round, so that all see the same machine."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.seconds = 0.25 if quick else 0.7
        self.repeats = 2 if quick else 5
        self.rows: list[Row] = []
        self.processes: list[Row] = []
        self.folder = Path(tempfile.mkdtemp(prefix="odsb-", dir="/tmp"))
        self._count = 0

    # --- processes --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def service(self, workload: str, *, watch: bool = False, **settings: Any) -> Iterator[Service]:
        """A broker, and a worker that has filled it and makes nothing more until told to."""
        self._count += 1
        folder = self.folder / str(self._count)
        folder.mkdir()
        with Child("broker", workload=workload, folder=str(folder), watch=watch, **settings) as broker:
            ipc, tcp = broker.hello["endpoints"]
            with Child("worker", endpoint=ipc, workload=workload) as worker:
                service = Service(workload, broker, worker, ipc, tcp)
                service.fill()
                yield service

    def consumers(self, count: int, keep: bool = True) -> contextlib.ExitStack:
        """So many trainers: ``consumers`` of the returned stack."""
        stack = contextlib.ExitStack()
        stack.consumers = [stack.enter_context(Child("consumer", keep=keep)) for _ in range(count)]  # type: ignore[attr-defined]
        return stack

    # --- measuring --------------------------------------------------------------------------------------------------

    def measure(
        self,
        cases: dict[str, tuple[list[Child], dict[str, Any]]],
        prepare: dict[str, Any] | None = None,
        beside: dict[str, Callable[[], dict[str, Any]]] | None = None,
    ) -> None:
        """Measure cases in turn. Each: name -> (consumers that draw at the same time, what they do).

        ``beside`` are figures of the machine itself that cases are compared with: taken in the same rounds.
        """
        found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in cases}
        bare: dict[str, list[dict[str, Any]]] = {name: [] for name in beside or {}}
        for _ in range(self.repeats):
            for name, take in (beside or {}).items():
                bare[name].append(take())
            for name, (consumers, case) in cases.items():
                if prepare is not None and name in prepare:
                    prepare[name]()
                for consumer in consumers:
                    consumer.tell("measure", seconds=self.seconds, repeats=1, **{"ahead": AHEAD, **case})
                found[name].append([consumer.answer() for consumer in consumers])
        for name, (consumers, case) in cases.items():
            self._row(name, len(consumers), case, found[name])
        for name, rates in bare.items():
            self.add_raw(name, rates)

    def add_raw(self, name: str, found: list[dict[str, Any]]) -> None:
        """Keep what the machine itself can do."""
        self.add({"name": name, **{what: spread([each[key] for each in found]) for what, key in _RAW}})

    def _row(self, name: str, consumers: int, case: dict[str, Any], rounds: list[list[dict[str, Any]]]) -> None:
        nbytes = WORKLOADS[case["workload"]].layout.nbytes
        rates = [sum(rate for each in together for rate in each["rates"]) for together in rounds]
        last = rounds[-1][0]
        row: Row = {
            "name": name,
            "workload": case["workload"],
            "client": case["client"],
            "path": case["endpoint"].split(":")[0] + " frames" if case.get("path") == "frames" else "shared memory",
            "mode": case.get("mode", "episode"),
            "consumers": consumers,
            "ahead": case.get("ahead", AHEAD),
            "batches_s": spread(rates),
            "gb_s": spread([rate * nbytes / 1e9 for rate in rates]),
            "p50_us": spread([statistics.median(each["p50_us"] for each in together) for together in rounds]),
            "p99_us": spread([max(each["p99_us"] for each in together) for together in rounds]),
            "worst_us": max(each["worst_us"] for together in rounds for each in together),
            "private_bytes": last["private"] - last["base"],
            "batches": sum(each["count"] for together in rounds for each in together),
        }
        self.add(row)

    def add(self, row: Row) -> None:
        """Keep a row, and show it."""
        self.rows.append(row)
        print(line(row), flush=True)

    def memory(self, name: str, child: Child, **more: Any) -> None:
        """Keep what a process has in memory."""
        self.processes.append({"name": name, **child.ask("memory"), **more})


class Service:
    """A broker under measurement and its worker."""

    def __init__(self, workload: str, broker: Child, worker: Child, ipc: str, tcp: str) -> None:
        self.workload = workload
        self.broker = broker
        self.worker = worker
        self.ipc = ipc
        self.tcp = tcp

    def fill(self) -> None:
        with RawConsumer(self.ipc, timeout=240.0) as consumer:
            consumer.ask(WaitReady())
        self.publish(False)

    def publish(self, going: bool) -> None:
        self.worker.ask("pause", pause=not going)
        if not going:
            time.sleep(0.1)

    def episodes(self) -> int:
        with RawConsumer(self.ipc) as consumer:
            stats = consumer.ask(GetStats())
            assert isinstance(stats, Stats)
            return stats.successful_episodes

    def case(self, client: str, path: str = "shm", **more: Any) -> dict[str, Any]:
        where = {"endpoint": self.tcp if path == "tcp" else self.ipc} | ({"path": "frames"} if path != "shm" else {})
        return {"client": client, "workload": self.workload, **where, **more}


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "least": min(values), "greatest": max(values)}


def line(row: Row) -> str:
    """A row of the table."""
    if "error" in row:
        return f"{row['name']:46} {row['error'][:90]}"
    text = f"{row['name']:46}"
    if "batches_s" in row:
        rate = row["batches_s"]
        text += f" {rate['median']:9.1f} batches/s ({rate['least']:.1f}-{rate['greatest']:.1f})"
    if "gb_s" in row:
        text += f" {row['gb_s']['median']:7.2f} GB/s"
    if "p50_us" in row:
        text += f"  p50 {row['p50_us']['median']:8.0f} us  p99 {row['p99_us']['median']:8.0f} us"
    return text + row.get("note", "")


# --- the groups -----------------------------------------------------------------------------------------------------


def raw(bench: Bench) -> None:
    """What the machine can do beside what the other groups compare themselves with."""
    size = WORKLOADS["S"].layout.nbytes
    with Child("raw", keep=True) as child:
        bench.add_raw(
            "memcpy S", [child.ask("memcpy", nbytes=size, seconds=bench.seconds) for _ in range(bench.repeats)]
        )
    with frames(bench, "I", keep=False) as bare:
        for name, take in bare.items():
            bench.add_raw(f"{name}, plain malloc", [take() for _ in range(bench.repeats)])


@contextlib.contextmanager
def frames(bench: Bench, workload: str, keep: bool = True) -> Iterator[dict[str, Callable[[], dict[str, Any]]]]:
    """Bare ZeroMQ frames of a batch's size, between two processes: name -> takes one round."""
    nbytes, found = WORKLOADS[workload].layout.nbytes, {}
    with contextlib.ExitStack() as stack:
        asker = stack.enter_context(Child("raw", keep=keep))
        for scheme in ("ipc", "tcp"):
            server = stack.enter_context(Child("raw", keep=keep))
            where = f"ipc://{bench.folder}/raw-{workload}-{keep}" if scheme == "ipc" else "tcp://127.0.0.1:*"
            addresses = server.ask("listen", endpoint=where, nbytes=nbytes).split()
            for kind, endpoint in zip(("ask", "pull"), addresses, strict=True):
                found[f"raw zmq {scheme} {kind} {workload}"] = functools.partial(
                    asker.ask, kind, endpoint=endpoint, seconds=bench.seconds
                )
        yield found


def memcpy(bench: Bench, stack: contextlib.ExitStack, workload: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """memcpy of a batch's size: name -> takes one round."""
    child, nbytes = stack.enter_context(Child("raw", keep=True)), WORKLOADS[workload].layout.nbytes
    return {f"memcpy {workload}": functools.partial(child.ask, "memcpy", nbytes=nbytes, seconds=bench.seconds)}


def small(bench: Bench) -> None:
    """Workload S: clients, paths, modes, budgets."""
    with bench.consumers(1) as stack, bench.service("S") as service, bench.service("S budget") as budgeted:
        who = stack.consumers  # type: ignore[attr-defined]
        cases = {f"S {client}": (who, service.case(client)) for client in CLIENTS}
        cases |= {
            f"S {client} {FAR_AHEAD}": (who, service.case(client, ahead=FAR_AHEAD))
            for client in CLIENTS
            if "prefetch" in client
        }
        bench.measure(cases)
        bench.measure(
            {
                f"S {path} {client}": (who, service.case(client, path))
                for path in ("ipc", "tcp")
                for client in ("blocking", "prefetch")
            }
        )
        cases = {"S plain": (who, service.case("blocking"))}
        for mode in ("segment", "boundary", "context"):
            cases[f"S {mode}"] = (who, service.case("blocking", mode=mode))
        cases["S budget, provenance"] = (who, budgeted.case("blocking"))
        bench.measure(cases)
        loaders(bench, service, who)
        bench.memory("broker S", service.broker)


def loaders(bench: Bench, service: Service, who: list[Child]) -> None:
    name = service.workload
    if find_spec("ods_async.client.dataset") is None:
        bench.add({"name": f"{name} DataLoader", "error": "ods_async.client.dataset is not there"})
        return
    bench.measure(
        {
            f"{name} DataLoader, {workers} workers": (who, service.case("dataloader", workers=workers))
            for workers in (0, 2)
        }
    )


def image(bench: Bench) -> None:
    """Workload I: clients, paths, with and without an allocator that keeps big blocks."""
    with bench.consumers(1) as stack, bench.consumers(1, keep=False) as plain, bench.service("I") as service:
        who, unkept = stack.consumers, plain.consumers  # type: ignore[attr-defined]
        beside = memcpy(bench, stack, "I")
        bench.measure({f"I {client}": (who, service.case(client)) for client in CLIENTS}, beside=beside)
        cases = {
            f"I {path} {client}": (who, service.case(client, path))
            for path in ("ipc", "tcp")
            for client in ("blocking", "prefetch")
        }
        cases["I tcp blocking, plain malloc"] = (unkept, service.case("blocking", "tcp"))
        with frames(bench, "I") as bare:
            bench.measure(cases, beside=bare)
        loaders(bench, service, who)
        bench.memory("broker I", service.broker)
        bench.memory("worker I", service.worker)
        for child in who:
            bench.memory("consumer I", child)


def cameras(bench: Bench) -> None:
    """Workload V."""
    with bench.consumers(1) as stack, bench.service("V") as service:
        who = stack.consumers  # type: ignore[attr-defined]
        kinds = ("blocking", "prefetch")
        bench.measure({f"V {kind}": (who, service.case(kind)) for kind in kinds}, beside=memcpy(bench, stack, "V"))
        cases = {f"V {path} {kind}": (who, service.case(kind, path)) for path in ("ipc", "tcp") for kind in kinds}
        with frames(bench, "V") as bare:
            bench.measure(cases, beside=bare)
        bench.memory("broker V", service.broker)


def publishing(bench: Bench) -> None:
    """S and I, idle and while 57 MB rollouts are published without pause."""
    for workload, letter in (("S big rollouts", "S"), ("I", "I")):
        with bench.consumers(1) as stack, bench.service(workload) as service:
            who = stack.consumers  # type: ignore[attr-defined]
            made: list[tuple[float, int]] = []

            def begin(service: Service = service, made: list[tuple[float, int]] = made) -> None:
                service.publish(True)
                time.sleep(0.2)
                made.append((time.monotonic(), service.episodes()))

            def end(service: Service = service, made: list[tuple[float, int]] = made) -> None:
                if made:
                    made.append((time.monotonic(), service.episodes()))
                    service.publish(False)

            case = service.case("blocking")
            bench.measure(
                {f"{letter} idle": (who, case), f"{letter} while publishing": (who, case)},
                {f"{letter} idle": end, f"{letter} while publishing": begin},
            )
            end()
            work = WORKLOADS[workload]
            per_episode = work.rollout_bytes / work.num_envs
            pairs = zip(made[::2], made[1::2], strict=False)
            rates = [(after - before) * per_episode / (then - when) / 1e9 for (when, before), (then, after) in pairs]
            bench.add({"name": f"{letter} published meanwhile", "gb_s": spread(rates)})


def rows(bench: Bench) -> None:
    """S at more and more rows."""
    sizes = (64, 1024, 4096) if bench.quick else (64, 1024, 65536)
    with bench.consumers(1) as stack:
        who = stack.consumers  # type: ignore[attr-defined]
        services = {size: stack.enter_context(bench.service(f"S rows {size}")) for size in sizes}
        bench.measure({f"S at {size} rows": (who, service.case("blocking")) for size, service in services.items()})
        for size, service in services.items():
            bench.memory(f"broker S at {size} rows", service.broker)


def together(bench: Bench) -> None:
    """One to eight consumers."""
    most = 4 if bench.quick else 8
    counts = [count for count in (1, 2, 4, 8) if count <= most]
    with bench.consumers(most) as stack, bench.service("I") as images, bench.service("S") as service:
        who = stack.consumers  # type: ignore[attr-defined]
        for letter, each in (("I", images), ("S", service)):
            bench.measure({f"{letter}, {count} consumers": (who[:count], each.case("blocking")) for count in counts})


def ingest(bench: Bench) -> None:
    """57 MB rollouts over ipc as fast as they go, nobody drawing; how long the broker's loop was held up."""
    with bench.service("I", watch=True) as service:
        work = WORKLOADS["I"]
        service.publish(True)
        rates = []
        service.broker.ask("watch")
        stolen = stolen_ms()
        for _ in range(bench.repeats):
            before, begin = service.episodes(), time.monotonic()
            time.sleep(bench.seconds)
            after, end = service.episodes(), time.monotonic()
            rates.append((after - before) / work.num_envs * work.rollout_bytes / (end - begin) / 1e9)
        loop = service.broker.ask("watch") | {"stolen_ms": stolen_ms() - stolen}
        note = (
            f"  loop held up {loop['worst_ms']:.1f} ms at worst ({loop['over_5_ms']} of {loop['calls']} over 5 ms), "
            f"{loop['worst_waited_for_a_processor_ms']:.1f} of them without a processor; "
            f"{loop['worst_without_waiting_ms']:.1f} ms at worst with one; {loop['stolen_ms']} ms taken by the host"
        )
        bench.add({"name": "ingest ipc I", "gb_s": spread(rates), "loop": loop, "note": note})
        bench.memory("broker while ingesting I", service.broker)


def stolen_ms() -> int:
    """Time in which this machine's processors could run something and its host let others run, see proc_stat(5)."""
    ticks = int(Path("/proc/stat").read_text().split(maxsplit=9)[8])
    return ticks * 1000 // os.sysconf("SC_CLK_TCK")


def peers(bench: Bench) -> None:
    """Other people's buffers, where their environments are (``benchmarks/peers/make.sh``)."""
    folder = Path(os.environ.get("ODS_BENCH_PEERS", ROOT / ".venv-peers"))
    for name in ("torchrl", "reverb", "transferqueue"):
        python = folder / name / "bin" / "python"
        if not python.exists():
            bench.add({"name": f"peer {name}", "error": f"not installed here: no {python}"})
            continue
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [str(python), "-m", f"benchmarks.peers.{name}_peer", str(bench.seconds), str(bench.repeats)]
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
            found = json.loads(next(text for text in reversed(done.stdout.splitlines()) if text.startswith("{")))
        except (subprocess.TimeoutExpired, StopIteration) as error:
            bench.add({"name": f"peer {name}", "error": f"does not run here: {type(error).__name__}"})
            continue
        for workload in ("S", "I"):
            result = found[workload]
            row: Row = {"name": f"{found['peer']}: {workload}", "versions": found["versions"]}
            if "error" in result:
                bench.add(row | {"error": result["error"]})
                continue
            nbytes = WORKLOADS[workload].layout.nbytes
            row |= {
                "batches_s": spread(result["rates"]),
                "gb_s": spread([rate * nbytes / 1e9 for rate in result["rates"]]),
                "p50_us": spread([result["p50_us"]]),
                "p99_us": spread([result["p99_us"]]),
            }
            bench.add(row)


GROUPS: dict[str, Callable[[Bench], None]] = {
    "raw": raw,
    "S": small,
    "I": image,
    "V": cameras,
    "publishing": publishing,
    "rows": rows,
    "consumers": together,
    "ingest": ingest,
    "peers": peers,
}


def machine() -> dict[str, Any]:
    """Where this was measured."""
    cpu = next((text.split(":")[1].strip() for text in _read("/proc/cpuinfo") if text.startswith("model name")), "")
    total = next((int(text.split()[1]) * 1024 for text in _read("/proc/meminfo") if text.startswith("MemTotal")), 0)
    return {
        "processor": cpu,
        "processors": os.cpu_count(),
        "memory_bytes": total,
        "kernel": platform.release(),
        "load_average": os.getloadavg(),
        "hugepages": "".join(_read("/sys/kernel/mm/transparent_hugepage/enabled")).strip(),
    }


def _read(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def commit() -> str:
    """The commit, with ``+`` when something is changed."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short rounds: see that everything runs")
    parser.add_argument("--only", help=f"some of {','.join(GROUPS)}")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",") if arguments.only else list(GROUPS)
    unknown = set(chosen) - set(GROUPS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(GROUPS)}")
    begin = time.monotonic()
    bench = Bench(arguments.quick)
    print(f"{commit()} on {machine()['processor']}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    failed = {}
    before = machine()
    for name in chosen:
        print(f"--- {name}", flush=True)
        try:
            GROUPS[name](bench)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            print(f"{name} failed: {failed[name]}", file=sys.stderr, flush=True)
    bars = [found for bar in BARS if (found := bar.judge(bench.rows)) is not None]
    print("--- bars")
    for bar in bars:
        print(f"{'ok  ' if bar['ok'] else 'MISS'} {bar['bar']:58} {bar['measured']:10.2f}  wanted {bar['wanted']}")
    print("--- memory (own bytes of each process, without what is shared)")
    for process in bench.processes:
        print(f"{process['name']:46} {process['private'] / 1e6:9.1f} MB own {process['shared'] / 1e6:9.1f} MB shared")
    result = {
        "commit": commit(),
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "quick": arguments.quick,
        "groups": chosen,
        "took_seconds": round(time.monotonic() - begin, 1),
        "machine": before,
        "compiled_copy": COMPILED,
        "versions": {"python": platform.python_version()}
        | {
            name: version(name)
            for name in ("ods-async", "torch", "tensordict", "pyzmq", "numpy", "msgpack")
            if has(name)
        },
        "seeds": {"broker": 20_240, "data": 7},
        "round_seconds": bench.seconds,
        "rounds": bench.repeats,
        "ahead": AHEAD,
        "workloads": {name: work.described() for name, work in WORKLOADS.items()},
        "rows": bench.rows,
        "processes": bench.processes,
        "bars": bars,
        "failed": failed,
    }
    out = arguments.out or ROOT / "benchmarks" / "results" / ("quick.tmp.json" if arguments.quick else "latest.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {out} after {result['took_seconds']:.0f} s")
    return 1 if failed else 0


def has(name: str) -> bool:
    """Whether a distribution is installed."""
    with contextlib.suppress(Exception):
        return bool(version(name))
    return False


if __name__ == "__main__":
    sys.exit(main())
