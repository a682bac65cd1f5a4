<?php

// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors

/**
 * A small client for the locks of the Turnstile module, over phpredis. One file, to copy. PHP 8.1.
 *
 *     require 'Turnstile.php';
 *
 *     $locks = new Turnstile\Client($redis);
 *     $locks->using('table:12', function (Turnstile\Hold $hold) {
 *         $hold->run('SET', 'table:12:guest', 'alice');  // written only while this hold has the lock
 *     }, lease: 10, wait: 5);
 *
 * All times are in seconds. Everything goes over the connection it is given; a wait keeps it busy, up to `wait` and the
 * time-out of the client. PHP runs handlers of signals after that; a signal without a handler ends the process, and with
 * its connection its wait.
 *
 * After a \RedisException, ours or another one, it is best to connect anew: after a time-out phpredis 5.3 may come back in
 * database 0, or take a late answer for that of another command. This client looks after its own commands only.
 *
 * Nothing renews a hold behind the back of a PHP program: ask for a lease that covers the work, or call $hold->keep()
 * from within its loop. Hand $hold->token to every store outside that can refuse a token lower than one it has seen.
 */

declare(strict_types=1);

namespace Turnstile;

/** What the server refused. Trouble with the connection is phpredis' own \RedisException. */
class Error extends \RuntimeException
{
}

/** Others hold the lock, or the wait ran out. */
final class NotAcquired extends Error
{
}

/** The hold is lost: its lease ran out, or an operator removed it. */
final class Lost extends Error
{
}

/** The token does not hold the lock: nothing was written. */
final class Fenced extends Error
{
}

/** Waiting would close a cycle. */
final class Deadlock extends Error
{
}

/** The wait was ended from outside, or the server was demoted. */
final class Superseded extends Error
{
}

/** Too many wait on this server. */
final class WaitLimit extends Error
{
}

/** This server is a replica. */
final class NotPrimary extends Error
{
}

/** The cluster keeps this lock elsewhere. */
final class Moved extends Error
{
}

final class Client
{
    private Commands $commands;

    /** @var \WeakMap<Hold, true> the holds whose owner the caller chose */
    private \WeakMap $held;

    /** @param float $timeout how long the server may be slow or away when a lock is acquired, on top of the wait */
    public function __construct(\Redis $redis, float $timeout = 2.0)
    {
        $this->commands = new Commands($redis, $timeout);
        $this->held = new \WeakMap();
    }

    /**
     * Takes the lock, calls $work with the hold, and gives the lock up, also when the work throws. Lost if the hold was
     * not ours to the end; what the work throws comes first. Takes the options of acquire().
     */
    public function using(string $key, callable $work, mixed ...$options): mixed
    {
        $hold = $this->acquire($key, ...$options);
        try {
            $result = $work($hold);
        } catch (\Throwable $error) {
            try {
                $hold->release();
            } catch (\Throwable) {
                // would hide what the work threw
            }
            throw $error;
        }
        $hold->release();

        return $result;
    }

    /**
     * Takes the lock, or stands in line for it. The hold ends with the object, at the latest with the program.
     *
     * @param float       $lease   how long the lock outlives a holder that died or does not renew it
     * @param float       $wait    how long to stand in line; 0: one try
     * @param bool        $shared  together with other shared holders
     * @param int|null    $limit   up to so many holders
     * @param int|null    $weight  with $limit: for how many of them this one counts
     * @param string[]    $also    these locks too, all or none, under one token
     * @param float|null  $linger  after a crash the lock stays closed for so much longer
     * @param int|null    $maxLine do not join a line of so many
     * @param string|null $tag     what LOCK.INFO and error messages show of this hold
     * @param bool        $session the hold also ends with the connection; not for pconnect()
     * @param string|null $owner   the same one for all locks of a worker that takes one while it holds another: only so
     *                             can the server see a deadlock. Random, never shared. A new one for each hold if null.
     *
     * @throws NotAcquired|Error|\RedisException
     */
    public function acquire(
        string $key,
        float $lease = 10.0,
        float $wait = 0.0,
        bool $shared = false,
        ?int $limit = null,
        ?int $weight = null,
        array $also = [],
        ?float $linger = null,
        ?int $maxLine = null,
        ?string $tag = null,
        bool $session = false,
        ?string $owner = null,
    ): Hold {
        $options = array_merge(
            $shared ? ['SHARED'] : [],
            null === $limit ? [] : ['LIMIT', $limit],
            null === $weight ? [] : ['WEIGHT', $weight],
            null === $linger ? [] : ['LINGER', Commands::milliseconds($linger)],
            null === $tag ? [] : ['TAG', $tag],
            $session ? ['SESSION'] : [],
        );
        $keys = [$key, ...array_values($also)];
        $who = $owner ?? Commands::newOwner();
        $older = null;
        foreach ($this->held as $hold => $_) {
            if ($hold->owner === $owner && !$hold->isOver() && array_intersect($hold->keys, $keys)) {
                $older = $hold;
            }
        }
        $grant = $this->commands->acquire(
            $keys,
            $who,
            $lease,
            $wait,
            $options,
            $maxLine,
            null === $older ? null : [$older->keys[0], $older->token],
        );
        if (null === $grant) {
            throw new NotAcquired($this->commands->whoHolds($keys));
        }
        $hold = new Hold($this->commands, $keys, $who, $grant[0], $lease, $grant[1], $session);
        if (null !== $owner) {
            $this->held[$hold] = true;
        }

        return $hold;
    }
}

