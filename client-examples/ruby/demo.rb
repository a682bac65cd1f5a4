# frozen_string_literal: true

# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors

# Shows what turnstile.rb can do, step by step, against a server with the module: ruby demo.rb [host [port]]

require_relative "turnstile"

redis = Redis.new(host: ARGV.fetch(0, "127.0.0.1"), port: ARGV.fetch(1, "6379").to_i, timeout: 1)

puts "1. lock: the work gets the token, and a write that only the holder can make."
Turnstile.lock(redis, "demo:table:12", lease: 2, wait: 3) do |hold|
  puts "   token #{hold.token}"
  hold.run("SET", "demo:table:12:guest", "alice")
end

puts "2. acquire, touch, release. Meanwhile a second one is refused."
first = Turnstile.acquire(redis, "demo:table:12", lease: 2, tag: "alice")
first.touch
begin
  Turnstile.acquire(redis, "demo:table:12")
  abort "two at one table"
rescue Turnstile::NotAcquired => e
  puts "   #{e.message}"
end

puts "3. Another one waits in line and gets the lock at the moment of the release."
second = Thread.new { Turnstile.lock(redis, "demo:table:12", wait: 3, &:token) }
first.release
abort "the token did not rise" if second.value <= first.token

puts "4. Work that takes longer than its lease: it is renewed in the background."
Turnstile.lock(redis, "demo:report", lease: 0.3) do |hold|
  sleep 1
  hold.check!
end

puts "5. An operator removes the lock: the work is told, and a late write is refused."
late = Turnstile.acquire(redis, "demo:report", lease: 0.3)
redis.del("demo:report")
sleep 0.01 until late.lost?
begin
  late.run("SET", "demo:report:page", "stale")
  abort "a stale write went through"
rescue Turnstile::Fenced => e
  puts "   #{e.message}"
end

puts "6. Readers together; at most two at the printer; two tables at once; a session."
Turnstile.lock(redis, "demo:menu", shared: true) { Turnstile.lock(redis, "demo:menu", shared: true) { nil } }
Turnstile.lock(redis, "demo:printer", limit: 2) { Turnstile.lock(redis, "demo:printer", limit: 2) { nil } }
Turnstile.lock(redis, "demo:table:{a}13", also: ["demo:table:{a}14"]) { nil }
Turnstile.lock(redis, "demo:leader", session: true) { nil }

redis.del("demo:table:12:guest")
puts "done"
