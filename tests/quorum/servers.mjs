// Servers with the module for tests in Node. The module is build/turnstile.so, or what TURNSTILE_MODULE
// names; the server is redis-server, or what REDIS_SERVER names. They end with the process.

import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

export const root = fileURLToPath(new URL('../../', import.meta.url));
const require = createRequire(path.join(root, 'client-examples/node/'));
export const { createClient } = require('redis');
export const { Redis, Cluster } = require('ioredis');

const module = path.resolve(root, process.env.TURNSTILE_MODULE ?? 'build/turnstile.so');
const folder = mkdtempSync(path.join(tmpdir(), 'turnstile-quorum-'));
const running = new Set();
process.on('exit', () => {
  for (const child of running) child.kill('SIGKILL');
  rmSync(folder, { recursive: true, force: true });
});
for (const [signal, number] of [['SIGINT', 2], ['SIGTERM', 15], ['SIGHUP', 1]]) {
  process.on(signal, () => process.exit(128 + number));
}

/** Waits until the condition holds, and returns what it returned. */
export async function until(condition, what, ms = 20_000) {
  const end = performance.now() + ms;
  for (;;) {
    const value = await condition();
    if (value) return value;
    if (performance.now() > end) assert.fail(`in vain for ${ms} ms: ${what}`);
    await sleep(5);
  }
}

export class Server {
  /** If the port is taken another is tried. */
  static async start(...options) {
    for (let attempt = 0; attempt < 20; ++attempt) {
      const server = new Server(15_000 + Math.floor(Math.random() * 17_000), options);
      if (await server.#isUp()) return server;
      await server.stop();
    }
    assert.fail('no server');
  }

  constructor(port, options) {
    this.port = port;
    this.url = `redis://127.0.0.1:${port}`;
    this.options = options;
    this.#spawn();
  }

  #spawn() {
    const base = ['--bind', '127.0.0.1', '--port', this.port, '--save', '', '--dir', folder, '--loadmodule', module];
    const command = [...base, ...this.options].map(String);
    this.process = spawn(process.env.REDIS_SERVER ?? 'redis-server', command, { stdio: 'ignore' });
    this.exited = once(this.process, 'exit');
    running.add(this.process);
  }

  async #isUp() {
    this.admin ??= createClient({ url: this.url, socket: { reconnectStrategy: 20 } }).on('error', () => {});
    if (!this.admin.isOpen) this.admin.connect().catch(() => {});
    const pid = new RegExp(`process_id:${this.process.pid}\\r`);
    const end = performance.now() + 5_000;
    while (this.process.exitCode === null && performance.now() < end) {
      if (this.admin.isReady && pid.test(await this.ask('INFO', 'server').catch(() => ''))) return true;
      await sleep(10);
    }
    return false;
  }

  ask(...command) {
    return this.admin.sendCommand(command.map(String));
  }

  /** The token that holds the lock, or null. */
  token(key) {
    return this.ask('LOCK.FENCE', key);
  }

  async kill() {
    this.process.kill('SIGKILL');
    await this.exited;
    running.delete(this.process);
  }

  /** With nothing in it. */
  async restart() {
    await this.kill();
    this.#spawn();
    assert(await this.#isUp(), `no server on ${this.port} any more`);
  }

  async stop() {
    if (this.admin.isOpen) this.admin.destroy();
    await this.kill();
  }
}