/** A lock that was acquired. */
final class Hold
{
    private float $since;
    private bool $released = false;
    private int $process;

    /** @internal */
    public function __construct(
        private Commands $commands,
        /** @var string[] */
        public readonly array $keys,
        public readonly string $owner,
        /** Larger than that of every earlier holder. */
        public readonly int $token,
        private float $lease,
        float $since,
        private bool $session,
    ) {
        $this->since = $since;
        $this->process = getmypid();
    }

    public function __destruct()
    {
        if ($this->released || getmypid() !== $this->process) { // what a fork has is a copy
            return;
        }
        try {
            $this->release();
        } catch (\Throwable) {
            // the lease ends it
        }
    }

    /** Seconds until the lease may be over, by our clock; 0 if it may be. */
    public function remaining(): float
    {
        return $this->released ? 0.0 : max(0.0, $this->since + $this->lease - Commands::now());
    }

    public function isOver(): bool
    {
        return 0.0 === $this->remaining();
    }

    /** Lost if the lease may be over. Asks nobody. */
    public function check(): void
    {
        if ($this->isOver()) {
            throw new Lost($this->released ? 'The lock was released.' : 'The lease ran out.');
        }
    }

    /** Starts the lease anew, with another length if one is given. Lost if the hold is gone. */
    public function touch(?float $lease = null): void
    {
        if ($this->released) {
            $this->check();
        }
        $lease ??= $this->lease;
        $sent = Commands::now();
        if (!$this->commands->touch($this->keys, $this->owner, $lease)) {
            $this->since = -INF;
            throw new Lost('The server no longer knows the hold.');
        }
        [$this->since, $this->lease] = [$sent, $lease];
    }

    /** touch() if a third of the lease is over. So cheap that a loop can call it in each round. */
    public function keep(): void
    {
        if ($this->remaining() < $this->lease * 2 / 3) {
            $this->touch();
        }
    }

    /**
     * Runs a command if and only if this hold still has the lock, in one step of the server; else Fenced. phpredis'
     * prefix and serializer do not reach the command. With `also` it looks at the first lock only.
     */
    public function run(string|int|float ...$command): mixed
    {
        return $this->commands->run($this->keys[0], $this->token, $command);
    }

    /** Gives the lock up. Lost if it was not ours to the end: then the work may have had company. Once more does nothing. */
    public function release(): void
    {
        if ($this->released) {
            return;
        }
        $ends = $this->since + $this->lease;
        $this->released = true;
        $all = \count($this->keys);
        try {
            $count = $this->commands->release($this->keys, $this->owner);
        } catch (\RedisException) {
            // Perhaps only the reply was lost. Then 0 means that the first try did it, if the lease lasts yet; but a
            // session may have ended together with the connection.
            $count = $this->commands->release($this->keys, $this->owner);
            if (0 === $count && !$this->session && Commands::now() < $ends) {
                $count = $all;
            }
        }
        if ($count !== $all) {
            throw new Lost('The lock was lost before its release.');
        }
    }
}

/**
 * The commands over one connection of phpredis.
 *
 * @internal for Client and TurnstileStore
 */
final class Commands
{
    private const ERRORS = [
        'FENCED' => Fenced::class,
        'DEADLOCK' => Deadlock::class,
        'UNBLOCKED' => Superseded::class,
        'WAITLIMIT' => WaitLimit::class,
        'READONLY' => NotPrimary::class,
        'MOVED' => Moved::class,
        'ASK' => Moved::class,
        'TRYAGAIN' => Moved::class,
        'CLUSTERDOWN' => Moved::class,
    ];
    private const PAUSE = 0.05; // before asking again after trouble with the connection

