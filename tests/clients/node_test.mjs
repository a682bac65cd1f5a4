// node --test tests/clients/node_test.mjs
//
// client-examples/node/turnstile.mjs with node-redis and with ioredis, against servers of its own:
// paused, killed, demoted, and behind a proxy that loses replies. The module is build/turnstile.so, or
// what TURNSTILE_MODULE names; the server is redis-server, or what REDIS_SERVER names. Needs
// `npm ci --prefix client-examples/node`.

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

const { turnstile, Deadlock, Fenced, Lost, Moved, NotAcquired, NotPrimary } = client;
const { Superseded, Unavailable, WaitLimit } = client;
const root = fileURLToPath(new URL('../../', import.meta.url));
const require = createRequire(path.join(root, 'client-examples/node/'));
const { createClient } = require('redis');
const { Redis } = require('ioredis');

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
    const base = ['--bind', '127.0.0.1', '--port', port, '--save', '', '--dir', folder, '--loadmodule', module];
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
 * request on that `stall` names, its connection is stuck: nothing reaches the server before resume().
 */
class Proxy {
  replies = []; // those that were lost
  #refuse = false;
  #stuck; // the connection, and what it sent
  #stalled = false;

  static async start(port, lose, stall = () => false) {
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
      const socket = timeout && { socketTimeout: timeout };
      const commandOptions = timeout && { timeout };
      const redis = createClient({ url, ...options, ...(timeout && { socket, commandOptions }) });
      return redis.on('error', () => {}).connect();
    },
    close: (redis) => redis.isOpen && redis.destroy(),
  },
  ioredis: {
    async connect(port, { timeout, ...options } = {}) {
      const limits = timeout && { commandTimeout: timeout, socketTimeout: timeout };
      const redis = new Redis(port, '127.0.0.1', { ...options, ...limits, lazyConnect: true });
      redis.on('error', () => {});
      await redis.connect();
      return redis;
    },
    close: (redis) => redis.disconnect(),
  },
};

