// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors
import { randomUUID } from 'node:crypto';
import { createClient } from 'redis';

const url = process.env.REDIS_URL ?? 'redis://127.0.0.1:6379';
const client = await createClient({ url }).on('error', console.error).connect();
const socket = { socketTimeout: 7000, reconnectStrategy: false }; // ms: WAIT and a margin
const waiting = await client.duplicate({ socket }).on('error', console.error).connect(); // its own connection
const owner = randomUUID(); // a new one for each acquisition
let token;
try {
  token = await waiting.sendCommand(['LOCK.ACQUIRE', 'table:12', owner, 'PX', '10000', 'WAIT', '5000']);
} catch (error) { // the lock may have been granted anyway
  await client.sendCommand(['LOCK.RELEASE', 'table:12', owner]);
  throw error;
}
if (token === null) {
  console.error('not acquired');
  process.exit(1);
}
console.log('token', token);
try { // the work; this write happens only while the token holds the lock
  const write = ['SET', '{table:12}:guest', 'alice', 'EX', '60'];
  await client.sendCommand(['LOCK.FENCE', 'table:12', String(token), 'THEN', ...write]);
} finally {
  console.log('released', await client.sendCommand(['LOCK.RELEASE', 'table:12', owner]));
  waiting.destroy();
  client.destroy();
}
