#!/usr/bin/env bash
# Makes an environment for each peer and records what was installed: bash benchmarks/peers/make.sh [FOLDER]
# A peer that cannot be installed is left out, and the benchmark says so.
set -uo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-${ODS_BENCH_PEERS:-.venv-peers}}
python=${PYTHON:-python3}
mkdir -p "$folder"

peer() { # peer NAME PACKAGES...
  local name=$1
  shift
  [ -e "$folder/$name/ok" ] && return
  echo "installing $name ($*) ..."
  "$python" -m venv "$folder/$name" &&
    "$folder/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >"$folder/$name.log" 2>&1 &&
    "$folder/$name/bin/python" -m pip freeze >"$folder/$name/versions.txt" &&
    touch "$folder/$name/ok" || echo "$name cannot be installed here; see $folder/$name.log"
}

peer torchrl "torch==2.13.0" "torchrl==0.14.1"
peer reverb "dm-reverb==0.14.0" "tensorflow-cpu==2.15.1" "numpy<2"
peer transferqueue "TransferQueue==0.1.11"
