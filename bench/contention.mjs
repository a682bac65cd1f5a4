// Contenders for one lock in Node: redlock, redis-semaphore and Turnstile, over ioredis.
//
//   node bench/contention.mjs --port P --pid PID --way WAY [--clients N] [--think MS] [--seconds S]
//
// As bench/contention.cc, whose JSON it prints too, but all clients are in one process, each with a
// connection of its own, and they hold the lock for 0 or 1 ms, because Node's timers know no less.
//
//   plain            LOCK.ACQUIRE … WAIT and LOCK.RELEASE
//   turnstile        client-examples/node/turnstile.mjs, whose short waits block a connection too
//   redlock          with its own delays; its retries do not end
//   redis-semaphore  its Mutex, with its own delays; it has a minute to acquire
//
// Each holder checks that it is alone; a violation, and any error, ends it with status 1.

import { randomUUID } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { setImmediate as turn, setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';

import { turnstile } from '../client-examples/node/turnstile.mjs';

// The packages are those of the scenario about changing over from them.
const scenario = '../client-examples/scenarios/07-change-over/package.json';
const load = createRequire(new URL(scenario, import.meta.url));
const { Redis } = load('ioredis');
const { Mutex } = load('redis-semaphore');
const { default: Redlock } = load('redlock');

const { values } = parseArgs({
  options: {
    port: { type: 'string' },
    pid: { type: 'string' },
    way: { type: 'string' },
    clients: { type: 'string', default: '50' },
    think: { type: 'string', default: '10' },
    seconds: { type: 'string', default: '2' },
  },
});
const { way, pid } = values;
const [port, clients, think, seconds] = [
  values.port,
  values.clients,
  values.think,
  values.seconds,
].map(Number);

const LEASE = 10_000;
const WAIT = 60_000;

// Each way makes of a client a function that acquires the lock and gives one that releases it.
const ways = {
  plain(redis) {
    return async () => {
      const owner = randomUUID();
      const token = await redis.call('LOCK.ACQUIRE', 'lock', owner, 'PX', LEASE, 'WAIT', WAIT);
      if (!(token > 0)) throw new Error(`no token: ${token}`);
      return async () => {
        const released = await redis.call('LOCK.RELEASE', 'lock', owner);
        if (released !== 1) throw new Error('a release was refused');
      };
    };
  },

  turnstile(redis) {
    const lock = turnstile(redis).lock('lock', { lease: LEASE, wait: WAIT });
    return async () => {
      const hold = await lock.acquire();
      return () => hold.release();
    };
  },

  redlock(redis) {
    const redlock = new Redlock([redis]);
    return async () => {
      // Not in the settings of all: its release would be tried for ever too.
      const hold = await redlock.acquire(['lock'], LEASE, { retryCount: -1 });
      return () => hold.release();
    };
  },

  'redis-semaphore'(redis) {
    return async () => {
      const mutex = new Mutex(redis, 'lock', { lockTimeout: LEASE, acquireTimeout: WAIT });
      await mutex.acquire();
      return () => mutex.release();
    };
  },
};

// Every command that any connection sends, also of those that a library opens for itself. One that
// has to wait until its connection is ready passes here twice.
let requests = 0;
const seen = new WeakSet();
const { sendCommand } = Redis.prototype;
Redis.prototype.sendCommand = function (command, ...rest) {
  if (!seen.has(command)) requests++;
  seen.add(command);
  return sendCommand.call(this, command, ...rest);
};

const cpu = () => Number(readFileSync(`/proc/${pid}/schedstat`, 'utf8').split(' ')[0]) / 1000;
const upTo = (ms) => Math.floor(Math.random() * (ms + 1));
const pass = (ms) => (ms > 0 ? sleep(ms) : turn());
const now = () => performance.now();

let inside = 0;
let begin = Infinity;
let end = Infinity;
const waits = [];

async function compete(acquire) {
  let acquisitions = 0;
  while (now() < end) {
    await pass(upTo(think));
    const asked = now();
    const release = await acquire();
    const got = now();
    if (++inside !== 1) throw new Error('two clients hold the lock');
    await pass(upTo(1));
    inside--;
    await release();
    if (got < begin || asked > end) continue;
    // A wait that the end has cut counts with what it had lasted by then.
    waits.push(Math.min(got, end) - asked);
    if (got < end) acquisitions++;
  }
  return acquisitions;
}

if (!ways[way]) throw new Error(`no way is named '${way}'`);
const redis = await Promise.all(
  Array.from({ length: clients }, async () => {
    const client = new Redis({ port, lazyConnect: true });
    await client.connect();
    return client;
  }),
);
await redis[0].del('lock', 'mutex:lock'); // the keys of others stay
const contenders = redis.map((client) => compete(ways[way](client)));
const finished = Promise.all(contenders);

const measured = (async () => {
  await sleep(300); // until a line has formed
  const before = { cpu: cpu(), requests };
  begin = now();
  await sleep(1000 * seconds);
  end = now();
  return { cpu_us: cpu() - before.cpu, requests: requests - before.requests };
})();
await Promise.race([measured, finished]); // an error is seen at once
const acquisitions = await finished;
const { cpu_us, requests: sent } = await measured;
for (const client of redis) client.disconnect();

waits.sort((a, b) => a - b);
const quantile = (q) => waits[Math.floor(q * (waits.length - 1))];
console.log(
  JSON.stringify({
    seconds: (end - begin) / 1000,
    acquisitions: acquisitions.reduce((sum, count) => sum + count, 0),
    requests: sent,
    cpu_us,
    p50_ms: quantile(0.5),
    p99_ms: quantile(0.99),
    max_ms: waits.at(-1),
    most: Math.max(...acquisitions),
    least: Math.min(...acquisitions),
  }),
);
