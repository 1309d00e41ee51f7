#!/usr/bin/env bash
# Installs into .venv, fetches tokens, checks them, trains. What is there is not done again.
#
#   ./run.sh [PRESET] [--field value ...]       trains record, medium, small or tiny
#   ./run.sh record92 [--field value ...]       trains records/upstream92/train_gpt.py
#   ./run.sh my_idea.py tiny [--field ...]      trains a copy of train_gpt.py
#   ./run.sh idea NAME... [PRESET] [--field]    trains a copy with ideas of records/ideas/
#   ./run.sh tiny --help                        lists that preset's values, which are the flags
#   ./run.sh plan [PRESET] [--price 20]         what it takes here: disk, minutes, flags, dollars
#   ./run.sh check ...                          measures how fast the machine is; --full: whether it
#                                               computes right
#   ./run.sh watch [LOG]                        shows how a run is going, from its log
#   ./run.sh sample | loss | look [WEIGHTS]     text, the loss, pictures of a trained model
#   ./run.sh hellaswag | export | share ...     a benchmark, a folder to pass on, Hugging Face
#   ./run.sh tokenize PATH... --out DIR         makes training data of your own text: --bytes
#   ./run.sh optimizers [NAME] [--flag ...]     trains with another optimizer: --help
#   ./run.sh basics [NAME]                      lists the tutorials, or runs one
#   ./run.sh compare VARIANT... -n RUNS         runs versions of the file in turn, same seeds
#   ./run.sh verify | pack | plot FOLDER...     judges runs, makes a record, draws their curves
#   ./run.sh test [--quick | --all | ...]       runs the tests; what follows is pytest's
#   ./run.sh clean                              lists what runs have left, asks, and removes it
#   ./run.sh install                            installs, and nothing else
#   ./run.sh --version                          the commit and the jax that are here
#
# PYTHON=/path/to/python ./run.sh ... takes that Python and no other. Paths are from here.
# Started many times in one folder, as by srun, it installs and fetches once: the others wait.

[ "${BASH_SOURCE:-$0}" = "$0" ] || { echo "run.sh: type  ./run.sh,  not source" >&2 && return 1; }
# -p ignores what others may have set for bash: BASH_ENV, CDPATH, functions with commands' names.
case ${BASH_VERSION:+$-} in *p*) ;; *) exec "${BASH:-bash}" -p -- "$0" "$@" ;; esac
set -euo pipefail # macOS has bash 3.2, where an empty array counts as unset: none are used here
set +o posix      # as in sh
{ true >&1; } 2>/dev/null || exec >/dev/null # a service may have no stdout
cd -- "$(dirname -- "$0")"

fail() {
  echo "run.sh: $*" >&2
  exit 1
}

# Nor must Python find other packages, or git another repository, by what others have set.
unset BASH_ENV ENV CDPATH FUNCNEST POSIXLY_CORRECT __PYVENV_LAUNCHER__ GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE \
  GIT_COMMON_DIR GIT_OBJECT_DIRECTORY GIT_NAMESPACE
export -n SHELLOPTS
for variable in ${!PYTHON*}; do
  case ${variable#PYTHON} in
    "" | IOENCODING | UTF8 | UNBUFFERED | DONTWRITEBYTECODE | PYCACHEPREFIX | NOUSERSITE) ;;
    BREAKPOINT | FAULTHANDLER) ;;
    *) unset "$variable" ;;
  esac
done

# The comment at the top.
print_help() {
  while IFS= read -r line; do
    case $line in
      "#!"*) ;;
      "#"*) line=${line#"#"} && echo "${line# }" ;;
      *) break ;;
    esac
  done <run.sh
}

