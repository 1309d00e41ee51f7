#!/usr/bin/env bash
# Installs into .venv, fetches tokens, checks them, trains. What is there is not done again.
#
#   ./run.sh [SCRIPT.py] [record | tiny] [--field value ...]          a copy of train_gpt.py
#   ./run.sh check [--small | --field value ...]
#   ./run.sh basics/NAME.py [argument ...]                            basics/README.md
#   ./run.sh sample | hellaswag | loss | export | look WEIGHTS ...    evals/README.md
#   ./run.sh test [--quick | --all | pytest argument ...]
#
# PYTHON=/path/to/python ./run.sh ... takes that Python and no other. Paths are from here.
# Started many times in one folder, as by srun, it installs and fetches once: the others wait.
set -euo pipefail # macOS has bash 3.2, where an empty array counts as unset: none are used here
cd "$(dirname "$0")"

fail() {
  echo "run.sh: $*" >&2
  exit 1
}

[ -f requirements.txt ] || fail "call it in its own folder, not by a link"

# .lock is a link to "HOST PID", because a link is made in one step, on shared disks too. Where
# nothing can be written, the process goes on without a lock. The lock of a dead process is removed
# by one waiting process at a time, which first checks whether it still belongs to the dead one.
lock() {
  local owner error announced=""
  until error=$(LC_ALL=C ln -s "$this_process" .lock 2>&1); do
    [ -w . ] && [[ $error = *"File exists"* ]] || return 0
    owner=$(readlink .lock) || continue
    if is_dead "$owner" && mkdir .lock-guard 2>/dev/null; then
      [ "$(readlink .lock)" != "$owner" ] || rm -f .lock
      rmdir .lock-guard
    else
      [ -n "$announced" ] ||
        echo "Waiting for process ${owner##* } on ${owner% *}; if it is gone, type  rm -r .lock*"
      announced=yes
      sleep 1
    fi
  done
}

# A process of this host that kill does not find; it has another message for other users' processes.
# A lock with the number of this process was left by a container that was started a second time.
is_dead() {
  [ "$1" = "$this_process" ] ||
    [[ $1 = "${this_process% *} "* && $(LC_ALL=C kill -0 "${1##* }" 2>&1) = *"No such process"* ]]
}

unlock() {
  [ "$(readlink .lock)" != "$this_process" ] || rm -f .lock
}

# Runs a Python with a module: a pyenv shim may exist and refuse, and Debian's Python may come
# without ensurepip.
runs() {
  "$1" -c "import ${2:-sys}, sys; sys.exit(sys.version_info < (3, $minor))" >/dev/null 2>&1
}

version() {
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

pick_python() {
  for python in ${PYTHON:+"$PYTHON"} python3.14 python3.13 python3.12 python3.11 python3; do
    if runs "$python" venv,ensurepip; then return; fi
    [ -z "${PYTHON:-}" ] || fail "PYTHON=$PYTHON does not work as $needs"
  done
  fail "found no $needs. Install one (Debian, Ubuntu: also python3-venv), or set PYTHON to it"
}

# Two CUDA generations in one environment would both register as jax's GPU backend.
venv_fits() {
  runs .venv/bin/python && [ ! -e ".venv/installed-$other_cuda" ] &&
    { [ -z "${PYTHON:-}" ] || [ "$(version .venv/bin/python)" = "$(version "$PYTHON")" ]; }
}

# Deletes only a .venv that run.sh has made. What uv or an editor has made is used, or left alone.
make_venv() {
  if venv_fits; then return; fi
  pick_python
  if [ -e .venv ] && [ ! -e .venv/made-by-run.sh ]; then
    fail ".venv, which run.sh has not made, is not for $needs: type  mv .venv .venv-old"
  fi
  rm -rf .venv && mkdir .venv && : >.venv/made-by-run.sh && "$python" -m venv .venv
}

# install NAME FILE [REQUIREMENT]. The stamp, a copy of FILE, comes last: an interrupted install is
# repeated, a changed FILE installed anew.
install() {
  local stamp=.venv/installed-$1 file=$2
  shift 2
  if [ "$(cat "$file")" = "$(cat "$stamp" 2>/dev/null)" ]; then return; fi
  echo "Installing $file${*:+ with $*} into .venv (first run: a minute or two, more with GPUs) ..."
  runs .venv/bin/python pip || .venv/bin/python -m ensurepip >/dev/null ||
    fail ".venv has no pip: type  uv pip install --python .venv/bin/python pip"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$file" "$@" ||
    fail "pip could not install $file; its message is above"
  cp "$file" "$stamp"
}

case "$(uname -s) $(uname -m)" in
  MINGW* | MSYS* | CYGWIN*) fail "jax needs Linux or macOS: on Windows, run this inside WSL2" ;;
  "Darwin x86_64") fail "jax has no wheels for Intel Macs any more: run this on another machine" ;;
