// Locks of Turnstile, over a node-redis or an ioredis client that is already connected.
//
//   const lock = turnstile(client).lock('table:12', { lease: 10_000, wait: 5_000 });
//   await lock.using(async (hold) => {
//     await fetch(url, { signal: hold.signal });        // aborted when the lock is lost
//     await hold.run('SET', 'table:12:guest', 'alice'); // written only while the lock is held
//   });
//
// using() releases on every way out. While it works the lease is renewed at every third of it. The
// options are described in turnstile.d.mts.
//
// Every holder has an owner of its own, a random string. The same owner asking again gets the same
// token, so acquiring, renewing and releasing may be asked twice: by this file after a lost connection,
// and by ioredis, which sends commands again that had no reply when it reconnected. That goes for a
// command in run() too: while the lock is held, an INCR may count twice. Run what may be repeated (SET),
// or give ioredis the option autoResendUnfulfilledCommands: false. This file never repeats it.
//
// What this file expects of the client: one server, or the primary that Sentinel names, not a cluster;
// no blocking commands (BLPOP), behind which a renewal would have to queue; and a database that is
// chosen in its options, since connections that are opened for waiting do not follow a SELECT. A
// keyPrefix of the client is not applied: neither library knows where the keys of these commands are.

import { randomUUID } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';

export class TurnstileError extends Error {
  get name() {
    return this.constructor.name;
  }
}
/** The lock is busy, or the wait ran out. */
export class NotAcquired extends TurnstileError {}
/** The hold is gone, or nobody can say any more that it is not. Stop working. */
export class Lost extends TurnstileError {}
/** A guarded write was refused: its token does not hold the lock. */
export class Fenced extends TurnstileError {}
/** Waiting would have closed a cycle of holders that wait for each other. */
export class Deadlock extends TurnstileError {}
/** The wait was ended: by a newer call of the same owner, an operator, or a failover. */
export class Superseded extends TurnstileError {}
/** Too many clients wait on this server. */
export class WaitLimit extends TurnstileError {}
/** This server is a replica. */
export class NotPrimary extends TurnstileError {}
/** The slot is elsewhere or on its way: ask the cluster again. */
export class Moved extends TurnstileError {}
/** No answer: the connection failed, or the time was over. Its `cause` is the library's own error. */
export class Unavailable extends TurnstileError {}

const errorOf = {
  FENCED: Fenced,
  DEADLOCK: Deadlock,
  UNBLOCKED: Superseded,
  WAITLIMIT: WaitLimit,
  READONLY: NotPrimary,
  MOVED: Moved,
  ASK: Moved,
  TRYAGAIN: Moved,
  CLUSTERDOWN: Moved,
};

/** What went wrong, in our terms. Other errors of the server (ERR, NOPERM, OOM …) stay as they are. */
function translate(error) {
  if (error instanceof TurnstileError) return error;
  const [, code] = /^([A-Z]{2,})( |$)/.exec(error.message) ?? [];
  if (!code) return new Unavailable(error.message || String(error), { cause: error });
  return errorOf[code] ? new errorOf[code](error.message, { cause: error }) : error;
}

// The two libraries. `duplicate` makes a connection of our own, for one request that waits or for
// one session. It never reconnects: a session must not outlive its connection unnoticed, and who
// waits asks again for the time that is left. No time-out of the library may end a wait either.

const nodeRedis = {
  send: (client, args) => client.sendCommand(args),
  duplicate: (client) =>
    client.duplicate({
      commandOptions: { ...client.options.commandOptions, timeout: undefined },
      socket: { ...client.options.socket, reconnectStrategy: false, socketTimeout: undefined },
    }),
  close: (client) => (client.isOpen || client.isReady) && client.destroy(),
  closed: 'error', // the only kind of error on a connection that does not reconnect
  socket: () => null, // what was sent is not sent again
};

