"""What starting costs on the launching side: `python -m tests.bench.launch_cost`, ours beside `deepspeed` with pdsh.

Until every host has its orders, for many hosts: both sides reach their hosts through the same stand-in for ssh
(stub_ssh.c, stub_hosts.py). There all is answered at once and nothing is started, so that only the launching side's own
work is counted.

Until the last rank runs its first line of Python, for few hosts: real ssh servers in namespaces of this machine, whose
processors all of them share. One rank a host. Needs root.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.bench.launching import AT_START, ON_CPU, REPO, Cost, adopt_orphans, middle, until_all
from tests.bench.stub_hosts import Hosts
from tests.cluster import Cluster, make_cluster, why_not

LIMIT_S = 120.0


@dataclass(frozen=True)
class Bench:
    """Where things lie, and who stands behind the stand-in."""

    folder: Path
    hosts: Hosts
    python: str = sys.executable

    def hostfile(self, hosts: int) -> Path:
        """Numeric names: nothing has to resolve them."""
        file = self.folder / f"hosts.{hosts}"
        file.write_text("".join(f"10.{200 + n // 250}.0.{n % 250 + 1} slots=1\n" for n in range(hosts)))
        return file

    def env(self) -> dict[str, str]:
        """The user's environment with the stand-in first on the PATH."""
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "TERM", "USER") if name in os.environ}
        path = os.pathsep.join([str(self.folder / "bin"), str(Path(self.python).parent), "/usr/bin", "/bin"])
        return {**kept, **ON_CPU, "PATH": path, "PYTHONPATH": str(REPO), "STUB_SSH": str(self.folder)}


def deepspeed(python: str, hostfile: Path, run: Path) -> list[str]:
    """DeepSpeed's own command with its default fan-out, pdsh; --force_multi: also for one host."""
    train = ["--module", "launcher.training", "train", "--plan", str(run / "plan.json")]
    return [str(Path(python).with_name("deepspeed")), "--hostfile", str(hostfile), "--force_multi", *train]


def ours(python: str, hostfile: Path, run: Path) -> list[str]:
    """The digits demo on these hosts, with a run folder of its own."""
    shutil.rmtree(run, ignore_errors=True)
    keys = {"cluster.hostfile": hostfile, "run.dir": run, "batch.global_size": 256}
    return [python, "-m", "launcher", *(f"{key}={value}" for key, value in keys.items())]


TOOLS: dict[str, Callable[[str, Path, Path], list[str]]] = {"deepspeed": deepspeed, "ours": ours}


def measure(bench: Bench, tool: str, hosts: int) -> Cost:
    """One start, until all hosts have their orders."""
    argv = TOOLS[tool](bench.python, bench.hostfile(hosts), bench.folder / "run")
    bench.hosts.forget()
    said = bench.folder / f"{tool}.{hosts}.txt"
    return until_all(argv, bench.env(), said, bench.folder / "orders", hosts, LIMIT_S)


def prepare(folder: Path) -> Bench:
    """Compile the stand-in and lay out what it answers."""
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    source = Path(__file__).with_name("stub_ssh.c")
    subprocess.run(["cc", "-O2", "-o", str(folder / "bin" / "ssh"), str(source)], check=True)
    return Bench(folder, Hosts(folder))


