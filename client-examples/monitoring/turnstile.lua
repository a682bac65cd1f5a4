#!lua flags=no-writes,allow-stale
-- SPDX-License-Identifier: BSD-3-Clause
-- Copyright (c) 2026 The Turnstile authors
-- Turnstile's figures for the option -script of prometheus-redis-exporter: each number in
-- INFO turnstile becomes redis_script_values{key="turnstile_..."}.
--
-- The flags let the server run this also while writes are paused for a failover and on a replica that
-- has lost its primary and may not serve stale data. And they keep it from ever writing.
--
-- Values stay the text that the server wrote: as Lua numbers they would come back cut to integers.
-- Without the module the section is empty, and so is the result.
local figures = {}
for name, value in redis.call('INFO', 'turnstile'):gmatch('(turnstile_[%w_]+):(%-?%d+%.?%d*)\r?\n') do
  figures[#figures + 1] = name
  figures[#figures + 1] = value
end

-- If the user may see them, the five locks that most requests wait for, with the tag of the latest
-- holder: redis_script_values{key="waiting for table:12, held by web-3 pid 42"}. What is not
-- printable ASCII is shown as ?.
if #figures > 0 and redis.acl_check_cmd('LOCK.TOP', 5) then
  local seen = {}
  for _, fields in ipairs(redis.call('LOCK.TOP', 5)) do
    local lock = {}
    for i = 1, #fields, 2 do lock[fields[i]] = fields[i + 1] end
    local holder = lock.tag and ', held by ' .. lock.tag or ''
    local label = ('waiting for ' .. lock.key:sub(1, 100) .. holder):gsub('[^ -~]', '?')
    if not seen[label] then
      seen[label] = true
      figures[#figures + 1] = label
      figures[#figures + 1] = tostring(lock.waiting)
    end
  end
end
return figures
