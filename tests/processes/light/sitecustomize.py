"""First on PYTHONPATH, it stands in for what imports torch: the loop of a rank, and DeepSpeed's node launcher.

A rank writes its environment to RUN/env.RANK.json, then takes steps of 50 ms, saving every `checkpoint.every_steps`.
DEED=RANK:kill9 or RANK:raise, in the environment, comes to pass at step 3. With LIGHT=ranks the node launcher is the
real one.
"""

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import types


def train(plan, run, status, compiling=None):
    from launcher.fingerprint import fingerprint

    rank = int(os.environ["RANK"])
    (run.path / f"env.{rank}.json").write_text(json.dumps(dict(os.environ)))
    before = {"step": 0, "serial": 0}
    if plan.resume_from:
        with open(f"{plan.resume_from}/state.json") as file:
            before = json.load(file)
    print(f"from step {before['step']}")
    state = {"format": 1, "serial": before["serial"], "files": {}, "fingerprint": fingerprint(plan.config, plan.arch)}
    for step in range(before["step"] + 1, plan.config.train.max_steps + 1):
        time.sleep(0.01 if plan.resume_from else 0.05)  # a run that goes on has nothing to be waited for
        status.update(state="running", step=step, phase="training")
        if step == 3 and os.environ.get("DEED") == f"{rank}:kill9":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 3 and os.environ.get("DEED") == f"{rank}:raise":
            raise ValueError("row 7 has no positive document")
        if rank == 0 and (status.stop_requested or step % (plan.config.checkpoint.every_steps or step + 1) == 0):
            state |= {"step": step, "serial": state["serial"] + 1}
            save(run.checkpoint(step), json.dumps(state))
        if status.stop_requested:
            status.update(state="stopped", phase="stopped")
            return
    status.update(state="done", phase="done")


def save(folder, state):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text(state)
    (folder / "COMPLETE").write_text(hashlib.sha256(state.encode()).hexdigest())


def launch(words):
    """DeepSpeed's node launcher: starts the ranks of one host, reaps them, leaves with the code of one that failed."""
    given = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--") and "=" in word)
    hosts = list(json.loads(base64.urlsafe_b64decode(given["world_info"])).values())
    node, size = int(given["node_rank"]), sum(map(len, hosts))
    first = sum(map(len, hosts[:node]))
    meet = {"MASTER_ADDR": given["master_addr"], "MASTER_PORT": given["master_port"]}
    argv = [sys.executable, "-u", "-m", *words[words.index("launcher.training") :]]
    ranks = []
    for rank in range(first, first + len(hosts[node])):
        env = {**meet, "RANK": rank, "LOCAL_RANK": rank - first, "WORLD_SIZE": size, "LOCAL_SIZE": len(hosts[node])}
        ranks.append(subprocess.Popen(argv, env={**os.environ, **{name: str(value) for name, value in env.items()}}))

    def end(number, frame):
        for rank in ranks:  # one by one, as the real one does
            rank.terminate()
            rank.wait()
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    while ranks:
        time.sleep(1)
        for rank in [rank for rank in ranks if rank.poll() is not None]:
            ranks.remove(rank)
            if rank.returncode != 0:
                print(f"exits with return code = {rank.returncode}")
                for other in ranks:
                    other.terminate()
                return rank.returncode % 256
    return 0


if "launcher.training" in sys.orig_argv[:4]:
    loop = types.ModuleType("launcher.training.loop")
    loop.train = train
    sys.modules[loop.__name__] = loop
elif "launcher.running.nodelaunch" in sys.orig_argv[:4] and os.environ.get("LIGHT") != "ranks":
    code = launch(sys.orig_argv)
    sys.stdout.flush()
    os._exit(code)
