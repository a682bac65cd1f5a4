// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors
//
// The interface of the npm package redlock, version 5, over locks of Turnstile. Swap the import, and load
// the module on the servers. Needs turnstile.mjs beside it.
//
//   import Redlock from './redlock.mjs';
//   const redlock = new Redlock([client]); // ioredis or node-redis, also their clusters; or three servers, five …
//   await redlock.using(['table:12'], 5_000, async (signal, lock) => {
//     await store.write(page, { fencingToken: lock.fencingToken, signal });
//   });
//
// What is better: every lock has a fencing token. With one server a retry does not ask again and again, but
// stands in the server's line for as long as all the retries would take. Over several servers a majority agrees
// on one token, and a server that restarted empty is won back by the next extension.
//
// What differs: a duration is at most turnstile.max-lease-ms, a day by default. GET of the key is WRONGTYPE:
// ask LOCK.INFO. Custom scripts are refused. What a retry cannot change fails at once: extending or
// releasing what is lost, or a request with an error in it. The wait in line emits one 'error', not one for
// each retry. If the routine of using() throws, that error comes out, also when the release fails too.

import { randomBytes } from 'node:crypto';
import { EventEmitter } from 'node:events';
import { setTimeout as sleep } from 'node:timers/promises';
import { ModuleMissing, Unavailable, serverOf } from './turnstile.mjs';

const defaults = Object.freeze({
  driftFactor: 0.01,
  retryCount: 10,
  retryDelay: 200,
  retryJitter: 100,
  automaticExtensionThreshold: 500,
});
const day = 86_400_000;
const noQuorum = 'The operation was unable to achieve a quorum during its retry window.';

/** Somebody else has one of the resources, or the owner does not have it any more. */
export class ResourceLockedError extends Error {
  name = 'ResourceLockedError';
}

/** No majority in time. `attempts` has the votes of each attempt. */
export class ExecutionError extends Error {
  name = 'ExecutionError';

  constructor(message, attempts) {
    super(message);
    this.attempts = attempts;
  }
}

/** A vote against that is no fault: the server's clock is ahead of the others. */
class OtherToken extends Error {}

export class Lock {
  constructor(redlock, resources, value, attempts, expiration, fencingToken) {
    this.redlock = redlock;
    this.resources = resources;
    this.value = value;
    this.attempts = attempts;
    this.expiration = expiration;
    this.fencingToken = fencingToken;
  }

  release() {
    return this.redlock.release(this);
  }

  extend(duration, settings) {
    return this.redlock.extend(this, duration, settings);
  }

  /** For `await using lock = await redlock.acquire(…)`. */
  async [Symbol.asyncDispose ?? Symbol.for('Symbol.asyncDispose')]() {
    await this.release();
  }
}

export default class Redlock extends EventEmitter {
  constructor(clients, settings = {}, scripts = {}) {
    super();
    this.on('error', () => {}); // events for who wants them: without a listener Node would end the process
    this.clients = new Set(clients);
    if (this.clients.size === 0) throw new Error('Redlock needs at least one client.');
    for (const client of this.clients) serverOf(client); // throws if it is none
    const custom = Object.values(scripts).some(Boolean);
    if (custom) throw new TypeError('Custom scripts are not supported: the locks are commands.');
    const numbers = Object.entries(settings).filter(([, value]) => typeof value === 'number');
    this.settings = { ...defaults, ...Object.fromEntries(numbers) };
    this.quorum = Math.floor(this.clients.size / 2) + 1;
  }

  async quit() {
    await Promise.all([...this.clients].map((client) => ('call' in client ? client.quit() : client.close())));
  }

  async acquire(resources, duration, settings) {
    wholeNumber(duration);
    const all = { ...this.settings, ...settings };
    if (this.clients.size === 1) return this.#inLine(resources, duration, all);
    return this.#byMajority(resources, duration, all);
  }

