#!/usr/bin/env bash
# Installs into .venv, with uv where it is and else with pip, fetches tokens, and trains.
#
#   ./run.sh [PRESET] [--field value ...]     trains record, record92, medium, small or tiny; --help
#   ./run.sh my_idea.py tiny [--field ...]    trains a copy of train_gpt.py
#   ./run.sh idea NAME... [PRESET]            trains a copy with ideas of records/ideas/
#   ./run.sh plan [PRESET]                    says what a run takes here, and installs nothing
#   ./run.sh check                            measures how fast and how right a GPU computes
#   ./run.sh sample | loss | look | hellaswag | export [WEIGHTS]    of a trained model
#   ./run.sh tokenize PATH... --out DIR       makes training data of your own text
#   ./run.sh optimizers [NAME]                trains with another optimizer
#   ./run.sh basics [NAME]                    lists the tutorials, or runs one
#   ./run.sh attempt IDEA | verify | pack     tries an idea and judges it; judges runs; packs
#   ./run.sh test | install | help            runs lint and tests; only installs; prints this

set -euo pipefail
CDPATH="" cd -- "$(dirname -- "$0")" # CDPATH may have another clone
unset PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE # only .venv's packages, compiled once
python=.venv/bin/python

refuse() {
  echo "run.sh: $*" >&2
  exit 2
}

# Installs what a file lists. The stamp comes last, so that what was stopped is repeated.
install() { # install FILE
  local stamp=.venv/installed-${1//\//-} pins
  pins=$(cat requirements.txt evals/requirements.txt "$1")
  [ "$pins" != "$(cat "$stamp" 2>/dev/null)" ] || return 0
  echo "Installing $1 into .venv (a minute or two, more with GPUs) ..."
  if command -v uv >/dev/null; then
    uv pip install --quiet --python $python -r "$1"
  else
    $python -m pip install --quiet --disable-pip-version-check --no-compile -r "$1"
  fi
  echo "$pins" >"$stamp"
}

tool="" packages=""
case ${1:-} in
  help | -h | --help) sed -n "2,/^set/s/^# \{0,1\}//p" run.sh && exit ;;
  basics/*.py) tool=$1 packages=evals/requirements.txt ;;
  "" | -* | *.py | record | medium | small | tiny | record92) ;;
  loss | look | hellaswag | export) tool=evals/$1.py packages=evals/requirements.txt ;;
  attempt | pack) tool=records/$1.py packages=evals/requirements.txt ;;
  sample) tool=evals/$1.py ;;
  verify | idea) tool=records/$1.py ;;
  optimizers) tool=records/optimizers/run.py ;;
  tokenize) tool=data/tokenize_text.py ;;
  check) tool="-m lab.check" ;;
  test) tool="-m pytest -q -n 3 --dist loadfile" packages=tests/requirements.txt ;;
  install) tool="run/machine.py plan" ;;
  basics)
    [ $# -gt 1 ] || exec grep "^## .*py: " basics/README.md
    exec ./run.sh "basics/${2%.py}.py" "${@:3}"
    ;;
  plan)
    [ -x $python ] || python=${PYTHON:-python3}
    exec "$python" run/machine.py "$@"
    ;;
  *) refuse "there is no preset or command '$1': ./run.sh help lists them" ;;
esac

# Of several starts in one folder, one installs and fetches, and the others wait for file 9.
[ ! -w . ] || exec 9>.lock
flock 9 2>/dev/null || python3 -c "import fcntl; fcntl.flock(9, fcntl.LOCK_EX)" 2>/dev/null || true
if [ ! -x $python ] && command -v uv >/dev/null; then
  uv venv -q -p "${PYTHON:->=3.12,<3.15}" 2>/dev/null || uv venv -q -p "${PYTHON:->=3.11,<3.15}"
elif [ ! -x $python ]; then
  for name in ${PYTHON:-python3.14 python3.13 python3.12 python3.11 python3} none; do
    [ "$name" != none ] || refuse "needs uv, or Python 3.11 or newer with venv (python3-venv)"
    "$name" -c "import ensurepip, sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null && break
  done
  "$name" -m venv .venv
fi
wheels=cpu preset=tiny why="there is no nvidia-smi in PATH, and no TPU"
if command -v nvidia-smi >/dev/null || [ -e /dev/accel0 ] || [ -e /dev/vfio/0 ]; then
  read -r wheels preset fraction why < <($python run/machine.py decide)
fi
if [ "$wheels" != cpu ]; then
  [ ! -d .venv/lib/python3.11 ] || refuse "GPUs and TPUs need Python 3.12: rm -r .venv"
  export XLA_FLAGS="--xla_gpu_first_collective_call_terminate_timeout_seconds=600 ${XLA_FLAGS:-}"
  export JAX_PLATFORMS="${JAX_PLATFORMS:-${wheels%%[0-9]*},cpu}" # else JAX may take the CPU
  export XLA_CLIENT_MEM_FRACTION="${XLA_CLIENT_MEM_FRACTION:-$fraction}"
fi
install "run/wheels/$wheels.txt"
[ -z "$packages" ] || install "$packages"
[ $wheels != cpu ] || export GLIBC_TUNABLES="${GLIBC_TUNABLES-glibc.malloc.hugetlb=1}" # faster
# jax 0.10.2, the newest for Python 3.11, computes some sums wrong on CPUs: its issue 39103.
[ ! -d .venv/lib/python3.11 ] ||
  export XLA_FLAGS="--xla_cpu_experimental_ynn_fusion_type=${XLA_FLAGS:+ $XLA_FLAGS}"

if [ "${1:-}" = test ]; then # what git knows: a copy that somebody tries does not count
  git ls-files -z "*.py" "*.ipynb" | xargs -0 $python -m ruff check --force-exclude
  git ls-files -z "*.py" "*.ipynb" | xargs -0 $python -m ruff format --check --force-exclude
fi
if [ -n "$tool" ]; then
  shift
  set -- $tool "$@"
else
  script=train_gpt.py
  case ${1:-} in *.py) script=$1 && shift ;; esac
  case ${1:--} in
    -*) echo "No preset given: $preset, as $why" ;;
    *) preset=$1 && shift ;;
  esac
  case "$preset $wheels${JAX_PLATFORMS:-} $* " in
    *" -h "* | *" --help "* | *" --data"*) ;;
    "record cpu "* | "record92 cpu "* | "medium cpu "*) refuse "$preset needs a GPU, and $why" ;;
    tiny*) $python data/source_code.py ;; # which also checks what is there
    record*) $python data/cached_fineweb10B.py ;;
    medium*) $python data/cached_fineweb10B.py 24 ;; # training shards
    small*) $python data/cached_fineweb10B.py 1 ;;
  esac
  set -- run/launch.py "$script" "$preset" "$@"
  [ "$preset" != record92 ] || set -- records/upstream92/train_gpt.py "${@:3}"
fi
exec 9>&- # the next one may begin
exec $python "$@"
