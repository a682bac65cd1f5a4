<?php

// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors

// Shows what Turnstile.php can do, step by step, against a server with the module: php demo.php [host [port]]

declare(strict_types=1);

use Turnstile\Client;
use Turnstile\Fenced;
use Turnstile\Hold;
use Turnstile\NotAcquired;

require __DIR__.'/Turnstile.php';

function connect(array $argv): \Redis
{
    $redis = new \Redis();
    $redis->connect($argv[1] ?? '127.0.0.1', (int) ($argv[2] ?? 6379), 1.0, null, 0, 1.0);

    return $redis;
}

$locks = new Client(connect($argv));
$others = new Client(connect($argv));

echo "1. using: the work gets the token, and a write that only the holder can make.\n";
$locks->using('demo:table:12', function (Hold $hold): void {
    echo "   token $hold->token\n";
    $hold->run('SET', 'demo:table:12:guest', 'alice');
}, lease: 2, wait: 3);

echo "2. acquire, touch, release. Meanwhile a second one is refused.\n";
$hold = $locks->acquire('demo:table:12', lease: 2, tag: 'alice');
$hold->touch();
try {
    $others->acquire('demo:table:12');
    exit("two at one table\n");
} catch (NotAcquired $error) {
    echo "   {$error->getMessage()}\n";
}
$hold->release();

echo "3. Another one waits in line and gets the lock when its lease runs out.\n";
$first = $locks->acquire('demo:table:12', lease: 0.2);
$second = $others->acquire('demo:table:12', wait: 3);
if ($second->token <= $first->token) {
    exit("the token did not rise\n");
}

echo "4. A late write is refused, whatever the writer believes.\n";
try {
    $first->run('SET', 'demo:table:12:guest', 'stale');
    exit("a stale write went through\n");
} catch (Fenced $error) {
    echo "   {$error->getMessage()}\n";
}
$second->run('DEL', 'demo:table:12:guest');
$second->release();

echo "5. Readers together; at most two at the printer; two tables at once.\n";
$readers = [$locks->acquire('demo:menu', shared: true), $others->acquire('demo:menu', shared: true)];
$prints = [$locks->acquire('demo:printer', limit: 2), $others->acquire('demo:printer', limit: 2)];
$locks->using('demo:table:{a}13', fn () => null, also: ['demo:table:{a}14']);
unset($readers, $prints); // which releases them

echo "done\n";