# .lock is a link to "HOST PID", because a link is made in one step, on shared disks too. Where
# nothing can be written, the process goes on without a lock. The lock of a dead process is removed
# by one waiting process at a time, which first checks whether it still belongs to the dead one.
lock() {
  local owner error announced=""
  [ ! -e .lock ] || [ -L .lock ] || fail "there is a .lock that run.sh has not made: type  rm -r .lock"
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

# Whether PYTHON is at least 3.MINOR and has MODULES. A pyenv shim may exist and refuse.
runs() { # runs PYTHON MINOR [MODULES]
  output=$("$1" -c "import sys, ${3:-sys}; sys.exit(sys.version_info < (3, $2))" 2>&1)
}

pythons="python3.14 python3.13 python3.12 python3.11 python3"
outside_pip='pip; assert tuple(map(int, pip.__version__.split(".")[:2])) >= (22, 3)' # has --python

# For run/machine.py, which an old one can run.
any_python() {
  for python in .venv/bin/python ${PYTHON:+"$PYTHON"} $pythons; do
    if runs "$python" 8; then return; fi
  done
  case $output in *"not found"*) output="" ;; esac
  fail "found no Python: install 3.12 or newer (CPUs: 3.11)${output:+; $python: ${output%%$'\n'*}}"
}

# Sets kind: the Python that the packages of .venv are for. Else sets why .venv cannot be used. The
# wheels of two accelerators in one environment would both register with jax.
venv_fits() {
  kind=$(.venv/bin/python run/install.py state "$minor" $other_wheels 2>/dev/null) ||
    why=${kind:-has no Python that runs}
  kind=${kind##*$'\n'} # a plugin in .venv may print lines of its own
  if [ -z "$why" ] && [ -n "${PYTHON:-}" ]; then
    [ "$kind" = "$("$PYTHON" run/install.py kind 2>/dev/null)" ] ||
      why="is for $kind, and PYTHON=$PYTHON is not"
  fi
  [ -z "$why" ]
}

# Uses what uv or an editor has made, or leaves it alone.
find_venv() {
  local why=""
  if venv_fits; then return; fi
  if [ -e .venv ] || [ -L .venv ]; then
    [ -e .venv/made-by-run.sh ] ||
      fail ".venv, which run.sh has not made, $why: type  mv .venv .venv-old"
    [ -O .venv ] || fail ".venv, which belongs to another user, $why: use a clone of your own"
    make_venv "$why"
  else
    make_venv ""
  fi
}

# Takes the newest Python that can. One without ensurepip, as on Colab, is taken last.
make_venv() { # make_venv WHAT_IS_WRONG_WITH_THE_OLD_ONE
  local old=$1 outside status unfit
  if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- $pythons; fi
  for outside in "" outside; do
    unfit=""
    for python; do
      status=0
      kind=$("$python" run/install.py make "$minor" $outside 2>/dev/null) || status=$?
      case $status in
        0) [ -z "$old" ] || echo "Made .venv anew: the old one $old" ;;
        2) fail "$kind" ;;
        *) unfit="$unfit${kind:+, $python $kind}" && continue ;;
      esac
      fresh=yes
      return
    done
  done
  if [ -n "${PYTHON:-}" ]; then
    runs "$PYTHON" 0 "importlib.util" || unfit=${unfit:-", ${output%%$'\n'*}"}
    unfit=${unfit:-", it does not run run/install.py"}
    fail "PYTHON=$PYTHON does not work as $needs: ${unfit#, }"
  fi
  hint="Debian, Ubuntu: also python3-venv; without root: pip install uv && uv python install 3.12"
  fail "found no $needs${unfit:+ (${unfit#, })}. Install one ($hint), or set PYTHON to it"
}

# Runs a pip from outside of .venv, whose Python is of the same kind: older ones may not know that of
# .venv. Else the pip of .venv, which ensurepip makes in three seconds.
venv_pip() {
  for python in ${PYTHON:+"$PYTHON"} $pythons; do
    if runs "$python" "$minor" "$outside_pip" &&
      [ "$kind" = "$("$python" run/install.py kind 2>/dev/null)" ]; then
      "$python" -m pip --python .venv/bin/python "$@"
      return
    fi
  done
  if runs .venv/bin/python 8 pip ||
    .venv/bin/python -m ensurepip --default-pip >/dev/null 2>&1; then
    .venv/bin/python -m pip "$@"
    return
  fi
  fail ".venv has no pip: type  uv pip install --python .venv/bin/python pip"
}

# Installs with uv where there is one, in seconds.
uv_install() {
  command -v uv >/dev/null || return 1
  local uv_flags=""
  (
    set -f # words of uv_flags are no patterns
    eval "$(.venv/bin/python run/install.py uv)"
    uv pip install --quiet --python .venv/bin/python $uv_flags "$@"
  ) || { echo "uv could not install it, so pip tries ..." >&2 && return 1; }
}