esac
minor=11 cuda="" other_cuda=none needs="Python 3.11 or newer with its venv and ensurepip modules"
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || driver=""
driver=${driver%%.*}
if [ "$driver" -gt 0 ] 2>/dev/null; then
  [ "$driver" -ge 525 ] || fail "the NVIDIA driver, $driver, is too old: jax needs 525 or newer"
  minor=12 cuda=cuda12 other_cuda=cuda13
  if [ "$driver" -ge 580 ]; then cuda=cuda13 other_cuda=cuda12; fi # as CUDA 13 requires
  needs="Python 3.12 ${needs#* * } (GPUs need jax >= 0.11.2, which has left Python 3.11)"
fi

this_process="$(uname -n) $$" # HOSTNAME may come from where srun was typed
trap unlock EXIT              # also at Ctrl-C
trap 'exit 143' TERM # after the install that runs now, which would go on without a lock
lock
make_venv
install "${cuda:-cpu}" requirements.txt ${cuda:+"jax[$cuda]"}

if [ "${1:-}" = check ]; then
  shift
  unlock # exec runs no trap
  export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR-.cache/jax}"
  exec .venv/bin/python -m dev.check_gpu "$@"
fi
case ${1:-} in
  basics/*.py | ./basics/*.py)
    case " $* " in *" --draw"*) install tests tests/requirements.txt ;; esac # for matplotlib
    unlock
    exec .venv/bin/python "$@"
    ;;
  sample | hellaswag | loss | export | look)
    tool=$1
    shift
    case $tool in hellaswag | loss | look) install tests tests/requirements.txt ;; esac
    unlock
    exec .venv/bin/python "evals/$tool.py" "$@"
    ;;
esac
if [ "${1:-}" = test ]; then
  shift
  install tests tests/requirements.txt
  unlock
  .venv/bin/python -m ruff check .
  .venv/bin/python -m ruff format --check .
  # Freed memory is used again, which saves the kernel's work of clearing new pages. glibc only.
  export MALLOC_TRIM_THRESHOLD_=268435456 MALLOC_MMAP_THRESHOLD_=33554432
  export MALLOC_TOP_PAD_=16777216
  # Three workers for two cores, because tests/test_hosts.py mostly waits. tests/conftest.py sorts
  # the files, so xdist need not.
  exec .venv/bin/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder "$@"
fi

trainer=train_gpt.py
case ${1:-} in
  *.py)
    trainer=$1
    shift
    ;;
esac
case ${1:--} in
  -*)
    preset=tiny why="no NVIDIA GPU"
    [ -z "$cuda" ] || preset=record why="an NVIDIA GPU"
    echo "No preset given, and this machine has $why: running \"$preset\""
    ;;
  *)
    preset=$1
    shift
    ;;
esac

data="" script="" before=""
for argument in "$@"; do
  case $argument in --data=*) data=${argument#*=} ;; esac
  if [ "$before" = --data ]; then data=$argument; fi
  before=$argument
done
case "$preset:$data: $* " in
  *" --help "* | *" -h "*) data="" ;;
  tiny::*) data=data/source_code script=data/source_code.py ;;
  record::*) [ -z "$cuda" ] || data=data/fineweb10B script=data/cached_fineweb10B.py ;;
esac
[ -z "$script" ] || .venv/bin/python $script
unlock
[ -z "$data" ] || .venv/bin/python data/check.py --quick -- "$data"
# On CPUs XLA asks for its memory anew every step: in pages of 2 MB (glibc >= 2.35) that is faster.
[ -n "$cuda" ] || export GLIBC_TUNABLES="${GLIBC_TUNABLES-glibc.malloc.hugetlb=1}"
exec .venv/bin/python dev/launch.py "$trainer" "$preset" "$@"
