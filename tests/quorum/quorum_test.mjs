// node --test tests/quorum/quorum_test.mjs
//
// client-examples/node/quorum.mjs on three servers that restart with nothing. See run and servers.mjs.

import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import path from 'node:path';
import { test } from 'node:test';
import { Lost, NotAcquired, Quorum, closestMajority } from '../../client-examples/node/quorum.mjs';
import { Redis, Server, createClient, root, until } from './servers.mjs';

const leaseMs = 900;
const timeoutMs = 200;
const patience = 20_000;
const using = (quorum, key, work) => quorum.using(key, { leaseMs: 5_000 }, work);

test('T is the highest token of the majority that lies closest together', () => {
  for (const [tokens, size, expected] of [
    [[7], 1, 7],
    [[5, 9], 2, 9],
    [[10, 11, 12], 2, 11], // equally close: the lower
    [[10, 13, 14], 2, 14],
    [[30_000_014, 10, 13], 2, 13], // one that has just started
    [[30_000_014, 10, 30_000_010], 2, 30_000_014], // two that have, beside one that is old
    [[1, 2, 3, 100, 101], 3, 3],
    [[100, 101, 102, 1, 2], 3, 102],
    [[1, 50, 51, 52, 99], 3, 52],
    [[1, 50, 51, 101], 3, 51], // four of five answered
    [[4, 4, 4, 9, 9], 3, 4],
    [[9007199254740990, 1, 9007199254740991], 2, 9007199254740991],
  ]) {
    assert.equal(closestMajority(tokens, size), expected, String(tokens));
    assert.equal(closestMajority(tokens.toReversed(), size), expected, String(tokens));
  }
});

/** Three servers and a quorum of them, for one test. */
async function setUp(t, graceMs = 0) {
  const grace = ['--turnstile.failover-grace-ms', graceMs];
  const servers = await Promise.all([0, 1, 2].map(() => Server.start(...grace)));
  t.after(() => Promise.all(servers.map((server) => server.stop())));
  const urls = servers.map((server) => server.url);
  const open = async (kind = Quorum) => {
    const quorum = await kind.open(urls, { timeoutMs });
    t.after(() => quorum.close());
    await until(() => quorum.servers.every((server) => server.isReady), 'connected');
    return quorum;
  };
  const tokens = (key) => Promise.all(servers.map((server) => server.token(key)));
  return { servers, urls, open, tokens, quorum: await open() };
}

/** Notes the owner, and can refuse to ask for a hold again. */
class Watched extends Quorum {
  heals = true;

  async ask(server, command) {
    if (command[0] === 'LOCK.ACQUIRE') {
      if (!this.heals) throw new Error('not asked');
      this.owner = command[2];
    }
    return super.ask(server, command);
  }
}

/** A quorum in which a hold is lost between the two rounds, and somebody else was there. */
class Overtaken extends Quorum {
  async ask(server, command) {
    const floor = command[command.indexOf('FLOOR') + 1];
    if (command.includes('FLOOR') && server === this.servers[0]) {
      await server.sendCommand(['DEL', command[1]]);
      await server.sendCommand(['LOCK.ACQUIRE', command[1], 'rival', 'PX', '1000', 'FLOOR', String(Number(floor) + 1)]);
      await server.sendCommand(['DEL', command[1]]);
    }
    return super.ask(server, command);
  }
}

test('a server that answers with a larger token does not count', async (t) => {
  const { servers, open, tokens } = await setUp(t);
  const quorum = await open(Overtaken);
  await servers[2].ask('SET', 'lock', 'other');
  assert.equal(await quorum.acquire('lock', { leaseMs }), null);
  assert.equal(quorum.lastError, undefined); // it did answer
  assert.deepEqual(await tokens('lock'), [null, null, null]); // no token: a plain lock
});

const holds = async (server, { owner }) => JSON.stringify(await server.ask('LOCK.INFO', 'lock'))?.includes(owner);

/** Each when those before it hold the lock again; or until it is lost. */
async function restartOneAfterAnother(servers, quorum, hold) {
  for (const server of servers) {
    await server.restart();
    await until(async () => hold.signal.aborted || (await holds(server, quorum)), 'the lock is held there again');
  }
}

test('a hold outlasts the restart of every server, one after another', async (t) => {
  const { servers, open } = await setUp(t, leaseMs);
  const quorum = await open(Watched);
  const hold = await quorum.acquire('lock', { leaseMs, waitMs: patience });
  const { token } = hold;
  for (const server of servers) await until(() => holds(server, quorum), 'all hold it');
  const rival = await open();
  let stop = false;
  let tries = 0;
  const rivals = (async () => {
    for (; !stop; tries++) {
      const next = await rival.acquire('lock', { leaseMs, waitMs: 10, renew: false });
      if (next) return next;
    }
  })();
  t.after(() => (stop = true));
  await restartOneAfterAnother(servers, quorum, hold);
  assert(hold.valid() && !hold.signal.aborted);
  assert.equal(hold.token, token);
  assert(tries > 1);
  await hold.release();
  assert((await rivals).token > token);
});

