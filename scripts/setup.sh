# Sourced by scripts/demo and scripts/check: makes .venv beside this repository and installs the package with what it needs.
# Nothing outside the repository is touched. A second run finds everything in place and goes on at once.

ods_setup() { # ods_setup EXTRAS
  local python=${PYTHON:-python3} extras=$1 venv=.venv
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "Python 3.11 or newer is needed; '$python' is $("$python" --version 2>&1). Set PYTHON=/path/to/python3.11" >&2
    return 2
  }
  local stamp
  stamp="$("$python" --version) $(cat pyproject.toml setup.py ods_async/core/_copy.c requirements/constraints.txt | cksum)"
  if [ "$(cat "$venv/.ods-$extras" 2>/dev/null)" != "$stamp" ]; then
    echo "installing into $venv (once; torch is large) ..."
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || {
      echo "no virtual environment could be made; on Debian and Ubuntu: apt-get install python3-venv" >&2
      return 2
    }
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
      --constraint requirements/constraints.txt --editable ".[$extras]" || return 2
    printf '%s' "$stamp" >"$venv/.ods-$extras"
  fi
  export PATH="$PWD/$venv/bin:$PATH"
}
