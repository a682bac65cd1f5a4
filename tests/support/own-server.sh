# shellcheck shell=bash
#
# For tests in bash: starts servers, and stops them however the test ends.
#
#   . tests/support/own-server.sh     # at the top of the project
#   start_server --maxclients 100     # sets $port and $server_pid
#
# The module is build/turnstile.so, or the value of TURNSTILE_MODULE; the server is redis-server, or
# the value of REDIS_SERVER. $folder is removed at the end; add other processes to $pids.

module=${TURNSTILE_MODULE:-$PWD/build/turnstile.so}
server=${REDIS_SERVER:-redis-server}
folder=$(mktemp -d)
pids=()
port='' server_pid=''

clean_up() {
  local pid
  for pid in "${pids[@]}"; do kill -CONT "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  rm -rf "$folder"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

section() { printf -- '--- %s\n' "$*"; }
fail() { printf '%s: %s\n' "$0" "$*" >&2; exit 1; }

# start_server [OPTION...]: if the chosen port is taken before the server listens, tries another.
# shellcheck disable=SC2120 # options are optional
start_server() {
  local attempt i
  for attempt in {1..20}; do
    port=$((20000 + RANDOM % 10000))
    "$server" --bind 127.0.0.1 --port "$port" --save '' --dir "$folder" --loadmodule "$module" "$@" \
      >>"$folder/log" 2>&1 &
    server_pid=$!
    pids+=("$server_pid")
    for ((i = 0; i < 200; ++i)); do
      kill -0 "$server_pid" 2>/dev/null || break
      if [[ $(redis-cli -p "$port" INFO server 2>/dev/null) == *"process_id:$server_pid"[!0-9]* ]]; then
        return
      fi
      sleep 0.05
    done
    kill "$server_pid" 2>/dev/null || true
  done
  cat "$folder/log" >&2
  fail "no server after $attempt attempts"
}