def table(costs: dict[tuple[str, int], list[Cost]], tools: Sequence[str], sizes: Sequence[int]) -> str:
    """Medians of all, one line a number of hosts; with both tools, ours as a part of the other's."""
    head = ["hosts", *(f"{tool}, wall s | {tool}, CPU s" for tool in tools)]
    both = len(tools) == 2
    lines = [" | ".join(["", *head, *(["ours / deepspeed, wall | CPU"] if both else []), ""]).strip()]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for size in sizes:
        found = [middle(costs[tool, size]) for tool in tools]
        cells = [str(size), *(f"{cost.wall_s:.2f} | {cost.cpu_s:.2f}" for cost in found)]
        if both:
            cells.append(f"{found[1].wall_s / found[0].wall_s:.2f} | {found[1].cpu_s / found[0].cpu_s:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    for tool in tools:
        least, most = middle(costs[tool, sizes[0]]), middle(costs[tool, sizes[-1]])
        growth = f"{most.wall_s / least.wall_s:.2f} (wall), {most.cpu_s / least.cpu_s:.2f} (CPU)"
        lines.append(f"\n{tool}, {sizes[-1]} hosts / {sizes[0]} hosts: {growth}")
    return "\n".join(lines)


def first_lines(cluster: Cluster, tool: str, hosts: int, folder: Path) -> float:
    """Seconds from the command to the first Python line of the last rank."""
    times = folder / "times"
    shutil.rmtree(times, ignore_errors=True)
    times.mkdir(parents=True)
    argv = TOOLS[tool](sys.executable, cluster.hostfile(slots=1, nodes=hosts), folder / "run")
    env = {**ON_CPU, "PYTHONPATH": f"{REPO}:{AT_START}", "PYTHON_BENCH_FIRST_LINE": str(times)}
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    said = folder / f"{tool}.{hosts}.txt"
    with open(said, "wb") as out:
        start = time.monotonic()
        null = subprocess.DEVNULL
        process = cluster.head.popen(argv, env=env, cwd=folder, stdin=null, stdout=out, stderr=out)
    while len(list(times.iterdir())) < hosts:
        if process.poll() is not None or time.monotonic() - start > LIMIT_S:
            raise RuntimeError(f"{tool} on {hosts} hosts started no ranks; see {said}")
        time.sleep(0.02)
    cluster.clear()
    process.wait()
    return max(float(file.read_text()) for file in times.iterdir()) - start


def measure_real(tools: Sequence[str], sizes: Sequence[int], repeats: int, folder: Path) -> str:
    """The table of `first_lines`, medians."""
    found: dict[tuple[str, int], list[float]] = {(tool, size): [] for tool in tools for size in sizes}
    with tempfile.TemporaryDirectory(prefix="launch-cost-") as home, make_cluster(Path(home), max(sizes)) as cluster:
        for _ in range(repeats):
            for size in sizes:
                for tool in tools:
                    found[tool, size].append(first_lines(cluster, tool, size, folder))
                    print(f"{tool:10} {size:4} real hosts {found[tool, size][-1]:6.2f} s to the first line", flush=True)
    lines = [f"| hosts | {' | '.join(f'{tool}, s' for tool in tools)} |", "|---" * (len(tools) + 1) + "|"]
    lines += [f"| {size} | {' | '.join(f'{median(found[tool, size]):.2f}' for tool in tools)} |" for size in sizes]
    return "\n".join(lines)


def measure_stub(tools: Sequence[str], sizes: Sequence[int], repeats: int, folder: Path) -> str:
    """The table of `measure`, medians; the tools take turns."""
    bench = prepare(folder)
    costs: dict[tuple[str, int], list[Cost]] = {(tool, size): [] for tool in tools for size in sizes}
    for tool in tools:
        measure(bench, tool, sizes[0])  # files come into memory
    for _ in range(repeats):
        for size in sizes:
            for tool in tools:
                cost = measure(bench, tool, size)
                costs[tool, size].append(cost)
                print(f"{tool:10} {size:4} hosts   {cost.wall_s:6.2f} s wall {cost.cpu_s:6.2f} s CPU", flush=True)
    return table(costs, tools, sizes)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="2,16,64,256", help="numbers of hosts behind the stand-in; empty: none")
    parser.add_argument("--real", default="1,2,4", help="numbers of real hosts; empty: none")
    parser.add_argument("--tools", default="deepspeed,ours")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="keep what the commands print there")
    options = parser.parse_args()
    tools = options.tools.split(",")
    sizes, real = ([int(size) for size in text.split(",") if size] for text in (options.sizes, options.real))
    if real and (why := why_not()):
        sys.exit(why)
    folder = (options.out or Path(tempfile.mkdtemp(prefix="launch-cost-"))).resolve()
    tables = []
    if real:
        tables.append(measure_real(tools, real, options.repeats, folder / "real"))
    if sizes:
        adopt_orphans()
        tables.append(measure_stub(tools, sizes, options.repeats, folder))
    print("\n" + "\n\n".join(reversed(tables)))


if __name__ == "__main__":
    main()
