// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors
//
// One lock over N independent Turnstile servers, held while a majority of them agrees.
//
//   const quorum = await Quorum.open(['redis://10.0.0.1', 'redis://10.0.0.2', 'redis://10.0.0.3']);
//   await quorum.using('report:daily', { leaseMs: 10_000, waitMs: 5_000 }, async (hold) => {
//     await store.write(page, { fencingToken: hold.token, signal: hold.signal });
//   });
//
// The lock survives the loss of any minority of the servers. Two rounds find one fencing token: the
// first asks every server for a token, the second raises a majority to one of them. Any two
// majorities share a server, so a later holder's token is larger, and a store that keeps the
// highest token it has seen can refuse a holder that is late.
//
// The lease is extended in the background at every third of it, and hold.signal is aborted when
// that fails for too long. A server that has lost the hold because it restarted is asked for it again
// at every extension: so servers may restart one after another during a long hold.
//
// The servers share nothing: no replication, no persistence is needed. A server that restarts empty
// has forgotten its holds: set turnstile.failover-grace-ms on all of them to the longest lease in
// use, and turnstile.token-margin-ms to at least twice what their clocks may be apart.

import { randomUUID } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

/** No majority could be had in time. */
export class NotAcquired extends Error {}
/** The hold is gone, or a majority can no longer say that it is not. Stop working. */
export class Lost extends Error {}

/**
 * @typedef {object} Options
 * @property {number} leaseMs how long the lock is held without an extension
 * @property {number} [waitMs] how long to go on trying; at least one try is made
 * @property {string[]} [also] more locks, all or none, under one token
 * @property {boolean} [renew] extend in the background at every third of the lease; true by default
 * @property {AbortSignal} [signal] ends the tries; acquire() then rejects
 */

/** N servers, each given timeoutMs to answer, so that a dead one blocks nobody. */
export class Quorum {
  /**
   * Connects to the servers with node-redis, and goes on connecting to those that do not answer at
   * once. The time-out should be a small part of the lease; pauseMs is the longest pause between tries.
   * @param {string[]} urls
   * @param {{ timeoutMs?: number, pauseMs?: number }} [options]
   */
  static async open(urls, options = {}) {
    const { createClient } = await import('redis'); // not needed by who has clients already
    const { timeoutMs = 50 } = options;
    // A request must not lie about here and reach the server when its owner is long gone.
    const socket = { connectTimeout: timeoutMs, reconnectStrategy: timeoutMs };
    const clients = urls.map((url) => createClient({ url, disableOfflineQueue: true, socket }));
    const quorum = new this(clients, options);
    const connected = clients.map((client) =>
      client
        .on('error', (error) => (quorum.lastError = error))
        .connect()
        .catch(() => {}),
    );
    await Promise.race([Promise.all(connected), sleep(timeoutMs)]);
    return quorum;
  }

  /** @param {any[]} clients one of node-redis or ioredis for each server */
  constructor(clients, { timeoutMs = 50, pauseMs = 30 } = {}) {
    this.timeoutMs = timeoutMs;
    this.pauseMs = pauseMs;
    /** Why a server did not count; for logs. @type {unknown} */
    this.lastError = undefined;
    this.servers = clients;
    this.majority = Math.floor(clients.length / 2) + 1;
  }

  /**
   * Runs the work while a majority holds the lock for it, and releases it whatever happens. Rejects with
   * NotAcquired, with the work's own error, or with Lost if the hold was gone at the end.
   * @template Result
   * @param {string} key
   * @param {Options} options
   * @param {(hold: Hold) => Promise<Result>} work
   */
  async using(key, options, work) {
    const hold = await this.acquire(key, options);
    if (!hold) throw new NotAcquired(`no majority for ${key}`, { cause: this.lastError });
    try {
      const result = await work(hold);
      hold.check();
      return result;
    } finally {
      await hold.release();
    }
  }

  /**
   * A hold, or null if no majority could be had in waitMs.
   * @param {string} key
   * @param {Options} options
   * @returns {Promise<Hold | null>}
   */
  async acquire(key, options) {
    const { waitMs = 0, signal } = options;
    const deadline = performance.now() + waitMs;
    for (;;) {
      signal?.throwIfAborted();
      const hold = await this.#try(key, options);
      if (hold && signal?.aborted) {
        await hold.release();
        signal.throwIfAborted();
      }
      if (hold) return hold;
      // Rivals that split the servers between them must not meet again at the same moment.
      const pause = Math.random() * this.pauseMs;
      if (performance.now() + pause >= deadline) return null;
      await sleep(pause);
    }
  }

