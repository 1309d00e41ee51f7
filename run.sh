#!/usr/bin/env bash
# Installs into .venv, fetches the tokens, trains. What is already there is not done again.
#
#   ./run.sh [record | tiny] [--field value ...]
#   ./run.sh test [pytest argument ...]
#
# PYTHON=/path/to/python ./run.sh ... takes that Python and no other.
set -euo pipefail # macOS has bash 3.2, where an empty array counts as unset: none are used here
cd "$(dirname "$0")"

fail() {
  echo "run.sh: $*" >&2
  exit 1
}

# Really run it: a pyenv shim may exist and refuse, Debian's Python may come without ensurepip.
suits() {
  "$1" -c "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, $minor))" >/dev/null 2>&1
}

version() {
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'
}

pick_python() {
  local needs="Python 3.$minor or newer with its venv and ensurepip modules"
  [ -z "$cuda" ] || needs="$needs (GPUs need jax >= 0.11.2, which has left Python 3.11)"
  if [ -n "${PYTHON:-}" ]; then
    python=$PYTHON
    suits "$python" || fail "PYTHON=$PYTHON does not work as $needs"
    return
  fi
  for python in .venv/bin/python python3.14 python3.13 python3.12 python3.11 python3; do
    if suits "$python"; then return; fi
  done
  fail "found no $needs. Install one (Debian, Ubuntu: also python3-venv), or set PYTHON to it"
}

# Two CUDA generations in one environment would both register as jax's GPU backend.
make_venv() {
  if [ -x .venv/bin/pip ] && suits .venv/bin/python && [ ! -e ".venv/installed-$other_cuda" ] &&
    [ "$(version .venv/bin/python)" = "$(version "$python")" ]; then return; fi
  "$python" -m venv --clear .venv
}

# install NAME FILE [REQUIREMENT]. The stamp, a copy of FILE, comes last: an interrupted install is
# repeated, a changed FILE installed anew.
install() {
  local stamp=.venv/installed-$1 file=$2
  shift 2
  if [ "$(cat "$file")" = "$(cat "$stamp" 2>/dev/null)" ]; then return; fi
  echo "Installing $file${*:+ with $*} into .venv (first run: a minute or two, more with GPUs) ..."
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$file" "$@" ||
    fail "pip could not install $file; its own words are above"
  cp "$file" "$stamp"
}

minor=11 cuda="" other_cuda=none
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || driver=""
driver=${driver%%.*}
if [ "$driver" -gt 0 ] 2>/dev/null; then
  minor=12 cuda=cuda12 other_cuda=cuda13
  if [ "$driver" -ge 580 ]; then cuda=cuda13 other_cuda=cuda12; fi # as CUDA 13 requires
fi

pick_python
make_venv
install "${cuda:-cpu}" requirements.txt ${cuda:+"jax[$cuda]"}

if [ "${1:-}" = test ]; then
  shift
  install tests tests/requirements.txt
  .venv/bin/python -m ruff check .
  .venv/bin/python -m ruff format --check .
  exec .venv/bin/python -m pytest -q "$@"
fi

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

case "$preset $* " in
  *" --data "* | *" --data="* | *" --help "* | *" -h "*) ;; # own data, or none
  "tiny "*) .venv/bin/python data/source_code.py ;;
  "record "*) [ -z "$cuda" ] || .venv/bin/python data/cached_fineweb10B.py ;;
esac
exec .venv/bin/python train_gpt.py "$preset" "$@"
