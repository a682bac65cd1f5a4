// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors
import { randomUUID } from 'node:crypto';
import { Redis } from 'ioredis';

const redis = new Redis(process.env.REDIS_URL ?? 'redis://127.0.0.1:6379');
const waiting = redis.duplicate({ commandTimeout: 7000 }); // its own connection; ms: WAIT and a margin
const owner = randomUUID(); // a new one for each acquisition
let token;
try {
  token = await waiting.call('LOCK.ACQUIRE', 'table:12', owner, 'PX', 10000, 'WAIT', 5000);
} catch (error) { // the lock may have been granted anyway
  waiting.disconnect();
  await redis.call('LOCK.RELEASE', 'table:12', owner);
  throw error;
}
if (token === null) {
  console.error('not acquired');
  process.exit(1);
}
console.log('token', token);
try { // the work; this write happens only while the token holds the lock
  await redis.call('LOCK.FENCE', 'table:12', token, 'THEN', 'SET', '{table:12}:guest', 'alice', 'EX', 60);
} finally {
  console.log('released', await redis.call('LOCK.RELEASE', 'table:12', owner));
  waiting.disconnect();
  redis.disconnect();
}
