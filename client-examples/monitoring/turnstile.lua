#!lua flags=no-writes,allow-stale
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
return figures
