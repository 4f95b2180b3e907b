#!/bin/sh
# Make .venv and install what one stage needs:  sh tools/venv.sh run|test|dev
#
# Each finished stage leaves a stamp, .venv/.stamp-STAGE, with a checksum of what it was installed
# from: a second call returns at once, and a changed requirement updates .venv in place. A .venv that
# was interrupted, moved, or whose interpreter is gone is made again.
#
# PYTHON is the interpreter to use (default: the one .venv was made with, or else python3). If it
# can import torch and Megatron-Core, .venv sees its packages and only the missing ones are installed.
# TORCH_INDEX_URL is the package index to take torch from (default: pip's).
set -eu
cd "$(dirname "$0")/.."

stage=${1:-}
case $stage in
    run | test | dev) ;;
    *) echo "usage: sh tools/venv.sh run|test|dev" >&2; exit 2 ;;
esac

root=$(pwd -P)
venv_python=.venv/bin/python
origin=.venv/.origin         # line 1: the folder of the project, line 2: the interpreter
inherited=.venv/.inherited   # exists if .venv sees the interpreter's packages
installing=.venv/.installing # exists while an install runs; holds the process id of this script

say() { echo "[venv] $*"; }

die() {
    for line in "$@"; do echo "[venv] $line" >&2; done
    exit 1
}

# The full path of interpreter $1; nothing if it is that of .venv itself (an activated .venv).
path_of() {
    "$1" -c 'import os, sys
if os.path.realpath(sys.prefix) != os.path.realpath(".venv"):
    print(sys.executable)'
}

check_interpreter() {
    command -v "$1" >/dev/null || die "there is no $1" \
        "Install Python 3.10 or newer, or name one: make $stage PYTHON=/path/to/python3"
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "$1 is $("$1" --version 2>&1), and Python 3.10 or newer is needed" \
            "Name another one: make $stage PYTHON=python3.12"
}

# --- .venv itself -------------------------------------------------------------------------------

is_usable() {
    # pip is not found if the interpreter behind the link has become another version.
    [ ! -e "$installing" ] && "$venv_python" -c 'import pip' 2>/dev/null || return 1
    # One that was made by hand has no record, and is taken as it is.
    [ -e "$origin" ] || [ -z "$wanted" ] || return 1
    [ ! -e "$origin" ] || [ "$(sed -n 1p "$origin")" = "$root" ] || return 1
    [ -z "$wanted" ] || [ "$(sed -n 2p "$origin")" = "$wanted" ]
}

choose_interpreter() {
    python=$wanted
    if [ -z "$python" ] && [ -e "$origin" ]; then
        python=$(sed -n 2p "$origin")
        [ -x "$python" ] || python=
    fi
    if [ -z "$python" ]; then
        check_interpreter python3
        python=$(path_of python3)
        [ -n "$python" ] || python=$(python3 -c 'import sys; print(sys._base_executable)')
    fi
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python cannot make virtual environments: its modules venv and ensurepip are missing" \
            "On Debian and Ubuntu: apt install $("$python" -c \
                'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
}

# Make packages of $python visible in .venv. `--system-site-packages` would not do: for an
# interpreter that is itself in a virtual environment it shows the packages of the base one.
inherit_packages() {
    folder=$("$venv_python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -c 'import os, site
folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
for folder in filter(os.path.isdir, folders):
    print(f"import site; site.addsitedir({folder!r})")' >"$folder/inherited.pth"
    : >"$inherited"
}

make_venv() {
    choose_interpreter
    say "making .venv with $python ($("$python" --version))"
    rm -rf .venv
    mkdir .venv
    echo $$ >"$installing"
    "$python" -m venv .venv
    printf '%s\n' "$root" "$python" >"$origin"
    if "$python" -c 'import torch, megatron.core' >/dev/null 2>&1; then
        say "using the torch and Megatron-Core of this interpreter"
        inherit_packages
    fi
}

# --- the stages ---------------------------------------------------------------------------------

fingerprint() {
    {
        cat tools/venv.sh setup.py requirements/constraints.txt requirements/run.txt "requirements/$1.txt"
        grep '^__version__' megatron_lossagg/version.py
    } | cksum
}

is_installed() { [ "$(cat ".venv/.stamp-$1" 2>/dev/null)" = "$(fingerprint "$1")" ]; }

pip_install() {
    "$venv_python" -m pip install -qq --disable-pip-version-check "$@"
}

pip_install_pinned() {
    # Inherited packages fit each other as they are: versions of our own would shadow some of them.
    if [ -e "$inherited" ]; then
        pip_install "$@"
    else
        pip_install --constraint requirements/constraints.txt "$@"
    fi
}

# A regular install that is inherited would come before the editable one, and hide this folder.
check_source() {
    source=$("$venv_python" -c 'import importlib.util, sys
sys.path[:] = filter(None, sys.path)
print(importlib.util.find_spec("megatron_lossagg").origin)')
    [ "$source" = "$root/megatron_lossagg/__init__.py" ] ||
        die "megatron_lossagg would be imported from $source" "Uninstall that one first"
}

install_run() {
    if [ ! -e "$inherited" ]; then
        say "installing torch (the first download can take minutes)"
        pip_install_pinned ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
        say "installing megatron-core and the packages in requirements/run.txt"
        pip_install_pinned megatron-core --requirement requirements/run.txt
    else
        say "installing what is missing of requirements/run.txt"
        pip_install_pinned --requirement requirements/run.txt
    fi
    pip_install --no-deps --no-build-isolation --editable .
    check_source
    versions=$("$venv_python" -W ignore -c 'import megatron.core, torch
print(f"torch {torch.__version__}, megatron-core {megatron.core.__version__}")')
    say "$versions"
}

install_other() {
    say "installing the packages in requirements/$1.txt"
    pip_install_pinned --requirement "requirements/$1.txt"
}

install() {
    rm -f ".venv/.stamp-$1"
    echo $$ >"$installing"
    if [ "$1" = run ]; then install_run; else install_other "$1"; fi
    fingerprint "$1" >".venv/.stamp-$1"
    rm "$installing"
}

if [ -e "$installing" ] && kill -0 "$(cat "$installing")" 2>/dev/null; then
    die "process $(cat "$installing") is installing into .venv: wait for it" \
        "If that is some other process, remove .venv: make clean"
fi
wanted=
if [ -n "${PYTHON:-}" ]; then
    check_interpreter "$PYTHON"
    wanted=$(path_of "$PYTHON")
fi
is_usable || make_venv
is_installed run || install run
is_installed "$stage" || install "$stage"
