// A service that needs the same locks as all the others, and takes them in its own way:
//
//     node service.mjs redlock|redis-semaphore|turnstile|nothing URL FOLDER LOCK...
//
// It works until it gets a SIGTERM. In FOLDER each lock has a room with place for one; whoever
// finds somebody else in it says VIOLATION and ends with exit code 1.

import { randomUUID } from 'node:crypto';
import { closeSync, openSync, unlinkSync, appendFileSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';

import { Redis } from 'ioredis';
import { Mutex } from 'redis-semaphore';
import Redlock from 'redlock';

const LEASE = 5000;
const bare = (lock) => lock.replace(/^mutex:/, '');

// Each way makes of a client a function that runs `work` while it holds the lock.
const ways = {
  redlock(redis) {
    const redlock = new Redlock([redis], { retryCount: 0, retryDelay: 6, retryJitter: 4 });
    return async (lock, work) => {
      // Tries for ever here, not in the settings above: its release would do so too.
      const hold = await redlock.acquire([lock], LEASE, { retryCount: -1 });
      try {
        await work();
      } finally {
        await hold.release();
      }
    };
  },

  'redis-semaphore'(redis) {
    return async (lock, work) => {
      // It puts "mutex:" before the name it is given. The others must say the full name.
      const mutex = new Mutex(redis, bare(lock), { lockTimeout: LEASE, retryInterval: 5 });
      await mutex.acquire();
      try {
        await work();
      } finally {
        await mutex.release();
      }
    };
  },

  turnstile(redis) {
    return async (lock, work) => {
      const owner = randomUUID();
      const token = await redis.call('LOCK.ACQUIRE', lock, owner, 'PX', LEASE, 'WAIT', 5000);
      if (token === null) return;
      try {
        await work();
      } finally {
        await redis.call('LOCK.RELEASE', lock, owner);
      }
    };
  },

  nothing() {
    return async (_lock, work) => work();
  },
};

const [way, url, folder, ...locks] = process.argv.slice(2);
const redis = new Redis(url);
const holding = ways[way](redis);

async function enter(lock) {
  const room = `${folder}/${bare(lock)}`;
  try {
    closeSync(openSync(room, 'wx'));
  } catch (error) {
    if (error.code !== 'EEXIST') throw error;
    console.error(`VIOLATION: ${way} is in the room of ${lock}, and somebody else is there`);
    process.exit(1);
  }
  appendFileSync(`${folder}/journal`, `${way} (Node)\t${lock}\n`);
  await sleep(3);
  unlinkSync(room);
}

let stopping = false;
process.once('SIGTERM', () => (stopping = true));
while (!stopping) {
  const lock = locks[Math.floor(Math.random() * locks.length)];
  await holding(lock, () => enter(lock));
  await sleep(10 * Math.random());
}
await redis.quit();
