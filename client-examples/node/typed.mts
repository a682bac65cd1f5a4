// How turnstile.mjs looks from TypeScript. `npm run check` compiles it; the tests do not run it.

import { Redis } from 'ioredis';
import { createClient } from 'redis';
import { Deadlock, type Hold, Lost, NotAcquired, turnstile } from './turnstile.mjs';

const client = await createClient({ url: 'redis://127.0.0.1:6379' }).connect();
const locks = turnstile(client);
turnstile(new Redis('redis://127.0.0.1:6379'));

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

// @ts-expect-error: the lease is a number
locks.lock('table:12', { lease: '10s' });
// @ts-expect-error: not a client
turnstile({});
