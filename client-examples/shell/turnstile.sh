#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
#
# Turnstile for shell scripts, over redis-cli.
#
#   turnstile.sh run KEY [options] -- command [arg ...]   runs the command under the lock, as flock(1) does
#   turnstile.sh fence KEY TOKEN command [arg ...]        a write that happens only while TOKEN holds the lock
#   turnstile.sh acquire KEY OWNER [options]              prints the token
#   turnstile.sh touch KEY OWNER [--lease S] [--also KEY]...
#   turnstile.sh release KEY OWNER [--also KEY]...
#
# Options; S is seconds, such as 10 or 0.5:
#
#   --lease S     how long the lock lasts without renewal; 30 by default. `run` renews it after every third of that.
#   --wait S      wait in line for up to that long; 0 by default: one try
#   --shared      a shared lock, for readers
#   --limit N     one of at most N holders
#   --also KEY    this lock too, all or none; may be repeated. `fence` looks at one lock only: with the token of
#                 `run` give it the lock that guards the write, be it TURNSTILE_KEY or one of these.
#   --session     (run) if everything here is killed, the lock is free at once and not only at the end of the lease
#   --max S       (run) stop the command after that long. The lease is not renewed during the grace
#                 either, so the grace should be at most half of the lease.
#   --grace S     (run) from SIGTERM to SIGKILL, for a command that has lost its lock; 3 by default
#
# The command of `run` finds its lock in TURNSTILE_KEY, TURNSTILE_TOKEN and TURNSTILE_OWNER:
#
#   turnstile.sh run report --wait 10 -- sh -c '
#     text=$(make_report) && turnstile.sh fence "$TURNSTILE_KEY" "$TURNSTILE_TOKEN" SET report:text "$text"'
#
# If the lock is lost the command gets SIGTERM, and after the grace SIGKILL, with all of its process group. It is
# in a group of its own, so that nothing of it goes on alone, and therefore cannot read from the terminal;
# standard input from a file or a pipe is fine. SIGINT, SIGTERM and SIGHUP are passed on to it.
#
# A signal ends the wait of `run` and `acquire`: then nothing is held that they asked for. A shared hold that OWNER had
# before, when `acquire` was to make it exclusive, is kept, unless that was granted in the same moment.
#
# Exit status: that of the command, or
#   64  wrong usage
#   69  no connection, or no answer in time
#   75  not acquired: others hold the lock, or the wait ran out
#   76  lost: the command was told to stop, or had ended well but too late
#   80  FENCED: this token does not hold the lock, nothing was written
#   81  DEADLOCK: the wait would have closed a cycle
#   82  UNBLOCKED: the wait was ended by a newer call of the same owner, an operator or a failover
#   83  WAITLIMIT: too many wait on this server
#   84  READONLY: this server is a replica
#   85  MOVED, ASK, TRYAGAIN, CLUSTERDOWN: try again; `redis-cli -c` follows the first two
#   86  another error of the server; standard error has it
#
# Another server: REDISCLI='redis-cli -h db -p 7000'; a password: REDISCLI_AUTH.
# Sourced, it is a function: `turnstile run KEY -- f` can run a function f of yours.
# Needs bash 5, redis-cli 7 and timeout(1).

_turnstile_say() { printf 'turnstile: %s\n' "$*" >&2; }

# Sets $now, in milliseconds of a clock that nobody sets, where there is one.
_turnstile_now() {
  if read -r now _ 2>/dev/null </proc/uptime; then
    now=${now/./}0
  else
    now=${EPOCHREALTIME/[.,]/}
    now=${now%???}
  fi
}

# _turnstile_ask MS COMMAND...: one call of redis-cli, which gets no more than so long. Sets $reply. An error becomes
# one of the numbers above. While $asking, the answer is still to come from $answer, and the process is $!.
_turnstile_ask() {
  local status=0 limit cli
  IFS=' ' read -ra cli <<<"${REDISCLI:-redis-cli}"
  printf -v limit '%d.%03d' $(($1 / 1000)) $(($1 % 1000))
  shift
  # Not $(...): a signal must be able to interrupt a long wait, and it interrupts `read`.
  answer='' asking=1
  exec {answer}< <(exec timeout -s KILL "$limit" "${cli[@]}" --no-auth-warning -e "$@" 2>&1 </dev/null)
  read -r -d '' -u "$answer" reply || true
  exec {answer}<&-
  wait "$!" || status=$?
  asking=
  ((status == 0)) || _turnstile_kind "$reply"
}

