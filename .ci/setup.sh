# shellcheck shell=bash
# Sourced by ./serve and ./test: finds a Python and sets the checkout up. Sets nothing but functions.

# Prints the Python to use: PYTHON if set, else that of the .venv that is there, else the first supported one on PATH.
find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    if ! "$PYTHON" -c '' 2>/dev/null; then
      echo "error: PYTHON is '$PYTHON', which does not run: set it to a Python 3.11 or 3.12, or leave it unset" >&2
      return 1
    fi
    echo "$PYTHON"
    return
  fi
  for candidate in .venv/bin/python python3.11 python3.12 python3; do
    # Run, not just found: a version manager's stand-in is on PATH and refuses.
    if "$candidate" -c 'import sys; sys.exit((3, 11) > sys.version_info or sys.version_info >= (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: no Python 3.11 or 3.12 found: install one (Debian 12: python3.11, python3.11-venv, libpython3.11;" \
    "Ubuntu 24.04: the same with 3.12) or name it with PYTHON=/path/to/python3.11" >&2
  return 1
}

# set_up [--extra NAME]: run in the root of the checkout. Without arguments, shellcheck wants a bare `--`.
set_up() {
  local python
  python=$(find_python) || return 1
  "$python" python_backend/diffusion_backend/bootstrap.py . "$@"
}
