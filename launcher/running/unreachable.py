"""Why a host did not answer: the last words of ssh, docker, srun or a shell, as a reason and what to do."""

from __future__ import annotations

import re

from launcher.running.findings import Finding
from launcher.running.panel import Silence
from launcher.running.transport import ssh_argv
from launcher.spec import Host, RunPlan

NOT_FOUND, NOT_RUN = 127, 126  # exit codes of a shell
ACTIVATE_FAILED = 96  # exit code of transport.ACTIVATE


def unreachable(plan: RunPlan, host: Host, silence: Silence) -> Finding:
    """The row of a host that did not answer."""
    alias = f"-oHostKeyAlias={host.name}"
    by_address = alias in ssh_argv(host, plan.config.cluster.connect_s)  # ssh knows no machine by its name
    name = host.address if by_address else host.name
    target = f"{host.user}@{name}" if host.user else name
    port = f"-p {host.port} " if host.port else ""
    facts = {
        "host": host.name,
        "ssh": f"ssh {f'{alias} ' if by_address else ''}{port}{target}",
        "copy": f"ssh-copy-id {port}{target}",
        "address": host.address or host.name,
        "python": plan.config.cluster.python or "Python",
    }
    said = silence.said.strip()
    for pattern, what, reason, tries in KNOWN:
        match = re.search(pattern, said, re.IGNORECASE)
        if match:
            words = {**facts, **{key: value or "" for key, value in match.groupdict().items()}}
            return Finding(
                host=host.name,
                what=what,
                reason=reason.format(**words) if "{" in reason else reason,
                tries=tuple(text.format(**words) for text in tries),
                config=what == "python" and plan.config.cluster.python is not None,
            )
    return _unknown(plan, host, silence, facts["ssh"])


def _unknown(plan: RunPlan, host: Host, silence: Silence, ssh: str) -> Finding:
    lines = [line.strip() for line in silence.said.splitlines() if line.strip()]
    last = "; ".join(lines[-2:])
    cluster = plan.config.cluster
    if silence.exit_code == ACTIVATE_FAILED:
        reason = f"cluster.activate={cluster.activate} failed: {last}"
        return Finding(host=host.name, what="activate", reason=reason, tries=("cluster.activate=SCRIPT",), config=True)
    if silence.exit_code in (NOT_FOUND, NOT_RUN):
        what, fix = ("wrap", "cluster.wrap=[PROGRAM,ARGUMENT]") if cluster.wrap else ("python", "cluster.python=PATH")
        return Finding(host=host.name, what=what, reason=last, tries=(fix,), config=True)
    code = "" if silence.exit_code is None else f" (exit code {silence.exit_code})"
    tries = () if plan.transport == "local" else (ssh,)
    return Finding(host=host.name, what="unreachable", reason=f"{last}{code}", tries=tries)


PYTHON = ("cluster.python=PATH   (of an interpreter that every host has)", "make the same environment there")
ANSWERS = ("{ssh}   (does it answer?)",)

# What is said -> subject, reason, what to do. The first that fits; ssh's own words before those of what it runs.
KNOWN: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|host key for \S+ has changed",
        "host key",
        "its ssh host key is not the one that is known here: another machine has its name, or it was installed anew",
        ("ssh-keygen -R {address}   (once you know why), then  {ssh}",),
    ),
    (
        r"Host key verification failed|No \S+ host key is known",
        "host key",
        "its ssh host key is not known here",
        ("{ssh}   (once, and compare the key)",),
    ),
    (
        r"(?P<words>Permission denied \([^)]*\))",
        "login",
        "{words}: ssh must log in with a key and no question",
        ("{copy}", "user=NAME in the hostfile, or in ~/.ssh/config"),
    ),
    (
        r"Too many authentication failures",
        "login",
        "it refused after too many keys were offered",
        ("IdentitiesOnly yes and IdentityFile for this host in ~/.ssh/config",),
    ),
    (
        r"Could not resolve hostname (?P<name>\S+?):",
        "name",
        "this machine knows no address for {name}",
        ("addr=ADDRESS in its line of the hostfile", "HostName ADDRESS in ~/.ssh/config"),
    ),
    (
        r"connect to host (?P<name>\S+) port (?P<number>\d+): Connection refused",
        "unreachable",
        "nothing listens at {name} port {number}: no sshd, or another port",
        ("port=NUMBER in its line of the hostfile", "systemctl start ssh   (there)"),
    ),
    (
        r"connect to host (?P<name>\S+) port (?P<number>\d+): (?P<words>[^\n\r]+)",
        "unreachable",
        "{name} port {number}: {words}; is it switched on, is the address right, is a firewall between?",
        ("ping {address}", "cluster.exclude={host}   (to do without it)"),
    ),
    (
        r"(?P<words>Connection timed out during banner exchange|kex_exchange_identification[^\n\r]*)",
        "unreachable",
        "its sshd ended the connection: {words}",
        ("look at sshd's log there; MaxStartups limits connections at once", *ANSWERS),
    ),
    (
        r"(?P<words>Error response from daemon[^\n\r]*|Cannot connect to the Docker daemon[^\n\r]*)",
        "container",
        "{words}",
        ("docker ps   (there)", "cluster.wrap=[docker,exec,-i,NAME]"),
    ),
    (
        r"(?P<words>OCI runtime exec failed[^\n\r]*)",
        "python",
        "{words}",
        ("cluster.python=PATH   (of the interpreter in the container)",),
    ),
    (r"srun: (?:error: )?(?P<words>[^\n\r]+)", "slurm", "srun: {words}", ("sinfo", "squeue --me")),
    (
        r"SyntaxError|ImportError|TypeError: module",  # Python 2 stumbles over the type of a name
        "python",
        "its {python} is too old: 3.10 or newer is needed",
        PYTHON,
    ),
    (
        r"(?P<words>[^\n\r:]*(?:python|py)[^\s:]*: (?:No such file or directory|not found|command not found))",
        "python",
        "{words}",
        PYTHON,
    ),
)