# The status for an error. Replies begin with a word in capitals, what redis-cli itself has to say does not.
_turnstile_kind() {
  case $1 in
    FENCED\ *) return 80 ;;
    DEADLOCK\ *) return 81 ;;
    UNBLOCKED\ *) return 82 ;;
    WAITLIMIT\ *) return 83 ;;
    READONLY\ *) return 84 ;;
    MOVED\ * | ASK\ * | TRYAGAIN\ * | CLUSTERDOWN\ *) return 85 ;;
    [A-Z][A-Z]*) return 86 ;;
    *) return 69 ;;
  esac
}

# Reads options, see _turnstile_main.
_turnstile_options() {
  local name value
  while (($#)); do
    name=$1
    case $name in
      --shared) mode+=(SHARED); shift; continue ;;
      --session) session=1; shift; continue ;;
      --) shift; break ;;
    esac
    case $name in
      --limit | --also | --lease | --wait | --max | --grace) ;;
      *) _turnstile_say "unknown option $name"; return 64 ;;
    esac
    if (($# < 2)); then _turnstile_say "$name needs a value"; return 64; fi
    value=$2
    shift 2
    case $name in
      --limit) mode+=(LIMIT "$value") ;;
      --also) keys+=("$value") ;;
      --lease | --wait | --max | --grace)
        if [[ ! $value =~ ^[0-9]{1,9}(\.([0-9]{1,3}))?$ ]]; then
          _turnstile_say "$name $value: not a number of seconds"
          return 64
        fi
        value=${value%.*}$(printf '%-3s' "${BASH_REMATCH[2]}" | tr ' ' 0)
        printf -v "${name#--}" '%d' "$((10#$value))"
        ;;
    esac
  done
  also=()
  ((${#keys[@]} == 1)) || also=(ALSO $((${#keys[@]} - 1)) "${keys[@]:1}")
  command=("$@")
}

# Gets the lock for $owner: $token, and $until, the end of the lease on our own clock.
_turnstile_get() {
  local end left status tries=0
  _turnstile_now
  end=$((now + wait))
  while true; do
    _turnstile_now
    left=$((end > now ? end - now : 0))
    until=$((now + lease)) # counted from before the question: the server's lease cannot end earlier
    status=0
    _turnstile_ask $((left + 5000)) \
      LOCK.ACQUIRE "${keys[0]}" "$owner" PX "$lease" WAIT "$left" "${mode[@]}" "${also[@]}" || status=$?
    # A reply that was lost may have been a grant. The same owner asks again, and would get the same token.
    if ((status != 69 || (left == 0 && tries > 0))); then break; fi
    tries=$((tries + 1))
    sleep 0.1
  done
  if ((status == 0)) && [[ ! $reply ]]; then
    _turnstile_say "${keys[*]}: not acquired: held by others"
    return 75
  fi
  if ((status)); then
    _turnstile_say "${keys[*]}: ${reply:-no answer in time}"
    return "$status"
  fi
  token=$reply
}

# Renews all locks, or fails; 76 if the server says that they are lost.
_turnstile_renew() {
  local sent
  _turnstile_now
  sent=$now
  _turnstile_ask "$1" LOCK.TOUCH "${keys[0]}" "$owner" PX "$lease" "${also[@]}" || return
  ((reply == ${#keys[@]})) || return 76
  until=$((sent + lease))
}

# Releases all locks, or fails; 76 if they were lost.
_turnstile_give_up() {
  _turnstile_ask 5000 LOCK.RELEASE "${keys[0]}" "$owner" "${also[@]}" || return
  ((reply == ${#keys[@]})) || return 76
}

# For an owner that others know: ends its wait, and gives up what that call was granted. A release would also give up
# what the owner held before. The same request for 1 ms takes over the place in line and leaves it again.
_turnstile_take_back() {
  _turnstile_ask 5000 LOCK.ACQUIRE "${keys[0]}" "$owner" PX "$lease" WAIT 1 "${mode[@]}" "${also[@]}" || return
  [[ ! $reply ]] || _turnstile_give_up
}

# _turnstile_leave COMMAND: the last thing we do if we do not get the lock. COMMAND gives up what we may have. If a call
# is under way it is read to its end: COMMAND may have overtaken it, and then has to be repeated. With one command a call
# redis-cli cannot send a release behind it, so after 5 s without an answer the lease has to end what is granted.
_turnstile_leave() {
  local pid='' late='' part text='' end ended
  if [[ $asking && $answer ]]; then pid=$! late=$answer; fi
  _turnstile_now
  end=$((now + 5000))
  while true; do
    "$1"
    [[ $late ]] || return
    ended=0
    read -r -d '' -t 0.05 -u "$late" part || ended=$?
    text+=$part
    if ((ended <= 128)); then break; fi # else it is the time-out
    _turnstile_now
    if ((now >= end)); then kill "$pid"; break; fi
  done
  if [[ $text =~ ^[0-9] ]]; then _turnstile_give_up; fi # granted anyway
}

_turnstile_usage() { sed -n '5,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

# turnstile run|fence|acquire|touch|release ...: in a subshell, so that traps and settings stay ours.
turnstile() { (_turnstile_main "$@"); }

_turnstile_main() {
  # All functions here work on these.
  local keys=("${2-}") owner='' lease=30000 wait=0 mode=() also=() session='' max=0 grace=3000 command=()
  local token='' until=0 reply='' now=0 asking='' answer='' status=0
  set +e
  case ${1-}:$# in
    run:*) _turnstile_options "${@:3}" && _turnstile_run ;;
    fence:1 | fence:2 | fence:3) _turnstile_usage >&2; return 64 ;;
    fence:*) _turnstile_fence "${@:2}" ;;
    acquire:1 | acquire:2 | touch:1 | touch:2 | release:1 | release:2) _turnstile_usage >&2; return 64 ;;
    acquire:* | touch:* | release:*)
      owner=$3
      _turnstile_options "${@:4}" && "_turnstile_$1"
      ;;
    -h:* | --help:*) _turnstile_usage ;;
    *) _turnstile_usage >&2; return 64 ;;
  esac
}

_turnstile_acquire() {
  if [[ $session ]]; then _turnstile_say '--session works with run only, which keeps a connection open'; return 64; fi
  _turnstile_end_by_signals _turnstile_take_back
  _turnstile_get || {
    status=$?
    if ((status != 69)); then trap - EXIT; fi # the server has said that there is none
    return "$status"
  }
  trap - EXIT
  printf '%s\n' "$token"
}

_turnstile_touch() {
  _turnstile_renew 5000 || { status=$?; _turnstile_say "${keys[*]}: not renewed: ${reply:-no answer in time}"; }
  return "$status"
}

_turnstile_release() {
  _turnstile_give_up || { status=$?; _turnstile_say "${keys[*]}: not released: ${reply:-no answer in time}"; }
  return "$status"
}

_turnstile_fence() {
  local error cli
  IFS=' ' read -ra cli <<<"${REDISCLI:-redis-cli}"
  # The reply goes out as it is, an error comes here.
  cli=(timeout -s KILL 30 "${cli[@]}" --no-auth-warning -e LOCK.FENCE "$1" "$2" THEN)
  { error=$("${cli[@]}" "${@:3}" 2>&1 >&3) && return; } 3>&1
  _turnstile_say "$1: ${error:-no answer in time}"
  _turnstile_kind "$error"
}

# _turnstile_end_by_signals COMMAND: a signal ends the wait in line, and us. COMMAND is for _turnstile_leave.
_turnstile_end_by_signals() {
  # shellcheck disable=SC2064 # $1 is meant to be replaced now
  trap "trap '' INT TERM HUP; _turnstile_leave $1" EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  trap 'exit 129' HUP
}

_turnstile_run() {
  local alive watcher pid='' signal signalled='' lost='' released
  if ((${#command[@]} == 0)); then _turnstile_usage >&2; return 64; fi
  owner=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n') # so that nobody else can release or renew
  # Until the command runs, whatever goes wrong: no grant is left behind, not even one that we have not heard of.
  _turnstile_end_by_signals _turnstile_give_up
  _turnstile_get || {
    status=$?
    if ((status != 69)); then trap - EXIT; fi # the server has said that there is none
    return "$status"
  }
  # When in its wait was it granted? It is simpler to renew at once than to guess. So it is if the answer was slow.
  _turnstile_now
  if ((wait || now > until - lease * 2 / 3)) && ! _turnstile_renew 5000; then
    _turnstile_say "${keys[*]}: lost as soon as it was granted: ${reply:-no answer in time}"
    return 76
  fi
  set -m # the jobs that follow have a process group of their own
  if [[ $session ]]; then _turnstile_open_session || return; fi
  _turnstile_now
  if ((now >= until)); then
    _turnstile_say "${keys[*]}: the server answers too slowly for this lease"
    return 76
  fi

  exec {alive}> >(_turnstile_watch >&2)
  watcher=$!
  # shellcheck disable=SC2064 # $signal is meant to be replaced now
  for signal in INT TERM HUP; do trap "signalled=$signal; _turnstile_pass_on" "$signal"; done
  export TURNSTILE_KEY=${keys[0]} TURNSTILE_TOKEN=$token TURNSTILE_OWNER=$owner
  "${command[@]}" & # because of -m its standard input is ours, not /dev/null
  pid=$!
  set +m # and `wait` waits for the end, not also for a stop
  _turnstile_pass_on # one that came before there was a $pid
  echo "$pid" >&"$alive"
  while true; do
    signalled=''
    wait "$pid" 2>/dev/null
    status=$?
    [[ $signalled ]] || break # else it was the signal that ended the wait
  done

  trap '' INT TERM HUP PIPE
  { echo 'done' >&"$alive"; } 2>/dev/null # nobody reads it if the lock was lost
  wait "$watcher" || { lost=1; status=76; }
  trap - EXIT
  _turnstile_give_up
  released=$?
  if ((released == 69)); then # perhaps only the answer was lost: then there is nothing left to release, which is fine
    _turnstile_give_up
    released=$?
    if ((released == 76 && reply == 0)); then released=0; fi
  fi
  case $released in
    0) ;;
    76)
      [[ $lost ]] || _turnstile_say "${keys[*]}: the lock was lost before the command ended"
      ((status)) || status=76
      ;;
    *) _turnstile_say "${keys[*]}: not released, it ends with its lease: ${reply:-no answer in time}" ;;
  esac
  return "$status"
}

_turnstile_pass_on() {
  if [[ $pid && $signalled ]]; then kill -s "$signalled" -- "-$pid" 2>/dev/null; fi
}

# Runs beside the command, which it knows by the first line that it reads. Renews at every third of the lease; if the
# lock is lost, ends the command and answers 76. The pipe is also open in the command, so its end means that there is
# nobody left, even if turnstile.sh itself was killed.
_turnstile_watch() {
  local pid line why='' third=$((lease / 3)) pause stop left
  trap '' INT TERM HUP
  trap - EXIT
  read -r pid || return 0
  _turnstile_now
  stop=$((max ? now + max : now + 10 ** 12))
  pause=$((until - lease + third - now)) # the lease has begun a while ago
  while [[ ! $why ]]; do
    _turnstile_now
    if ((pause > stop - now)); then pause=$((stop - now)); fi
    if ((pause < 1)); then pause=1; fi
    read -r -t "$((pause / 1000)).$(printf %03d $((pause % 1000)))" line
    case $? in
      0) return 0 ;; # the command is done
      1) _turnstile_give_up; return 0 ;; # the end of the pipe
    esac
    _turnstile_now
    if ((now >= stop)); then
      why='the maximum is over'
      break
    fi
    left=$((until > now ? until - now : 1))
    _turnstile_renew $((left < third ? left : third))
    case $? in
      0) pause=$third ;;
      76) why='the server says so' ;;
      *) # not reached, or not the one to ask: there is time for another try until the lease is over
        _turnstile_now
        if ((now >= until)); then why="the lease is over, no renewal: ${reply:-no answer in time}"; fi
        pause=$((third / 4))
        if ((pause > until - now)); then pause=$((until - now)); fi
        ;;
    esac
  done
  _turnstile_say "${keys[*]}: lost, stopping the command: $why"
  kill -s TERM -- "-$pid" 2>/dev/null
  read -r -t "$((grace / 1000)).$(printf %03d $((grace % 1000)))" line
  kill -s KILL -- "-$pid" 2>/dev/null # also what it may have left behind
  return 76
}

# Binds the hold to a connection that is open until all of us have ended, or were killed.
_turnstile_open_session() {
  local word line=() cli
  IFS=' ' read -ra cli <<<"${REDISCLI:-redis-cli}"
  for word in LOCK.ACQUIRE "${keys[0]}" "$owner" PX "$lease" SESSION "${mode[@]}" "${also[@]}"; do
    word=${word//\\/\\\\}
    word=${word//\"/\\\"}
    line+=("\"${word//$'\n'/\\n}\"")
  done
  coproc SESSION { exec "${cli[@]}" --no-auth-warning 2>&1; }
  exec {session}>&"${SESSION[1]}" # this copy the command will have too
  _turnstile_now
  until=$((now + lease)) # asking again starts the lease anew
  echo "${line[*]}" >&"$session"
  read -r -t 5 -u "${SESSION[0]}" reply
  if [[ $reply != "$token" ]]; then
    _turnstile_say "${keys[*]}: no session: ${reply:-no answer in time}"
    return 69
  fi
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then _turnstile_main "$@"; fi # no subshell: signals come to this process
