// What redlock and redis-semaphore see of a Turnstile lock, and Turnstile of theirs.
// docs/migration.md says the same in words. Prints a line for each, and throws at a surprise.
//
//     node libraries.mjs URL PREFIX

import assert from 'node:assert/strict';
import { once } from 'node:events';

import { Redis } from 'ioredis';
import { Mutex, TimeoutError } from 'redis-semaphore';
import Redlock, { ExecutionError, ResourceLockedError } from 'redlock';

const [url, prefix] = process.argv.slice(2);
const redis = new Redis(url);
const redlock = new Redlock([redis], { retryCount: 0 });
const options = { lockTimeout: 5000, acquireTimeout: 30, retryInterval: 5, refreshInterval: 0 };

const say = (library, what) => console.log(`  ${library.padEnd(16)} ${what}`);
const turnstile = (command, ...args) => redis.call(`LOCK.${command}`, ...args);
const wrongType = (error) => error.message.startsWith('WRONGTYPE');

async function info(key) {
  const reply = await turnstile('INFO', key);
  if (reply === null) return null;
  const holder = reply[reply.indexOf('holders') + 1][0];
  const field = (name) => holder[holder.indexOf(name) + 1];
  return { mode: reply[1], owner: field('owner'), token: field('token') };
}

// Why redlock failed: the errors of its servers, here one, at the last try.
async function votes(error) {
  assert(error instanceof ExecutionError);
  const { votesAgainst } = await error.attempts.at(-1);
  return [...votesAgainst.values()];
}

// The old holder's key is gone, as after its TTL, and Turnstile took the lock.
async function lostTo(key) {
  const take = redis.multi().del(key).call('LOCK.ACQUIRE', key, 'alice', 'PX', 60000);
  const token = (await take.exec())[1][1];
  const expected = { mode: 'exclusive', owner: 'alice', token };
  return async () => assert.deepEqual(await info(key), expected);
}

async function usesRedlock() {
  const key = `${prefix}redlock`;
  await turnstile('ACQUIRE', key, 'alice', 'PX', 60000);
  const refusal = await redlock.acquire([key], 5000).catch(votes);
  assert(refusal[0] instanceof ResourceLockedError);
  say('redlock', 'held by Turnstile: acquire fails as with any held lock (ResourceLockedError)');
  await turnstile('RELEASE', key, 'alice');

  let hold = await redlock.acquire([key], 5000);
  assert.deepEqual(await info(key), { mode: 'plain', owner: hold.value, token: null });
  assert.equal(await turnstile('ACQUIRE', key, 'alice', 'PX', 5000), null);
  say('redlock', 'held by redlock: LOCK.ACQUIRE answers null, LOCK.INFO says plain and the value');

  const unharmed = await lostTo(key);
  assert((await hold.extend(5000).catch(votes)).every(wrongType));
  assert((await hold.release().catch(votes)).every(wrongType));
  await unharmed();
  say('redlock', 'lost to Turnstile: extend and release fail, the new hold is unharmed');
  await redis.del(key);

  const settings = { automaticExtensionThreshold: 100 };
  const work = async (signal) => {
    await lostTo(key);
    await once(signal, 'abort');
    say('redlock', 'lost to Turnstile during using(): its signal is aborted');
  };
  await assert.rejects(redlock.using([key], 200, settings, work), ExecutionError); // its release
  await redis.del(key);

  const keys = [`${prefix}{two}:a`, `${prefix}{two}:b`];
  hold = await redlock.acquire(keys, 5000);
  await lostTo(keys[0]);
  await assert.rejects(hold.release());
  assert.equal(await redis.get(keys[1]), hold.value);
  say('redlock', 'two keys, one lost to Turnstile: release stops there, the other stays locked');
  assert.equal(await turnstile('RELEASE', keys[1], hold.value), 1);
  await redis.del(...keys);

  hold = await redlock.acquire([key], 5000);
  assert((await turnstile('ACQUIRE', key, hold.value, 'PX', 60000)) > 0);
  assert.equal((await info(key)).mode, 'exclusive');
  await assert.rejects(hold.release());
  assert.equal(await turnstile('RELEASE', key, hold.value), 1);
  say('redlock', 'taken over by its value: a token at once; from then on only LOCK.RELEASE works');
}

async function usesRedisSemaphore() {
  const name = `${prefix}semaphore`;
  const key = `mutex:${name}`;
  await turnstile('ACQUIRE', key, 'alice', 'PX', 60000);
  let mutex = new Mutex(redis, name, options);
  assert.equal(await mutex.tryAcquire(), false);
  await assert.rejects(mutex.acquire(), TimeoutError);
  say('redis-semaphore', 'held by Turnstile: tryAcquire is false, acquire a TimeoutError');
  await turnstile('RELEASE', key, 'alice');

  await mutex.acquire();
  assert.deepEqual(await info(key), { mode: 'plain', owner: mutex.identifier, token: null });
  assert.equal(await turnstile('ACQUIRE', key, 'alice', 'PX', 5000), null);
  say('redis-semaphore', 'held by a Mutex: LOCK.ACQUIRE answers null, LOCK.INFO says plain');

  let unharmed = await lostTo(key);
  await assert.rejects(mutex.release(), wrongType);
  await unharmed();
  say('redis-semaphore', 'lost to Turnstile: release throws WRONGTYPE, the new hold is unharmed');
  await redis.del(key);

  // Its timer does not catch what its refresh throws. Without a handler Node ends the process.
  let told = false;
  const onLockLost = () => (told = true);
  mutex = new Mutex(redis, name, { ...options, refreshInterval: 20, onLockLost });
  await mutex.acquire();
  const rejection = once(process, 'unhandledRejection');
  unharmed = await lostTo(key);
  const [error] = await rejection;
  mutex.stopRefresh();
  assert(wrongType(error) && !told && mutex.isAcquired);
  await unharmed();
  say('redis-semaphore', 'its refresh of a lost lock: an unhandled WRONGTYPE, no onLockLost');
  await redis.del(key);

  mutex = new Mutex(redis, name, options);
  await mutex.acquire();
  assert((await turnstile('ACQUIRE', key, mutex.identifier, 'PX', 60000)) > 0);
  await assert.rejects(mutex.release(), wrongType);
  assert.equal(await turnstile('RELEASE', key, mutex.identifier), 1);
  say('redis-semaphore', 'taken over by its identifier: the same as with redlock');
}

async function usesAPrefix() {
  const prefixed = new Redis(url, { keyPrefix: `${prefix}app:` });
  await prefixed.set('x', 'plain', 'PX', 5000, 'NX');
  const acquire = (key) => prefixed.call('LOCK.ACQUIRE', key, 'alice', 'PX', 5000);
  assert((await acquire(`${prefix}x`)) > 0);
  assert.equal(await acquire(`${prefix}app:x`), null);
  say('ioredis', 'keyPrefix goes before the key of SET, not of call("LOCK…"): say the full name');
  await redis.del(`${prefix}x`, `${prefix}app:x`);
  await prefixed.quit();
}

await usesRedlock();
await usesRedisSemaphore();
await usesAPrefix();
await redis.quit();