# install NAME FILE [REQUIREMENT CONSTRAINTS]. The stamp, the kind of Python and a copy of the files,
# comes last: an interrupted install is repeated, changed files are installed anew. Where packages
# cannot be imported, .venv is made anew once: what is wrong then is not of .venv.
install() {
  local stamp=.venv/installed-$1 pins why
  pins="$kind"$'\n'$(cat "$2" ${4:+"$4"})
  if [ "$pins" = "$(cat "$stamp" 2>/dev/null)" ]; then return; fi
  echo "Installing $2${3:+ with $3} into .venv (first run: a minute or two, more with GPUs) ..."
  if ! uv_install -r "$2" ${3:+"$3" -c "$4"}; then
    eval "$(.venv/bin/python run/install.py pip)"
    # What is used is compiled when it is first imported, which takes less time.
    venv_pip install --quiet --no-compile --disable-pip-version-check -r "$2" ${3:+"$3" -c "$4"} ||
      fail "pip could not install $2; its message is above"
  fi
  if ! why=$(.venv/bin/python run/install.py check 2>/dev/null); then
    why=${why:-"ends when it imports jax: try  .venv/bin/python -c 'import jax'"}
    if [ "$1" = "$wheels" ] && [ -z "$fresh" ] && [ -e .venv/made-by-run.sh ] &&
      [ ! -e .venv/fails ]; then
      make_venv "$why"
      install "$@"
      return
    fi
    : >.venv/fails
    fail "$2 is installed, but .venv $why"
  fi
  rm -f .venv/fails
  echo "$pins" >"$stamp"
}

# What git knows, so that a copy that somebody tries does not count. Without git, all.
lint() {
  local name
  set --
  while IFS= read -r -d "" name; do
    [ ! -e "$name" ] || set -- "$@" "$name"
  done < <(git ls-files -z "*.py" "*.ipynb" pyproject.toml 2>/dev/null)
  [ $# -gt 0 ] || set -- .
  .venv/bin/python -m ruff check --force-exclude "$@"
  .venv/bin/python -m ruff format --check --force-exclude "$@"
}

[ ! -L "${0##*/}" ] || fail "call it in its own folder, not by the link $0"
[ -f requirements.txt ] || fail "there is no requirements.txt in $PWD: get the whole repository"
case ${1:-} in -h | --help) print_help && exit ;; esac
case "$(uname -s) $(uname -m)" in
  MINGW* | MSYS* | CYGWIN*) fail "jax needs Linux or macOS: on Windows, run this inside WSL2" ;;
  "Darwin x86_64") fail "jax has no wheels for Intel Macs any more: run this on another machine" ;;
esac

any_python
case ${1:-} in
  plan | watch | clean) verb=$1 && shift && exec "$python" "run/$verb.py" "$@" ;;
  idea)
    shift
    case ${1:-} in "" | -*) exec "$python" records/idea.py "$@" ;; esac
    words=$("$python" records/idea.py "$@") || exit
    eval "set -- $words" # idea_NAME.py, and what follows the names
    echo "$1 is train_gpt.py with these ideas"
    ;;
esac
case "$*" in
  --version | basics | "basics -h" | "basics --help") exec "$python" run/machine.py "$1" ;;
esac
decisions=$("$python" run/machine.py "$@") || exit
# This sets wheels, requirement, constraints, other_wheels, minor, environment, preset and why.
eval "$decisions"
[ -z "$environment" ] || export $environment # as NAME=VALUE NAME=VALUE
needs="Python 3.$minor or newer with venv, and with ensurepip or pip 22.3"
[ "$minor" = 11 ] || needs="$needs (GPUs and TPUs need jax >= 0.11.2, which has left Python 3.11)"

this_process="$(uname -n) $$" # HOSTNAME may come from where srun was typed
trap unlock EXIT              # also at Ctrl-C
trap 'exit 143' TERM # after the install that runs now, which would go on without a lock
fresh="" # whether .venv was made in this start
lock
find_venv
install "$wheels" requirements.txt ${requirement:+"$requirement" "$constraints"}
# jax 0.10.2, the newest for Python 3.11, computes some sums wrong on CPUs: its issue 39103.
case $kind in
  "Python 3.11"*) export XLA_FLAGS="--xla_cpu_experimental_ynn_fusion_type=${XLA_FLAGS:+ $XLA_FLAGS}" ;;
