#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
url=${REDIS_URL:-redis://127.0.0.1:6379}
owner=$(cat /proc/sys/kernel/random/uuid) # a new one for each acquisition
# -e: an error is an exit status. 7 s: WAIT and a margin.
cli() { timeout 7 redis-cli -e -u "$url" "$@"; }

if ! token=$(cli LOCK.ACQUIRE table:12 "$owner" PX 10000 WAIT 5000); then
  cli LOCK.RELEASE table:12 "$owner" # the lock may have been granted anyway
  exit 1
fi
if [ -z "$token" ]; then
  echo 'not acquired' >&2
  exit 1
fi
echo "token $token"
# The work. This write happens only while the token holds the lock.
cli LOCK.FENCE table:12 "$token" THEN SET '{table:12}:guest' alice EX 60
status=$?
echo "released $(cli LOCK.RELEASE table:12 "$owner")"
exit $status
