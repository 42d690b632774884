#!/usr/bin/env bash
# Create or refresh the virtual environment behind the Makefile's targets.
#
#   tests/tools/setup.sh          (PYTHON= chooses the interpreter, VENV= the folder)
#
# Runs in milliseconds when nothing changed: a stamp holds the checksum of the files that decide
# what is installed. Written for bash 3.2, which macOS ships.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=${VENV:-.venv}
stamp=$venv/.ready
log=$venv/install.log
cpu_index=https://download.pytorch.org/whl/cpu

say() { printf 'setup: %s\n' "$*"; }

# fail MESSAGE [WHAT TO TRY]...
fail() {
  printf '\nsetup: %s\n' "$1" >&2
  shift
  for hint in "$@"; do printf '   try  %s\n' "$hint" >&2; done
  exit 1
}

usable() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' >/dev/null 2>&1; }
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# The interpreter that is asked for, else that of the environment, else the first good one on the PATH.
choose_python() {
  if [ -n "${PYTHON:-}" ]; then
    usable "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.10 to 3.13 ($(version_of "$PYTHON" || echo "it does not start"))" \
      "make demo PYTHON=/path/to/python3.12"
    python=$PYTHON
    return
  fi
  for python in "$venv/bin/python" python3 python3.12 python3.13 python3.11 python3.10 python; do
    if usable "$python"; then return; fi
  done
  fail "no Python 3.10 to 3.13 found (python3 is $(version_of python3 || echo missing))" \
    "apt-get install python3 python3-venv     (Debian, Ubuntu)" \
    "make demo PYTHON=/path/to/python3.12"
}

checksum() { cat pyproject.toml requirements-test.lock tests/tools/setup.sh | cksum; pwd; version_of "$python"; }

create_venv() {
  if [ -x "$venv/bin/python" ] && [ "$(version_of "$venv/bin/python")" = "$(version_of "$python")" ] &&
    "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    return
  fi
  "$python" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
    fail "$python has no venv module, which makes virtual environments" \
      "apt-get install python$(version_of "$python")-venv     (Debian, Ubuntu)"
  say "creating $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv" || fail "the virtual environment $venv could not be created"
}

nvidia_driver() { [ -e /proc/driver/nvidia/version ] || { command -v nvidia-smi && nvidia-smi -L; } >/dev/null 2>&1; }
own_index() { "$venv/bin/python" -m pip config list 2>/dev/null | grep -qE "(\.|:)\.?(index-url|no-index)="; }
pip_install() { "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@" >>"$log" 2>&1; }

# Without a driver the CPU build of torch is enough, and much smaller. Where its index cannot be reached,
# or pip is set to an index of its own, the build that the usual index has serves as well.
install_torch() {
  [ "$(uname -s)" = Linux ] || return 0
  if nvidia_driver; then
    say "NVIDIA driver found: torch with CUDA"
    return
  fi
  own_index || pip_install --no-deps --retries 0 --timeout 15 --index-url "$cpu_index" \
    $(grep -E '^torch(vision)?==' requirements-test.lock) || true
  if "$venv/bin/python" -m pip freeze 2>/dev/null | grep -q '^torch==.*+cpu'; then
    say "no NVIDIA driver: the CPU build of torch is enough"
  else
    say "no NVIDIA driver, and no CPU build of torch at hand: the usual build serves too, it is only larger"
  fi
}

# A sign of life every 20 seconds, until it is killed: what pip says it is doing. Where a pipe reads our output,
# the sleep that is left behind must not hold that open.
say_progress() {
  while sleep 20 >/dev/null 2>&1; do
    say "$SECONDS s: $(grep -E '^ *(Collecting|Downloading|Processing|Building|Installing) ' "$log" | tail -n 1 | sed 's/^ *//' | cut -c 1-90)"
  done
}

# What the end of pip's log means, in one line with what to do.
explain_failure() {
  grep -E '^ *(ERROR|error):' "$log" | tail -n 5 >&2 || true
  if grep -qi 'no space left on device' "$log"; then
    fail "the disk is full (the environment takes about 2 GB with the CPU build of torch, 7 GB with CUDA); log: $log" \
      "free some space, then the same command again"
  elif grep -qiE 'name resolution|failed to establish|connection (refused|reset|aborted)|unreachable|timed out|ProxyError|SSLError|from versions: none' "$log"; then
    fail "packages could not be downloaded: the package index is not reachable from here, or lacks them; log: $log" \
      "check the network, or the proxy (https_proxy=http://HOST:PORT), then the same command again" \
      "pip config set global.index-url URL     (an index inside your network)"
  elif grep -qiE "failed building wheel|command '.*(gcc|g\+\+|cc)' failed|unable to find vcvarsall" "$log"; then
    fail "a package has no ready build for this machine and could not be compiled; log: $log" \
      "apt-get install build-essential python$(version_of "$python")-dev     (Debian, Ubuntu)"
  fi
  fail "pip could not install the packages of requirements-test.lock; log: $log"
}

install() {
  : >"$log"
  say "installing the pinned packages of requirements-test.lock (minutes, once; log: $log)"
  say_progress &
  progress=$!
  disown # else bash tells of its end
  trap 'kill "$progress" 2>/dev/null || true' EXIT
  trap 'say "interrupted; the same command again goes on"; exit 130' INT # pip's own end looks like any failure
  install_torch
  pip_install -r requirements-test.lock || explain_failure
  pip_install --no-deps --no-build-isolation -e . || explain_failure
  kill "$progress" 2>/dev/null || true
  trap - EXIT INT
}

if [ "$(uname -s)" != Linux ]; then
  say "this is $(uname -s): plan, config, status and logs work here; training needs Linux, so run refuses"
fi
choose_python
if [ "$(cat "$stamp" 2>/dev/null)" = "$(checksum)" ] && [ -x "$venv/bin/python" ]; then exit 0; fi
create_venv
install
checksum >"$stamp"
say "ready: $venv/bin/python ($(version_of "$python"))"
