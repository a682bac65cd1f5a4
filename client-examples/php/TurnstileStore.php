<?php

// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors

/**
 * A store for symfony/lock (5.4 and later) over phpredis, on a server with the Turnstile module. Copy it together with
 * Turnstile.php.
 *
 *     $store = new Turnstile\TurnstileStore($redis);
 *     $factory = new LockFactory($store);
 *     $lock = $factory->createLock('table:12', ttl: 30);
 *     if ($lock->acquire(blocking: true)) {  // stands in line in the server: no polling
 *         ...
 *     }
 *
 * The fencing token belongs to the key, so make the lock from one:
 *
 *     $key = new Key('table:12');
 *     $lock = $factory->createLockFromKey($key, ttl: 30);
 *     $lock->acquire(true);
 *     $store->token($key);                                        // for stores outside
 *     $store->run($key, 'SET', 'table:12:guest', 'alice');        // written only while the lock is held
 *
 * A key can be serialized and handed to another process, which then holds, refreshes and releases the lock.
 *
 * Symfony's RedisStore keeps its locks in sorted sets. On the same name each store gets an error for what the other one
 * has, so nobody comes in twice, but they cannot share a lock: change all users of a name over together.
 */

declare(strict_types=1);

namespace Turnstile;

use Symfony\Component\Lock\BlockingSharedLockStoreInterface;
use Symfony\Component\Lock\BlockingStoreInterface;
use Symfony\Component\Lock\Exception\InvalidTtlException;
use Symfony\Component\Lock\Exception\LockConflictedException;
use Symfony\Component\Lock\Exception\LockReleasingException;
use Symfony\Component\Lock\Exception\LockStorageException;
use Symfony\Component\Lock\Key;
use Symfony\Component\Lock\Store\ExpiringStoreTrait;

require_once __DIR__.'/Turnstile.php';

final class TurnstileStore implements BlockingStoreInterface, BlockingSharedLockStoreInterface
{
    use ExpiringStoreTrait;

    private const HOUR = 3600.0;

    private Commands $commands;

    /**
     * @param float      $initialTtl the lease of a lock until its ttl is set, in seconds
     * @param float|null $maxWait    how long a blocking call stands in line before LockConflictedException, in seconds;
     *                               null: until it has the lock (each hour it goes to the end of the line)
     * @param float      $timeout    how long the server may be slow or away when a lock is acquired, on top of the wait
     */
    public function __construct(
        \Redis $redis,
        private float $initialTtl = 300.0,
        private ?float $maxWait = null,
        float $timeout = 2.0,
    ) {
        if ($initialTtl <= 0) {
            throw new InvalidTtlException(sprintf('"%s()" expects a strictly positive TTL. Got %s.', __METHOD__, $initialTtl));
        }
        $this->commands = new Commands($redis, $timeout);
    }

    public function save(Key $key): void
    {
        $this->acquire($key, 0.0, []);
    }

    public function saveRead(Key $key): void
    {
        $this->acquire($key, 0.0, ['SHARED']);
    }

    public function waitAndSave(Key $key): void
    {
        $this->wait($key, []);
    }

    public function waitAndSaveRead(Key $key): void
    {
        $this->wait($key, ['SHARED']);
    }

    public function putOffExpiration(Key $key, float $ttl): void
    {
        $key->reduceLifetime($ttl);
        $state = $this->state($key);
        if (null === $state || !$this->call(fn () => $this->commands->touch([(string) $key], $state[0], $ttl))) {
            throw new LockConflictedException();
        }
        $this->checkNotExpired($key);
    }

    public function delete(Key $key): void
    {
        if (null === $state = $this->state($key)) {
            return;
        }
        try {
            $this->commands->release([(string) $key], $state[0]);
        } catch (Error|\RedisException $error) {
            throw new LockReleasingException($error->getMessage(), 0, $error);
        }
        $key->removeState(self::class); // the next acquisition gets an owner of its own
    }

    public function exists(Key $key): bool
    {
        $state = $this->state($key);

        return null !== $state && $this->call(fn () => $this->commands->holds((string) $key, $state[1]));
    }

    /** The fencing token of the hold that the key has, or had until its lease ran out; null: it was never acquired. */
    public function token(Key $key): ?int
    {
        return $this->state($key)[1] ?? null;
    }

    /**
     * Runs a command if and only if the key still holds the lock, in one step of the server. phpredis' prefix and
     * serializer do not reach the command.
     *
     * @throws LockConflictedException nothing was written
     */
    public function run(Key $key, string|int|float ...$command): mixed
    {
        if (null === $state = $this->state($key)) {
            throw new LockConflictedException();
        }
        try {
            return $this->call(fn () => $this->commands->run((string) $key, $state[1], $command));
        } catch (LockStorageException $error) {
            throw $error->getPrevious() instanceof Fenced
                ? new LockConflictedException($error->getMessage(), 0, $error)
                : $error;
        }
    }

    /** @return array{string, int}|null owner and token */
    private function state(Key $key): ?array
    {
        return $key->hasState(self::class) ? $key->getState(self::class) : null;
    }

    private function wait(Key $key, array $mode): void
    {
        while (true) {
            try {
                $this->acquire($key, $this->maxWait ?? self::HOUR, $mode);

                return;
            } catch (LockConflictedException $error) {
                if (null !== $this->maxWait) {
                    throw $error;
                }
            }
        }
    }

    private function acquire(Key $key, float $wait, array $mode): void
    {
        $name = (string) $key;
        $state = $this->state($key);
        $owner = $state[0] ?? Commands::newOwner();
        $older = null === $state ? null : [$name, $state[1]];
        $grant = $this->call(
            fn () => $this->commands->acquire([$name], $owner, $this->initialTtl, $wait, $mode, null, $older),
        );
        if (null === $grant) {
            throw new LockConflictedException();
        }
        [$token, $since] = $grant;
        $key->setState(self::class, [$owner, $token]);
        $key->reduceLifetime($this->initialTtl - (Commands::now() - $since));
        $this->checkNotExpired($key);
    }

    private function call(callable $command): mixed
    {
        try {
            return $command();
        } catch (Error|\RedisException $error) {
            throw new LockStorageException($error->getMessage(), 0, $error);
        }
    }
}
