// One competitor of tests/cluster/run: the cluster clients of node-redis and ioredis.
//
// worker.mjs node-redis|ioredis REGISTER_PORT NODE_PORT...: see worker.py, which does the same.

import { randomUUID } from 'node:crypto';
import { createCluster } from '@redis/client';
import { Cluster } from 'ioredis';
import { connectToRegister } from '../support/register.mjs';

const PATIENCE_MS = 10_000;
// Server errors that no cluster client has to expect. All others are temporary.
const SURPRISES =
  /^(ERR|WRONGTYPE|DEADLOCK|WAITLIMIT|NOPERM|CROSSSLOT|OOM|MISCONF|EXECABORT|BUSY)\b/;

class GaveUp extends Error {}
class Fenced extends Error {}

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
    await cluster.connect();
    return {
      call: (command) => cluster.sendCommand(command[1], false, command),
      close: () => cluster.destroy(),
    };
  },
  async ioredis(ports) {
    const cluster = new NoticingCluster(ports.map((port) => ({ host: '127.0.0.1', port })));
    cluster.on('error', () => {});
    return {
      call: ([name, ...args]) => cluster.call(name, ...args),
      close: () => cluster.disconnect(),
    };
  },
};

const nowUs = () => Number(process.hrtime.bigint() / 1000n);
const also = (keys) => (keys.length > 1 ? ['ALSO', String(keys.length - 1), ...keys.slice(1)] : []);

const [kind, registerPort, ...ports] = process.argv.slice(2);
const client = await clients[kind](ports.map(Number));
const { tell, end: hangUp } = await connectToRegister(registerPort, kind);

/** The reply, or nothing if the outcome is unknown. */
async function tryOnce(command) {
  try {
    return { reply: await client.call(command.map(String)), certain: true };
  } catch (error) {
    if (error.message.startsWith('FENCED')) throw new Fenced();
    if (SURPRISES.test(error.message)) {
      await tell('surprise', command[0], error.message);
      throw new GaveUp();
    }
    disturbances++;
    await tell('disturbed'); // the register replies when the cluster has changed
    return { certain: false };
  }
}

async function call(...command) {
  const deadline = performance.now() + PATIENCE_MS;
  while (performance.now() < deadline) {
    const { reply, certain } = await tryOnce(command);
    if (certain) return reply;
  }
  throw new GaveUp();
}

/** The token and the end of its validity; [0, 0] if the lock was not acquired. */
async function acquire(keys, owner, leaseMs, waitMs) {
  const deadline = performance.now() + waitMs;
  for (;;) {
    const left = Math.max(0, Math.floor(deadline - performance.now()));
    const end = nowUs() + leaseMs * 1000;
    const command = ['LOCK.ACQUIRE', keys[0], owner, 'PX', leaseMs, 'WAIT', left, ...also(keys)];
    const { reply, certain } = await tryOnce(command);
    if (certain) return reply === null ? [0, 0] : [Number(reply), end];
    if (performance.now() > deadline + PATIENCE_MS / 2) throw new GaveUp();
  }
}

/** The value that the guarded write replaced. */
async function write(key, token, value) {
  try {
    return await call('LOCK.FENCE', key, token, 'THEN', 'SET', value, token, 'GET');
  } catch (error) {
    if (error instanceof Fenced) return 'fenced';
    if (error instanceof GaveUp) return 'unknown';
    throw error;
  }
}

async function release(keys, owner) {
  const before = disturbances;
  try {
    const count = await call('LOCK.RELEASE', keys[0], owner, ...also(keys));
    await tell('released', count, disturbances === before ? 'clean' : 'disturbed');
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
      const end = nowUs() + leaseMs * 1000;
      const count = await call('LOCK.TOUCH', keys[0], owner, 'PX', leaseMs, ...also(keys));
      await tell('touched', count, end);
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
    await call('LOCK.RELEASE', keys[0], heir, ...also(keys));
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
client.close();
// A client may still keep connections to nodes whose roles have changed.
hangUp(() => process.exit());
