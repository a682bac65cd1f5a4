// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors
//
// How turnstile.mjs looks from TypeScript. `npm run check` compiles it; the tests do not run it.

import { Cluster, Redis } from 'ioredis';
import { createClient, createCluster } from 'redis';
import { Deadlock, type Hold, Lost, NotAcquired, serverOf, turnstile } from './turnstile.mjs';

const client = await createClient({ url: 'redis://127.0.0.1:6379' }).connect();
const locks = turnstile(client);
turnstile(new Redis('redis://127.0.0.1:6379'));
turnstile(new Cluster([{ host: '127.0.0.1', port: 6379 }]));
turnstile(createCluster({ rootNodes: [{ url: 'redis://127.0.0.1:6379' }] }));

export async function seat(guest: string): Promise<number> {
  const lock = locks.lock('table:12', { lease: 10_000, wait: 5_000, maxHold: 60_000, also: ['table:13'] });
  return lock.using(async (hold: Hold) => {
    hold.signal.throwIfAborted();
    const reply = await hold.run<string>('SET', 'table:12:guest', guest, 'PX', 60_000);
    return reply.length + hold.token;
  });
}

export async function tidy(): Promise<boolean> {
  const free: Hold | null = await locks.lock('room:4', { limit: 3, session: true }).tryAcquire();
  await free?.release();
  try {
    await using hold = await locks.lock('room:4', { shared: true }).acquire({ signal: AbortSignal.timeout(500) });
    await hold.touch(1_000);
    return true;
  } catch (error) {
    if (error instanceof NotAcquired || error instanceof Lost || error instanceof Deadlock) return false;
    throw error;
  }
}

export async function resume(owner: string, token: number): Promise<boolean> {
  const hold = await locks.lock('room:4', { tag: 'worker 7', limit: 10, weight: 2, maxLine: 50, watch: true }).adopt(owner, token);
  return (await hold.owned()) && (await locks.lock('room:4').locked());
}

export async function without(): Promise<number | null> {
  const any = turnstile(client, { fallback: true, without: ['token', 'line'] });
  await using hold = await any.lock('room:4', { wait: 1_000 }).acquire();
  return hold.token;
}

export async function bare(): Promise<number> {
  const grant = await serverOf(client).acquire(['room:4'], 'an owner', { lease: 1_000, wait: 500, options: { floor: 7 } });
  const { count } = await serverOf(client).touch(['room:4'], 'an owner', 1_000);
  await serverOf(client).abandon(['room:4'], 'an owner', { timeout: 100 });
  return (grant?.token ?? 0) + count;
}

// @ts-expect-error: with plain locks there may be no token
turnstile(client, { fallback: true }).lock('a').acquire().then((hold) => hold.token.toFixed());
// @ts-expect-error: the lease is a number
locks.lock('table:12', { lease: '10s' });
// @ts-expect-error: not a client
turnstile({});