test('without healing the same hold is lost', async (t) => {
  const { servers, open } = await setUp(t, leaseMs);
  const quorum = await open(Watched);
  const hold = await quorum.acquire('lock', { leaseMs, waitMs: patience });
  for (const server of servers) await until(() => holds(server, quorum), 'all hold it');
  quorum.heals = false;
  await servers[0].restart();
  const graceIsOver = async () => /grace_left_ms:0\r/.test(await servers[0].ask('INFO', 'turnstile'));
  await until(graceIsOver, 'it could give the lock again');
  assert(hold.valid());
  await servers[1].restart();
  await until(() => hold.signal.aborted, 'lost');
  assert(hold.signal.reason instanceof Lost);
});

test('an empty server counts from the next extension on', async (t) => {
  const { servers, quorum } = await setUp(t);
  const hold = await quorum.acquire('lock', { leaseMs: 20_000, renew: false });
  const { token } = hold;
  await servers[0].restart();
  await until(() => quorum.servers[0].isReady, 'reconnected');
  await servers[2].kill();
  assert.equal(await hold.extend(), false); // 0 and 1, and no answer
  assert(hold.valid());
  assert((await servers[0].token('lock')) >= token);
  assert.equal(await hold.extend(), true); // 1 and 1
  assert.equal(hold.token, token);
  await hold.release();
  assert.equal(await servers[0].token('lock'), null);
});

test('a hold that others have taken is lost at once', async (t) => {
  const { servers, quorum } = await setUp(t);
  const hold = await quorum.acquire('lock', { leaseMs: 60_000, renew: false });
  const { token } = hold;
  await servers[0].ask('DEL', 'lock');
  await servers[1].ask('DEL', 'lock');
  assert.equal(await hold.extend(), false); // no majority this time, but both give it back
  assert(hold.valid());
  assert.equal(await hold.extend(), true);
  assert.equal(hold.token, token);
  await servers[0].ask('DEL', 'lock');
  await servers[1].ask('DEL', 'lock');
  const rival = await quorum.acquire('lock', { leaseMs, renew: false });
  assert(rival.token > token);
  assert.equal(await hold.extend(), false);
  assert(hold.signal.aborted && !hold.valid());
  assert(rival.valid());
});

test('several locks under one token', async (t) => {
  const { servers, quorum, tokens } = await setUp(t);
  const hold = await quorum.acquire('a', { leaseMs: 20_000, also: ['b', 'c'], renew: false });
  const [a, b, c] = await Promise.all(['a', 'b', 'c'].map(tokens));
  assert.deepEqual(a, b);
  assert.deepEqual(a, c);
  assert(a.filter((token) => token === hold.token).length >= 2);
  assert.equal(await quorum.acquire('c', { leaseMs }), null);
  assert.equal(await quorum.acquire('x', { leaseMs, also: ['b'] }), null);
  assert.deepEqual(await tokens('x'), [null, null, null]);
  assert(await hold.extend());

  await servers[0].restart();
  await until(() => quorum.servers[0].isReady, 'reconnected');
  assert(await hold.extend());
  for (const key of ['a', 'b', 'c']) assert((await servers[0].token(key)) >= hold.token);

  // One that lost some of them does not count, and is not asked to give up the others.
  await servers[1].ask('DEL', 'b');
  assert(await hold.extend());
  assert.equal(await servers[1].token('b'), null);
  assert((await servers[1].token('a')) && (await servers[1].token('c')));
  await servers[2].ask('DEL', 'c');
  assert.equal(await hold.extend(), false);
  assert(hold.signal.aborted); // neither of the two counts again
  await hold.release();
  for (const key of ['a', 'b', 'c']) assert.deepEqual(await tokens(key), [null, null, null]);
});

test('all holds are renewed, and told when they are lost', async (t) => {
  const { servers, quorum } = await setUp(t);
  const holds = await Promise.all([...Array(40).keys()].map((i) => quorum.acquire(`lock:${i}`, { leaseMs })));
  const renewed = performance.now() + 2.5 * leaseMs;
  await until(() => holds.every((hold) => hold.until > renewed), 'renewed by two leases');
  await Promise.all(holds.slice(0, 20).map((hold) => hold.release()));
  const late = [];
  for (const hold of holds.slice(20)) {
    hold.signal.addEventListener('abort', () => late.push(performance.now() - hold.until));
  }
  await Promise.all(servers.slice(0, 2).map((server) => server.kill()));
  await until(() => late.length === 20, 'told');
  assert(holds.every((hold) => !hold.valid()));
  assert(Math.max(...late) < 500 && Math.min(...late) >= 0, String(late));
  assert(!holds.slice(0, 20).some((hold) => hold.signal.aborted));
});

test('a hold that is not renewed ends with its lease', async (t) => {
  const { quorum } = await setUp(t);
  const hold = await quorum.acquire('lock', { leaseMs: 100, renew: false });
  await until(() => hold.signal.aborted, 'told');
  assert(performance.now() >= hold.until);
  assert.throws(() => hold.check(), Lost);
});