    /** @var \WeakMap<\Redis, int>|null those that must be closed before they are used again, and their database */
    private static ?\WeakMap $broken = null;

    public function __construct(private \Redis $redis, private float $timeout)
    {
        self::$broken ??= new \WeakMap();
    }

    public static function newOwner(): string
    {
        return bin2hex(random_bytes(16));
    }

    /** By a clock that nobody sets. */
    public static function now(): float
    {
        return hrtime(true) / 1e9;
    }

    public static function milliseconds(float $seconds): int
    {
        return max(1, (int) round($seconds * 1000));
    }

    /**
     * The token, and a moment by our clock before which the lease cannot have begun. Null: others hold the lock. When it
     * throws, it has given up what it may have got; but not the older hold of the same owner: [its key, its token].
     *
     * @param string[]                 $keys
     * @param array<string|int>        $options
     * @param array{string, int}|null  $older
     *
     * @return array{int, float}|null
     */
    public function acquire(
        array $keys,
        string $owner,
        float $lease,
        float $wait = 0.0,
        array $options = [],
        ?int $maxLine = null,
        ?array $older = null,
    ): ?array {
        $end = self::now() + $wait;
        $deadline = $end + $this->timeout;
        $unsure = false; // whether the server may have granted a hold that we do not know of
        try {
            // As long as the owner is the same, asking twice is safe: the server answers with the same token.
            while (true) {
                $sent = self::now();
                $left = (int) (($end - $sent) * 1000);
                $waiting = $left <= 0 ? [] : ['WAIT', $left, ...(null === $maxLine ? [] : ['MAXLINE', $maxLine])];
                $arguments = $this->arguments($keys, $owner, ['PX', self::milliseconds($lease), ...$waiting, ...$options]);
                try {
                    $token = $this->within($deadline - $sent, fn () => $this->send('LOCK.ACQUIRE', $arguments));
                } catch (\RedisException $error) {
                    $unsure = true;
                    $timedOut = self::now() > $deadline - 0.005; // with the connection still there
                    if ($timedOut && null === $older) {
                        $this->releaseBehind($keys, $owner);
                    }
                    if (!$this->hangUp() && $timedOut) {
                        $unsure = false; // no more than this can be done
                    }
                    if (self::now() + self::PAUSE >= $deadline) {
                        throw $error;
                    }
                    usleep((int) (self::PAUSE * 1e6));
                    continue;
                }
                if (!\is_int($token)) {
                    return null;
                }
                $unsure = true;
                if (self::now() - $sent < $lease / 3) {
                    return [$token, $sent];
                }
                if (self::now() >= $deadline) {
                    throw new \RedisException('The lock was granted, but the server is too slow for its lease.');
                }
                // We stood in line, so the lease began somewhere in the time that the call took. Asking once more,
                // without waiting, starts it anew.
                $end = $sent;
            }
        } catch (\Throwable $error) {
            if ($unsure) {
                $this->leave($keys, $owner, $older);
            }
            throw $error;
        }
    }

    /** Whether all leases were set. */
    public function touch(array $keys, string $owner, float $lease): bool
    {
        $count = $this->call('LOCK.TOUCH', $this->arguments($keys, $owner, ['PX', self::milliseconds($lease)]));

        return $count === \count($keys);
    }

    public function release(array $keys, string $owner): int
    {
        return $this->call('LOCK.RELEASE', $this->arguments($keys, $owner));
    }

    public function holds(string $key, int $token): bool
    {
        return 1 === $this->call('LOCK.FENCE', [$this->redis->_prefix($key), $token]);
    }

    public function run(string $key, int $token, array $command): mixed
    {
        return $this->call('LOCK.FENCE', [$this->redis->_prefix($key), $token, 'THEN', ...$command]);
    }

    /** A text for people, by the tags: an owner is a proof, so it is not shown. */
    public function whoHolds(array $keys): string
    {
        foreach ($keys as $key) {
            try {
                $info = $this->map($this->call('LOCK.INFO', [$this->redis->_prefix($key)]));
            } catch (\Throwable) {
                break; // the error that is to be explained counts, not this one
            }
            if ($info['holding'] ?? 0) {
                $first = $this->map($info['holders'][0] ?? []);

                return sprintf(
                    'Lock %s is held by %s for another %d ms; %d wait.',
                    $key,
                    ($first['tag'] ?? false) ?: 'another owner',
                    $first['lease-left-ms'] ?? 0,
                    $info['waiting'] ?? 0,
                );
            }
        }

        return sprintf('Others held lock %s.', $keys[0]);
    }