  async extend(existing, duration, settings) {
    wholeNumber(duration);
    const { resources, value, fencingToken } = existing;
    const all = { ...this.settings, ...settings };
    const valid = () => existing.expiration > Date.now();
    if (!valid()) throw new ExecutionError('Cannot extend an already-expired lock.', []);
    const { attempts, expiration } = await this.#repeat(all, async () => {
      const expiration = endOf(performance.now(), duration, all);
      const touches = this.#ask(resources, this.clients, async (server, keys) => {
        const { count } = await server.touch(keys, value, duration, once(duration));
        if (count < keys.length) throw lacking(count, keys);
      });
      const passed = (await touches.settled()) && valid();
      if (passed) existing.expiration = 0; // from now on the new lock counts
      else existing.expiration = Math.min(existing.expiration, expiration); // the new lease may be the shorter one
      const denied = [...touches.failed].filter(([, error]) => error instanceof ResourceLockedError);
      let healed = 0;
      if (fencingToken && this.clients.size > 1 && (passed || valid())) {
        // A server that restarted empty is won back. It counts from the next extension on.
        const empty = denied.filter(([, { applied }]) => applied === 0);
        const request = { lease: duration, options: { floor: fencingToken }, ...once(duration) };
        const again = ([client]) => serverOf(client).acquire(keysOf(client, resources), value, request);
        healed = (await Promise.allSettled(empty.map(again))).filter((result) => result.value).length;
      }
      if (denied.length - healed >= this.quorum) existing.expiration = 0; // others hold it already
      return { passed, expiration, hopeless: !valid() || touches.hopeless(), stats: touches.stats() };
    });
    return new Lock(this, resources, value, attempts, expiration, fencingToken);
  }

  async release(lock, settings) {
    lock.expiration = 0;
    const done = new Set(); // an attempt that is repeated finds nothing there
    return this.#repeat({ ...this.settings, ...settings }, async () => {
      const start = Date.now();
      const releases = this.#ask(lock.resources, this.clients, async (server, keys, client) => {
        if (done.has(client)) return;
        const { count, again } = await server.release(keys, lock.value, once(2_000));
        if (count < keys.length && !again) throw lacking(count, keys);
        done.add(client);
      });
      const passed = await releases.passed();
      const lost = [...releases.failed.values()].filter((error) => error instanceof ResourceLockedError);
      const hopeless = lost.length > this.clients.size - this.quorum || releases.hopeless();
      return { passed, start, hopeless, stats: releases.stats() };
    });
  }

  async using(resources, duration, settingsOrRoutine, optionalRoutine) {
    wholeNumber(duration);
    const routine = optionalRoutine ?? settingsOrRoutine;
    if (typeof routine !== 'function') throw new TypeError('The routine is not a function.');
    const settings = { ...this.settings, ...(routine === settingsOrRoutine ? {} : settingsOrRoutine) };
    const threshold = settings.automaticExtensionThreshold;
    if (threshold > duration - 100) {
      throw new Error('The duration must exceed automaticExtensionThreshold by at least 100 ms.');
    }
    const controller = new AbortController();
    const { signal } = controller;
    let lock = await this.acquire(resources, duration, settings);
    let timer, deadline, extension;
    let over = false;

    const abort = (error) => {
      signal.error ??= error;
      controller.abort(signal.error);
    };
    const expired = () => abort(new ExecutionError('The lock expired before a majority extended it.', []));
    const plan = () => {
      clearTimeout(deadline);
      if (over) return;
      timer = after(lock.expiration - threshold, () => (extension = extend()));
      deadline = after(lock.expiration, expired);
    };
    const extend = async () => {
      while (!over) {
        try {
          lock = await lock.extend(duration, settings);
          return plan();
        } catch (error) {
          if (lock.expiration <= Date.now()) return abort(error);
          await sleep(Math.min(pauseOf(settings) || 10, lock.expiration - Date.now()));
        }
      }
    };

    plan();
    let result, failure;
    try {
      result = await routine(signal, lock);
    } catch (error) {
      failure = { error };
    }
    over = true;
    clearTimeout(timer);
    clearTimeout(deadline);
    await extension; // a release must not overtake it
    const again = signal.aborted ? { retryCount: 0 } : {}; // what is lost is not worth the time
    const released = await this.release(lock, again).catch((error) => ({ error }));
    failure ??= released.error && released;
    if (failure) throw failure.error;
    return result;
  }

  /** One server: what would be retries is one wait in its line. */
  async #inLine(resources, duration, settings) {
    const [client] = this.clients;
    const value = newValue();
    const endless = settings.retryCount === -1;
    const retries = []; // when they are due
    for (let at = performance.now(); retries.length < settings.retryCount; ) retries.push((at += pauseOf(settings)));
    const attempts = [];
    for (;;) {
      const wait = endless ? day : Math.max(0, Math.ceil((retries.at(-1) ?? 0) - performance.now()));
      const vote = this.#ask(resources, this.clients, async (server, keys) =>
        obtained(await server.acquire(keys, value, { lease: duration, wait, ...once(duration) }), keys),
      );
      const passed = await vote.passed();
      const stats = vote.stats();
      if (!endless) attempts.push(stats);
      if (passed) {
        const { token, validFrom, forget } = vote.answers.get(client);
        forget(); // nobody listens to messages about it
        return new Lock(this, resources, value, attempts, endOf(validFrom, duration, settings), token);
      }
      const waited = vote.failed.get(client) instanceof ResourceLockedError;
      if (waited && endless) continue;
      if (waited) attempts.push(...retries.map(() => stats)); // their time is over
      else if (!vote.hopeless() && (endless || retries.length)) {
        await sleep(endless ? pauseOf(settings) : Math.max(0, retries.shift() - performance.now()));
        continue;
      }
      throw new ExecutionError(noQuorum, attempts);
    }
  }

  /** Several servers: two rounds find one token. See quorum.mjs and docs/guarantees.md. */
  async #byMajority(resources, duration, settings) {
    const { attempts, value, token, expiration } = await this.#repeat(settings, async () => {
      // A new owner for each attempt: what a slow server does with an old request concerns nobody.
      const value = newValue();
      const expiration = endOf(performance.now(), duration, settings); // before the first lease can begin
      const acquire = (floor) => async (server, keys) => {
        const grant = await server.acquire(keys, value, { lease: duration, options: { floor }, ...once(duration) });
        obtained(grant, keys).forget();
        return grant.token;
      };
      const giveUp = (client) => serverOf(client).abandon(keysOf(client, resources), value, once(duration));
      const first = this.#ask(resources, this.clients, acquire());
      const agreed = await first.settled();
      const granted = new Map(first.answers); // in time; others may come later
      let passed = false;
      let token;
      let stats = first.stats();
      if (agreed) {
        token = closestMajority([...granted.values()], this.quorum);
        const second = this.#ask(resources, granted.keys(), async (server, keys) => {
          // A larger token means that the hold was lost in between, or that this server is not of the majority.
          const its = await acquire(token)(server, keys);
          if (its !== token) throw new OtherToken(`This server has token ${its}, a majority has ${token}.`);
        });
        passed = (await second.passed()) && Date.now() < expiration;
        stats = Promise.all([first.stats(), second.stats()]).then(([before, votes]) => {
          const votesAgainst = new Map([...before.votesAgainst, ...votes.votesAgainst]);
          for (const client of before.votesFor) {
            if (!granted.has(client)) votesAgainst.set(client, new Error('The answer came too late.'));
          }
          return { ...votes, votesAgainst };
        });
      }
      if (!passed) {
        first.stats().then(({ votesFor }) => [...votesFor].filter((client) => !granted.has(client)).forEach(giveUp));
        await Promise.all([...granted.keys()].map(giveUp));
      }
      return { passed, value, token, expiration, hopeless: first.hopeless(), stats };
    });
    return new Lock(this, resources, value, attempts, expiration, token);
  }

  /** Makes attempts until one passes. */
  async #repeat(settings, attempt) {
    const attempts = [];
    for (let retries = 0; ; retries++) {
      const { passed, hopeless, stats, ...result } = await attempt();
      if (settings.retryCount !== -1) attempts.push(stats); // endless attempts would fill the memory
      if (passed) return { attempts, ...result };
      if (hopeless || retries === settings.retryCount) throw new ExecutionError(noQuorum, attempts);
      await sleep(pauseOf(settings));
    }
  }

  /** Asks each of these clients' servers at the same time. */
  #ask(resources, clients, ask) {
    const { size } = this.clients;
    const answers = new Map();
    const failed = new Map();
    const start = performance.now();
    let decide;
    const decided = new Promise((resolve) => (decide = resolve));
    const isDecided = () => answers.size >= this.quorum || failed.size > size - this.quorum;
    const one = async (client) => {
      try {
        answers.set(client, await ask(serverOf(client), keysOf(client, resources), client));
      } catch (error) {
        failed.set(client, plainError(client, error));
        if (!(error instanceof OtherToken)) this.emit('error', failed.get(client));
      }
      if (isDecided()) decide();
    };
    const requests = [...clients].map(one);
    const asked = requests.length;
    const all = Promise.all(requests);
    return {
      answers,
      failed,
      /** Whether a majority agreed. */
      passed: async () => {
        await Promise.race([all, decided]);
        return answers.size >= this.quorum;
      },
      /** The same, when the others have had as much time again; a dead one holds nobody up. */
      settled: async () => {
        await Promise.race([all, decided]);
        const elapsed = performance.now() - start;
        const grace = () => sleep(elapsed + 10, undefined, { ref: false });
        if (answers.size + failed.size < asked) await Promise.race([all, grace()]);
        return answers.size >= this.quorum;
      },
      /** Whether the errors will be the same next time. */
      hopeless: () => [...failed.values()].filter(isHopeless).length > size - this.quorum,
      stats: async () => {
        await all;
        const votesFor = new Set(answers.keys());
        return { membershipSize: size, quorumSize: this.quorum, votesFor, votesAgainst: failed };
      },
    };
  }
}

