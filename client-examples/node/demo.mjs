// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors
//
// Everything that turnstile.mjs does on one server, once with node-redis and once with ioredis.
//
//   node client-examples/node/demo.mjs [redis://127.0.0.1:6379]
//
// Prints what happens and stops at the first surprise.

import assert from 'node:assert/strict';
import { once } from 'node:events';
import { setTimeout as sleep } from 'node:timers/promises';
import { Redis } from 'ioredis';
import { createClient } from 'redis';
import { Deadlock, Fenced, Lost, NotAcquired, serverOf, turnstile } from './turnstile.mjs';

const url = process.argv[2] ?? 'redis://127.0.0.1:6379';
const name = `demo-${process.pid}`; // of all our connections
const table = `table:12:${process.pid}`; // an own table for every run

async function show(client, command) {
  const locks = turnstile(client);
  const wait = 2_000;
  const lock = locks.lock(table, { lease: 1_000, wait });
  const connections = async () => {
    const all = (await command('CLIENT', 'LIST')).split('\n');
    return all.filter((line) => line.includes(` name=${name} `)).map((line) => /^id=(\d+)/.exec(line)[1]);
  };
  const somebodyWaits = async (key) => {
    while (!(await serverOf(client).info(key)).waiting) await sleep(5);
  };

  let carol;
  await lock.using(async (hold) => {
    console.log(`alice has the table, under token ${hold.token}`);
    const bob = await lock.tryAcquire();
    assert.equal(bob, null);
    console.log('bob tries, and is refused at once');
    carol = lock.acquire();
    await somebodyWaits(table);
    await hold.run('SET', `${table}:guest`, 'alice', 'PX', 60_000);
    console.log('carol stands in line; alice writes, guarded by her token');
  });
  await (await carol).release();
  console.log('alice left, and the table went to carol');

  const failure = new Error('the kitchen is on fire');
  await assert.rejects(lock.using(() => Promise.reject(failure)), failure);
  await (await lock.acquire()).release();
  console.log('work that throws leaves no lock behind');

  const quick = locks.lock(table, { lease: 300 });
  await quick.using(async () => {
    await sleep(900);
    assert.equal(await quick.tryAcquire(), null);
  });
  console.log('a lease of 300 ms, renewed, lasted 900 ms of work');

  const hurried = locks.lock(table, { lease: 300, maxHold: 400 });
  await assert.rejects(hurried.using(({ signal }) => once(signal, 'abort')), Lost);
  console.log('with a maximum of 400 ms the work was told to stop');

  await locks.lock(table, { tag: 'frank, at the door' }).using(async (hold) => {
    assert.ok((await lock.locked()) && (await hold.owned()));
    await assert.rejects(locks.lock(table).acquire(), (error) => console.log(`who has it? ${error.message}`) ?? true);
    const stored = await locks.lock(table).adopt(hold.owner, hold.token);
    assert.equal(stored.token, hold.token);
    console.log('another process may go on with a hold whose owner was stored');
  });

  const hold = await quick.acquire();
  await command('DEL', table); // an operator
  await once(hold.signal, 'abort');
  console.log(`the operator took the lock away: ${hold.signal.reason.message}`);
  await assert.rejects(hold.run('SET', `${table}:guest`, 'late'), Fenced);
  await assert.rejects(hold.release(), Lost);
  console.log('a late write was refused, and the release said so too');

  const watched = await locks.lock(table, { watch: true, lease: 60_000 }).acquire();
  const toldAt = once(watched.signal, 'abort').then(() => performance.now());
  const takenAt = performance.now();
  await command('DEL', table);
  console.log(`watched, the loss is told after ${((await toldAt) - takenAt).toFixed(1)} ms`);

  const readers = locks.lock(table, { shared: true });
  const two = [await readers.acquire(), await readers.acquire()];
  await assert.rejects(locks.lock(table).acquire(), NotAcquired);
  for (const reader of two) await reader.release();
  console.log('two readers together kept a writer out');

  const seats = locks.lock(table, { limit: 2 });
  const taken = [await seats.acquire(), await seats.acquire()];
  assert.equal(await seats.tryAcquire(), null);
  for (const seat of taken) await seat.release();
  console.log('two seats, and no third');

  const before = await connections();
  const session = await locks.lock(table, { session: true }).acquire();
  const its = (await connections()).find((id) => !before.includes(id));
  await command('CLIENT', 'KILL', 'ID', its);
  if (!session.signal.aborted) await once(session.signal, 'abort');
  console.log(`a session ended with its connection: ${session.signal.reason.message}`);

  const nested = locks.lock(table, { reentrant: true });
  await nested.using(() => nested.using(() => console.log('the same lock twice, counted')));

  const both = await locks.lock(`${table}:left`, { also: [`${table}:right`] }).acquire();
  assert.equal(await locks.lock(`${table}:right`).tryAcquire(), null);
  await both.release();
  console.log('two locks at once, all or none');

  const left = locks.lock(`${table}:left`, { owner: 'dave' });
  const right = locks.lock(`${table}:right`, { owner: 'erin' });
  const holds = [await left.acquire(), await right.acquire()];
  const dave = locks.lock(`${table}:right`, { owner: 'dave', wait }).acquire();
  await somebodyWaits(`${table}:right`);
  await assert.rejects(locks.lock(`${table}:left`, { owner: 'erin', wait }).acquire(), Deadlock);
  await holds[1].release();
  await (await dave).release();
  await holds[0].release();
  console.log('who would wait for each other for ever is told at once');
}

console.log('--- node-redis');
const client = await createClient({ url, name }).on('error', console.error).connect();
await show(client, (...args) => client.sendCommand(args));
await client.close();

console.log('--- ioredis');
const redis = new Redis(url, { connectionName: name });
await show(redis, (...args) => redis.call(...args));
await redis.quit();