    private function map(mixed $flat): array
    {
        $map = [];
        foreach (array_chunk(\is_array($flat) ? $flat : [], 2) as [$name, $value]) {
            $map[$name] = $value;
        }

        return $map;
    }

    /** Gives up what the server may have granted, or may yet grant. If this fails too, the lease ends it. */
    private function leave(array $keys, string $owner, ?array $older): void
    {
        try {
            $this->within($this->timeout, function () use ($keys, $owner, $older): void {
                // An upgrade: a release would give up the older hold too. Its wait has ended with the connection.
                if (null === $older || !$this->holds(...$older)) {
                    $this->release($keys, $owner);
                }
            });
        } catch (\Throwable) {
        }
    }

    private function arguments(array $keys, string $owner, array $options = []): array
    {
        $keys = array_map(fn (string $key) => $this->redis->_prefix($key), $keys);
        $also = \count($keys) > 1 ? ['ALSO', \count($keys) - 1, ...\array_slice($keys, 1)] : [];

        return [$keys[0], $owner, ...$options, ...$also];
    }

    /** Calls with this read time-out, and sets the caller's back. */
    private function within(float $seconds, callable $call): mixed
    {
        $before = (float) $this->redis->getOption(\Redis::OPT_READ_TIMEOUT);
        $this->redis->setOption(\Redis::OPT_READ_TIMEOUT, max($seconds, 0.001));
        try {
            return $call();
        } finally {
            // 0 stands for PHP's default in a new connection, but for no time at all in one that is open.
            $this->redis->setOption(\Redis::OPT_READ_TIMEOUT, $before ?: (float) \ini_get('default_socket_timeout'));
        }
    }

    private function call(string $command, array $arguments): mixed
    {
        try {
            return $this->send($command, $arguments);
        } catch (\RedisException $error) {
            $this->hangUp();
            throw $error;
        }
    }

    /** After its \RedisException the connection must be hung up. */
    private function send(string $command, array $arguments): mixed
    {
        if (\Redis::ATOMIC !== $this->redis->getMode()) {
            throw new Error('The connection is within multi() or pipeline(): locks need the answer at once.');
        }
        $this->redis->clearLastError();
        try {
            $this->mend();
            $reply = $this->redis->rawCommand($command, ...$arguments);
            $refused = $this->redis->getLastError();
        } catch (\RedisException $error) {
            // phpredis throws for some of the server's errors and returns false for the others. That it could not connect
            // it calls an error too; those of the server begin with a word in capitals.
            $refused = $this->redis->getLastError();
            if (null === $refused || !preg_match('/^(?!SSL)[A-Z]+( |$)/', $refused)) {
                throw $error;
            }
        }
        $this->redis->clearLastError();
        if (null !== $refused) {
            $class = self::ERRORS[strtok($refused, ' ')] ?? Error::class;
            throw new $class($refused);
        }

        return $reply;
    }

    /** Behind a request that nobody waits for any more: whenever the server reads that one, it reads this next. */
    private function releaseBehind(array $keys, string $owner): void
    {
        try {
            $this->within(0.001, fn () => $this->redis->rawCommand('LOCK.RELEASE', ...$this->arguments($keys, $owner)));
        } catch (\RedisException) {
            // nobody reads the answer
        }
    }

    /**
     * After a time-out phpredis (5.3) keeps the connection, and would take the late answer for that of the next command. A
     * new one it opens by itself at the next call of any method, with the password but without the database. If there is
     * no answer to the password, it is out of step and cannot even be closed: so with a password nothing more is done
     * until the next command. Returns whether there is none.
     */
    private function hangUp(): bool
    {
        $password = (bool) $this->redis->getAuth();
        self::$broken[$this->redis] ??= (int) $this->redis->getDbNum();
        try {
            $this->redis->close();
            if (!$password) {
                $this->within($this->timeout, fn () => $this->mend());
            }
        } catch (\RedisException) {
            // before the next command, then
        }

        return !$password;
    }

    private function mend(): void
    {
        $database = self::$broken[$this->redis] ?? null;
        if (null === $database) {
            return;
        }
        $this->redis->close();
        if ($database > 0 && !$this->redis->select($database)) {
            throw new \RedisException('The database cannot be selected again.');
        }
        unset(self::$broken[$this->redis]);
    }
}
