// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors

// Concurrency per tenant, for the jobs of a BullMQ queue: one tenant sends thirty jobs, another four,
// and of each at most two run at a time, on all workers together. A job whose tenant has no permit
// left goes back to the queue for a moment, so that it does not block a worker for the others.

import { randomUUID } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import { DelayedError, Queue, Worker } from 'bullmq';
import { Redis } from 'ioredis';

const url = process.env.REDIS_URL ?? 'redis://127.0.0.1:6379';
const run = randomUUID();
const PER_TENANT = 2;
const LEASE_MS = 5000; // a worker that crashes gives its permits back after this
const AGAIN_MS = 50; // about as long as a job takes

const locks = new Redis(url); // no call here waits, so one connection is enough for all jobs
const connection = new Redis(url, { maxRetriesPerRequest: null }); // what BullMQ wants for workers

/** Runs `work(signal)` under a permit of the tenant, or delays the job. */
async function withPermit(tenant, job, jobToken, work) {
  const lock = `recipe:${run}:tenant:${tenant}`;
  const owner = randomUUID(); // not the job's id: a job that runs twice needs two permits
  if ((await locks.call('LOCK.ACQUIRE', lock, owner, 'PX', LEASE_MS, 'LIMIT', PER_TENANT)) === null) {
    await job.moveToDelayed(Date.now() + AGAIN_MS * (0.5 + Math.random()), jobToken);
    throw new DelayedError(); // tells the worker that the job was moved
  }
  const lost = new AbortController();
  const renewal = setInterval(async () => {
    const held = await locks.call('LOCK.TOUCH', lock, owner, 'PX', LEASE_MS).catch(() => 'no answer');
    if (held === 0) lost.abort(); // without an answer the next renewal tries again
  }, LEASE_MS / 3);
  try {
    return await work(lost.signal);
  } finally {
    clearInterval(renewal);
    await locks.call('LOCK.RELEASE', lock, owner);
  }
}

const running = { big: 0, small: 0 };
const most = { big: 0, small: 0 };
const done = [];
let delayed = 0;
async function processJob(job, jobToken) {
  const { tenant } = job.data;
  await withPermit(tenant, job, jobToken, async () => {
    most[tenant] = Math.max(most[tenant], ++running[tenant]);
    await sleep(AGAIN_MS); // stands for the work
    running[tenant]--;
    done.push(tenant);
  }).catch((error) => {
    delayed += error instanceof DelayedError;
    throw error;
  });
}

const name = `recipe-${run}`;
const queue = new Queue(name, { connection });
const tenants = [...Array(30).fill('big'), ...Array(4).fill('small')];
await queue.addBulk(tenants.map((tenant) => ({ name: 'report', data: { tenant } })));
const workers = [1, 2].map(() => new Worker(name, processJob, { connection, concurrency: 4 }));
for (const deadline = Date.now() + 30000; done.length < tenants.length && Date.now() < deadline;) {
  await sleep(20);
}
const state = await queue.getJobCounts('active', 'failed');
console.log(`${done.length} jobs done, ${delayed} times delayed, at most`, most, 'at a time');
console.log(`the last job of the small tenant was number ${done.lastIndexOf('small') + 1} of ${done.length}`);

await Promise.all(workers.map((worker) => worker.close()));
await queue.obliterate({ force: true });
await queue.close();
for (const client of [locks, connection]) client.disconnect();
const fair = done.lastIndexOf('small') < 20;
if (done.length !== tenants.length || state.failed || !fair || most.big !== 2 || most.small > 2) {
  console.error('FAILED: too many at a time, or the big tenant kept the small one waiting');
  process.exit(1);
}