esac

case ${1:-} in
  install)
    fault=$(.venv/bin/python run/install.py check 2>/dev/null) ||
      fail ".venv $fault: type  rm -r .venv  and ./run.sh install"
    [ "$wheels" = cpu ] || echo "next: ./run.sh check, which tests this machine"
    echo "next: ./run.sh, which trains \"$preset\", because $why; ./run.sh plan says what it takes"
    exit
    ;;
  check)
    shift
    unlock # exec runs no trap
    exec .venv/bin/python -m lab.check_gpu "$@"
    ;;
  basics | basics/* | ./basics/*)
    if [ "$1" = basics ]; then shift; fi
    lesson=${1##*/}
    shift
    case " $* " in *" --draw"*) install evals evals/requirements.txt ;; esac # for matplotlib
    unlock
    exec .venv/bin/python "basics/${lesson%.py}.py" "$@"
    ;;
  optimizers)
    shift
    unlock
    [ "$wheels" != cpu ] || export GLIBC_TUNABLES="${GLIBC_TUNABLES-glibc.malloc.hugetlb=1}"
    exec .venv/bin/python records/optimizers/run.py "$@"
    ;;
  sample | hellaswag | loss | export | look | share | tokenize | compare | verify | pack | plot)
    case $1 in
      tokenize) tool=data/tokenize_text.py ;;
      compare) tool=records/run_ab.py ;;
      verify | pack | plot) tool=records/$1.py ;;
      *) tool=evals/$1.py ;;
    esac
    case $1 in hellaswag | loss | look | plot | pack) install evals evals/requirements.txt ;; esac
    shift
    unlock
    exec .venv/bin/python "$tool" "$@"
    ;;
  test)
    shift
    install evals evals/requirements.txt # its pins are not in the stamp of tests
    install tests tests/requirements.txt
    unlock
    lint
    # Freed memory is used again, which saves the kernel's work of clearing new pages. glibc only.
    export MALLOC_TRIM_THRESHOLD_=268435456 MALLOC_MMAP_THRESHOLD_=33554432
    export MALLOC_TOP_PAD_=16777216
    # Three workers for two cores, because tests/test_hosts.py mostly waits. tests/conftest.py sorts
    # the files, so xdist need not. A worker that crashes ends the suite with the name of its test:
    # one that xdist starts in its place waits for ever.
    set -- -q -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 "$@"
    exec .venv/bin/python -m pytest "$@"
    ;;
esac

trainer=train_gpt.py
case ${1:-} in
  *.py)
    trainer=$1
    shift
    ;;
esac
case ${1:--} in
  -*) echo "No preset given: running \"$preset\", because $why" ;;
  *)
    preset=$1
    shift
    ;;
esac
[ "$trainer $preset" != "train_gpt.py record92" ] || trainer=records/upstream92/train_gpt.py

data="" script="" before=""
for argument in "$@"; do
  case $argument in --data=*) data=${argument#*=} ;; esac
  if [ "$before" = --data ]; then data=$argument; fi
  before=$argument
done
case "$preset:$data: $* " in
  *" --help "* | *" -h "*) data="" ;;
  tiny::*) data=data/source_code script=data/source_code.py ;;
  record::* | record92::*) data=data/fineweb10B script=data/cached_fineweb10B.py ;;
  medium::*) data=data/fineweb10B script="data/cached_fineweb10B.py 24" ;; # training shards
  small::*) data=data/fineweb10B script="data/cached_fineweb10B.py 1" ;;
esac
[ -z "$script" ] || .venv/bin/python $script
unlock
[ -z "$data" ] || .venv/bin/python data/check.py --quick -- "$data"
# On CPUs XLA asks for its memory anew every step: in pages of 2 MB (glibc >= 2.35) that is faster.
[ "$wheels" != cpu ] || export GLIBC_TUNABLES="${GLIBC_TUNABLES-glibc.malloc.hugetlb=1}"
exec .venv/bin/python run/launch.py "$trainer" "$preset" "$@"
