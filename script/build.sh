# shellcheck shell=bash
# For the other scripts: . script/build.sh

# show_progress NAME: passes on the output of a build, with a line for every 10 % instead of one for
# every file.
show_progress() {
  awk -v name="$1" '
    /^\[[0-9]+\/[0-9]+\] / {
      split(substr($1, 2), step, /[\/\]]/)
      percent = int(10 * step[1] / step[2]) * 10
      if (percent > shown) { shown = percent; printf "%s: built %d %%\n", name, percent; fflush() }
      next
    }
    /^ninja: no work to do/ { next }
    { print; fflush() }'
}

# build NAME PRESET FOLDER [cmake --build options]: configures and builds, and shows progress: on a
# terminal in one line that is overwritten, elsewhere in ten lines.
build() {
  local name=$1 preset=$2 folder=$3
  shift 3
  echo "$name: building (the first time takes some minutes)"
  cmake --preset "$preset" >/dev/null
  if [[ -t 1 ]]; then
    NINJA_STATUS="$name: building %f of %t " cmake --build "$folder" "$@"
  else
    NINJA_STATUS='[%f/%t] ' cmake --build "$folder" "$@" | show_progress "$name"
  fi
}
