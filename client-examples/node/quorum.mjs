// One lock over N independent Turnstile servers, held while a majority of them agrees.
//
//   const quorum = await Quorum.open(['redis://10.0.0.1', 'redis://10.0.0.2', 'redis://10.0.0.3']);
//   const hold = await quorum.acquire('report:daily', { leaseMs: 10_000, waitMs: 5_000 });
//   if (hold) {
//     try {
//       await store.write(page, { fencingToken: hold.token });
//     } finally {
//       await hold.release();
//     }
//   }
//
// The lock survives the loss of any minority of the servers. Two rounds find one fencing token: the
// first asks every server for a token, the second raises a majority to one of them. Any two
// majorities share a server, so a later holder's token is larger, and a store that keeps the
// highest token it has seen can refuse a holder that is late.
//
// The servers share nothing: no replication, no persistence is needed. A server that restarts empty
// has forgotten its holds: set turnstile.failover-grace-ms on all of them to the longest lease in
// use, and turnstile.token-margin-ms to at least twice what their clocks may be apart.

import { randomUUID } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { createClient } from 'redis';

/** @typedef {ReturnType<typeof createClient>} Server */

/** N servers, each given timeoutMs to answer, so that a dead one blocks nobody. */
export class Quorum {
  /**
   * Connects to the servers, and goes on connecting to those that do not answer at once.
   * The time-out should be a small part of the lease; pauseMs is the longest pause between tries.
   * @param {string[]} urls
   * @param {{ timeoutMs?: number, pauseMs?: number }} [options]
   */
  static async open(urls, options = {}) {
    const quorum = new this(urls, options);
    const connected = quorum.servers.map((server) => server.connect().catch(() => {}));
    await Promise.race([Promise.all(connected), sleep(quorum.timeoutMs)]);
    return quorum;
  }

  constructor(urls, { timeoutMs = 50, pauseMs = 30 } = {}) {
    this.timeoutMs = timeoutMs;
    this.pauseMs = pauseMs;
    /** Why a server did not count; for logs. @type {unknown} */
    this.lastError = undefined;
    this.servers = urls.map((url) =>
      createClient({
        url,
        // A request must not lie about here and reach the server when its owner is long gone.
        disableOfflineQueue: true,
        socket: { connectTimeout: timeoutMs, reconnectStrategy: timeoutMs },
      }).on('error', (error) => (this.lastError = error)),
    );
    this.majority = Math.floor(urls.length / 2) + 1;
  }

  /**
   * A hold, or null if no majority could be had in waitMs. Makes at least one try.
   * @param {string} key
   * @param {{ leaseMs: number, waitMs?: number }} times
   * @returns {Promise<Hold | null>}
   */
  async acquire(key, { leaseMs, waitMs = 0 }) {
    const deadline = performance.now() + waitMs;
    for (;;) {
      const hold = await this.#try(key, leaseMs);
      if (hold) return hold;
      // Rivals that split the servers between them must not meet again at the same moment.
      const pause = Math.random() * this.pauseMs;
      if (performance.now() + pause >= deadline) return null;
      await sleep(pause);
    }
  }

  async #try(key, leaseMs) {
    // A new owner for each try: what a slow server does with an old request concerns nobody.
    const owner = randomUUID();
    const command = ['LOCK.ACQUIRE', key, owner, 'PX', String(leaseMs)];
    const start = performance.now(); // before the first lease can begin
    const tokens = await this.askAll(this.servers, command);
    const granted = this.servers.filter((_, i) => tokens[i] !== null);
    if (granted.length >= this.majority) {
      const token = closestMajority(
        tokens.filter((t) => t !== null),
        this.majority,
      );
      // A larger answer means that the hold was lost in between, or that this server is not of the
      // majority: only the same token counts.
      const again = await this.askAll(granted, [...command, 'FLOOR', String(token)]);
      const hold = new Hold(this, key, owner, token, validUntil(start, leaseMs));
      if (count(again, token) >= this.majority && hold.valid()) return hold;
    }
    await this.askAll(this.servers, ['LOCK.RELEASE', key, owner]);
    return null;
  }

  /**
   * The answers of the servers, asked in parallel; null for one that failed.
   * @param {Server[]} servers
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

  /** @returns {Promise<any>} */
  async ask(server, command) {
    return server.sendCommand(command);
  }

  close() {
    for (const server of this.servers) server.destroy();
  }
}

/** A lock that was obtained. Work only while valid(); give `token` to whatever you write to. */
export class Hold {
  #quorum;
  #owner;

  constructor(quorum, key, owner, token, until) {
    this.#quorum = quorum;
    this.#owner = owner;
    this.key = key;
    /** Exact: tokens stay below 2^53. @type {number} */
    this.token = token;
    /** On performance.now(). @type {number} */
    this.until = until;
  }

  valid() {
    return performance.now() < this.until;
  }

  /** Whether a majority let the lease end leaseMs from now, while the old one was valid. */
  async extend(leaseMs) {
    const until = validUntil(performance.now(), leaseMs);
    const lease = [this.key, this.#owner, 'PX', String(leaseMs)];
    const { servers, majority } = this.#quorum;
    const answers = await this.#quorum.askAll(servers, ['LOCK.TOUCH', ...lease]);
    const extended = count(answers, 1) >= majority && this.valid();
    // If not, the new lease may be the shorter one.
    this.until = extended ? until : Math.min(this.until, until);
    const lost = servers.filter((_, i) => answers[i] === 0);
    if (lost.length && this.valid()) {
      // A server that restarted can be won back. It counts from the next extension on: by then a
      // majority has kept everybody else out without it.
      await this.#quorum.askAll(lost, ['LOCK.ACQUIRE', ...lease, 'FLOOR', String(this.token)]);
    }
    return extended && this.valid();
  }

  /** Gives the lock up on every server it can reach; elsewhere the lease ends it. */
  async release() {
    this.until = performance.now();
    await this.#quorum.askAll(this.#quorum.servers, ['LOCK.RELEASE', this.key, this.#owner]);
  }
}

/**
 * The highest of the `size` tokens that lie closest together. A server that started a moment ago
 * leads the others, by up to its margin, and they would refuse to follow it: it is left out if
 * there are enough of them.
 * @param {number[]} tokens
 * @param {number} size
 */
function closestMajority(tokens, size) {
  const sorted = [...tokens].sort((a, b) => a - b);
  const last = (i) => sorted[i + size - 1];
  let best = 0;
  for (let i = 1; i + size <= sorted.length; i++) {
    if (last(i) - sorted[i] < last(best) - sorted[best]) best = i;
  }
  return last(best);
}

const count = (answers, wanted) => answers.filter((answer) => answer === wanted).length;

/** The end of a lease less what the clocks may drift apart meanwhile: 1 % of it and 2 ms. */
const validUntil = (start, leaseMs) => start + leaseMs - leaseMs / 100 - 2;

async function main(urls) {
  const quorum = await Quorum.open(urls.length ? urls : ['redis://127.0.0.1:6379']);
  const hold = await quorum.acquire('report:daily', { leaseMs: 2_000, waitMs: 5_000 });
  if (!hold) throw new Error('not obtained', { cause: quorum.lastError });
  try {
    console.log(`a majority of ${quorum.servers.length} agreed on token ${hold.token}`);
    if (!(await hold.extend(10_000))) throw new Error('lost');
    console.log('extended; now write, and send the token along');
  } finally {
    await hold.release();
  }
  console.log('released');
  quorum.close();
}

if (process.argv[1] === fileURLToPath(import.meta.url)) await main(process.argv.slice(2));
