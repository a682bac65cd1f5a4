#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
#
# Two guests want table 12. Shows every command once and stops at the first surprising reply.
#
#   sh client-examples/redis-cli/table-12.sh [redis-cli options]
set -eu
table=table:12:$$                           # a separate table for each run
alice=$(cat /proc/sys/kernel/random/uuid) # an owner is a unique id of one request for the lock
bob=$(cat /proc/sys/kernel/random/uuid)

# ask EXPECTED COMMAND...: sends the command and checks its reply; "token" stands for any token.
ask() {
  expected=$1
  shift
  reply=$(redis-cli $options "$@")
  printf '> %s\n%s\n' "$*" "${reply:-(nil)}"
  case $expected:$reply in
    token:[1-9][0-9]*) ;;
    "$reply":"$reply") ;;
    *)
      echo "expected ${expected:-(nil)}" >&2
      exit 1
      ;;
  esac
}
options=$*

ask token LOCK.ACQUIRE "$table" "$alice" PX 60000
token=$reply
ask '' LOCK.ACQUIRE "$table" "$bob" PX 60000         # busy: Bob hears so at once
ask '' LOCK.ACQUIRE "$table" "$bob" PX 60000 WAIT 50 # he waits in line for a moment, in vain
ask "$token" LOCK.ACQUIRE "$table" "$alice" PX 60000 # asked again, the same token: a retry is safe
ask 1 LOCK.TOUCH "$table" "$alice" EX 120            # a long dinner
ask 0 LOCK.RELEASE "$table" "$bob"                   # another owner cannot release
ask 1 LOCK.FENCE "$table" "$token"                   # Alice's token is the current one
ask 1 LOCK.RELEASE "$table" "$alice"
ask token LOCK.ACQUIRE "$table" "$bob" PX 60000
[ "$reply" -gt "$token" ] || { echo "Bob's token is not above Alice's" >&2; exit 1; }
ask 0 LOCK.FENCE "$table" "$token" # Alice's late order is recognised as late
ask 1 LOCK.RELEASE "$table" "$bob"
echo 'Everybody got the right answer.'
