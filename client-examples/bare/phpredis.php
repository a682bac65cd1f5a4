<?php
// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors
function connect(): Redis
{
    $url = parse_url(getenv('REDIS_URL') ?: 'redis://127.0.0.1:6379');
    $redis = new Redis();
    $redis->connect($url['host'], $url['port'] ?? 6379, 2.0, null, 0, 7.0); // reads: WAIT and a margin
    return $redis;
}

$redis = connect();
$owner = bin2hex(random_bytes(16)); // a new one for each acquisition
try {
    $token = $redis->rawCommand('LOCK.ACQUIRE', 'table:12', $owner, 'PX', 10000, 'WAIT', 5000);
} catch (RedisException $error) { // the lock may have been granted anyway
    connect()->rawCommand('LOCK.RELEASE', 'table:12', $owner);
    throw $error;
}
if ($token === false) { // null, or an error that begins with ERR
    fwrite(STDERR, $redis->getLastError() ?? "not acquired\n");
    exit(1);
}
echo "token $token\n";
try { // the work; this write happens only while the token holds the lock
    $write = ['SET', '{table:12}:guest', 'alice', 'EX', 60];
    if ($redis->rawCommand('LOCK.FENCE', 'table:12', $token, 'THEN', ...$write) === false) {
        throw new RuntimeException($redis->getLastError());
    }
} finally {
    echo 'released ', $redis->rawCommand('LOCK.RELEASE', 'table:12', $owner), "\n";
}
