// One of several processes that compete for a lock, in Node, over ioredis. As clients_worker.py.

import { randomUUID } from 'node:crypto';
import { closeSync, openSync, unlinkSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join } from 'node:path';
import { createInterface } from 'node:readline/promises';
import { setTimeout as sleep } from 'node:timers/promises';

import DropIn from '../client-examples/node/redlock.mjs';
import { turnstile } from '../client-examples/node/turnstile.mjs';

// The packages are those of the scenario about changing over from them.
const scenario = '../client-examples/scenarios/07-change-over/package.json';
const load = createRequire(new URL(scenario, import.meta.url));
const { Redis } = load('ioredis');
const { Mutex } = load('redis-semaphore');
const { default: Redlock } = load('redlock');

const LEASE = 10_000;
const WAIT = 60_000;

const withRedlock = (Kind) => (redis) => {
  const redlock = new Kind([redis], { automaticExtensionThreshold: 100 });
  return async () => {
    const hold = await redlock.acquire(['lock'], LEASE, { retryCount: -1 });
    return () => hold.release();
  };
};

const ways = {
  bare: (redis) => async () => {
    const owner = randomUUID();
    const token = await redis.call('LOCK.ACQUIRE', 'lock', owner, 'PX', LEASE, 'WAIT', WAIT);
    if (!(token > 0)) throw new Error(`no token: ${token}`);
    return () => redis.call('LOCK.RELEASE', 'lock', owner);
  },
  turnstile: (redis) => {
    const lock = turnstile(redis).lock('lock', { lease: LEASE, wait: WAIT });
    return async () => {
      const hold = await lock.acquire();
      return () => hold.release();
    };
  },
  'drop-in': withRedlock(DropIn),
  redlock: withRedlock(Redlock),
  'redis-semaphore': (redis) => async () => {
    const mutex = new Mutex(redis, 'lock', { lockTimeout: LEASE, acquireTimeout: WAIT });
    await mutex.acquire();
    return () => mutex.release();
  },
};

const [port, way, think, seconds, folder] = process.argv.slice(2);
const redis = new Redis({ port: Number(port) });
const acquire = ways[way](redis);
const inside = join(folder, 'inside');
await (await acquire())(); // what is loaded and connected at first use
const input = createInterface({ input: process.stdin });
console.log('ready');
await input[Symbol.asyncIterator]().next();
const waits = [];
const cpu = process.cpuUsage();
const end = performance.now() + 1000 * Number(seconds);
while (performance.now() < end) {
  const asked = performance.now();
  const release = await acquire();
  waits.push((performance.now() - asked) / 1000);
  closeSync(openSync(inside, 'wx')); // fails if two are inside
  unlinkSync(inside);
  await release();
  if (Number(think)) await sleep(Number(think));
}
const { user, system } = process.cpuUsage(cpu);
process.stdout.write(JSON.stringify({ waits, cpu: (user + system) / 1e6 }), () => process.exit());