const ioredis = {
  send: (client, args) => client.call(...args),
  duplicate: (client) =>
    client.duplicate({
      lazyConnect: true,
      retryStrategy: null,
      reconnectOnError: null,
      commandTimeout: undefined,
      socketTimeout: undefined,
    }),
  close: (client) => client.disconnect(),
  closed: 'close',
  socket: (client) => client.stream, // what has no reply is sent again on the next one
};

/** The client that was given: it is shared with others, and never closed here. */
class Connection {
  constructor(client, library) {
    this.client = client;
    this.library = library;
  }

  async send(...args) {
    try {
      return await this.library.send(this.client, args.map(plain));
    } catch (error) {
      throw translate(error);
    }
  }

  socket() {
    return this.library.socket(this.client);
  }

  /** Another connection to the same server, for ourselves. */
  async open(ms, signal) {
    const own = new OwnConnection(this.library.duplicate(this.client), this.library);
    const connected = own.client.connect();
    try {
      await within(ms, connected, signal);
      return own;
    } catch (error) {
      own.close();
      // node-redis finishes connecting all the same if it is closed in the midst of it.
      connected.then(() => own.close()).catch(() => {});
      signal?.throwIfAborted();
      throw translate(error);
    }
  }

  close() {}
}

class OwnConnection extends Connection {
  constructor(client, library) {
    super(client, library);
    client.on('error', () => {}); // whoever waits for a reply hears of it
  }

  onClose(listener) {
    this.client.once(this.library.closed, listener);
  }

  close() {
    this.library.close(this.client);
  }
}

const plain = (arg) => (arg instanceof Uint8Array ? arg : String(arg));
const now = () => performance.now();
const held = new Set(); // the locks that are held under an owner of the caller's: other calls may use it too
const longest = 2 ** 31 - 1; // a longer timer would fire at once
const pause = 50; // before a connection that failed is tried again

/** The promise's value, if it comes in that time and before the signal. */
function within(ms, promise, signal) {
  let timer, abort;
  const limit = new Promise((_, reject) => {
    const late = () => reject(new Unavailable(`no answer in ${Math.round(ms)} ms`));
    timer = setTimeout(late, Math.min(ms, longest));
    abort = () => reject(signal.reason);
    signal?.addEventListener('abort', abort);
  });
  return Promise.race([promise, limit]).finally(() => {
    clearTimeout(timer);
    signal?.removeEventListener('abort', abort);
  });
}

/**
 * Asks until there is an answer, however often the connection fails: the second time and later on a
 * connection of its own, which does not depend on how and when the library reconnects. Each try has
 * `patience`, all together have until `end`. `sent` is when the try that was answered was sent, and
 * `again` says that the server may have been asked twice. With `keep` the connection of its own is
 * left open, for the caller to close: it is `via`. If `abandoned` is given, it gets the requests that may
 * still be answered, each with its connection, which the caller has to close too.
 */
async function ask(connection, request, options) {
  const { keep = false, once = false, abandoned, patience, end, signal } = options;
  let { own = false } = options;
  let failure;
  for (let tries = 1; ; tries++) {
    signal?.throwIfAborted();
    const time = () => Math.min(patience(), end - now());
    let via, answer;
    try {
      via = own ? await connection.open(time(), signal) : connection;
      const socket = via.socket();
      const sent = now();
      answer = via.send(...request());
      const reply = await within(time(), answer, signal);
      if (own && !keep) via.close();
      return { reply, sent, via, again: tries > 1 || via.socket() !== socket };
    } catch (error) {
      const late = error instanceof Unavailable || signal?.aborted;
      if (own && late && answer && abandoned) abandoned.push({ via, answer });
      else if (own) via?.close();
      if (!(error instanceof Unavailable)) throw error;
      failure = error.cause ??= failure; // why, also if the last try was merely late
      if (once || now() + pause >= end) throw error;
      await sleep(pause);
      own = true;
    }
  }
}

