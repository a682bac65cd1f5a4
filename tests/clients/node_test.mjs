// node --test tests/clients/node_test.mjs
//
// client-examples/node/turnstile.mjs with node-redis and with ioredis, against servers and clusters of its own:
// paused, killed, demoted, with slots that move, without the module, and behind a proxy that loses replies and
// messages. The module is build/turnstile.so, or what TURNSTILE_MODULE names; the server is redis-server, or what
// REDIS_SERVER names. Needs `npm ci --prefix client-examples/node`.

import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { createRequire } from 'node:module';
import net from 'node:net';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { after, before, describe, test } from 'node:test';
import { setImmediate as nextTurn, setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import * as client from '../../client-examples/node/turnstile.mjs';

const { turnstile, serverOf, Deadlock, Fenced, Lost, ModuleMissing, Moved, NotAcquired, NotPrimary } = client;
const { Superseded, Unavailable, Unsupported, WaitLimit } = client;
const root = fileURLToPath(new URL('../../', import.meta.url));
const require = createRequire(path.join(root, 'client-examples/node/'));
const { createClient, createCluster } = require('redis');
const { Cluster, Redis } = require('ioredis');

const module = path.resolve(root, process.env.TURNSTILE_MODULE ?? 'build/turnstile.so');
const folder = mkdtempSync(path.join(tmpdir(), 'turnstile-node-'));
const servers = new Set();
process.on('exit', () => {
  for (const server of servers) server.process.kill('SIGKILL');
  rmSync(folder, { recursive: true, force: true });
});
for (const [signal, number] of [['SIGINT', 2], ['SIGTERM', 15], ['SIGHUP', 1]]) {
  process.on(signal, () => process.exit(128 + number));
}

const slack = 400; // how late a busy machine may be, in ms

/** Waits until the condition holds, and returns what it returned. */
async function until(condition, what, ms = 5_000) {
  const end = performance.now() + ms;
  for (;;) {
    const value = await condition();
    if (value) return value;
    if (performance.now() > end) assert.fail(`in vain for ${ms} ms: ${what}`);
    await sleep(5);
  }
}

/** A server. A port may be taken when it starts: then another is tried. */
class Server {
  static async start(...options) {
    for (let attempt = 0; attempt < 20; ++attempt) {
      const server = new Server(20_000 + Math.floor(Math.random() * 10_000), options);
      if (await server.#isUp()) return server;
      await server.stop();
    }
    assert.fail('no server');
  }

  constructor(port, options) {
    this.port = port;
    const base = ['--bind', '127.0.0.1', '--port', port, '--save', '', '--dir', folder];
    if (options[0] === 'without the module') options = options.slice(1);
    else base.push('--loadmodule', module);
    this.process = spawn(process.env.REDIS_SERVER ?? 'redis-server', [...base, ...options].map(String), { stdio: 'ignore' });
    this.exited = once(this.process, 'exit');
    servers.add(this);
  }

  async #isUp() {
    const pid = new RegExp(`process_id:${this.process.pid}\\r`);
    this.admin = createClient({ url: `redis://127.0.0.1:${this.port}`, socket: { reconnectStrategy: 20 } });
    this.admin.on('error', () => {});
    this.admin.connect().catch(() => {});
    const end = performance.now() + 5_000;
    while (this.process.exitCode === null && performance.now() < end) {
      if (this.admin.isReady) return pid.test(await this.ask('INFO', 'server').catch(() => ''));
      await sleep(10);
    }
    return false;
  }

  ask(...command) {
    return this.admin.sendCommand(command.map(String));
  }

  /** The holders of a lock, as text. */
  async holders(key) {
    const info = await this.ask('LOCK.INFO', key);
    if (info === null) return [];
    const fields = (map) => (Array.isArray(map) ? Object.fromEntries(map.flatMap((v, i) => (i % 2 ? [] : [[v, map[i + 1]]]))) : map);
    return fields(info).holders.map(fields);
  }

  async waiting(key, count = 1) {
    await until(async () => {
      const text = JSON.stringify(await this.ask('LOCK.INFO', key));
      return new RegExp(`"waiting"[,:]${count}[,}]`).test(text ?? '');
    }, `${count} waiting for ${key}`);
  }

  async connections() {
    return (await this.ask('CLIENT', 'LIST')).trim().split('\n');
  }

  async stop() {
    if (this.admin.isOpen) this.admin.destroy();
    this.process.kill('SIGKILL');
    await this.exited;
    servers.delete(this);
  }
}

/**
 * Passes everything on, until `lose` says that the reply to this request is not to arrive. From the first
 * request on that `stall` names, its connection is stuck: nothing reaches the server before resume(). What
 * `swallow` says of what the server sends is left out.
 */
class Proxy {
  replies = []; // those that were lost
  #refuse = false;
  #stuck; // the connection, and what it sent
  #stalled = false;

  static async start(port, lose, stall = () => false, swallow = () => false) {
    const proxy = new Proxy();
    proxy.sockets = new Set();
    proxy.server = net.createServer((near) => {
      if (proxy.#refuse) {
        proxy.#refuse = false;
        near.on('error', () => {});
        return near.destroy();
      }
      const far = net.connect(port, '127.0.0.1');
      let lost = false;
      for (const socket of [near, far]) {
        proxy.sockets.add(socket);
        socket.on('error', () => {});
        socket.on('close', () => (proxy.sockets.delete(socket), near.destroy(), far.destroy()));
      }
      near.on('data', (data) => {
        if (!proxy.#stalled && stall(data.toString())) {
          proxy.#stalled = true;
          proxy.#stuck = { far, requests: [] };
        }
        if (proxy.#stuck?.far === far) return proxy.#stuck.requests.push(data);
        lost ||= lose(data.toString(), proxy);
        far.write(data);
      });
      far.on('data', (data) => {
        if (swallow(data.toString())) return;
        if (!lost) return near.write(data);
        proxy.replies.push(data.toString());
        near.destroy();
      });
    });
    proxy.server.listen(0, '127.0.0.1');
    await once(proxy.server, 'listening');
    proxy.port = proxy.server.address().port;
    return proxy;
  }

  /** What is stuck, as text. */
  get stuck() {
    return Buffer.concat(this.#stuck?.requests ?? []).toString();
  }

  resume() {
    const { far, requests } = this.#stuck;
    this.#stuck = null;
    for (const data of requests) far.write(data);
  }

  /** Cuts all connections, and the next one. */
  cut() {
    this.#refuse = true;
    for (const socket of this.sockets) socket.destroy();
  }

  stop() {
    this.server.close();
    for (const socket of this.sockets) socket.destroy();
  }
}

const libraries = {
  'node-redis': {
    async connect(port, { timeout, ...options } = {}) {
      const url = `redis://127.0.0.1:${port}`;
      const redis = createClient({ url, ...options, ...(timeout && { commandOptions: { timeout } }) });
      return redis.on('error', () => {}).connect();
    },
    async connectCluster(ports) {
      const rootNodes = ports.map((port) => ({ url: `redis://127.0.0.1:${port}` }));
      const cluster = createCluster({ rootNodes }).on('error', () => {});
      return cluster.connect();
    },
    send: (redis, ...args) => redis.sendCommand(args),
    close: (redis) => redis.isOpen && redis.destroy(),
    closings: { close: (redis) => redis.close(), destroy: (redis) => redis.destroy() },
    script: (port) => `
      const redis = await require('redis').createClient({ url: 'redis://127.0.0.1:${port}' }).connect();
      const close = () => redis.close();
      const unref = () => redis.unref();`,
  },
  ioredis: {
    async connect(port, { timeout, ...options } = {}) {
      const limits = timeout && { commandTimeout: timeout, socketTimeout: timeout };
      const redis = new Redis(port, '127.0.0.1', { ...options, ...limits, lazyConnect: true });
      redis.on('error', () => {});
      await redis.connect().catch((error) => {
        redis.disconnect(); // it would go on trying
        throw error;
      });
      return redis;
    },
    async connectCluster(ports) {
      const nodes = ports.map((port) => ({ host: '127.0.0.1', port }));
      const cluster = new Cluster(nodes, { lazyConnect: true }).on('error', () => {});
      await cluster.connect();
      return cluster;
    },
    send: (redis, ...args) => redis.call(...args),
    close: (redis) => redis.disconnect(),
    closings: { quit: (redis) => redis.quit(), disconnect: (redis) => redis.disconnect() },
    script: (port) => `
      const redis = new (require('ioredis').Redis)(${port});
      const close = () => redis.quit();
      const unref = () => redis.stream.unref();`,
  },
};

// Most of the time is spent waiting.
describe('turnstile.mjs', { concurrency: 3 }, () => {
  for (const [name, library] of Object.entries(libraries)) {
    describe(name, { concurrency: 1 }, () => {
      let server, redis, locks;
      let number = 0;
      const newKey = () => `lock:${name}:${++number}`;

      // How long a wait may block a connection before a request with NOTIFY takes over its place.
      const usual = 1_000;
      let park = usual;
      /** A test with another time. */
      const parked = (ms, title, work) =>
        test(title, async (t) => {
          park = serverOf(redis).park = ms;
          try {
            await work(t, ms);
          } finally {
            park = serverOf(redis).park = usual;
          }
        });
      /** A test with each way of waiting. */
      const eachWay = (title, work) => {
        parked(10_000, `${title}; waits block a connection`, work);
        parked(4, `${title}; waits are taken over at once`, work);
        parked(0, `${title}; waits hear messages`, work);
      };

      before(async () => {
        server = await Server.start();
        redis = await library.connect(server.port);
        locks = turnstile(redis);
      });
      after(async () => {
        library.close(redis);
        await server.stop();
      });

      /** A client of its own to another port, closed at the end of the test. */
      const connect = async (t, port, options) => {
        const own = await library.connect(port, options);
        t.after(() => library.close(own));
        serverOf(own).park = park;
        return turnstile(own);
      };
      const start = async (t, ...options) => {
        const own = await Server.start(...options);
        t.after(() => own.stop());
        return own;
      };
      const proxyTo = async (t, port, lose, stall, swallow) => {
        const proxy = await Proxy.start(port, lose, stall, swallow);
        t.after(() => proxy.stop());
        return proxy;
      };
      /** When the work is told, on performance.now(). */
      const told = async (hold, ms = 5_000) => {
        await until(() => hold.signal.aborted, 'the work is told', ms);
        assert.ok(hold.signal.reason instanceof Lost, String(hold.signal.reason));
        return performance.now();
      };
      const counter = async (from, name) => Number(new RegExp(`turnstile_${name}:(\\d+)`).exec(await from.ask('INFO', 'turnstile'))[1]);
      const isFree = (key) => until(async () => !(await server.holders(key)).length, `${key} is free`, 1_000);

      test('acquire, try, release', async () => {
        const lock = locks.lock(newKey());
        const hold = await lock.acquire();
        assert.ok(Number.isSafeInteger(hold.token) && hold.token > 0);
        assert.equal(hold.token, await server.ask('LOCK.FENCE', lock.key));
        assert.equal((await server.holders(lock.key))[0].owner, hold.owner);
        assert.equal(await lock.tryAcquire(), null);
        await assert.rejects(lock.acquire(), NotAcquired);
        await hold.release();
        await hold.release();
        const next = await lock.tryAcquire();
        assert.ok(next.token > hold.token);
        assert.notEqual(next.owner, hold.owner);
        await next[Symbol.asyncDispose]();
        await isFree(lock.key);
        assert.equal(next.signal.aborted, false);
      });

      eachWay('waiting in line', async () => {
        const lock = locks.lock(newKey(), { wait: 5_000, lease: 500 });
        const before1 = (await server.connections()).length;
        const first = await lock.acquire();
        const waiter = lock.acquire();
        await server.waiting(lock.key);
        assert.ok((await server.connections()).length <= before1 + 2); // the subscriber's, one that is blocked
        await sleep(700); // longer than the lease: the hold begins with the grant
        const before = performance.now();
        await first.release();
        const second = await waiter;
        assert.ok(performance.now() - before < slack);
        assert.ok(second.token > first.token);
        await sleep(400);
        await second.run('SET', lock.key + ':data', 'x');
        await second.release();
      });

      eachWay('a wait that runs out', async () => {
        const lock = locks.lock(newKey(), { wait: 200 });
        const hold = await lock.acquire();
        const start = performance.now();
        await assert.rejects(lock.acquire(), NotAcquired);
        const waited = performance.now() - start;
        assert.ok(waited >= 199 && waited < 200 + slack, `${waited} ms`);
        await server.waiting(lock.key, 0);
        await hold.release();
      });

      eachWay('a wait that is cancelled', async () => {
        const lock = locks.lock(newKey(), { wait: 5_000 });
        const hold = await lock.acquire();
        const cancel = new AbortController();
        const waiter = lock.acquire({ signal: cancel.signal });
        const rejected = assert.rejects(waiter, /enough/);
        await server.waiting(lock.key);
        cancel.abort(new Error('enough'));
        await rejected;
        await server.waiting(lock.key, 0);
        await hold.release();
        await assert.rejects(lock.acquire({ signal: cancel.signal }), /enough/);
        await isFree(lock.key);
      });

      // When acquire() has rejected, the server has neither a hold nor a waiter of it. 200 times each, because
      // what is at stake is which of two connections the server reads first.
      const tries = 200;
      const left = async (keys) => {
        const held = await Promise.all(keys.map((key) => server.ask('LOCK.INFO', key)));
        return held.filter((info) => info !== null).length;
      };

      for (const [whose, owner] of [['a random owner', () => undefined], ["the caller's owner", () => randomUUID()]]) {
        eachWay(`aborted in line, then the hold is released: no hold is left (${whose})`, async () => {
          const keys = [];
          for (let i = 0; i < tries; ++i) {
            keys.push(newKey());
            const hold = await locks.lock(keys[i], { lease: 60_000 }).acquire();
            const cancel = new AbortController();
            const waiter = locks.lock(keys[i], { lease: 60_000, wait: 60_000, owner: owner() });
            const rejected = assert.rejects(waiter.acquire({ signal: cancel.signal }), /enough/);
            await server.waiting(keys[i]);
            cancel.abort(new Error('enough'));
            if (i % 2) await rejected;
            await hold.release();
            await rejected;
          }
          assert.equal(await left(keys), 0);
        });

        eachWay(`aborted at any moment: no hold is left (${whose})`, async () => {
          const keys = [];
          for (let i = 0; i < tries; ++i) {
            keys.push(newKey(), newKey());
            const [key, other] = keys.slice(-2);
            const hold = i % 2 ? await locks.lock(key, { lease: 60_000 }).acquire() : null;
            const cancel = new AbortController();
            const waiter = locks.lock(key, { lease: 60_000, wait: 60_000, owner: owner(), also: [other], session: i % 3 === 0 });
            const acquired = waiter.acquire({ signal: cancel.signal }).then((got) => got.release(), (error) => assert.match(error.message, /enough/));
            for (let turn = 0; turn < i % 20; ++turn) await nextTurn();
            cancel.abort(new Error('enough'));
            await Promise.all([hold?.release(), acquired]);
          }
          assert.equal(await left(keys), 0);
        });

        for (const when of ['before', 'after']) {
          eachWay(`aborted before the request arrives, the lock is released ${when} it does (${whose})`, async (t) => {
            const proxy = await proxyTo(t, server.port, () => false, (data) => data.includes('WAIT'));
            const lock = (await connect(t, proxy.port)).lock(newKey(), { lease: 60_000, wait: 60_000, owner: owner() });
            const hold = await locks.lock(lock.key, { lease: 60_000 }).acquire();
            const stale = await counter(server, 'stale_releases');
            const cancel = new AbortController();
            const rejected = assert.rejects(lock.acquire({ signal: cancel.signal }), /enough/);
            await until(() => proxy.stuck, 'asked');
            cancel.abort(new Error('enough'));
            await until(async () => (await counter(server, 'stale_releases')) > stale, 'a release overtakes the request');
            if (when === 'before') await hold.release();
            proxy.resume();
            await rejected;
            if (when === 'after') {
              await server.waiting(lock.key, 0);
              await hold.release();
            }
            assert.equal(await left([lock.key]), 0);
          });
        }
      }

      eachWay('an aborted request that is never answered is given up in time', async (t) => {
        const proxy = await proxyTo(t, server.port, () => false, (data) => data.includes('WAIT'));
        const lock = (await connect(t, proxy.port)).lock(newKey(), { wait: 60_000, timeout: 300 });
        const hold = await locks.lock(lock.key).acquire();
        const cancel = new AbortController();
        const rejected = assert.rejects(lock.acquire({ signal: cancel.signal }), /enough/);
        await until(() => proxy.stuck, 'asked');
        cancel.abort(new Error('enough'));
        await rejected;
        assert.match(proxy.stuck, /LOCK\.ACQUIRE[^]*LOCK\.RELEASE/, 'a release stands behind the request');
        await hold.release();
        await isFree(lock.key);
      });

      test('an aborted upgrade keeps the shared hold', async () => {
        const key = newKey();
        const other = await locks.lock(key, { shared: true }).acquire();
        const reader = await locks.lock(key, { shared: true, owner: 'upgrade' }).acquire();
        for (let i = 0; i < 20; ++i) {
          const cancel = new AbortController();
          const writer = locks.lock(key, { wait: 60_000, owner: 'upgrade' });
          const rejected = assert.rejects(writer.acquire({ signal: cancel.signal }), /enough/);
          await server.waiting(key);
          cancel.abort(new Error('enough'));
          await rejected;
          await server.waiting(key, 0);
          await reader.touch();
        }
        await other.release();
        await reader.run('SET', key + ':data', 'x'); // under the token of before
        await reader.release();
        await isFree(key);
      });

      test('an upgrade aborted just before the shared hold is released: no hold is left', async () => {
        const keys = [];
        for (let i = 0; i < tries / 4; ++i) {
          keys.push(newKey());
          const other = await locks.lock(keys[i], { shared: true, lease: 60_000 }).acquire();
          const reader = await locks.lock(keys[i], { shared: true, lease: 60_000, owner: 'upgrade' }).acquire();
          const cancel = new AbortController();
          const writer = locks.lock(keys[i], { wait: 60_000, lease: 60_000, owner: 'upgrade' });
          const rejected = assert.rejects(writer.acquire({ signal: cancel.signal }), /enough/);
          await server.waiting(keys[i]);
          cancel.abort(new Error('enough'));
          await Promise.all([other.release(), reader.release(), rejected]);
        }
        await until(async () => (await left(keys)) === 0, 'all are free', 1_000);
      });

      test('an aborted re-entry keeps the count', async () => {
        const lock = locks.lock(newKey(), { reentrant: true, lease: 60_000, wait: 60_000 });
        const outer = await lock.acquire();
        for (let i = 0; i < tries / 2; ++i) {
          const cancel = new AbortController();
          const inner = lock.acquire({ signal: cancel.signal }).then((got) => got.release(), (error) => assert.match(error.message, /enough/));
          for (let turn = 0; turn < i % 20; ++turn) await nextTurn();
          cancel.abort(new Error('enough'));
          await inner;
        }
        assert.equal((await server.holders(lock.key))[0].count, 1);
        await outer.release();
        await isFree(lock.key);
      });

      test('cancelled while it connects: the connection is closed', async () => {
        const lock = locks.lock(newKey(), { session: true });
        const before = (await server.connections()).length;
        for (let i = 0; i < 5; ++i) {
          const cancel = new AbortController();
          const rejected = assert.rejects(lock.acquire({ signal: cancel.signal }), /enough/);
          cancel.abort(new Error('enough'));
          await rejected;
        }
        await sleep(100); // time to connect, if they do
        await until(async () => (await server.connections()).length === before, 'they are closed', 1_000);
        await isFree(lock.key);
      });

      test('using releases, whatever happens', async () => {
        const lock = locks.lock(newKey());
        assert.equal(await lock.using(async (hold) => hold.token && 'done'), 'done');
        await isFree(lock.key);
        const failure = new Error('the work failed');
        await assert.rejects(lock.using(() => { throw failure; }), failure);
        await isFree(lock.key);
        // Lost as well: the work's error says more.
        const both = lock.using(async () => {
          await server.ask('DEL', lock.key);
          throw failure;
        });
        await assert.rejects(both, failure);
        await assert.rejects(lock.using(() => server.ask('DEL', lock.key)), Lost);
      });

      test('renewal far beyond the lease', async () => {
        const lock = locks.lock(newKey(), { lease: 1_000 });
        await lock.using(async (hold) => {
          const end = performance.now() + 3_500;
          while (performance.now() < end) {
            assert.equal(await server.ask('LOCK.FENCE', lock.key), hold.token);
            await sleep(20);
          }
          assert.equal(hold.signal.aborted, false);
        });
        await isFree(lock.key);
      });

      test('without renewal the work is told at the end of the lease', async () => {
        const lock = locks.lock(newKey(), { lease: 200, renew: false });
        const start = performance.now();
        const hold = await lock.acquire();
        const got = performance.now();
        const end = await told(hold);
        assert.ok(end >= start + 200 && end < got + 200 + slack, `${end - start} ms`);
        await assert.rejects(hold.touch(), Lost);
        await assert.rejects(hold.release(), Lost);
      });

      test('touch', async () => {
        const lock = locks.lock(newKey(), { lease: 400, renew: false });
        const hold = await lock.acquire();
        await hold.touch(5_000);
        assert.ok((await server.ask('PTTL', lock.key)) > 4_000);
        await sleep(500);
        assert.equal(hold.signal.aborted, false);
        const before = performance.now();
        await hold.touch(100); // may be shorter
        const end = await told(hold);
        assert.ok(end >= before + 100 && end < before + 100 + slack);
        const next = await until(() => lock.tryAcquire(), 'the lease ends');
        await server.ask('DEL', lock.key);
        await assert.rejects(next.touch(), Lost);
        assert.ok(next.signal.aborted);
        await assert.rejects(next.release(), Lost);
      });

      test('an operator takes it away: told within a third of the lease', async () => {
        const lock = locks.lock(newKey(), { lease: 1_500 });
        const hold = await lock.acquire();
        await server.ask('DEL', lock.key);
        const before = performance.now();
        const end = await told(hold);
        assert.ok(end - before < 500 + slack, `${end - before} ms`);
        await assert.rejects(hold.release(), Lost);
      });

      for (const signal of ['SIGSTOP', 'SIGKILL']) {
        test(`the server is gone (${signal}): told at the local deadline`, async (t) => {
          const doomed = await start(t);
          const lock = (await connect(t, doomed.port)).lock('a', { lease: 600, timeout: 300 });
          const start1 = performance.now();
          const hold = await lock.acquire();
          const got = performance.now();
          doomed.process.kill(signal);
          const end = await told(hold);
          assert.ok(end >= start1 + 600, `too early: ${end - start1} ms`);
          assert.ok(end < got + 600 + slack, `too late: ${end - got} ms`);
          await assert.rejects(hold.release(), Lost);
          const before = performance.now();
          await assert.rejects(lock.acquire(), Unavailable);
          const gaveUp = performance.now() - before; // half of the time-out more, to leave nothing behind
          assert.ok(gaveUp < 1.5 * 300 + slack, `${gaveUp} ms`);
          await assert.rejects(lock.tryAcquire(), Unavailable);
        });
      }

      test('the server is away for less than the lease: nothing is lost', async (t) => {
        const slow = await start(t);
        const lock = (await connect(t, slow.port)).lock('a', { lease: 900 });
        await lock.using(async (hold) => {
          for (const pause of [250, 500]) {
            await hold.touch();
            slow.process.kill('SIGSTOP');
            await sleep(pause);
            slow.process.kill('SIGCONT');
            await sleep(700);
          }
          assert.equal(hold.signal.aborted, false);
          assert.equal(await slow.ask('LOCK.FENCE', 'a'), hold.token);
        });
      });

      test('the server refuses for less than the lease: nothing is lost', async (t) => {
        const other = await start(t);
        const lock = (await connect(t, other.port)).lock('a', { lease: 1_500 });
        await lock.using(async (hold) => {
          await other.ask('REPLICAOF', '127.0.0.1', '1');
          await sleep(700); // a renewal is answered with READONLY
          await other.ask('REPLICAOF', 'NO', 'ONE');
          await sleep(1_000); // beyond the lease
          assert.equal(hold.signal.aborted, false);
          assert.equal(await other.ask('LOCK.FENCE', 'a'), hold.token);
        });
      });

      test('the connections are cut: nothing is lost', async (t) => {
        const other = await start(t);
        const lock = (await connect(t, other.port)).lock('a', { lease: 1_200 });
        await lock.using(async (hold) => {
          for (let i = 0; i < 15; ++i) {
            await other.ask('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
            await sleep(120);
            assert.equal(await other.ask('LOCK.FENCE', 'a'), hold.token);
          }
          assert.equal(hold.signal.aborted, false);
        });
        assert.equal((await other.holders('a')).length, 0);
      });

      test('a renewal does not queue behind a blocking command for ever', async (t) => {
        const own = await library.connect(server.port);
        t.after(() => library.close(own));
        const lock = turnstile(own).lock(newKey(), { lease: 450 });
        const hold = await lock.acquire();
        const blocked = own.call ? own.call('BLPOP', 'nothing', '1') : own.sendCommand(['BLPOP', 'nothing', '1']);
        await blocked;
        assert.equal(hold.signal.aborted, false);
        await hold.release();
      });

      for (const [waited, lease, most, title] of [
        [false, 300, 500, 'a maximum'],
        [true, 300, 500, 'a maximum, after waiting'],
        [true, 1_500, 1_500, 'a maximum, after waiting for a moment'],
      ]) {
        test(title, async () => {
          const lock = locks.lock(newKey(), { lease, maxHold: most, wait: 5_000 });
          const first = waited && (await locks.lock(lock.key).acquire());
          const acquired = lock.acquire();
          if (waited) await server.waiting(lock.key);
          if (waited) await sleep(300); // does not count
          const start = performance.now();
          await (first && first.release());
          const hold = await acquired;
          const end = await told(hold);
          assert.ok(end >= start + most - 10 && end < start + most + slack, `${end - start} ms`);
          assert.match(hold.signal.reason.message, /maximum|expired/); // whoever is faster
          // Nobody keeps it longer: the server counts too.
          await until(async () => !(await lock.locked()), 'the server ends it', slack);
          await assert.rejects(hold.release(), Lost);
          await assert.rejects(lock.using((h) => told(h)), Lost);
        });
      }

      test('guarded writes', async () => {
        const lock = locks.lock(newKey());
        const data = `${lock.key}:data`;
        const hold = await lock.acquire();
        assert.equal(String(await hold.run('SET', data, Buffer.from('first'))), 'OK');
        assert.equal(Number(await hold.run('INCRBY', `${data}:n`, 5)), 5);
        await assert.rejects(hold.run('INCR', data), (error) => /^ERR /.test(error.message) && !(error instanceof client.TurnstileError));
        assert.equal(hold.signal.aborted, false);
        await server.ask('DEL', lock.key);
        await assert.rejects(hold.run('SET', data, 'late'), Fenced);
        assert.ok(hold.signal.reason instanceof Lost);
        assert.equal(await server.ask('GET', data), 'first');
        await assert.rejects(hold.release(), Lost);
      });

      // The reply to the first request of the kind is lost.
      const first = (kind) => (data, proxy) => data.includes(kind) && !proxy.replies.length;

      for (const [how, options] of [
        ['at once', {}],
        ['on a connection of its own', { wait: 2_000, session: true }],
        ['of several locks', { also: ['lost:also:a', 'lost:also:b'] }],
      ]) {
        test(`a lost reply to acquire, ${how}: the same token`, async (t) => {
          const proxy = await proxyTo(t, server.port, first('LOCK.ACQUIRE'));
          const lock = (await connect(t, proxy.port)).lock(newKey(), { ...options });
          const hold = await lock.acquire();
          assert.equal(proxy.replies.length, 1);
          const holders = await server.holders(lock.key);
          assert.equal(holders.length, 1);
          assert.equal(holders[0].token, hold.token);
          // A session ends with the connection that was cut, if the server is quick to notice.
          if (!options.session) assert.equal(proxy.replies[0], `:${hold.token}\r\n`);
          await hold.release();
          await isFree(lock.key);
        });
      }

      eachWay('a lost reply to a waiting request', async (t) => {
        const proxy = await proxyTo(t, server.port, (data, { replies }) => data.includes('WAIT') && !replies.length);
        const lock = (await connect(t, proxy.port)).lock(newKey(), { wait: 3_000 });
        const hold = await locks.lock(lock.key).acquire();
        const waiter = lock.acquire();
        await server.waiting(lock.key);
        await hold.release();
        const next = await waiter;
        assert.equal(proxy.replies.length, 1);
        assert.deepEqual((await server.holders(lock.key)).map((h) => h.token), [next.token]);
        await next.release();
        await isFree(lock.key);
      });

      test('every reply is lost: nothing is left behind', async (t) => {
        const proxy = await proxyTo(t, server.port, (data) => data.includes('LOCK.ACQUIRE'));
        const lock = (await connect(t, proxy.port)).lock(newKey(), { lease: 60_000, timeout: 400 });
        await assert.rejects(lock.acquire(), Unavailable);
        assert.ok(proxy.replies.length > 1, 'asked again');
        await isFree(lock.key);
      });

      const nothing = () => false;

      for (const wait of [0, 100]) {
        eachWay(`refused while an older request is stuck: nothing is left behind (wait ${wait})`, async (t) => {
          const proxy = await proxyTo(t, server.port, nothing, (data) => data.includes('LOCK.ACQUIRE'));
          const shared = await library.connect(proxy.port);
          t.after(() => library.close(shared));
          const lock = turnstile(shared).lock(newKey(), { lease: 60_000, timeout: 1_500, wait });
          const hold = await locks.lock(lock.key).acquire();
          if (wait) await assert.rejects(lock.acquire(), NotAcquired);
          else assert.equal(await lock.tryAcquire(), null);
          assert.match(proxy.stuck, /LOCK\.ACQUIRE/);
          await hold.release();
          const before = await counter(server, 'acquired');
          proxy.resume();
          await shared.ping(); // behind everything that was stuck
          assert.equal((await counter(server, 'acquired')) - before, 1, 'the old request was granted');
          assert.deepEqual(await server.holders(lock.key), []);
        });
      }

      test('refused while an older request waits for a reconnect: nothing is left behind', async (t) => {
        let waits = false; // node-redis asks first with 0, and tries at once
        const slowly = (tries) => {
          waits ||= tries > 0;
          return 2_500;
        };
        const proxy = await proxyTo(t, server.port, nothing);
        const shared = await library.connect(proxy.port, { socket: { reconnectStrategy: slowly }, retryStrategy: slowly });
        t.after(() => library.close(shared));
        const lock = turnstile(shared).lock(newKey(), { lease: 60_000, timeout: 1_000 });
        const hold = await locks.lock(lock.key).acquire();
        proxy.cut(); // and the next connection: node-redis tries that one at once
        await until(() => waits, 'it waits for a reconnect');
        assert.equal(await lock.tryAcquire(), null);
        await hold.release();
        const before = await counter(server, 'acquired');
        await shared.ping();
        assert.equal((await counter(server, 'acquired')) - before, 1, 'the old request was granted');
        assert.deepEqual(await server.holders(lock.key), []);
      });

      test('a release that never arrived, asked again after the lease: lost', async (t) => {
        const proxy = await proxyTo(t, server.port, nothing, (data) => data.includes('LOCK.RELEASE'));
        const lock = (await connect(t, proxy.port)).lock(newKey(), { lease: 300, renew: false, timeout: 1_200 });
        const hold = await lock.acquire();
        await assert.rejects(hold.release(), Lost);
        assert.match(proxy.stuck, /LOCK\.RELEASE/);
      });

      test('a slow grant is renewed a third of the lease after it was asked for', async (t) => {
        let renewed;
        const note = (data) => {
          if (data.includes('LOCK.TOUCH')) renewed ??= performance.now();
          return false;
        };
        const proxy = await proxyTo(t, server.port, note, (data) => data.includes('LOCK.ACQUIRE'));
        const lock = (await connect(t, proxy.port)).lock(newKey(), { lease: 3_000, timeout: 4_000 });
        const start = performance.now();
        const acquired = lock.acquire();
        await until(() => proxy.stuck, 'asked');
        await sleep(800);
        proxy.resume();
        const hold = await acquired;
        await until(() => renewed, 'renewed');
        // Counted from the grant it would be 1,800. Together with others it may be a thirtieth of the lease early.
        assert.ok(renewed - start >= 890 && renewed - start < 1_750, `${renewed - start} ms`);
        await hold.release();
      });

      test('a guarded write without an answer, in a session', async (t) => {
        const other = await start(t);
        const lock = (await connect(t, other.port)).lock('a', { session: true, lease: 60_000, timeout: 300 });
        const hold = await lock.acquire();
        other.process.kill('SIGSTOP');
        const before = performance.now();
        await assert.rejects(hold.run('SET', 'a:data', 'x'), Unavailable);
        assert.ok(performance.now() - before < 300 + slack);
        other.process.kill('SIGCONT');
        assert.equal(hold.signal.aborted, false); // it is the server that decides
        await hold.release();
      });

      test('a lost reply to touch and release', async (t) => {
        const proxy = await proxyTo(t, server.port, (data, { replies }) =>
          replies.length === 0 ? data.includes('LOCK.TOUCH') : replies.length === 1 && data.includes('LOCK.RELEASE'));
        const lock = (await connect(t, proxy.port)).lock(newKey(), { renew: false });
        const hold = await lock.acquire();
        await hold.touch();
        await hold.release();
        assert.deepEqual(proxy.replies, [':1\r\n', ':1\r\n']);
        await isFree(lock.key);
      });

      test('a lost reply to a counted release does not release twice', async (t) => {
        const proxy = await proxyTo(t, server.port, first('LOCK.RELEASE'));
        const lock = (await connect(t, proxy.port)).lock(newKey(), { reentrant: true });
        const outer = await lock.acquire();
        const inner = await lock.acquire();
        await assert.rejects(inner.release(), Unavailable);
        assert.equal((await server.holders(lock.key))[0].count, 1);
        await outer.release();
        await isFree(lock.key);
      });

      eachWay('deadlock', async () => {
        const [a, b] = [newKey(), newKey()];
        const holds = [await locks.lock(a, { owner: 'x' }).acquire(), await locks.lock(b, { owner: 'y' }).acquire()];
        const x = locks.lock(b, { owner: 'x', wait: 5_000 }).acquire();
        await server.waiting(b);
        await assert.rejects(locks.lock(a, { owner: 'y', wait: 5_000 }).acquire(), Deadlock);
        await holds[1].release();
        await (await x).release();
        await holds[0].release();
      });

      eachWay('superseded: by a newer call, by an operator', async () => {
        const key = newKey();
        const hold = await locks.lock(key).acquire();
        const lock = locks.lock(key, { owner: 'z', wait: 5_000 });
        const older = assert.rejects(lock.acquire(), Superseded);
        await server.waiting(key);
        const newer = assert.rejects(lock.acquire(), Superseded);
        await older;
        await server.waiting(key);
        await server.ask('LOCK.RELEASE', key, 'z');
        await newer;
        await hold.release();
      });

      eachWay('demoted: goes on waiting, for the server or another to be a primary again', async (t) => {
        const other = await start(t);
        const lock = (await connect(t, other.port)).lock('a', { wait: 5_000 });
        await other.ask('LOCK.ACQUIRE', 'a', 'somebody', 'PX', 60_000);
        const waiter = lock.acquire();
        await other.waiting('a');
        await other.ask('REPLICAOF', '127.0.0.1', '1');
        await other.waiting('a', 0);
        await assert.rejects(lock.tryAcquire(), NotPrimary);
        await other.ask('REPLICAOF', 'NO', 'ONE');
        await other.waiting('a');
        await other.ask('LOCK.RELEASE', 'a', 'somebody');
        await (await waiter).release();
        await other.ask('REPLICAOF', '127.0.0.1', '1');
        const start1 = performance.now();
        await assert.rejects((await connect(t, other.port)).lock('a', { wait: 300 }).acquire(), NotPrimary);
        assert.ok(performance.now() - start1 < 300 + slack);
      });

      parked(0, 'too many wait', async (t) => {
        const other = await start(t);
        await other.ask('CONFIG', 'SET', 'turnstile.max-queued', 1);
        const lock = (await connect(t, other.port)).lock('a', { wait: 5_000 });
        const hold = await lock.acquire();
        const next = lock.acquire();
        await other.waiting('a');
        await assert.rejects(lock.acquire(), WaitLimit);
        await hold.release();
        await (await next).release();
        assert.equal(await counter(other, 'stale_releases'), 0, 'a plain no has nothing to undo');
      });

      test('elsewhere in a cluster', async (t) => {
        const other = await start(t, '--cluster-enabled', 'yes', '--cluster-config-file', `${name}.conf`);
        const lock = (await connect(t, other.port)).lock('a', { wait: 5_000 });
        await assert.rejects(lock.acquire(), (error) => error instanceof Moved && /^CLUSTERDOWN/.test(error.message));
      });

      test('shared, limit, linger', async () => {
        const key = newKey();
        const readers = locks.lock(key, { shared: true });
        const two = [await readers.acquire(), await readers.acquire()];
        assert.equal(await locks.lock(key).tryAcquire(), null);
        for (const reader of two) await reader.release();
        const seats = locks.lock(key, { limit: 2 });
        const taken = [await seats.acquire(), await seats.acquire()];
        assert.equal(await seats.tryAcquire(), null);
        for (const seat of taken) await seat.release();
        const lingering = await locks.lock(key, { linger: 60_000, lease: 100, renew: false }).acquire();
        await told(lingering);
        await until(async () => (await server.ask('LOCK.FENCE', key, lingering.token)) === 0, 'the lease ends');
        assert.equal(await locks.lock(key).tryAcquire(), null);
        await assert.rejects(lingering.release(), Lost); // and ends the linger
        await (await until(() => locks.lock(key).tryAcquire(), 'free again', 1_000)).release();
      });

      test('a session', async () => {
        const lock = locks.lock(newKey(), { session: true, lease: 60_000 });
        const before = await server.connections();
        const hold = await lock.acquire();
        assert.ok((await server.holders(lock.key))[0].session);
        const id = (line) => /^id=(\d+)/.exec(line)[1];
        const its = (await server.connections()).find((c) => !before.some((b) => id(b) === id(c)));
        await server.ask('CLIENT', 'KILL', 'ID', id(its));
        await told(hold, 500); // a third of the lease is far away
        const next = await lock.acquire();
        await assert.rejects(hold.release(), Lost);
        await next.touch();
        await next.release();
        assert.equal(next.signal.aborted, false);
        await until(async () => (await server.connections()).length === before.length, 'it is closed');
        assert.throws(() => locks.lock('a', { session: true, reentrant: true }), TypeError);
      });

      test('several locks', async () => {
        const [a, b, c] = [newKey(), newKey(), newKey()];
        const lock = locks.lock(a, { also: [b, c], lease: 1_000 });
        await lock.using(async (hold) => {
          await sleep(1_300);
          for (const key of [a, b, c]) assert.equal(await server.ask('LOCK.FENCE', key), hold.token);
          assert.equal(await locks.lock(c).tryAcquire(), null);
        });
        const hold = await lock.acquire();
        await server.ask('DEL', b);
        await told(hold);
        await assert.rejects(hold.release(), Lost);
        for (const key of [a, c]) await isFree(key);
      });

      test('counted holds', async () => {
        const lock = locks.lock(newKey(), { reentrant: true, lease: 1_000 });
        const outer = await lock.acquire();
        await lock.using(async (inner) => {
          assert.equal(inner.token, outer.token);
          assert.equal((await server.holders(lock.key))[0].count, 2);
        });
        assert.equal((await server.holders(lock.key))[0].count, 1);
        await sleep(1_300);
        await outer.release();
        await isFree(lock.key);
      });

      test("the library's and the server's own errors", async (t) => {
        await server.ask('LPUSH', 'a:list', 'x');
        await assert.rejects(locks.lock('a:list').acquire(), /^\w*: WRONGTYPE/);
        await assert.rejects(locks.lock(newKey(), { lease: 0 }).acquire(), /ERR /);
        const dead = await start(t);
        const there = await connect(t, dead.port);
        await dead.stop();
        const refused = (error) => error instanceof Unavailable && error.cause instanceof Error;
        await assert.rejects(there.lock('a', { timeout: 200, wait: 100 }).acquire(), refused);
        for (const code of ['MOVED 1 127.0.0.1:1', 'ASK 1 127.0.0.1:1', 'TRYAGAIN Multiple keys']) {
          const elsewhere = { sendCommand: async () => Promise.reject(new Error(code)), duplicate() {} };
          await assert.rejects(turnstile(elsewhere).lock('a').acquire(), Moved);
        }
        assert.throws(() => turnstile({}), TypeError);
      });

      // Connections.

      test('300 holds at once: no connection beyond the client', async (t) => {
        const other = await start(t);
        const own = await connect(t, other.port);
        const before = (await other.connections()).length;
        const taken = await Promise.all(Array.from({ length: 300 }, (_, i) => own.lock(`a:${i}`, { wait: 1_000 }).acquire()));
        assert.equal(await own.lock('a:1').tryAcquire(), null);
        await assert.rejects(own.lock('a:1').acquire(), NotAcquired);
        assert.equal((await other.connections()).length, before);
        await Promise.all(taken.map((hold) => hold.release()));
        const total = Number(/total_connections_received:(\d+)/.exec(await other.ask('INFO', 'stats'))[1]);
        assert.equal(total, before, 'nor was there one for a moment');
      });

      parked(0, '200 waits: one connection more', async (t) => {
        const other = await start(t);
        const own = await connect(t, other.port);
        const before = (await other.connections()).length;
        const keys = Array.from({ length: 40 }, (_, i) => `a:${i}`);
        const taken = await Promise.all(keys.map((key) => own.lock(key).acquire()));
        let inside = 0;
        const waits = keys.flatMap((key) => [1, 2, 3, 4, 5].map(() => own.lock(key, { wait: 20_000 }).using(async () => inside++)));
        for (const key of keys) await other.waiting(key, 5);
        assert.equal((await other.connections()).length, before + 1);
        await Promise.all([...taken.map((hold) => hold.release()), ...waits]);
        assert.equal(inside, 200);
        assert.equal((await other.connections()).length, before + 1);
        assert.equal(await counter(other, 'locks'), 0);
        assert.equal(await counter(other, 'queued'), 0);
      });

      test('the renewals of all holds are written at once', async (t) => {
        const other = await start(t);
        const own = await connect(t, other.port);
        const lease = 1_500;
        const taken = await Promise.all(Array.from({ length: 100 }, (_, i) => own.lock(`a:${i}`, { lease }).acquire()));
        const { _write: write, _writev: writev } = net.Socket.prototype;
        t.after(() => Object.assign(net.Socket.prototype, { _write: write, _writev: writev }));
        const touches = (text) => text.split('LOCK.TOUCH').length - 1;
        const writes = [];
        net.Socket.prototype._write = function (data, ...rest) {
          if (this.remotePort === other.port && touches(String(data))) writes.push(touches(String(data)));
          return write.call(this, data, ...rest);
        };
        net.Socket.prototype._writev = function (chunks, ...rest) {
          const count = touches(chunks.map(({ chunk }) => String(chunk)).join(''));
          if (this.remotePort === other.port && count) writes.push(count);
          return writev.call(this, chunks, ...rest);
        };
        await until(async () => (await counter(other, 'touched')) >= 300, 'renewed three times');
        assert.ok(writes.length <= 15, `writes of ${writes}`); // the socket may take a part of them first
        assert.ok(taken.every((hold) => !hold.signal.aborted));
        await Promise.all(taken.map((hold) => hold.release()));
      });

      /** Those that the messages of the server go over. */
      const subscribers = async (from) => (await from.connections()).filter((line) => / sub=[1-9]| ssub=[1-9]/.test(line));

      parked(0, 'the subscriber is killed: asked again, and nobody waits in vain', async (t) => {
        const other = await start(t);
        const own = await connect(t, other.port);
        const lock = own.lock('a', { wait: 10_000 });
        const hold = await lock.acquire();
        const order = [];
        const waiters = [1, 2, 3].map((i) => lock.using(async () => order.push(i)));
        await other.waiting('a', 3);
        for (let i = 0; i < 3; ++i) {
          const [line] = await until(async () => ((await subscribers(other)).length === 1 ? subscribers(other) : null), 'one subscriber');
          const id = /^id=(\d+)/.exec(line)[1];
          await other.ask('CLIENT', 'KILL', 'ID', id);
          await until(async () => (await subscribers(other)).some((c) => !c.startsWith(`id=${id} `)), 'another one');
        }
        await other.waiting('a', 3);
        await hold.release();
        await Promise.all(waiters);
        assert.equal(order.length, 3);
        assert.equal(await counter(other, 'locks'), 0);
      });

      /** Those that a wait blocks. */
      const blocked = async (from) => (await from.connections()).filter((line) => / flags=b/.test(line));
      const received = async (from) => Number(/total_connections_received:(\d+)/.exec(await from.ask('INFO', 'stats'))[1]);

      parked(60_000, 'short waits block a connection, which is used again, and hear no messages', async (t) => {
        const other = await start(t);
        const own = await connect(t, other.port);
        const lock = own.lock('a', { wait: 10_000, lease: 60_000 });
        const before = await received(other);
        for (let i = 0; i < 5; ++i) {
          await other.ask('LOCK.ACQUIRE', 'a', 'somebody', 'PX', 60_000);
          const waiter = lock.acquire();
          await other.waiting('a');
          assert.equal((await blocked(other)).length, 1);
          await other.ask('LOCK.RELEASE', 'a', 'somebody');
          await (await waiter).release();
        }
        assert.equal((await received(other)) - before, 1);
        // It was tried the first time only. The eighth time after that it is tried again.
        const asked = async () => Number(/cmdstat_lock.acquire:calls=(\d+)/i.exec(await other.ask('INFO', 'commandstats'))[1]);
        assert.equal(await asked(), 5 + 1 + 5);
        await (await lock.acquire()).release();
        await other.ask('CONFIG', 'RESETSTAT');
        for (let i = 0; i < 3; ++i) await (await lock.acquire()).release();
        await other.ask('LOCK.ACQUIRE', 'a', 'somebody', 'PX', 60_000);
        const last = lock.acquire();
        await other.waiting('a');
        assert.equal(await asked(), 3 + 1 + 2);
        await other.ask('LOCK.RELEASE', 'a', 'somebody');
        await (await last).release();
      });

      parked(60_000, 'the fourth wait hears a message', async (t) => {
        const other = await start(t);
        const own = await connect(t, other.port);
        const lock = own.lock('a', { wait: 20_000, lease: 60_000 });
        for (let round = 0; round < 2; ++round) {
          const hold = await lock.acquire();
          const order = [];
          const waits = [];
          for (let i = 1; i <= 6; ++i) {
            waits.push(lock.using(async () => order.push(i)));
            await other.waiting('a', i);
            assert.equal((await blocked(other)).length, Math.min(i, 3));
            if (round === 0) assert.equal((await subscribers(other)).length, i > 3 ? 1 : 0);
          }
          await hold.release();
          await Promise.all(waits);
          assert.deepEqual(order, [1, 2, 3, 4, 5, 6]);
          assert.equal((await other.connections()).length, 2 + 3 + 1);
        }
      });

      parked(300, 'a wait that blocks a connection is taken over in its place', async (t) => {
        const other = await start(t);
        const own = await connect(t, other.port);
        const lock = own.lock('a', { wait: 20_000, lease: 60_000 });
        const hold = await lock.acquire();
        const order = [];
        const waits = [];
        for (let i = 1; i <= 6; ++i) {
          waits.push(lock.using(async () => order.push(i)));
          await other.waiting('a', i);
        }
        await until(async () => !(await blocked(other)).length, 'all hear messages');
        assert.equal((await subscribers(other)).length, 1);
        await other.waiting('a', 6);
        await hold.release();
        await Promise.all(waits);
        assert.deepEqual(order, [1, 2, 3, 4, 5, 6]);
        const start1 = performance.now();
        const next = await lock.acquire();
        await assert.rejects(own.lock('a', { wait: 700 }).acquire(), NotAcquired);
        const waited = performance.now() - start1;
        assert.ok(waited >= 699 && waited < 700 + slack, `${waited} ms`);
        await other.waiting('a', 0);
        await next.release();
        assert.equal(await counter(other, 'stale_releases'), 0);
      });

      parked(3, 'released while a wait is being taken over: granted once, and nothing is left', async () => {
        const keys = [];
        for (let i = 0; i < tries; ++i) {
          keys.push(newKey());
          const lock = locks.lock(keys[i], { lease: 60_000, wait: 10_000 });
          const hold = await lock.acquire();
          const waiter = lock.acquire();
          const end = performance.now() + (i % 24) / 4;
          while (performance.now() < end) await nextTurn();
          const [next] = await Promise.all([waiter, hold.release()]);
          assert.deepEqual((await server.holders(keys[i])).map(({ token }) => token), [next.token]);
          assert.ok(next.token > hold.token);
          await next.release();
        }
        assert.equal(await left(keys), 0);
      });

      parked(300, 'a blocked connection that is stuck: nothing is left behind', async (t) => {
        const proxy = await proxyTo(t, server.port, nothing, (data) => data.includes('WAIT'));
        const own = await connect(t, proxy.port);
        for (const wait of [250, 5_000]) {
          const lock = own.lock(newKey(), { lease: 60_000, timeout: 600, wait });
          const hold = await locks.lock(lock.key).acquire();
          if (wait === 250) {
            await assert.rejects(lock.acquire(), Unavailable);
            proxy.resume();
          } else {
            await assert.rejects(lock.acquire({ signal: AbortSignal.timeout(500) }));
          }
          await server.waiting(lock.key, 0);
          await hold.release();
          await sleep(50);
          assert.equal(await left([lock.key]), 0);
        }
        const stuck = await proxyTo(t, server.port, nothing, (data) => data.includes('WAIT'));
        const lock = (await connect(t, stuck.port)).lock(newKey(), { lease: 60_000, timeout: 600, wait: 5_000 });
        const hold = await locks.lock(lock.key).acquire();
        await assert.rejects(lock.acquire(), Unavailable);
        assert.match(stuck.stuck, /LOCK\.ACQUIRE[^]*LOCK\.RELEASE/, 'a release stands behind the request');
        await server.waiting(lock.key, 0);
        await hold.release();
        stuck.resume();
        await sleep(50);
        assert.equal(await left([lock.key]), 0);
      });

      parked(10_000, 'the reply on a blocked connection is lost, then aborted: no hold is left', async (t) => {
        const proxy = await proxyTo(t, server.port, first('WAIT'), (data) => /SUBSCRIBE/i.test(data));
        const lock = (await connect(t, proxy.port)).lock(newKey(), { lease: 60_000, wait: 60_000 });
        const hold = await locks.lock(lock.key, { lease: 60_000 }).acquire();
        const cancel = new AbortController();
        const rejected = assert.rejects(lock.acquire({ signal: cancel.signal }), /enough/);
        await server.waiting(lock.key);
        await hold.release();
        await until(() => proxy.stuck, 'it subscribes');
        cancel.abort(new Error('enough'));
        await rejected;
        assert.equal(await left([lock.key]), 0);
      });

      parked(usual, 'where no connection may be blocked, waits hear messages', async (t) => {
        const other = await start(t);
        await other.ask('CONFIG', 'SET', 'turnstile.max-waiters', 0);
        const lock = (await connect(t, other.port)).lock('a', { wait: 5_000 });
        const hold = await lock.acquire();
        const waiter = lock.acquire();
        await other.waiting('a');
        assert.equal((await subscribers(other)).length, 1);
        await hold.release();
        await (await waiter).release();
      });

      /** A client behind a proxy that tells the channels and ids of its requests. */
      const overheard = async (t, options, swallow) => {
        const requests = [];
        const hear = (data) => {
          for (const [, channel, id] of data.matchAll(/NOTIFY\r\n\$\d+\r\n(\S+)\r\n\$\d+\r\n(\S+)\r\n/g)) requests.push({ channel, id });
          return false;
        };
        const proxy = await proxyTo(t, server.port, hear, undefined, swallow);
        return { own: await connect(t, proxy.port, options), requests };
      };

      parked(0, 'a forged message of a grant is not believed', async (t) => {
        const { own, requests } = await overheard(t);
        const lock = own.lock(newKey(), { wait: 10_000 });
        const first = await locks.lock(lock.key).acquire();
        const before = await locks.lock(lock.key, { wait: 10_000 });
        const ahead = before.acquire();
        await server.waiting(lock.key);
        let got;
        const waiter = lock.acquire().then((hold) => (got = hold));
        await server.waiting(lock.key, 2);
        const touched = await counter(server, 'stale_touches');
        const [{ channel, id }] = requests;
        assert.match(channel, /^turnstile:[0-9a-f]{32}$/);
        assert.match(id, /^[0-9a-f]{32}$/);
        assert.equal(await server.ask('PUBLISH', channel, `${id} granted 123 ${lock.key}`), 1);
        await until(async () => (await counter(server, 'stale_touches')) > touched, 'it asks the server');
        await server.waiting(lock.key, 2); // and keeps its place
        assert.equal(got, undefined);
        for (const text of ['', id, 'somebody granted 1 a', `${id}x granted 1 a`]) await server.ask('PUBLISH', channel, text);
        await first.release();
        const second = await ahead;
        assert.equal(got, undefined);
        await second.release();
        const third = await waiter;
        assert.equal(third.token, await server.ask('LOCK.FENCE', lock.key));
        assert.ok(third.token > second.token);
        await third.release();
      });

      parked(0, 'a forged message of a time-out is not believed', async (t) => {
        const { own, requests } = await overheard(t);
        const lock = own.lock(newKey(), { wait: 10_000, lease: 60_000 });
        const first = await locks.lock(lock.key, { lease: 60_000 }).acquire();
        const waiter = lock.acquire();
        waiter.catch(() => {}); // it is looked at below
        await server.waiting(lock.key);
        const [{ channel, id }] = requests;
        await server.ask('PUBLISH', channel, `${id} timeout ${lock.key}`);
        await until(() => requests.length === 2, 'it asks again');
        await server.waiting(lock.key);
        await first.release();
        await (await waiter).release();
      });

      for (const [text, kind] of [['ERR made up', Error], ['UNBLOCKED made up', Superseded]]) {
        parked(0, `a forged message of an error leaves nothing behind (${text})`, async (t) => {
          const { own, requests } = await overheard(t);
          const lock = own.lock(newKey(), { wait: 60_000, lease: 60_000 });
          const first = await locks.lock(lock.key, { lease: 60_000 }).acquire();
          const rejected = assert.rejects(lock.acquire(), kind);
          await server.waiting(lock.key);
          const [{ channel, id }] = requests;
          await server.ask('PUBLISH', channel, `${id} error ${text}`);
          await rejected;
          await server.waiting(lock.key, 0);
          await first.release();
          assert.equal(await left([lock.key]), 0);
        });
      }

      for (const kind of ['granted', 'timeout']) {
        parked(0, `a message that is lost (${kind})`, async (t) => {
          const { own } = await overheard(t, {}, (data) => data.includes(` ${kind} `));
          const lock = own.lock(newKey(), { wait: 500, timeout: 800 });
          const first = await locks.lock(lock.key).acquire();
          const waiter = kind === 'granted' ? lock.acquire() : assert.rejects(lock.acquire(), NotAcquired);
          await server.waiting(lock.key);
          if (kind === 'granted') {
            await first.release();
            const hold = await waiter;
            assert.equal(hold.token, await server.ask('LOCK.FENCE', lock.key));
            await hold.release();
          } else {
            await waiter;
            await server.waiting(lock.key, 0);
            await first.release();
          }
          await isFree(lock.key);
        });
      }

      parked(0, 'a message that is lost does not count a hold twice', async (t) => {
        const { own } = await overheard(t, {}, (data) => data.includes(' granted '));
        const lock = own.lock(newKey(), { wait: 500, timeout: 2_000, reentrant: true });
        const first = await locks.lock(lock.key).acquire();
        const waiter = lock.acquire();
        await server.waiting(lock.key);
        await first.release();
        const hold = await waiter;
        assert.equal((await server.holders(lock.key))[0].count, 1);
        await hold.release();
        await isFree(lock.key);
      });

      parked(0, 'a grant that nobody heard of ends soon', async (t) => {
        const { own } = await overheard(t, {}, (data) => data.includes(' granted '));
        const lock = own.lock(newKey(), { wait: 60_000, lease: 60_000, timeout: 1_000 });
        const first = await locks.lock(lock.key).acquire();
        const cancel = new AbortController();
        const waiter = assert.rejects(lock.acquire({ signal: cancel.signal }), /enough/);
        await server.waiting(lock.key);
        await first.release();
        const [holder] = await until(async () => ((await server.holders(lock.key)).length ? server.holders(lock.key) : null), 'granted');
        assert.ok(holder['lease-left-ms'] <= 2_000, `${holder['lease-left-ms']} ms`);
        cancel.abort(new Error('enough'));
        await waiter;
        assert.deepEqual(await server.holders(lock.key), []);
      });

      for (const [what, options] of [['a hold that was waited for', { wait: 5_000 }], ['a hold that is watched', { watch: true }]]) {
        parked(0, `told at once when it is lost: ${what}`, async () => {
          const lock = locks.lock(newKey(), { ...options, lease: 60_000 });
          const first = options.wait && (await lock.acquire());
          const acquired = lock.acquire();
          if (first) await server.waiting(lock.key);
          await (first && first.release());
          const hold = await acquired;
          assert.ok(hold.signal && (await hold.owned()));
          const before = performance.now();
          await server.ask('DEL', lock.key);
          const end = await told(hold);
          assert.ok(end - before < slack, `${end - before} ms`); // a third of the lease is far away
          assert.match(hold.signal.reason.message, /forced/);
          assert.equal(await hold.owned(), false);
          await assert.rejects(hold.release(), Lost);
        });
      }

      for (const right of ['publish', 'subscribe', 'use any channel']) {
        test(`without the right to ${right}: waits on connections that are used again`, async (t) => {
          const other = await start(t);
          const rules = { publish: '-publish', subscribe: '-subscribe', 'use any channel': 'resetchannels' };
          await other.ask('ACL', 'SETUSER', 'quiet', 'on', '>secret', '~*', '+@all', 'allchannels', rules[right]);
          const own = await connect(t, other.port, { username: 'quiet', password: 'secret' });
          const before = (await other.connections()).length;
          const received = async () => Number(/total_connections_received:(\d+)/.exec(await other.ask('INFO', 'stats'))[1]);
          const first = await received();
          const lock = own.lock('a', { wait: 5_000 });
          for (let i = 0; i < 5; ++i) {
            const hold = await lock.acquire();
            const next = lock.acquire();
            await other.waiting('a');
            await hold.release();
            await (await next).release();
          }
          // One that waits, and one for messages that never come.
          assert.ok((await received()) - first <= 2, `${(await received()) - first} connections`);
          const hold = await lock.acquire();
          const crowd = Array.from({ length: 12 }, () => lock.using(() => {}));
          await other.waiting('a', 12);
          await hold.release();
          await Promise.all(crowd);
          await until(async () => (await other.connections()).length <= before + 4, 'three are kept', 1_000);
          const cancel = new AbortController();
          const last = await lock.acquire();
          const aborted = assert.rejects(lock.acquire({ signal: cancel.signal }), /enough/);
          await other.waiting('a');
          cancel.abort(new Error('enough'));
          await aborted;
          await other.waiting('a', 0);
          await last.release();
        });
      }

      // Ends: of the time of the library, of the client, of the process.

      eachWay("the library's own time-out ends the request: no hold and no wait is left", async (t) => {
        const other = await start(t);
        for (const wait of [0, 10_000]) {
          const own = await connect(t, other.port, { timeout: 250 });
          const lock = own.lock(`a:${wait}`, { lease: 60_000, wait, timeout: 1_000 });
          const first = wait ? await own.lock(lock.key, { lease: 60_000 }).acquire() : null;
          const cancel = new AbortController();
          other.process.kill('SIGSTOP');
          const rejected = assert.rejects(lock.acquire({ signal: cancel.signal }));
          if (wait) setTimeout(() => cancel.abort(new Error('enough')), 700);
          await rejected;
          other.process.kill('SIGCONT');
          const held = async () => (await other.holders(lock.key)).map(({ owner }) => owner);
          await other.ask('PING');
          await until(async () => (await held()).join() === (first?.owner ?? ''), 'nothing is left', 2_000);
          await sleep(150); // what is under way has arrived
          assert.deepEqual(await held(), first ? [first.owner] : []);
          assert.equal(await counter(other, 'queued'), 0);
        }
      });

      eachWay("a wait is longer than the library's time-out", async (t, ms) => {
        const own = await connect(t, server.port, { timeout: 250 });
        const lock = own.lock(newKey(), { wait: 5_000 });
        const hold = await locks.lock(lock.key).acquire();
        const before = await counter(server, 'waits');
        const waiter = lock.acquire();
        await server.waiting(lock.key);
        await sleep(700);
        await hold.release();
        const next = await waiter;
        assert.equal((await counter(server, 'waits')) - before, ms === 4 ? 2 : 1, 'asked once, or taken over');
        await next.release();
      });

      for (const [how, close] of Object.entries(library.closings)) {
        eachWay(`the client is closed (${how}): holds end, waits end, nothing is renewed`, async (t) => {
          const other = await start(t);
          const own = await library.connect(other.port);
          t.after(() => library.close(own));
          serverOf(own).park = park;
          const first = await turnstile(own).lock('d').acquire();
          const second = turnstile(own).lock('d', { wait: 5_000 }).acquire();
          await other.waiting('d');
          await first.release();
          await (await second).release(); // its connection is kept
          const taken = turnstile(own).lock('a', { lease: 600 });
          const hold = await taken.acquire();
          const session = await turnstile(own).lock('b', { session: true, lease: 600 }).acquire();
          await other.ask('LOCK.ACQUIRE', 'c', 'somebody', 'PX', 60_000);
          const waiter = assert.rejects(turnstile(own).lock('c', { wait: 60_000 }).acquire(), Unavailable);
          await other.waiting('c');
          await Promise.resolve(close(own)).catch(() => {});
          await told(hold, 1_000);
          assert.match(hold.signal.reason.message, /client was closed/);
          await told(session, 1_000);
          await waiter;
          await other.waiting('c', 0);
          await until(async () => (await other.connections()).length === 1, "only the admin's is left", 2_000);
          const touched = await counter(other, 'touched');
          await until(async () => (await other.holders('a')).length === 0, 'the lease ends');
          assert.equal(await counter(other, 'touched'), touched, 'nobody renewed');
          await assert.rejects(hold.release(), Lost);
          await assert.rejects(taken.acquire(), Unavailable);
        });
      }

      for (const [what, code] of Object.entries({
        'a hold': `await locks.lock('a', { lease: 60_000 }).acquire();`,
        'a hold that was waited for': `
          const first = await locks.lock('a').acquire();
          const second = locks.lock('a', { wait: 5_000 }).acquire();
          await new Promise((resolve) => setTimeout(resolve, 100));
          await first.release();
          await second;`,
        'a hold that was waited for by message': `
          serverOf(redis).park = 20;
          const first = await locks.lock('a').acquire();
          const second = locks.lock('a', { wait: 5_000 }).acquire();
          await new Promise((resolve) => setTimeout(resolve, 200));
          await first.release();
          await second;`,
        'a session': `await locks.lock('a', { lease: 60_000, session: true }).acquire();`,
      })) {
        for (const end of ['close', 'unref']) test(`${what} does not keep the process alive (${end})`, async (t) => {
          const other = await start(t);
          const file = new URL('client-examples/node/turnstile.mjs', `file://${root}`);
          const script = `
            import { createRequire } from 'node:module';
            import { serverOf, turnstile } from '${file}';
            const require = createRequire('${file}');
            ${library.script(other.port)}
            const locks = turnstile(redis);
            ${code}
            console.log('held');
            await ${end}();`;
          const child = spawn(process.execPath, ['--input-type=module', '-e', script]);
          t.after(() => child.kill('SIGKILL'));
          let output = '';
          let heldAt;
          for (const stream of [child.stdout, child.stderr]) {
            stream.on('data', (data) => {
              output += data;
              heldAt ??= performance.now();
            });
          }
          const exited = once(child, 'close').then(([status]) => status);
          const status = await Promise.race([exited, sleep(10_000, 'too late', { ref: false })]);
          assert.equal(status, 0, output);
          assert.match(output, /held/);
          assert.ok(performance.now() - heldAt < 1_500, `it ended after ${performance.now() - heldAt} ms`);
        });
      }

      // Asking about locks.

      test('locked, owned, adopted', async (t) => {
        const lock = locks.lock(newKey(), { lease: 1_000 });
        assert.equal(await lock.locked(), false);
        const hold = await lock.acquire();
        assert.equal(await lock.locked(), true);
        assert.equal(await hold.owned(), true);
        // Another process has stored owner and token, and goes on with it.
        const there = (await connect(t, server.port)).lock(lock.key, { lease: 1_000 });
        const { owner, token } = hold;
        const adopted = await there.adopt(owner, token);
        assert.equal(adopted.token, token);
        assert.equal((await there.adopt(owner)).token, token);
        await assert.rejects(there.adopt(owner, token - 1), Lost);
        await assert.rejects(there.adopt('stranger'), Lost);
        const again = await locks.lock(lock.key, { owner }).acquire();
        assert.equal(again.token, token);
        await sleep(1_300);
        assert.equal(await adopted.owned(), true);
        await adopted.release();
        assert.equal(await adopted.owned(), false);
        assert.equal(await hold.owned(), false);
        assert.equal(await lock.locked(), false);
        await assert.rejects(hold.release(), Lost);
        await assert.rejects(again.release(), Lost);
      });

      test('an adopted hold ends at its maximum', async () => {
        const lock = locks.lock(newKey(), { lease: 300 });
        const begin = performance.now();
        await server.ask('LOCK.ACQUIRE', lock.key, 'stored', 'PX', 300, 'MAXHOLD', 600);
        const hold = await lock.adopt('stored');
        const end = await told(hold);
        assert.ok(end - begin >= 550 && end - begin < 600 + slack, `${end - begin} ms`);
      });

      test('the error says who holds it and for how long', async () => {
        const key = newKey();
        const named = await locks.lock(key, { tag: 'host-7 pid 12', lease: 30_000 }).acquire();
        await assert.rejects(locks.lock(key).acquire(), (error) => {
          assert.ok(error instanceof NotAcquired);
          assert.match(error.message, new RegExp(`^${key} is held by host-7 pid 12, for another (29|30)\\d{3} ms`));
          assert.equal(error.holder, 'host-7 pid 12');
          assert.ok(error.leaseLeft > 29_000 && error.leaseLeft <= 30_000);
          return true;
        });
        await named.release();
        const unnamed = await locks.lock(key).acquire();
        await assert.rejects(locks.lock(key).acquire(), (error) => {
          assert.match(error.message, /held by owner [0-9a-f]{6}…, /);
          assert.doesNotMatch(error.message, new RegExp(unnamed.owner));
          return true;
        });
        await unnamed.release();
      });

      test('weight, a longest line', async () => {
        const key = newKey();
        const heavy = await locks.lock(key, { limit: 3, weight: 2 }).acquire();
        assert.equal(await locks.lock(key, { limit: 3, weight: 2 }).tryAcquire(), null);
        const light = await locks.lock(key, { limit: 3 }).acquire();
        const one = locks.lock(key, { wait: 5_000, maxLine: 1 });
        const waiter = one.acquire();
        await server.waiting(key);
        const start1 = performance.now();
        await assert.rejects(one.acquire(), NotAcquired);
        assert.ok(performance.now() - start1 < slack);
        await heavy.release();
        await light.release();
        await (await waiter).release();
      });

      test('the part that talks', async () => {
        const part = serverOf(redis);
        assert.equal(part, serverOf(redis));
        const key = newKey();
        const grant = await part.acquire([key], 'me', { lease: 5_000 });
        assert.equal(grant.token, await server.ask('LOCK.FENCE', key));
        assert.ok(grant.validFrom <= performance.now());
        assert.equal(await part.acquire([key], 'you', { lease: 5_000 }), null);
        assert.equal((await part.touch([key], 'me', 6_000)).count, 1);
        assert.equal((await part.info(key)).holders[0].owner, 'me');
        await part.abandon([key], 'me');
        assert.deepEqual(await part.release([key], 'me'), { count: 0, again: false });
        const floor = grant.token + 1_000_000;
        assert.equal((await part.acquire([key], 'us', { lease: 5_000, options: { floor } })).token, floor);
        await part.abandon([key], 'us');
        await isFree(key);
      });

      // Without the module.

      const without = ['token', 'line', 'modes'];

      test('the module is missing', async (t) => {
        const bare = await start(t, 'without the module');
        const own = await library.connect(bare.port);
        t.after(() => library.close(own));
        await assert.rejects(turnstile(own).lock('a').acquire(), (error) => {
          assert.ok(error instanceof ModuleMissing);
          assert.match(error.message, /not loaded the Turnstile module.*fallback: true/);
          return true;
        });
        const strict = turnstile(own, { fallback: true });
        await assert.rejects(strict.lock('a').acquire(), (error) => error instanceof Unsupported && /lacks token;.*without: \['token'\]/.test(error.message));
        const part = turnstile(own, { fallback: true, without: ['token'] });
        await assert.rejects(part.lock('a', { wait: 100 }).acquire(), /lacks line/);
        await assert.rejects(part.lock('a', { shared: true }).acquire(), /lacks modes/);
        await assert.rejects(part.lock('a', { limit: 2 }).acquire(), /lacks modes/);
        const locks = turnstile(own, { fallback: true, without });
        await assert.rejects(locks.lock('a', { also: ['b'] }).acquire(), /lacks also/);
        await assert.rejects(locks.lock('a', { reentrant: true }).acquire(), /lacks reentrant/);
        await assert.rejects(locks.lock('a', { session: true }).acquire(), /lacks session/);

        const lock = locks.lock('a', { lease: 600, wait: 5_000 });
        const hold = await lock.acquire();
        assert.equal(hold.token, null);
        assert.equal(await bare.ask('GET', 'a'), hold.owner);
        assert.equal(await lock.tryAcquire(), null);
        assert.equal(await locks.lock('a', { shared: true }).tryAcquire(), null);
        await assert.rejects(locks.lock('a').acquire(), /^NotAcquired: a is held by somebody, for another \d+ ms/);
        assert.equal(await lock.locked(), true);
        await assert.rejects(hold.run('SET', 'b', 'x'), Unsupported);
        const waiter = lock.acquire();
        await sleep(900); // beyond the lease: it is renewed
        assert.equal(await hold.owned(), true);
        await hold.release();
        const next = await waiter;
        assert.equal((await lock.adopt(next.owner)).owner, next.owner);
        assert.equal((await locks.lock('a', { owner: next.owner }).acquire()).owner, next.owner);
        await bare.ask('SET', 'a', 'another', 'PX', 60_000);
        await told(next);
        await assert.rejects(next.release(), Lost);
        assert.equal(await bare.ask('GET', 'a'), 'another', "another's lock is left alone");
        const cancel = new AbortController();
        const aborted = assert.rejects(lock.acquire({ signal: cancel.signal }), /enough/);
        cancel.abort(new Error('enough'));
        await aborted;
        await bare.ask('DEL', 'a');
        assert.equal(await lock.locked(), false);
      });

      test('the module is missing: asked about a lock first, and not for it', async (t) => {
        const bare = await start(t, 'without the module');
        await bare.ask('SET', 'a', 'stored', 'PX', 60_000);
        const fresh = async () => {
          const own = await library.connect(bare.port);
          t.after(() => library.close(own));
          return own;
        };
        const options = { fallback: true, without };
        assert.equal(await turnstile(await fresh(), options).lock('a').locked(), true);
        assert.equal(await turnstile(await fresh(), options).lock('b').locked(), false);
        await assert.rejects(turnstile(await fresh(), options).lock('a').adopt('stranger'), Lost);
        const hold = await turnstile(await fresh(), options).lock('a').adopt('stored');
        assert.equal(hold.token, null);
        await hold.release();
        assert.equal(await bare.ask('EXISTS', 'a'), 0);
        await assert.rejects(turnstile(await fresh()).lock('a').locked(), ModuleMissing);
        await assert.rejects(turnstile(await fresh()).lock('a').adopt('stored'), ModuleMissing);
      });

      test('a plain lock: a lost reply, an abort, a time-out of the library', async (t) => {
        const bare = await start(t, 'without the module');
        const proxy = await proxyTo(t, bare.port, (data, { replies }) => /\$3\r\nSET\r\n/.test(data) && !replies.length);
        const options = { fallback: 'always', without };
        const own = await library.connect(proxy.port);
        t.after(() => library.close(own));
        const locks = turnstile(own, options);
        const hold = await locks.lock('a').acquire();
        assert.equal(proxy.replies.length, 1);
        assert.equal(await bare.ask('GET', 'a'), hold.owner);
        await hold.release();
        assert.equal(await bare.ask('EXISTS', 'a'), 0);
        for (let i = 0; i < 60; ++i) {
          const cancel = new AbortController();
          const acquired = locks.lock('a', { lease: 60_000 }).acquire({ signal: cancel.signal }).then((got) => got.release(), (error) => assert.match(error.message, /enough/));
          for (let turn = 0; turn < i % 20; ++turn) await nextTurn();
          cancel.abort(new Error('enough'));
          await acquired;
          assert.equal(await bare.ask('EXISTS', 'a'), 0);
        }
        const hasty = await library.connect(bare.port, { timeout: 250 });
        t.after(() => library.close(hasty));
        bare.process.kill('SIGSTOP');
        await assert.rejects(turnstile(hasty, options).lock('b', { lease: 60_000, timeout: 1_000 }).acquire(), Unavailable);
        bare.process.kill('SIGCONT');
        await bare.ask('PING');
        await sleep(150); // what is under way has arrived
        await until(async () => (await bare.ask('EXISTS', 'b')) === 0, 'nothing is left', 2_000);
      });

      test('plain locks use the commands that the server has', async () => {
        // No server here has them all, so this one is made up: it tells what it was asked.
        for (const [known, commands] of [
          [['DELEX'], ['SET k me IFEQ me PX 5000', 'DELEX k IFEQ me']],
          [['DELIFEQ'], ['SET k me IFEQ me PX 5000', 'DELIFEQ k me']],
          [[], [/^EVALSHA \w{40} 1 k me 5000$/, /^EVAL if .* 1 k me 5000$/, /^EVALSHA \w{40} 1 k me$/, /^EVAL if .* 1 k me$/]],
        ]) {
          const asked = [];
          const answer = async (args) => {
            if (args[0] === 'COMMAND') return args.slice(2).map((command) => (known.includes(command) ? [command] : null));
            asked.push(args.join(' '));
            if (args[0] === 'EVALSHA') throw new Error('NOSCRIPT No matching script');
            return args[0] === 'SET' ? 'OK' : 1;
          };
          const part = serverOf({ sendCommand: answer, duplicate() {} }, { plain: true });
          assert.equal((await part.touch(['k'], 'me', 5_000)).count, 1);
          assert.equal((await part.release(['k'], 'me')).count, 1);
          assert.equal(asked.length, commands.length, asked.join('\n'));
          commands.forEach((command, i) => (typeof command === 'string' ? assert.equal(asked[i], command) : assert.match(asked[i], command)));
        }
      });

      test('a node of a cluster that cannot be connected to does not end the process', async () => {
        const unhandled = [];
        const note = (error) => unhandled.push(error);
        process.prependListener('unhandledRejection', note);
        const nodeClient = () => Promise.reject(new Error('not there'));
        const slots = Array(16_384).fill({ master: {} });
        const part = serverOf({ sendCommand() {}, duplicate() {}, nodeClient, slots });
        assert.equal(part.stream('a'), undefined);
        part.releaseLater(['a'], 'me');
        for (let turn = 0; turn < 5; ++turn) await nextTurn();
        process.off('unhandledRejection', note);
        assert.deepEqual(unhandled, []);
      });

      test('a key prefix of the client is not applied', async (t) => {
        const own = await library.connect(server.port, { keyPrefix: 'app:' });
        t.after(() => library.close(own));
        const key = newKey();
        const lock = turnstile(own).lock(key, { wait: 5_000 });
        const hold = await lock.acquire();
        assert.equal((await server.holders(key)).length, 1);
        const waiter = lock.acquire();
        await server.waiting(key);
        await hold.release();
        await (await waiter).release();
        if (!own.call) return;
        assert.throws(() => serverOf(own, { plain: true }), (error) => error instanceof Unsupported && /keyPrefix/.test(error.message));
      });

      // Clusters.

      /** Two nodes with half of the slots each. */
      const startCluster = async (t) => {
        const nodes = [];
        for (const range of [[0, 8191], [8192, 16383]]) {
          const node = await start(t, '--cluster-enabled', 'yes', '--cluster-config-file', `nodes-${randomUUID()}.conf`, '--cluster-node-timeout', 2_000);
          await node.ask('CLUSTER', 'ADDSLOTSRANGE', ...range);
          node.id = await node.ask('CLUSTER', 'MYID');
          nodes.push(node);
        }
        await nodes[0].ask('CLUSTER', 'MEET', '127.0.0.1', nodes[1].port);
        for (const node of nodes) {
          await until(async () => {
            const info = await node.ask('CLUSTER', 'INFO');
            return /cluster_state:ok/.test(info) && /cluster_known_nodes:2/.test(info) && /cluster_slots_ok:16384/.test(info);
          }, 'the cluster is up', 20_000);
        }
        const cluster = await library.connectCluster(nodes.map(({ port }) => port));
        t.after(() => library.close(cluster));
        return { nodes, cluster, locks: turnstile(cluster) };
      };
      const errors = async (node) => await node.ask('INFO', 'errorstats');

      test('a cluster: locks on all nodes, without redirections', async (t) => {
        const { nodes, locks } = await startCluster(t);
        const keys = Array.from({ length: 40 }, (_, i) => `lock:${i}`);
        const before = [];
        for (const node of nodes) before.push((await node.connections()).length);
        const taken = await Promise.all(keys.map((key) => locks.lock(key, { lease: 2_000 }).acquire()));
        for (const [i, node] of nodes.entries()) {
          assert.ok((await counter(node, 'locks')) > 5);
          assert.ok((await node.connections()).length <= before[i] + 1, 'the library may connect to a node when it is needed');
        }
        const waiters = keys.map((key) => locks.lock(key, { wait: 10_000 }).acquire());
        for (const [i, key] of keys.entries()) {
          const node = (await nodes[0].ask('CLUSTER', 'KEYSLOT', key)) < 8192 ? nodes[0] : nodes[1];
          await node.waiting(key);
          if (i === 0) await sleep(2_200); // all are renewed meanwhile
        }
        for (const node of nodes) {
          assert.equal((await subscribers(node)).length, 1, 'one for each node');
          assert.doesNotMatch(await errors(node), /MOVED|ASK|CROSSSLOT/);
        }
        await Promise.all(taken.map((hold) => hold.release()));
        const next = await Promise.all(waiters);
        next.forEach((hold, i) => assert.ok(hold.token > taken[i].token));
        await next[0].run('SET', `{${keys[0]}}:data`, 'x');
        const both = await locks.lock('{pair}a', { also: ['{pair}b'] }).acquire();
        assert.equal(await locks.lock('{pair}b').tryAcquire(), null);
        await both.release();
        await Promise.all(next.map((hold) => hold.release()));
        for (const node of nodes) assert.doesNotMatch(await errors(node), /MOVED|ASK|CROSSSLOT/);
      });

      test('a cluster: a slot moves while some wait, then while its lock is held', async (t) => {
        const { nodes, locks } = await startCluster(t);
        const key = 'lock:moves';
        const slot = await nodes[0].ask('CLUSTER', 'KEYSLOT', key);
        let [from, to] = slot < 8192 ? nodes : [...nodes].reverse();
        const move = async (step = async () => {}) => {
          await to.ask('CLUSTER', 'SETSLOT', slot, 'IMPORTING', from.id);
          await from.ask('CLUSTER', 'SETSLOT', slot, 'MIGRATING', to.id);
          await from.ask('MIGRATE', '127.0.0.1', to.port, '', 0, 2_000, 'KEYS', key);
          await step();
          for (const node of [to, from]) await node.ask('CLUSTER', 'SETSLOT', slot, 'NODE', to.id);
          [from, to] = [to, from];
        };
        const lock = locks.lock(key, { wait: 20_000, lease: 2_000 });
        let inside = 0;
        let most = 0;
        const tokens = [];
        const first = await lock.acquire();
        tokens.push(first.token);
        const waiters = [1, 2, 3, 4].map(() => lock.using(async (hold) => {
          most = Math.max(most, ++inside);
          tokens.push(hold.token);
          await hold.run('SET', `{${key}}:data`, tokens.length);
          --inside;
        }));
        await from.waiting(key, 4);
        for (let i = 0; i < 3; ++i) {
          // Between the steps the key is at the new node, which does not own the slot yet.
          await move(() => sleep(i * 150));
          await from.waiting(key, 4);
        }
        assert.equal(first.signal.aborted, false, 'renewed all the time');
        assert.equal(await from.ask('LOCK.FENCE', key), first.token);
        await move();
        await first.release();
        await Promise.all(waiters);
        assert.equal(most, 1);
        assert.deepEqual(tokens, [...tokens].sort((a, b) => a - b));
        assert.equal(tokens.length, 5);
        for (const node of nodes) {
          assert.equal(await counter(node, 'locks'), 0);
          assert.equal(await counter(node, 'queued'), 0);
        }
      });

      test('a cluster: aborted, and closed', async (t) => {
        const { nodes, cluster, locks } = await startCluster(t);
        const lock = locks.lock('lock:a', { wait: 20_000, lease: 60_000 });
        const hold = await lock.acquire();
        const [node] = (await nodes[0].ask('CLUSTER', 'KEYSLOT', 'lock:a')) < 8192 ? nodes : [nodes[1]];
        const cancel = new AbortController();
        const aborted = assert.rejects(lock.acquire({ signal: cancel.signal }), /enough/);
        await node.waiting('lock:a');
        cancel.abort(new Error('enough'));
        await aborted;
        await node.waiting('lock:a', 0);
        const waiter = assert.rejects(lock.acquire(), Unavailable);
        await node.waiting('lock:a');
        library.close(cluster);
        await told(hold, 2_000);
        await waiter;
        await node.waiting('lock:a', 0);
        for (const each of nodes) await until(async () => (await each.connections()).filter((c) => !/ flags=[MS]/.test(c)).length === 1, "only the admin's is left", 2_000);
      });

      test('one connection is left open, for messages', async () => {
        // The admin's, the client's and the subscriber's; and up to three for short waits, or when a reply is late.
        await until(async () => (await server.connections()).length <= 6, 'no more than six');
        assert.ok((await subscribers(server)).length <= 1);
      });
    });
  }

  test('the demonstration runs and ends by itself', async () => {
    const server = await Server.start();
    const demo = spawn(process.execPath, [path.join(root, 'client-examples/node/demo.mjs'), `redis://127.0.0.1:${server.port}`]);
    let output = '';
    let last;
    for (const stream of [demo.stdout, demo.stderr]) {
      stream.on('data', (data) => {
        output += data;
        last = performance.now();
      });
    }
    const timer = setTimeout(() => demo.kill('SIGKILL'), 15_000);
    const [code] = await once(demo, 'close');
    clearTimeout(timer);
    assert.equal(code, 0, output);
    assert.ok(performance.now() - last < 2_000, 'no timer and no socket is left');
    assert.equal(output.match(/told at once/g)?.length, 2, output);
    await server.stop();
  });
});