test('the using forms', async (t) => {
  const { servers, quorum, tokens } = await setUp(t);
  const options = { leaseMs: 5_000 };
  const result = await quorum.using('lock', options, async (hold) => {
    assert((await tokens('lock')).includes(hold.token));
    await assert.rejects(
      quorum.using('lock', options, () => assert.fail('two inside')),
      NotAcquired,
    );
    return 'done';
  });
  assert.equal(result, 'done');
  assert.deepEqual(await tokens('lock'), [null, null, null]);

  const own = new Error('its own');
  const fails = () => Promise.reject(own);
  await assert.rejects(quorum.using('lock', options, fails), own);
  assert.deepEqual(await tokens('lock'), [null, null, null]);

  const taken = async () => {
    await Promise.all(servers.map((server) => server.ask('SET', 'lock', 'other')));
  };
  const isTold = async (hold) => {
    await taken();
    await until(() => hold.signal.aborted, 'told');
  };
  await assert.rejects(quorum.using('lock', { leaseMs }, isTold), Lost);
  await Promise.all(servers.map((server) => server.ask('DEL', 'lock')));
  await assert.rejects(
    quorum.using('lock', { leaseMs }, () => taken().then(fails)),
    own,
  );

  await Promise.all(servers.map((server) => server.ask('DEL', 'lock')));
  const hold = await quorum.acquire('lock', options);
  await hold[Symbol.asyncDispose]();
  assert.deepEqual(await tokens('lock'), [null, null, null]);
});

test('a release does not overtake an extension', async (t) => {
  const { servers, quorum, tokens } = await setUp(t);
  for (let i = 0; i < 50; i++) {
    const hold = await quorum.acquire('lock', { leaseMs: 5_000 });
    await servers[0].ask('FLUSHALL'); // so that the extension asks for it again
    const extension = hold.wake(); // as if it were due
    await (i % 2 ? Promise.resolve() : servers[0].ask('PING')); // before and after its first answers
    await Promise.all([hold.release(), extension]);
    assert.deepEqual(await tokens('lock'), [null, null, null]);
    assert(!hold.signal.aborted);
  }
});

test('a signal ends the tries', async (t) => {
  const { quorum, tokens } = await setUp(t);
  await using(quorum, 'lock', async () => {
    const reason = new Error('enough');
    const abort = new AbortController();
    const tries = quorum.acquire('lock', { leaseMs, waitMs: patience, signal: abort.signal });
    setTimeout(() => abort.abort(reason), 50);
    await assert.rejects(tries, reason);
  });
  assert.deepEqual(await tokens('lock'), [null, null, null]);
});

test('a signal in the last round: no hold is left', async (t) => {
  const { quorum, tokens } = await setUp(t);
  const reason = new Error('enough');
  const abort = new AbortController();
  const ask = quorum.ask.bind(quorum);
  quorum.ask = (server, command) => {
    if (command.includes('FLOOR')) abort.abort(reason);
    return ask(server, command);
  };
  await assert.rejects(quorum.acquire('lock', { leaseMs: 60_000, signal: abort.signal }), reason);
  assert.deepEqual(await tokens('lock'), [null, null, null]);
});

test('clients of both libraries, and a dead minority', async (t) => {
  const { servers, urls, tokens } = await setUp(t);
  const node = await createClient({ url: urls[0] }).on('error', () => {}).connect();
  const clients = [node, new Redis(urls[1]), new Redis(urls[2]).on('error', () => {})];
  const quorum = new Quorum(clients, { timeoutMs });
  t.after(() => quorum.close());
  await using(quorum, 'lock', async (hold) => assert((await tokens('lock')).includes(hold.token)));
  await servers[2].kill();
  const hold = await quorum.acquire('lock', { leaseMs });
  const { until: first } = hold;
  await until(() => hold.until > first + leaseMs, 'renewed');
  await hold.release();
  assert.equal(await servers[0].token('lock'), null);
});

test('an unreleased hold does not keep the process alive', async (t) => {
  const { urls } = await setUp(t);
  const program = `
    import { Quorum } from './quorum.mjs';
    const quorum = await Quorum.open(process.argv.slice(1), { timeoutMs: 500 });
    const hold = await quorum.acquire('lock', { leaseMs: 300, waitMs: 2000 });
    const { until } = hold;
    while (hold.until < until + 300) await new Promise((resolve) => setTimeout(resolve, 10)); // it is being renewed
    for (const server of quorum.servers) server.unref(); // else the connections keep it alive`;
  const child = spawn(process.execPath, ['--input-type=module', '-e', program, ...urls], {
    cwd: path.join(root, 'client-examples/node'),
    stdio: 'inherit',
  });
  t.after(() => child.kill('SIGKILL'));
  assert.deepEqual(await once(child, 'exit', { signal: AbortSignal.timeout(patience) }), [0, null]);
});