/** The locks of the server that this client is connected to. */
export function turnstile(client) {
  // ioredis has a sendCommand too, but it takes an object there.
  const library = 'call' in client ? ioredis : 'sendCommand' in client ? nodeRedis : null;
  if (!library) throw new TypeError('neither a node-redis nor an ioredis client');
  const connection = new Connection(client, library);
  return { lock: (key, options) => new Lock(connection, key, options) };
}

export class Lock {
  #connection;
  #options;

  constructor(connection, key, options = {}) {
    const { lease = 10_000, wait = 0, renew = true, timeout = 2_000, also = [] } = options;
    const { owner, reentrant, session } = options;
    this.#connection = connection;
    this.#options = { ...options, lease, wait, renew, timeout, also };
    // A session is bound to the connection of the last request: the inner of two holds would take
    // the outer one with it.
    if (reentrant && session) throw new TypeError('reentrant and session do not go together');
    // Counted holds belong to one owner; otherwise every hold has its own.
    if (reentrant && !owner) this.#options.owner = randomUUID();
    this.key = key;
  }

  /** A hold, after waiting for it if need be. Rejects with NotAcquired if there is none in time. */
  async acquire({ signal } = {}) {
    const hold = await this.#take(this.#options.wait, signal);
    if (!hold) throw new NotAcquired(`${this.key} is held by somebody else`);
    return hold;
  }

  /** A hold, or null if the lock is not free now. */
  tryAcquire() {
    return this.#take(0);
  }

  /** Runs the work under the lock, and releases it whatever happens. */
  async using(work, { signal } = {}) {
    const hold = await this.acquire({ signal });
    let result;
    try {
      result = await work(hold);
    } catch (error) {
      await hold.release().catch(() => {}); // the work's own error says more
      throw error;
    }
    await hold.release();
    return result;
  }

