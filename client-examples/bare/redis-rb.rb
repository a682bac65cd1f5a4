# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
require 'redis'
require 'securerandom'

url = ENV.fetch('REDIS_URL', 'redis://127.0.0.1:6379')
# Seconds: WAIT and a margin. The client's own retry would wait as long again.
redis = Redis.new(url: url, read_timeout: 7, reconnect_attempts: 0)
owner = SecureRandom.uuid # a new one for each acquisition
begin
  token = redis.call('LOCK.ACQUIRE', 'table:12', owner, 'PX', 10_000, 'WAIT', 5000)
rescue Redis::TimeoutError # the lock may have been granted anyway
  redis.call('LOCK.RELEASE', 'table:12', owner)
  raise
end
abort 'not acquired' if token.nil?
puts "token #{token}"
begin # the work; this write happens only while the token holds the lock
  write = ['SET', '{table:12}:guest', 'alice', 'EX', 60]
  redis.call('LOCK.FENCE', 'table:12', token, 'THEN', *write)
ensure
  puts "released #{redis.call('LOCK.RELEASE', 'table:12', owner)}"
end