const newValue = () => randomBytes(16).toString('hex');

function wholeNumber(duration) {
  if (!Number.isInteger(duration)) throw new Error('Duration must be an integer value in milliseconds.');
}

const pauseOf = ({ retryDelay, retryJitter }) =>
  Math.max(0, retryDelay + Math.floor((Math.random() * 2 - 1) * retryJitter));

/** By Date.now(): the end of a lease that began at this performance.now(), less what clocks may drift apart. */
const endOf = (start, duration, { driftFactor }) =>
  Math.floor(Date.now() - (performance.now() - start)) + duration - Math.round(driftFactor * duration) - 2;

const after = (time, action) => setTimeout(action, Math.min(time - Date.now(), 2 ** 31 - 1));

/** How long a server may take, when one attempt is made: half of `timeout`. */
const once = (duration) => ({ once: true, timeout: Math.min(2 * duration, 4_000) });

/** ioredis puts a keyPrefix before the keys of the commands it knows. redlock's locks have it in their names. */
const keysOf = (client, resources) => resources.map((resource) => (client.options?.keyPrefix ?? '') + resource);

function lacking(applied, keys) {
  const message = `The operation was applied to: ${applied} of the ${keys.length} requested resources.`;
  return Object.assign(new ResourceLockedError(message), { applied });
}

function obtained(grant, keys) {
  if (!grant) throw lacking(0, keys);
  return grant;
}

/** The library's own error, where there is one. */
function plainError(client, error) {
  if (!(error instanceof Unavailable)) return error;
  return serverOf(client).closed ? new Error('Connection is closed.', { cause: error }) : (error.cause ?? error);
}

const isHopeless = (error) => error instanceof ModuleMissing || /^(ERR|NOPERM|CROSSSLOT) /.test(error.message);

/** The highest of the `size` tokens that lie closest together: a server that has just started leads the others. */
function closestMajority(tokens, size) {
  const sorted = tokens.sort((a, b) => a - b);
  const last = (i) => sorted[i + size - 1];
  let best = 0;
  for (let i = 1; i + size <= sorted.length; i++) {
    if (last(i) - sorted[i] < last(best) - sorted[best]) best = i;
  }
  return last(best);
}