  async #take(wait, signal) {
    signal?.throwIfAborted();
    const { lease, timeout, owner, reentrant, session, also } = this.#options;
    const locks = new Locks(this.key, owner ?? randomUUID(), also);
    const start = now();
    const left = () => Math.max(0, Math.ceil(start + wait - now()));
    const end = start + wait + timeout;
    let via = this.#connection;
    let grant;
    let unsure = false; // a request without an answer may be under way still, and be granted later
    const abandoned = []; // such requests, on connections of their own
    const request = async (own, waiting) => {
      let asked = false;
      const patience = () => waiting() + timeout / 2; // so the server's time-out comes first
      const command = () => {
        unsure ||= asked;
        asked = true;
        return locks.acquire(this.#options, waiting());
      };
      grant = await ask(this.#connection, command, { own, keep: session, abandoned, patience, end, signal });
      unsure ||= grant.again;
      if (session) via = grant.via;
    };
    try {
      // A lock that is free costs no connection. Waiting blocks a connection, so it has its own; so
      // has a session; and so has what is counted, because ioredis might send it twice.
      if (!session && !reentrant) await request(false, () => 0);
      if (!grant || (grant.reply === null && wait > 0)) await request(true, left);
      let { reply, sent } = grant;
      if (reply === null) {
        if (unsure) await this.#leaveNothing(locks, abandoned);
        via.close();
        return null;
      }
      if (now() - sent > lease / 3) {
        // The lease began somewhere between request and reply. Begun anew, we know when it ends.
        const patience = () => timeout / 2;
        const touched = await ask(via, () => locks.touch(lease), { patience, end: now() + timeout, signal });
        if (Number(touched.reply) < locks.count) throw new Lost(`${this.key} was lost on the way here`);
        sent = touched.sent;
      }
      return new Hold(via, locks, Number(reply), sent, this.#options);
    } catch (error) {
      // If a reply was lost, so may be a grant. After a plain no of the server there is nothing to undo.
      const undo = unsure || grant?.reply || abandoned.length || error instanceof Unavailable || signal?.aborted;
      // A newer call of the same owner may have taken over the place: then it is not ours to give up.
      const newer = owner && error instanceof Superseded;
      if (undo && !newer) await this.#leaveNothing(locks, abandoned, grant?.reply);
      via.close();
      throw error;
    } finally {
      for (const { via: late } of abandoned) late.close();
    }
  }

  /**
   * Ends the wait and gives up what may have been granted. The abandoned requests are read to their end. It
   * takes a round trip, and half of `timeout` at most.
   */
  async #leaveNothing(locks, abandoned, granted) {
    const { owner, reentrant, timeout } = this.#options;
    const end = now() + timeout / 2;
    const release = (connection) => connection.send(...locks.release());
    if (!owner || !locks.heldElsewhere()) {
      // One release on the shared connection ends a wait. One stands behind each request, and gives up what
      // the request brought before that. But a release that overtakes a request does not end its wait.
      let answered = false;
      const behind = Promise.allSettled(abandoned.map(({ via }) => release(via))).then(() => (answered = true));
      do {
        await within(end - now(), release(this.#connection)).catch(() => {});
        await Promise.race([behind, sleep(pause)]);
      } while (!answered && now() < end);
    } else if (reentrant) {
      // The owner holds the lock already, so the request is answered at once and counts one more.
      const counted = abandoned.map(async ({ via, answer }) => (await answer) && release(via));
      if (granted) counted.push(release(this.#connection));
      await within(end - now(), Promise.allSettled(counted)).catch(() => {});
    } // else it is an upgrade. A release would give up the older hold too, so the wait ends with its connection.
  }
}

/** The requests about a set of locks. */
class Locks {
  constructor(key, owner, also) {
    this.key = key;
    this.owner = owner;
    this.keys = [key, ...also];
    this.count = this.keys.length;
    this.also = also.length ? ['ALSO', also.length, ...also] : [];
  }

  acquire({ lease, shared, limit, reentrant, session, linger }, wait) {
    const request = ['LOCK.ACQUIRE', this.key, this.owner, 'PX', lease];
    if (wait) request.push('WAIT', wait);
    if (shared) request.push('SHARED');
    if (limit) request.push('LIMIT', limit);
    if (reentrant) request.push('REENTRANT');
    if (session) request.push('SESSION');
    if (linger) request.push('LINGER', linger);
    return [...request, ...this.also];
  }

  touch(lease) {
    return ['LOCK.TOUCH', this.key, this.owner, 'PX', lease, ...this.also];
  }

  release() {
    return ['LOCK.RELEASE', this.key, this.owner, ...this.also];
  }

  /** Whether another call got one of the locks for the same owner, and its hold lasts. */
  heldElsewhere() {
    const same = ({ owner, keys }) => owner === this.owner && keys.some((key) => this.keys.includes(key));
    return [...held].some(same);
  }

  fence(token, command) {
    return ['LOCK.FENCE', this.key, token, 'THEN', ...command];
  }
}

/** A lock that was obtained. Give `token` to whatever you write to, and stop at `signal`. */
export class Hold {
  #connection;
  #locks;
  #options;
  #until; // the lease does not end before, on our own clock
  #lost; // why, if it is
  #failure; // of the last renewal
  #released = false;
  #told = new AbortController();
  #stopped = new AbortController();
  #timers = {};

  constructor(connection, locks, token, sent, options) {
    this.#connection = connection;
    this.#locks = locks;
    this.#options = { ...options };
    this.key = locks.key;
    this.owner = locks.owner;
    this.token = token; // below 2^53: exact
    this.signal = this.#told.signal;
    if (options.owner) held.add(locks);
    if (options.session) connection.onClose(() => this.#released || this.#lose('its connection closed'));
    if (options.maxHold) this.#timer('maximum', options.maxHold, () => this.#tooLong());
    this.#extend(sent, options.lease);
  }

  /** Lets the lease end that many milliseconds from now. Rejects with Lost if the lock is lost. */
  async touch(lease = this.#options.lease) {
    const start = now();
    if (start + lease < this.#until) this.#extend(start, lease); // the answer may be lost
    const { reply, sent } = await ask(this.#connection, () => this.#locks.touch(lease), {
      patience: () => lease / 3,
      end: this.#until,
      signal: this.#stopped.signal,
    });
    if (Number(reply) < this.#locks.count) throw this.#lose('the server says so');
    this.#extend(sent, lease);
  }

  /**
   * Runs a command if this token still holds the lock, in one step of the server; else rejects with
   * Fenced. The server decides, not our clock. (Of several locks it is the first that counts.) It is
   * Unavailable if there is no answer in `timeout`; then it may have run, or may run yet.
   */
  async run(...command) {
    try {
      const reply = this.#connection.send(...this.#locks.fence(this.token, command));
      return await within(this.#options.timeout, reply);
    } catch (error) {
      if (error instanceof Fenced && !this.#released) this.#lose('a write was refused');
      throw error;
    }
  }

  /** Gives the lock up. Rejects with Lost if it was lost before. A second call does nothing. */
  async release() {
    if (this.#released) return;
    this.#released = true;
    this.#stop(new Lost(`${this.key} was released`));
    const { owner, reentrant, timeout } = this.#options;
    const request = () => this.#locks.release();
    try {
      if (this.#lost) {
        // Some of several locks, or a linger, may be left. Nobody has to wait for that.
        if (!owner) this.#connection.send(...request()).catch(() => {});
        throw this.#lost;
      }
      // What is counted must not be released twice: the second might be another's hold.
      const { reply, again } = await ask(this.#connection, request, {
        own: reentrant,
        once: reentrant,
        patience: () => timeout / 2,
        end: now() + timeout,
      });
      // Asked again, 0 may mean that the first request did it; or, after the lease, that nothing was left.
      const done = again && now() < this.#until;
      if (Number(reply) < this.#locks.count && !done) throw this.#lose('the server says so');
    } finally {
      this.#connection.close();
    }
  }

  /** For `await using hold = await lock.acquire()`. */
  async [Symbol.asyncDispose ?? Symbol.for('Symbol.asyncDispose')]() {
    await this.release();
  }

  /** The lease began anew, at the earliest when the request was sent: from then on everything counts. */
  #extend(sent, lease) {
    this.#until = sent + lease;
    this.#options.lease = lease;
    if (this.#stopped.signal.aborted) return; // nothing is revived
    this.#watch();
    if (this.#options.renew) this.#timer('renewal', sent + lease / 3 - now(), () => this.#renew());
  }

  #watch() {
    this.#timer('deadline', this.#until - now(), () => {
      if (now() < this.#until) this.#watch(); // timers may be early
      else this.#lose('the lease may be over', this.#failure);
    });
  }

  async #renew() {
    try {
      await this.touch();
    } catch (error) {
      // Only a 0 or the deadline ends a hold. A server that is being replaced may say no for a while.
      this.#failure = error;
      if (this.#stopped.signal.aborted || !this.#options.renew) return;
      this.#timer('renewal', this.#options.lease / 10, () => this.#renew());
    }
  }

  /** The work is told and the lease is left to end: it has that long to finish. */
  #tooLong() {
    this.#options.renew = false;
    clearTimeout(this.#timers.renewal);
    this.#told.abort(new Lost(`${this.key} was held for ${this.#options.maxHold} ms, its maximum`));
  }

  #lose(why, cause) {
    this.#lost ??= new Lost(`${this.key} is lost: ${why}`, { cause });
    this.#stop(this.#lost);
    this.#told.abort(this.#lost);
    return this.#lost;
  }

  #stop(reason) {
    held.delete(this.#locks);
    for (const name in this.#timers) clearTimeout(this.#timers[name]);
    this.#stopped.abort(reason);
  }

  #timer(name, ms, action) {
    clearTimeout(this.#timers[name]);
    this.#timers[name] = setTimeout(action, Math.min(ms, longest));
  }
}
