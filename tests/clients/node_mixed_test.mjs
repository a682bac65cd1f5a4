// node --test tests/clients/node_mixed_test.mjs
//
// A mixed fleet: clients of client-examples/node/turnstile.mjs that use the module and clients that use plain locks, in
// processes of their own, on one lock name of one server. Whoever enters makes a file that must not exist, and
// removes it: two inside are noticed. The module is build/turnstile.so, or what TURNSTILE_MODULE names; the server is
// redis-server, or what REDIS_SERVER names. Needs `npm ci --prefix client-examples/node`.

import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { closeSync, mkdtempSync, openSync, rmSync, unlinkSync } from 'node:fs';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { describe, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { turnstile } from '../../client-examples/node/turnstile.mjs';

const self = fileURLToPath(import.meta.url);
const root = path.resolve(path.dirname(self), '../..');
const require = createRequire(path.join(root, 'client-examples/node/'));
const { createClient } = require('redis');
const { Redis } = require('ioredis');

const connect = {
  'node-redis': (port) => createClient({ url: `redis://127.0.0.1:${port}` }).on('error', () => {}).connect(),
  ioredis: async (port) => new Redis(port).on('error', () => {}),
};
const fallbacks = { module: false, plain: 'always', nothing: false };
const LEASE = 300;

/** Enters until its input ends, and says so each time. Ends with status 1 if it was not alone. */
async function work(library, how, port, room) {
  const redis = await connect[library](port);
  const locks = turnstile(redis, { fallback: fallbacks[how], without: ['token', 'line'] });
  const lock = locks.lock('shared-name', { lease: LEASE, wait: 20_000 });
  const hold = how === 'nothing' ? (inside) => inside() : (inside) => lock.using(inside);
  let entries = 0;
  let over = false;
  process.stdin.on('end', () => (over = true)).resume();
  while (!over) {
    await hold(async () => {
      try {
        closeSync(openSync(room, 'wx'));
      } catch (error) {
        if (error.code !== 'EEXIST') throw error;
        console.log(`VIOLATION: ${library} ${how} is not alone`);
        process.exit(1);
      }
      // Now and then longer than the lease, which has to be renewed.
      await sleep(entries % 10 === 5 ? 1.5 * LEASE : Math.random() * 5);
      unlinkSync(room);
      ++entries;
      console.log('entered');
    });
    await sleep(Math.random() * 60); // those in line are served first: leave a gap for those who poll
  }
  if (library === 'ioredis') redis.disconnect();
  else redis.destroy();
}

/** A server with the module. A port may be taken: then another is tried. */
async function startServer(t, folder) {
  const module = path.resolve(root, process.env.TURNSTILE_MODULE ?? 'build/turnstile.so');
  for (let attempt = 0; attempt < 20; ++attempt) {
    const port = 20_000 + Math.floor(Math.random() * 10_000);
    const options = ['--bind', '127.0.0.1', '--port', port, '--save', '', '--dir', folder, '--loadmodule', module];
    const server = spawn(process.env.REDIS_SERVER ?? 'redis-server', options.map(String), { stdio: 'ignore' });
    t.after(() => server.kill('SIGKILL'));
    const admin = createClient({ url: `redis://127.0.0.1:${port}`, socket: { reconnectStrategy: 20 } }).on('error', () => {});
    t.after(() => admin.isOpen && admin.destroy());
    admin.connect().catch(() => {});
    const end = performance.now() + 5_000;
    while (!admin.isReady && server.exitCode === null && performance.now() < end) await sleep(10);
    if (!admin.isReady) continue;
    if ((await admin.info('server')).includes(`process_id:${server.pid}\r`)) return { port, admin };
  }
  return assert.fail('no server');
}

/** Runs the workers until each of them entered often enough, or somebody ends. */
async function run(t, kinds, enough) {
  const folder = mkdtempSync(path.join(tmpdir(), 'turnstile-mixed-'));
  t.after(() => rmSync(folder, { recursive: true, force: true }));
  const { port, admin } = await startServer(t, folder);
  const workers = kinds.map(([library, how]) => {
    const child = spawn(process.execPath, [self, 'worker', library, how, String(port), path.join(folder, 'room')], { stdio: ['pipe', 'pipe', 'inherit'] });
    t.after(() => child.kill('SIGKILL'));
    const worker = { name: `${library} ${how}`, child, output: '', exited: once(child, 'close') };
    child.stdout.on('data', (data) => (worker.output += data));
    return worker;
  });
  const end = performance.now() + 30_000;
  const goOn = () => workers.some((w) => count(w) < enough) && workers.every(({ child }) => child.exitCode === null);
  while (goOn() && performance.now() < end) await sleep(20);
  for (const { child } of workers) child.stdin.end();
  const late = sleep(20_000, [null], { ref: false });
  for (const worker of workers) [worker.status] = await Promise.race([worker.exited, late]);
  return { workers, admin };
}

const count = ({ output }) => output.split('entered').length - 1;

if (process.argv[2] === 'worker') await work(...process.argv.slice(3));
else {
  describe('a mixed fleet', { concurrency: 1 }, () => {
    test('module and plain clients on one name: never two inside', async (t) => {
      const kinds = ['node-redis', 'ioredis'].flatMap((library) => [[library, 'module'], [library, 'plain']]);
      const { workers, admin } = await run(t, kinds, 12);
      for (const worker of workers) {
        t.diagnostic(`${worker.name}: ${count(worker)} times inside`);
        assert.equal(worker.status, 0, `${worker.name}: ${worker.output}`);
        assert.ok(count(worker) >= 12, `${worker.name}: ${count(worker)} times inside`);
      }
      assert.equal(await admin.exists('shared-name'), 0, 'all have released it');
    });

    test('somebody without a lock is noticed', async (t) => {
      const { workers } = await run(t, [['node-redis', 'module'], ['ioredis', 'plain'], ['ioredis', 'nothing']], Infinity);
      assert.ok(workers.some(({ status, output }) => status === 1 && /VIOLATION/.test(output)), 'the check can fail');
    });

    test('each takes over what the other left behind', async (t) => {
      const folder = mkdtempSync(path.join(tmpdir(), 'turnstile-mixed-'));
      t.after(() => rmSync(folder, { recursive: true, force: true }));
      const { port, admin } = await startServer(t, folder);
      for (const [name, open] of Object.entries(connect)) {
        const redis = await open(port);
        t.after(() => (name === 'ioredis' ? redis.disconnect() : redis.destroy()));
        const lock = (fallback, options) => turnstile(redis, { fallback, without: ['token', 'line'] }).lock('left', { wait: 5_000, ...options });
        const pairs = [['always', false, 'string'], [false, 'always', 'turnstile'], [false, false, 'turnstile']];
        for (const [before, after, type] of pairs) {
          const left = await lock(before, { lease: LEASE, renew: false }).acquire();
          assert.equal(await admin.type('left'), type);
          assert.equal(await lock(after).tryAcquire(), null);
          const begin = performance.now();
          const next = await lock(after).acquire();
          assert.ok(performance.now() - begin < 2_000);
          await assert.rejects(left.release(), /lost/);
          assert.equal(await next.owned(), true, 'a late release of the other does nothing');
          await next.release();
          assert.equal(await admin.exists('left'), 0);
        }
      }
    });
  });
}
