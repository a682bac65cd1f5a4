// One competitor of tests/cluster/run: client-examples/node/turnstile.mjs on the cluster clients of node-redis and
// ioredis, as they are: it finds the nodes, waits by messages, and goes on while slots move.
//
// worker.mjs node-redis|ioredis REGISTER_PORT NODE_PORT...: see worker.py, which does the same.

import { randomUUID } from 'node:crypto';
import { createCluster } from '@redis/client';
import { Cluster } from 'ioredis';
import { Fenced, serverOf, TurnstileError } from '../../client-examples/node/turnstile.mjs';
import { connectToRegister } from '../support/register.mjs';

const PATIENCE_MS = 10_000;
const timeout = PATIENCE_MS / 2;

class GaveUp extends Error {}

/** How often a command may have been sent twice. */
let disturbances = 0;

/** Detects that the library lost a connection and may have repeated a command by itself. */
class NoticingCluster extends Cluster {
  handleError(error, ttl, handlers) {
    if (!/^(MOVED|ASK|TRYAGAIN) /.test(error.message)) disturbances++;
    super.handleError(error, ttl, handlers);
  }
}

const clients = {
  async 'node-redis'(ports) {
    const rootNodes = ports.map((port) => ({ url: `redis://127.0.0.1:${port}` }));
    const cluster = createCluster({ rootNodes });
    cluster.on('error', () => {}); // reported by the calls
    return cluster.connect();
  },
  async ioredis(ports) {
    return new NoticingCluster(ports.map((port) => ({ host: '127.0.0.1', port }))).on('error', () => {});
  },
};

const nowUs = () => Number(process.hrtime.bigint() / 1000n);
/** When a lease ends at the earliest, on the clock of the register. */
const endUs = (validFrom, leaseMs) => Math.floor(nowUs() + (validFrom + leaseMs - performance.now()) * 1000);

const [kind, registerPort, ...ports] = process.argv.slice(2);
const cluster = await clients[kind](ports.map(Number));
const server = serverOf(cluster);
const { tell, end: hangUp } = await connectToRegister(registerPort, kind);

/** What the call returns. Rejects with GaveUp if it had no answer in time, or one that nobody has to expect. */
async function attempt(what, call) {
  try {
    return await call();
  } catch (error) {
    if (error instanceof Fenced) throw error;
    disturbances++;
    if (!(error instanceof TurnstileError)) await tell('surprise', what, error.message);
    throw new GaveUp('', { cause: error });
  }
}

/** The token and the end of its validity; [0, 0] if the lock was not acquired. */
async function acquire(keys, owner, leaseMs, waitMs) {
  const request = { lease: leaseMs, wait: waitMs, timeout };
  const grant = await attempt('LOCK.ACQUIRE', () => server.acquire(keys, owner, request));
  return grant ? [grant.token, endUs(grant.validFrom, leaseMs)] : [0, 0];
}

/** The value that the guarded write replaced. */
async function write(key, token, value) {
  try {
    const command = ['LOCK.FENCE', key, token, 'THEN', 'SET', value, token, 'GET'];
    return await attempt('LOCK.FENCE', () => server.send(key, command, { timeout: PATIENCE_MS }));
  } catch (error) {
    if (error instanceof Fenced) return 'fenced';
    if (error instanceof GaveUp) return 'unknown';
    throw error;
  }
}

async function release(keys, owner) {
  const before = disturbances;
  try {
    const how = { timeout: PATIENCE_MS };
    const { count, again } = await attempt('LOCK.RELEASE', () => server.release(keys, owner, how));
    await tell('released', count, !again && disturbances === before ? 'clean' : 'disturbed');
    return true;
  } catch (error) {
    if (!(error instanceof GaveUp)) throw error;
    await tell('unsure', 'release');
    return false;
  }
}

async function touchOrAskAgain(keys, owner, leaseMs, plan) {
  try {
    if (plan === 'touch') {
      const how = { timeout: PATIENCE_MS };
      const touched = await attempt('LOCK.TOUCH', () => server.touch(keys, owner, leaseMs, how));
      await tell('touched', touched.count, endUs(touched.validFrom, leaseMs));
    } else if (plan === 'again') {
      await tell('again', ...(await acquire(keys, owner, leaseMs, 0)));
    }
  } catch (error) {
    if (!(error instanceof GaveUp)) throw error;
    await tell('unsure', plan);
  }
}

/** Returns when the lease has ended: waits for the lock as another owner. */
async function outstay(keys, leaseMs) {
  const heir = randomUUID();
  try {
    await acquire(keys, heir, leaseMs, PATIENCE_MS / 2);
    await server.abandon(keys, heir);
  } catch (error) {
    if (!(error instanceof GaveUp)) throw error;
  }
}

async function take(keys, value, leaseMs, waitMs, plan, work) {
  const owner = randomUUID();
  let token;
  let end;
  try {
    [token, end] = await acquire(keys, owner, leaseMs, waitMs);
  } catch (error) {
    if (!(error instanceof GaveUp)) throw error;
    await release(keys, owner);
    await tell('missed', 'errors');
    return;
  }
  if (!token) {
    await tell('missed', waitMs === 0 ? 'busy' : 'time-out');
    return;
  }
  if ((await tell('enter', token, end))[0] === 'too-late') {
    await release(keys, owner);
    return;
  }
  if (plan === 'oversleep') {
    await outstay(keys, leaseMs);
    await tell('wrote-late', await write(keys[0], token, value));
    return;
  }
  await tell('work', work); // the register replies when others have done that much
  await touchOrAskAgain(keys, owner, leaseMs, plan);
  if (plan !== 'no-write') await tell('wrote', await write(keys[0], token, value));
  await tell('leave');
  if ((await release(keys, owner)) && plan === 'late-write') {
    await tell('wrote-late', await write(keys[0], token, value));
  }
}

for (;;) {
  const [order, keys, value, leaseMs, waitMs, plan, work] = await tell('next');
  if (order === 'stop') break;
  await take(keys.split(','), value, Number(leaseMs), Number(waitMs), plan, work);
}
if (kind === 'ioredis') cluster.disconnect();
else cluster.destroy();
// A client may still keep connections to nodes whose roles have changed.
hangUp(() => process.exit());