  async #try(key, { leaseMs, also = [], renew = true }) {
    // A new owner for each try: what a slow server does with an old request concerns nobody.
    const locks = new Locks(key, randomUUID(), also);
    const start = performance.now(); // before the first lease can begin
    const tokens = await this.askAll(this.servers, locks.acquire(leaseMs));
    const granted = this.servers.filter((_, i) => tokens[i] !== null);
    if (granted.length >= this.majority) {
      const token = closestMajority(
        tokens.filter((t) => t !== null),
        this.majority,
      );
      const again = await this.askAll(granted, locks.acquire(leaseMs, token));
      // A larger answer means that the hold was lost in between, or that this server is not of the
      // majority: only the same token counts.
      const agreed = count(again, (t) => t === token) >= this.majority;
      const until = validUntil(start, leaseMs);
      if (agreed && performance.now() < until) return new Hold(this, locks, token, until, leaseMs, renew);
    }
    await this.askAll(this.servers, locks.release());
    return null;
  }

  /**
   * The answers of the servers, asked in parallel; null for one that failed.
   * @param {any[]} servers
   * @param {string[]} command
   * @returns {Promise<(number | null)[]>}
   */
  async askAll(servers, command) {
    const timer = new AbortController();
    const late = sleep(this.timeoutMs, null, { signal: timer.signal }).catch(() => null);
    const failed = (error) => {
      this.lastError = error;
      return null;
    };
    const answers = servers.map((server) => this.ask(server, command).catch(failed));
    const inTime = await Promise.all(answers.map((answer) => Promise.race([answer, late])));
    timer.abort();
    return inTime;
  }

  /** @returns {Promise<number | null>} */
  async ask(server, command) {
    // ioredis has a sendCommand too, but it takes an object there.
    const reply = await ('call' in server ? server.call(...command) : server.sendCommand(command));
    return reply === null ? null : Number(reply);
  }

  close() {
    for (const server of this.servers) {
      if ('call' in server) server.disconnect();
      else server.destroy();
    }
  }
}

/** The requests about a set of locks. */
class Locks {
  constructor(key, owner, also) {
    this.key = key;
    this.count = 1 + also.length;
    this.about = [key, owner];
    this.also = also.length ? ['ALSO', String(also.length), ...also] : [];
  }

  acquire(leaseMs, floor) {
    const least = floor ? ['FLOOR', String(floor)] : [];
    return ['LOCK.ACQUIRE', ...this.about, 'PX', String(leaseMs), ...least, ...this.also];
  }

  touch(leaseMs) {
    return ['LOCK.TOUCH', ...this.about, 'PX', String(leaseMs), ...this.also];
  }

  release() {
    return ['LOCK.RELEASE', ...this.about, ...this.also];
  }
}

/** A lock that was obtained. Work only while valid(); give `token` to whatever you write to. */
export class Hold {
  #quorum;
  #locks;
  #leaseMs;
  #renew;
  #released;
  #told = new AbortController();