// Most of the time is spent waiting.
describe('turnstile.mjs', { concurrency: 3 }, () => {
  for (const [name, library] of Object.entries(libraries)) {
    describe(name, { concurrency: 1 }, () => {
      let server, redis, locks;
      let number = 0;
      const newKey = () => `lock:${name}:${++number}`;

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
        return turnstile(own);
      };
      const start = async (t, ...options) => {
        const own = await Server.start(...options);
        t.after(() => own.stop());
        return own;
      };
      const proxyTo = async (t, port, lose, stall) => {
        const proxy = await Proxy.start(port, lose, stall);
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

      test('waiting in line', async () => {
        const lock = locks.lock(newKey(), { wait: 5_000, lease: 500 });
        const first = await lock.acquire();
        const waiter = lock.acquire();
        await server.waiting(lock.key);
        assert.equal((await server.connections()).length, 3); // the admin's, the client's, the waiter's
        await sleep(700); // longer than the lease: the hold begins with the grant
        const before = performance.now();
        await first.release();
        const second = await waiter;
        assert.ok(performance.now() - before < slack);
        assert.ok(second.token > first.token);
        await sleep(400);
        await second.run('SET', lock.key + ':data', 'x');
        await second.release();
        await until(async () => (await server.connections()).length === 2, 'the connection is closed');
      });

      test('a wait that runs out', async () => {
        const lock = locks.lock(newKey(), { wait: 200 });
        const hold = await lock.acquire();
        const start = performance.now();
        await assert.rejects(lock.acquire(), NotAcquired);
        const waited = performance.now() - start;
        assert.ok(waited >= 199 && waited < 200 + slack, `${waited} ms`);
        await hold.release();
      });

      test('a wait that is cancelled', async () => {
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
        test(`aborted in line, then the hold is released: no hold is left (${whose})`, async () => {
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

        test(`aborted at any moment: no hold is left (${whose})`, async () => {
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
          test(`aborted before the request arrives, the lock is released ${when} it does (${whose})`, async (t) => {
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

      test('an aborted request that is never answered is given up in time', async (t) => {
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

      test("a wait longer than the client's time-outs", async (t) => {
        const hasty = await connect(t, server.port, { timeout: 100 });
        const lock = hasty.lock(newKey(), { wait: 5_000 });
        const hold = await locks.lock(lock.key).acquire();
        const waits = async () => Number(/turnstile_waits:(\d+)/.exec(await server.ask('INFO', 'turnstile'))[1]);
        const before = await waits();
        const waiter = lock.acquire();
        await server.waiting(lock.key);
        await sleep(400);
        await hold.release();
        const next = await waiter;
        assert.equal((await waits()) - before, 1, 'asked once');
        await next.release();
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
        const lock = locks.lock(newKey(), { lease: 300 });
        await lock.using(async (hold) => {
          const end = performance.now() + 1_500;
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
          assert.ok(performance.now() - before < 300 + slack);
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

      test('a maximum', async () => {
        const lock = locks.lock(newKey(), { lease: 300, maxHold: 500 });
        const start = performance.now();
        const hold = await lock.acquire();
        const end = await told(hold);
        assert.ok(end >= start + 500 && end < start + 500 + slack, `${end - start} ms`);
        assert.match(hold.signal.reason.message, /maximum/);
        // What is left of the lease is for finishing.
        await hold.run('SET', lock.key + ':data', 'x');
        const next = await until(() => lock.tryAcquire(), 'the lease ends');
        const over = performance.now() - start;
        assert.ok(over >= 500 && over < 500 + 300 + slack, `${over} ms`);
        await next.release();
        await assert.rejects(hold.release(), Lost);
        // In time it is no error.
        assert.equal(await lock.using(async (h) => (await told(h), 'done')), 'done');
      });

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

      test('a lost reply to a waiting request', async (t) => {
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
        test(`refused while an older request is stuck: nothing is left behind (wait ${wait})`, async (t) => {
          const proxy = await proxyTo(t, server.port, nothing, (data) => data.includes('LOCK.ACQUIRE'));
          const shared = await library.connect(proxy.port);
          t.after(() => library.close(shared));
          const lock = turnstile(shared).lock(newKey(), { lease: 60_000, timeout: 600, wait });
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
        // Counted from the grant it would be 1,800.
        assert.ok(renewed - start >= 995 && renewed - start < 1_750, `${renewed - start} ms`);
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

      test('deadlock', async () => {
        const [a, b] = [newKey(), newKey()];
        const holds = [await locks.lock(a, { owner: 'x' }).acquire(), await locks.lock(b, { owner: 'y' }).acquire()];
        const x = locks.lock(b, { owner: 'x', wait: 5_000 }).acquire();
        await server.waiting(b);
        await assert.rejects(locks.lock(a, { owner: 'y', wait: 5_000 }).acquire(), Deadlock);
        await holds[1].release();
        await (await x).release();
        await holds[0].release();
      });

      test('superseded: by a newer call, by an operator', async () => {
        const key = newKey();
        const hold = await locks.lock(key).acquire();
        const lock = locks.lock(key, { owner: 'z', wait: 5_000 });
        const older = assert.rejects(lock.acquire(), Superseded);
        await server.waiting(key);
        const newer = assert.rejects(lock.acquire(), Superseded);
        await older;
        const waiting = await until(async () => (await server.connections()).find((c) => / flags=\w*b/.test(c)), 'it waits');
        await server.ask('CLIENT', 'UNBLOCK', /^id=(\d+)/.exec(waiting)[1], 'ERROR');
        await newer;
        await hold.release();
      });

      test('demoted: superseded, then not a primary', async (t) => {
        const other = await start(t);
        const lock = (await connect(t, other.port)).lock('a', { wait: 5_000 });
        await other.ask('LOCK.ACQUIRE', 'a', 'somebody', 'PX', 60_000);
        const waiter = assert.rejects(lock.acquire(), Superseded);
        await other.waiting('a');
        await other.ask('REPLICAOF', '127.0.0.1', '1');
        await waiter;
        await assert.rejects(lock.acquire(), NotPrimary);
      });

      test('too many wait', async (t) => {
        const other = await start(t);
        await other.ask('CONFIG', 'SET', 'turnstile.max-waiters', 1);
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

      test('no connection is left open', async () => {
        await until(async () => (await server.connections()).length === 2, "the admin's and the client's");
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