  constructor(quorum, locks, token, until, leaseMs, renew) {
    this.#quorum = quorum;
    this.#locks = locks;
    this.#leaseMs = leaseMs;
    this.#renew = renew;
    this.key = locks.key;
    /** Exact: tokens stay below 2^53. @type {number} */
    this.token = token;
    /** On performance.now(). @type {number} */
    this.until = until;
    /** Aborted, with a Lost error, when the hold is not valid any more and was not released. */
    this.signal = this.#told.signal;
    watch(this, this.#due());
  }

  valid() {
    return performance.now() < this.until;
  }

  /** Throws Lost if the hold is not valid. */
  check() {
    if (!this.valid()) this.#lose();
    this.signal.throwIfAborted();
  }

  /** Whether a majority let the lease end leaseMs from now, while the old one was valid. */
  async extend(leaseMs = this.#leaseMs) {
    if (!this.valid()) return false;
    const { servers, majority } = this.#quorum;
    const until = validUntil(performance.now(), leaseMs);
    const answers = await this.#quorum.askAll(servers, this.#locks.touch(leaseMs));
    const extended = count(answers, (n) => n === this.#locks.count) >= majority && this.valid();
    // If not, the new lease may be the shorter one.
    this.until = extended ? until : Math.min(this.until, until);
    const denied = count(answers, (n) => n !== null && n < this.#locks.count);
    if (denied && this.valid()) {
      // A server that restarted can be won back. It counts from the next extension on: by then a
      // majority has kept everybody else out without it. One that lost only some of several locks is
      // left alone: what it has still is relied on.
      const empty = servers.filter((_, i) => answers[i] === 0);
      const again = await this.#quorum.askAll(empty, this.#locks.acquire(leaseMs, this.token));
      // A majority has nothing for us and gives us nothing: others hold it already.
      if (denied - count(again, (token) => token !== null) >= majority) this.#lose();
    }
    if (!extended || !this.valid()) return false;
    this.#leaseMs = leaseMs;
    watch(this, this.#due());
    return true;
  }

  /** Gives the lock up on every server it can reach; elsewhere the lease ends it. */
  release() {
    return (this.#released ??= this.#release());
  }

  /** For `await using hold = await quorum.acquire(…)`. */
  [Symbol.asyncDispose ?? Symbol.for('Symbol.asyncDispose')]() {
    return this.release();
  }

  /** Called by the timer when something is due. */
  async wake() {
    if (this.valid() && this.#renew && !(await this.extend()) && this.valid()) {
      // Not enough answers: try again soon. The old lease may last until then.
      watch(this, Math.min(this.until, performance.now() + this.#leaseMs / 10));
    } else if (!this.valid()) {
      this.#lose();
    } else if (!this.#renew) {
      watch(this, this.until);
    }
  }

  async #release() {
    this.#end();
    // Each server gets it behind what an extension under way has sent; that sends nothing more.
    await this.#quorum.askAll(this.#quorum.servers, this.#locks.release());
  }

  #due() {
    // A third of the lease after it began.
    return this.#renew ? this.until - (this.#leaseMs * 2) / 3 : this.until;
  }

  #lose() {
    this.#end();
    if (!this.#released) this.#told.abort(new Lost(`${this.key} is lost`, { cause: this.#quorum.lastError }));
  }

  #end() {
    watched.delete(this);
    this.until = Math.min(this.until, performance.now());
  }
}

// One timer for all holds. It does not keep the process alive: an unreleased hold ends with its lease.
/** @type {Map<Hold, number>} when something is due, on performance.now() */
const watched = new Map();
let timer;
let next = Infinity;

function watch(hold, due) {
  watched.set(hold, due);
  if (due < next) arm(due);
}

function arm(due) {
  clearTimeout(timer);
  next = due;
  // A timer may be early by a fraction of a millisecond, and none lasts longer than 2^31 ms.
  if (due < Infinity) timer = setTimeout(ring, Math.min(due - performance.now() + 1, 2 ** 31 - 1)).unref();
}

function ring() {
  const now = performance.now();
  let soonest = Infinity;
  for (const [hold, due] of watched) {
    if (due > now) {
      soonest = Math.min(soonest, due);
    } else {
      watched.set(hold, Infinity); // until it is done
      hold.wake(); // the requests of all holds leave together
    }
  }
  arm(soonest);
}

/**
 * The highest of the `size` tokens that lie closest together. A server that started a moment ago
 * leads the others, by up to its margin, and they would refuse to follow it: it is left out if
 * there are enough of them.
 * @param {number[]} tokens
 * @param {number} size
 */
export function closestMajority(tokens, size) {
  const sorted = [...tokens].sort((a, b) => a - b);
  const last = (i) => sorted[i + size - 1];
  let best = 0;
  for (let i = 1; i + size <= sorted.length; i++) {
    if (last(i) - sorted[i] < last(best) - sorted[best]) best = i;
  }
  return last(best);
}

const count = (answers, counts) => answers.filter(counts).length;

/** The end of a lease less what the clocks may drift apart meanwhile: 1 % of it and 2 ms. */
const validUntil = (start, leaseMs) => start + leaseMs - leaseMs / 100 - 2;

async function main(urls) {
  const quorum = await Quorum.open(urls.length ? urls : ['redis://127.0.0.1:6379']);
  await quorum.using('report:daily', { leaseMs: 2_000, waitMs: 5_000 }, async (hold) => {
    console.log(`a majority of ${quorum.servers.length} agreed on token ${hold.token}`);
    if (!(await hold.extend(10_000))) throw new Error('lost');
    console.log('extended; now write, and send the token along');
  });
  console.log('released');
  quorum.close();
}

if (process.argv[1] === fileURLToPath(import.meta.url)) await main(process.argv.slice(2));
