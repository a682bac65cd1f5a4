// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors
//
// Locks of Turnstile, over a client that is already connected: node-redis (createClient or createCluster) or
// ioredis (Redis or Cluster).
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
// Connections. A lock that is free is acquired, renewed and released over the caller's own client. A short wait
// blocks a connection (WAIT), one of three that are used again. A longer one, or one more, is told of its end by
// a message (NOTIFY): for that there is one connection for each client. In a cluster all waits are told, over one
// connection for each node in use. Without the right to publish or subscribe each waiting call blocks a
// connection. A session has one of its own while it lasts. All of them are opened when they are needed for the
// first time and end with the client; none keeps the process alive, nor does a hold.
//
// Every holder has an owner of its own, a random string. The same owner asking again gets the same
// token, so acquiring, renewing and releasing may be asked twice: by this file after a lost connection,
// and by ioredis, which sends commands again that had no reply when it reconnected. That goes for a
// command in run() too: while the lock is held, an INCR may count twice. Run what may be repeated (SET),
// or give ioredis the option autoResendUnfulfilledCommands: false. This file never repeats it.
//
// What this file expects of the client: no blocking commands (BLPOP), behind which a renewal would have to
// queue; and a database that is chosen in its options, since other connections do not follow a SELECT. A
// keyPrefix of the client is not applied, in no command: name the lock in full, as for clients in other languages.

import { createHash, randomUUID } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';

export class TurnstileError extends Error {
  get name() {
    return this.constructor.name;
  }
}
// What each means is said in turnstile.d.mts.
export class NotAcquired extends TurnstileError {}
export class Lost extends TurnstileError {}
export class Fenced extends TurnstileError {}
export class Deadlock extends TurnstileError {}
export class Superseded extends TurnstileError {}
export class WaitLimit extends TurnstileError {}
export class NotPrimary extends TurnstileError {}
export class Moved extends TurnstileError {}
export class Unavailable extends TurnstileError {}
export class ModuleMissing extends TurnstileError {}
export class Unsupported extends TurnstileError {}

const errorOf = { FENCED: Fenced, DEADLOCK: Deadlock, UNBLOCKED: Superseded, WAITLIMIT: WaitLimit, READONLY: NotPrimary };
for (const code of ['MOVED', 'ASK', 'TRYAGAIN', 'CLUSTERDOWN']) errorOf[code] = Moved;
const codeOf = (error) => /^([A-Z]{2,})( |$)/.exec(error.message)?.[1];

/** What went wrong, in our terms. Other errors of the server (ERR, NOPERM, OOM …) stay as they are. */
function translate(error) {
  if (error instanceof TurnstileError) return error;
  const code = codeOf(error);
  if (!code) return new Unavailable(error.message || String(error), { cause: error });
  return errorOf[code] ? new errorOf[code](error.message, { cause: error }) : error;
}

// The two libraries, and their cluster clients. `duplicate` makes a connection of our own. It never
// reconnects: a session must not outlive its connection unnoticed, and who waits asks again for the time that
// is left. No time-out of the library may end a wait either.

const nodeRedis = {
  send: (client, args) => client.sendCommand(args),
  duplicate(client) {
    const { commandOptions, socket } = client.options;
    const own = client.duplicate({
      clientSideCache: undefined,
      commandOptions: { ...commandOptions, timeout: undefined },
      socket: { ...socket, reconnectStrategy: false, socketTimeout: undefined },
    });
    own.unref();
    return own;
  },
  connected: () => {},
  subscribe: (client, channel, sharded, listener) =>
    sharded ? client.sSubscribe(channel, listener) : client.subscribe(channel, listener),
  close: (client) => (client.isOpen || client.isReady) && client.destroy(),
  closed: (client) => client.isOpen === false,
  ends: ['end', 'terminated'], // of a client that is shared
  breaks: ['error', 'end', 'sharded-channel-moved'], // of a connection that does not reconnect
  socket: () => undefined, // what was sent is not sent again
};

const nodeRedisCluster = {
  ...nodeRedis,
  nodes: nodeRedis,
  ends: ['disconnect'],
  node(cluster, key) {
    const master = cluster.slots[slotOf(key)]?.master;
    return master && (master.client?.isReady ? master.client : cluster.nodeClient(master));
  },
  redirect: (cluster, key, args) => cluster.sendCommand(key, false, args),
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
      keyPrefix: '', // it would be put before the name of a channel
    }),
  connected: (client) => client.stream.unref(),
  subscribe(client, channel, sharded, listener) {
    if (!client.listenerCount('message')) {
      for (const event of ['message', 'smessage']) client.on(event, (_channel, text) => listener(text));
    }
    return sharded ? client.ssubscribe(channel) : client.subscribe(channel);
  },
  close: (client) => client.disconnect(),
  closed: (client) => client.status === 'end',
  ends: ['end'],
  breaks: ['close', 'error', 'moved'],
  socket: (client) => client.stream, // what has no reply is sent again on the next one
  resends: true,
};

const ioredisCluster = {
  ...ioredis,
  nodes: ioredis,
  node(cluster, key) {
    const address = cluster.slots[slotOf(key)]?.[0];
    return cluster.nodes().find(({ options }) => `${options.host}:${options.port}` === address);
  },
  redirect: (cluster, _key, args) => cluster.call(...args),
};

function libraryOf(client) {
  // ioredis has a sendCommand too, but it takes an object there.
  if ('call' in client) return client.isCluster ? ioredisCluster : ioredis;
  if ('sendCommand' in client) return 'nodeClient' in client ? nodeRedisCluster : nodeRedis;
  throw new TypeError('neither a node-redis nor an ioredis client');
}

const now = () => performance.now();
const longest = 2 ** 31 - 1; // a longer timer would fire at once
const pause = 50; // before a connection that failed is tried again
const spare = 3; // connections for short waits; so many are kept for the next who has to block one
const stale = 60_000; // after so long one that was kept may be dead
const skips = 8; // how often a lock that was taken is not tried before standing in line
const plain = (arg) => (arg instanceof Uint8Array ? arg : String(arg));
const newId = () => randomUUID().replaceAll('-', ''); // nobody can guess it

// One timer for everything that has a time: holds, and requests without an answer. Most of those are answered
// long before, and a timer for each would cost a good part of the request. It does not keep the process alive:
// that is for the connection of the client to do.

const alarms = new Set(); // each has a time (at), says whether it is due, and rings
let timer;
let wakeAt = Infinity;

function wakeUp(at) {
  if (at >= wakeAt) return;
  clearTimeout(timer);
  wakeAt = at;
  timer = setTimeout(ring, Math.min(Math.max(at - now(), 1), longest));
  timer.unref();
}

function ring() {
  wakeAt = Infinity;
  const time = now();
  const corked = new Set(); // what is due on one connection is written at once
  for (const alarm of alarms) if (alarm.isDue(time)) alarm.ring(corked);
  for (const stream of corked) stream.uncork();
  let next = Infinity;
  for (const { at } of alarms) next = Math.min(next, at);
  wakeUp(next);
}

/** The promise's value, if it comes in that time and before the signal. */
function within(ms, promise, signal) {
  return new Promise((resolve, reject) => {
    const finish = (settle, value) => {
      alarms.delete(alarm);
      signal?.removeEventListener('abort', abort);
      settle(value);
    };
    const at = now() + ms;
    const late = () => finish(reject, new Unavailable(`no answer in ${Math.round(ms)} ms`));
    const alarm = { at, isDue: (time) => time >= at, ring: late };
    const abort = () => finish(reject, signal.reason);
    alarms.add(alarm);
    wakeUp(at);
    signal?.addEventListener('abort', abort);
    promise.then((value) => finish(resolve, value), (error) => finish(reject, error));
  });
}

const crcs = Uint16Array.from({ length: 256 }, (_, byte) => {
  let crc = byte << 8;
  for (let bit = 0; bit < 8; ++bit) crc = (crc << 1) ^ (crc & 0x8000 ? 0x1021 : 0);
  return crc;
});

/** The slot of a key or channel in a cluster. */
function slotOf(key) {
  const open = key.indexOf('{');
  const close = open < 0 ? -1 : key.indexOf('}', open + 1);
  let crc = 0;
  for (const byte of Buffer.from(close > open + 1 ? key.slice(open + 1, close) : key)) {
    crc = ((crc << 8) ^ crcs[(crc >> 8) ^ byte]) & 0xffff;
  }
  return crc % 16384;
}

const tags = new Map(); // slot -> a short text in it
let tagged = 0;

function tagOf(slot) {
  for (; !tags.has(slot); ++tagged) {
    const its = slotOf(String(tagged));
    if (!tags.has(its)) tags.set(its, String(tagged));
  }
  return tags.get(slot);
}

// The commands.

const alsoOf = (keys) => (keys.length > 1 ? ['ALSO', String(keys.length - 1), ...keys.slice(1)] : []);
const releaseOf = (keys, owner) => ['LOCK.RELEASE', keys[0], owner, ...alsoOf(keys)];
const touchOf = (keys, owner, lease) => ['LOCK.TOUCH', keys[0], owner, 'PX', String(lease), ...alsoOf(keys)];

const flags = { shared: 'SHARED', reentrant: 'REENTRANT', session: 'SESSION' };
const values = { limit: 'LIMIT', weight: 'WEIGHT', linger: 'LINGER', maxHold: 'MAXHOLD', tag: 'TAG', floor: 'FLOOR' };

function acquireOf(keys, owner, lease, options, wait = 0, notify = undefined) {
  const request = ['LOCK.ACQUIRE', keys[0], owner, 'PX', String(lease)];
  if (wait) request.push('WAIT', String(wait));
  if (wait && options.maxLine) request.push('MAXLINE', String(options.maxLine));
  for (const name in flags) if (options[name]) request.push(flags[name]);
  for (const name in values) if (options[name]) request.push(values[name], String(options[name]));
  if (notify) request.push('NOTIFY', ...notify);
  return keys.length > 1 ? request.concat(alsoOf(keys)) : request;
}

/** A map of the server as an object: RESP2 has it as a list. */
function objectOf(map) {
  if (!Array.isArray(map)) return map;
  return Object.fromEntries(map.flatMap((value, i) => (i % 2 ? [] : [[value, map[i + 1]]])));
}

/** A connection of our own. */
class Own {
  broken = false;
  keptSince = 0;

  constructor(client, library) {
    this.client = client;
    this.library = library;
    client.on('error', () => {}); // whoever waits for a reply hears of it
    this.onBreak(() => (this.broken = true));
  }

  send(args) {
    return this.library.send(this.client, args);
  }

  onBreak(listener) {
    for (const event of this.library.breaks) this.client.once(event, listener);
  }

  close() {
    this.broken = true;
    this.library.close(this.client);
  }
}

/**
 * One server: the client that was given, or a cluster's client of one node. It is shared with others, and
 * never closed here. What was opened beside it is closed with it.
 */
class Node {
  #opened = new Set();
  #idle = [];
  later = []; // what is to be done after a reconnect
  parked = 0; // short waits, each of which blocks a connection
  refused = false; // it does not let us publish or subscribe

  constructor(client, library, server) {
    this.client = client;
    this.library = library;
    this.subscriber = new Subscriber(this, server);
    for (const event of library.ends) client.on?.(event, () => this.#close());
    if (library.resends) client.on('ready', () => this.later.splice(0).forEach((act) => act()));
  }

  send(args) {
    return this.library.send(this.client, args);
  }

  get socket() {
    return this.library.socket(this.client);
  }

  async open(ms, signal) {
    const own = new Own(this.library.duplicate(this.client), this.library);
    const connected = own.client.connect();
    try {
      await within(ms, connected, signal);
      this.library.connected(own.client);
      this.#opened.add(own);
      own.onBreak(() => this.#opened.delete(own));
      return own;
    } catch (error) {
      own.close();
      // node-redis finishes connecting all the same if it is closed in the midst of it.
      connected.then(() => own.close()).catch(() => {});
      throw error;
    }
  }

  /** A connection for one request, which may block it. */
  async borrow(ms, signal) {
    for (let own; (own = this.#idle.pop()); own.close()) {
      if (!own.broken && now() - own.keptSince < stale) return own;
    }
    return this.open(ms, signal);
  }

  giveBack(own) {
    if (this.#idle.length >= spare || this.library.closed(this.client)) own.close();
    else if (!own.broken) {
      own.keptSince = now();
      this.#idle.push(own);
    }
  }

  #close() {
    for (const own of this.#opened) own.close();
    this.#idle = [];
    this.subscriber.close();
  }
}

/** Hears the messages of one server for all requests of a client, over one connection. */
class Subscriber {
  #node;
  #server;
  #opened; // the promise of a connection
  #channels = new Map(); // each with the promise of a subscription; true when it is kept
  #giveUp; // rejects those promises: not every version of ioredis does

  constructor(node, server) {
    this.#node = node;
    this.#server = server;
  }

  /** Returns when the channel is subscribed to. */
  async listen(channel, ms, signal) {
    if (this.#channels.get(channel) === true) return;
    const opened = (this.#opened ??= this.#open(ms));
    const { own, gone } = await within(ms, opened, signal);
    if (this.#opened === opened && !this.#channels.has(channel)) {
      const tell = (text) => this.#server.tell(text);
      const subscribed = this.#node.library.subscribe(own.client, channel, this.#server.cluster, tell);
      this.#channels.set(channel, subscribed);
      subscribed.then(
        () => this.#opened === opened && this.#channels.set(channel, true),
        () => this.#opened === opened && this.#channels.delete(channel),
      );
    }
    await within(ms, Promise.race([gone, this.#channels.get(channel) ?? gone]), signal);
  }

  async #open(ms) {
    try {
      const own = await this.#node.open(ms);
      const gone = new Promise((_, reject) => (this.#giveUp = reject));
      gone.catch(() => {});
      // Also if only a channel was taken from us, because its slot moved: then all requests ask again.
      own.onBreak(() => this.close());
      return { own, gone };
    } catch (error) {
      this.#opened = undefined;
      throw error;
    }
  }

  close() {
    const opened = this.#opened;
    if (!opened) return;
    this.#opened = undefined;
    this.#channels.clear();
    this.#giveUp?.(this.#server.cluster ? new Moved('MOVED perhaps') : new Unavailable('no connection for messages'));
    opened.then(({ own }) => own.close()).catch(() => {});
    this.#server.unsubscribed(this);
  }
}

/** A request that waits for a message, and later its hold. */
class Request {
  id = newId();
  subscriber; // who hears of it
  #message; // the first one that has not been looked at
  #loss = {}; // the last one that was told
  #token; // of its hold
  #wake;
  #onLost;

  constructor(onLost) {
    this.#onLost = onLost;
  }

  begin(subscriber) {
    this.subscriber = subscriber;
    this.#message = undefined;
  }

  tell(kind, text = '') {
    const [token, reason] = text.split(' ');
    if (kind !== 'lost') this.#message ??= { kind, text };
    else if ((this.#loss = { token, reason }).token === this.#token) this.#onLost?.(reason);
    this.#wake?.();
  }

  /** From now on its loss concerns somebody. It may have been told before the answer to a touch came. */
  holds(token) {
    this.#token = String(token);
    if (this.#loss.token === this.#token) this.#onLost?.(this.#loss.reason);
  }

  /** The next message, or undefined if there is none in that time. */
  async next(ms, signal) {
    const told = new Promise((resolve) => (this.#wake = resolve));
    if (!this.#message) await within(ms, told, signal).catch(() => signal?.throwIfAborted());
    return this.#message;
  }
}

const servers = new WeakMap();

/** The one Server of this client. With `plain` it uses plain locks, whether or not the module is loaded. */
export function serverOf(client, { plain = false } = {}) {
  const library = libraryOf(client); // throws if it is none
  let known = servers.get(client);
  if (!known) servers.set(client, (known = {}));
  return plain ? (known.plain ??= new Plain(client, library)) : (known.module ??= new Server(client, library));
}

/**
 * Talks to one server or cluster: acquires, touches and releases sets of locks for an owner, waiting included.
 * It renews nothing and remembers no holds. The signatures are in turnstile.d.mts.
 */
export class Server {
  #client;
  #library;
  #nodes = new WeakMap();
  #requests = new Map(); // by their ids
  #crowded = new Map(); // keys that were taken: how often not to try them before standing in line
  #channel = `turnstile:${newId()}`;
  park = 1_000; // how long a wait may block a connection before it waits for a message

  constructor(client, library) {
    this.#client = client;
    this.#library = library;
    this.cluster = 'redirect' in library;
    this.resends = Boolean(library.resends);
    for (const event of library.ends) client.on?.(event, () => clientEnded(this));
  }

  get closed() {
    return this.#library.closed(this.#client);
  }

  async acquire(keys, owner, request) {
    const { lease, wait = 0, timeout = 2_000, options = {}, signal, once } = request;
    const start = now();
    const left = () => Math.max(0, Math.ceil(start + wait - now()));
    const asked = []; // requests without an answer: they may be granted later
    // `entered`: it may wait or hold.
    const state = { keys, owner, request, timeout, options, left, end: start + wait + timeout, asked, entered: false };
    let grant;
    try {
      if (options.session) grant = await this.#block(state);
      else {
        if (!options.watch && !(wait > 0 && this.#isCrowded(keys[0]))) {
          const how = { asked, end: state.end, timeout, signal, once };
          const { reply, sent, via } = await this.ask(keys[0], acquireOf(keys, owner, lease, options), how);
          state.own = via instanceof Own; // the client's connection is stuck
          if (reply !== null) grant = await this.#granted(state, reply, sent, lease);
          else if (wait > 0) this.#crowd(keys[0]);
        }
        if (!grant && (wait > 0 || options.watch)) grant = await this.#stand(state);
      }
      state.over = true;
      if (!grant && (state.entered || state.asked.length)) await this.#leaveNothing(state);
      return grant ?? null;
    } catch (error) {
      state.over = true;
      // If a reply was lost, so may be a grant. After a plain no of the server there is nothing to undo. And a
      // newer call of the same owner may have taken over the place, if others know it: then it is not ours to give up.
      const undo = state.entered || state.asked.length > 0;
      if (undo && !(error instanceof Superseded && request.held)) await this.#leaveNothing(state);
      throw await this.explained(error, keys[0]);
    } finally {
      if (!grant) this.#requests.delete(state.heard?.id);
      for (const { via } of state.asked) if (via instanceof Own) via.close();
    }
  }

  async touch(keys, owner, lease, how) {
    const { reply, sent } = await this.ask(keys[0], touchOf(keys, owner, lease), how);
    return { count: Number(reply), validFrom: sent };
  }

  async release(keys, owner, how) {
    const { reply, again } = await this.ask(keys[0], releaseOf(keys, owner), how);
    return { count: Number(reply), again };
  }

  async abandon(keys, owner, { timeout = 2_000 } = {}) {
    await this.#leaveNothing({ keys, owner, timeout, asked: [], request: {} });
  }

  async info(key, how) {
    const info = objectOf(await this.send(key, ['LOCK.INFO', key], how));
    if (info) for (const list of ['holders', 'waiters']) info[list] = info[list]?.map(objectOf);
    return info;
  }

  /** Whether these locks are all held under this token. */
  async owns(keys, _owner, token, how) {
    const fences = keys.map((key) => this.send(key, ['LOCK.FENCE', key, token], how));
    return (await Promise.all(fences)).every((reply) => Number(reply) === 1);
  }

  /** Runs a command under a token. It is never repeated. */
  fence(key, token, command, how) {
    return this.send(key, ['LOCK.FENCE', key, token, 'THEN', ...command], { ...how, once: true });
  }

  async send(key, args, how) {
    return (await this.ask(key, args.map(plain), how)).reply;
  }

  /**
   * ioredis sends a request again after a reconnect even if it timed out before, but not always what stood behind
   * it. Then this does.
   */
  releaseLater(keys, owner, held) {
    const node = this.#node(keys[0]);
    if (!this.resends || !(node instanceof Node)) return;
    node.later.push(() => held?.() || this.release(keys, owner).catch(() => {}));
  }

  /** What to cork while renewals are written, so that they go as one; undefined if the library does that. */
  stream(key) {
    const node = this.#node(key);
    return node instanceof Node ? node.socket : undefined;
  }

  /** Called with every message. */
  tell(text) {
    const [, id, kind, rest] = /^(\S+) (\S+) ([^]*)/.exec(text) ?? [];
    this.#requests.get(id)?.tell(kind, rest);
  }

  unsubscribed(subscriber) {
    for (const request of this.#requests.values()) {
      if (request.subscriber === subscriber) request.tell('unsubscribed');
    }
  }

  /**
   * Asks until there is an answer, however often the connection fails: the second time and later on a
   * connection of its own, which does not depend on how and when the library reconnects; and through the cluster's
   * client, with `detour`, if the slot is elsewhere. Each try has `patience`, all together have until `end`.
   * `sent` is when the try that was answered was sent, and `again` says that the server may have been asked
   * twice. `asked` gets the requests that may still be answered, and the caller closes their connections. With
   * `fresh` the connection is a new one: it is `via`, and left open.
   */
  async ask(key, args, how = {}) {
    const { timeout = 2_000, once, end = now() + timeout, detour = args } = how;
    const { patience = once ? timeout : timeout / 2, signal, asked, fresh, closing } = how;
    let route = how.own || fresh ? 'own' : 'shared';
    let failure;
    for (let tries = 1; ; tries++) {
      signal?.throwIfAborted();
      const time = () => Math.min(typeof patience === 'number' ? patience : patience(), end - now());
      let node, via, entry;
      try {
        node = how.node ?? this.#node(key);
        if (node instanceof Promise) node = await within(time(), node, signal);
        if (!node) route = 'cluster';
        if (route === 'shared') via = node;
        else if (route === 'own') via = await (fresh ? node.open(time(), signal) : node.borrow(time(), signal));
        else via = { send: (command) => this.#library.redirect(this.#client, key, command) };
        if (this.closed && !closing) throw new Unavailable('the client is closed');
        const { socket } = via;
        const command = route === 'cluster' ? detour : args;
        const sent = now();
        const answer = via.send(typeof command === 'function' ? command() : command);
        if (asked) asked.push((entry = { via, answer }));
        const reply = await within(time(), answer, signal);
        if (entry) asked.splice(asked.indexOf(entry), 1);
        if (route === 'own' && !fresh) node.giveBack(via);
        return { reply, sent, via, detoured: route === 'cluster', again: tries > 1 || via.socket !== socket };
      } catch (caught) {
        const aborted = signal?.aborted && caught === signal.reason;
        const error = aborted ? caught : translate(caught);
        const open = aborted || error instanceof Unavailable; // it may be answered yet
        if (entry && !open) asked.splice(asked.indexOf(entry), 1);
        if (via instanceof Own && !(entry && open)) {
          if (open || fresh) via.close();
          else node.giveBack(via);
        }
        const moved = this.cluster && error instanceof Moved;
        if (!moved && !(error instanceof Unavailable)) throw error;
        if (!moved) failure = error.cause ??= failure; // why, also if the last try was merely late
        if ((once && !moved) || now() + pause >= end || (this.closed && !closing)) throw error;
        if (!moved || route === 'cluster') await sleep(pause);
        // The cluster's own client follows redirections, and learns from them.
        if (!fresh) route = this.cluster && (moved || route === 'own') ? 'cluster' : 'own';
      }
    }
  }

  /** The node of this key: a Node, the promise of one, or undefined if the cluster's client knows none. */
  #node(key) {
    const nodeOf = (client) => {
      let node = this.#nodes.get(client);
      if (!node) this.#nodes.set(client, (node = new Node(client, this.#library.nodes ?? this.#library, this)));
      return node;
    };
    if (!this.cluster) return nodeOf(this.#client);
    const client = this.#library.node(this.#client, key);
    if (!(client instanceof Promise)) return client && nodeOf(client);
    const node = client.then(nodeOf);
    node.catch(() => {}); // whoever waits for it hears of it, and not everybody does
    return node;
  }

  /** Whether to stand in line at once. Now and then a lock is tried all the same. */
  #isCrowded(key) {
    const left = this.#crowded.get(key);
    if (left > 1) this.#crowded.set(key, left - 1);
    else this.#crowded.delete(key);
    return left > 0;
  }

  #crowd(key) {
    if (this.#crowded.size > 1_000) this.#crowded.clear();
    this.#crowded.set(key, skips);
  }

  /** Stands in line. Goes on while a server is being replaced, and after lost connections. */
  async #stand(state) {
    const { request, options, left, end } = state;
    const { signal, held } = request;
    // What is counted would be counted twice, and who holds another mode must not be released by mistake.
    let mayPark = !this.cluster && !options.watch && !options.reentrant && !options.maxLine && !held?.();
    for (;;) {
      signal?.throwIfAborted();
      if (this.closed) throw new Unavailable('the client is closed');
      try {
        const first = mayPark;
        mayPark = false;
        const grant = await (first ? this.#park(state) : this.#standOnce(state));
        if (grant) await this.#unparked(state);
        if (grant !== undefined) return grant;
      } catch (error) {
        state.moved = this.cluster && error instanceof Moved;
        const away = error instanceof Unavailable && !state.stuck && !this.closed && now() + pause < end;
        const demoted = /no longer a primary|instance state changed|^LOADING|^MASTERDOWN/;
        const replaced = error instanceof NotPrimary || demoted.test(error.message);
        if (!away && !((state.moved || replaced) && left() > 0)) throw error;
        await sleep(pause);
      }
    }
  }

  /**
   * Waits for a moment on a connection that this blocks, which is the quickest way. A grant, null, or undefined:
   * another request of the same owner is to take over the place in line.
   */
  async #park(state) {
    const { keys, owner, request, options, timeout, left, end, asked } = state;
    const { lease, signal } = request;
    const node = this.#node(keys[0]);
    if (!(this.park > 0) || node.refused || node.parked >= spare) return undefined;
    node.parked++;
    let via;
    try {
      via = await node.borrow(Math.min(timeout / 2, end - now()), signal);
    } catch {
      node.parked--;
      signal?.throwIfAborted();
      return undefined; // there is another way
    }
    if (this.closed) {
      node.parked--;
      via.close();
      return undefined;
    }
    const moment = Math.min(this.park, lease / 3); // so that the lease can be counted from the start
    const brief = left() <= moment; // then there is nothing to take over
    const sent = now();
    const answer = via.send(acquireOf(keys, owner, lease, options, left()));
    const entry = { via, answer };
    asked.push(entry);
    const parked = (state.parked = { sent });
    const settle = (reply, error) => {
      node.parked--;
      Object.assign(parked, { reply, error, answered: true });
      if (reply || error instanceof Unavailable) state.entered = true;
      if (state.over) return; // a release may stand behind it
      asked.splice(asked.indexOf(entry), 1);
      if (error instanceof Unavailable) via.close();
      else node.giveBack(via);
    };
    parked.settled = answer.then(settle, (error) => settle(undefined, translate(error)));
    try {
      await within(brief ? left() + timeout / 2 : moment, parked.settled, signal);
    } catch {
      signal?.throwIfAborted();
      if (brief) throw this.#stuck(state);
    }
    return this.#parkedGrant(state);
  }

  /** What the request that blocks a connection has brought so far: a grant, null, undefined, or an error. */
  #parkedGrant(state) {
    const { reply, error, sent, answered } = state.parked;
    Object.assign(state.parked, { reply: undefined, error: undefined }); // it counts once
    if (!answered) state.entered = true;
    // Messages have a limit of their own, and an answer that was lost comes again.
    if (error && !(error instanceof WaitLimit || error instanceof Unavailable)) throw error;
    return reply ? this.#granted(state, reply, sent, state.request.lease) : reply;
  }

  /**
   * Returns when the request that blocked a connection is answered, which it is when another takes over its
   * place. One that is stuck might bring a hold later.
   */
  async #unparked(state) {
    const { parked, timeout, request } = state;
    if (!parked || parked.answered) return;
    await within(timeout / 2, parked.settled, request.signal).catch(() => {
      request.signal?.throwIfAborted();
      throw this.#stuck(state);
    });
  }

  #stuck(state) {
    state.stuck = true;
    return new Unavailable('no answer on a connection that was waiting');
  }

  /** A grant that a message tells of, null if there is none in time, or undefined: ask again. */
  async #standOnce(state) {
    const { keys, owner, request, options, timeout, left, end, asked } = state;
    const { lease, signal, held } = request;
    const short = Math.min(lease, Math.max(2_000, 2 * timeout)); // of a grant that may not reach us
    const oneTry = acquireOf(keys, owner, lease, options);
    const how = { asked, patience: timeout / 2, end, signal, detour: oneTry, own: state.own };
    const node = await this.#node(keys[0]);
    state.node = node;
    if (node?.refused) return this.#block(state);
    if (!state.heard) {
      state.heard = new Request(request.onLost);
      const channel = this.cluster ? `${this.#channel}:{${tagOf(slotOf(keys[0]))}}` : this.#channel;
      state.notify = [channel, state.heard.id];
      this.#requests.set(state.heard.id, state.heard); // before it is sent: the message may be faster than the reply
    }
    const { heard, notify } = state;
    if (node && !state.moved) {
      try {
        await node.subscriber.listen(notify[0], Math.min(timeout / 2, end - now()), signal);
      } catch (caught) {
        if (signal?.aborted) throw signal.reason;
        const error = translate(caught);
        if (error instanceof TurnstileError) throw error;
        node.refused = true; // NOPERM, or a proxy that knows no subscriptions
        return undefined;
      }
      heard.begin(node.subscriber);
    }
    if (state.parked && !state.tookOver) {
      const grant = await this.#parkedGrant(state); // it may have been answered meanwhile
      if (grant !== undefined) return grant;
      state.tookOver = true;
    }
    // Nobody can subscribe at the node that a slot is on its way to. There we try until it has arrived.
    const inLine = node && !state.moved ? () => acquireOf(keys, owner, short, options, left(), notify) : oneTry;
    state.moved = false;
    let answer;
    try {
      answer = await this.ask(keys[0], inLine, how);
    } catch (error) {
      if (codeOf(error) !== 'NOPERM' || inLine === oneTry) throw error;
      node.refused = true; // to publish
      return undefined;
    }
    const { reply, sent, detoured } = answer;
    if (reply === null || Number(reply) > 0) this.#crowded.delete(keys[0]);
    if (Number(reply) > 0) return this.#granted(state, reply, sent, detoured || inLine === oneTry ? lease : short);
    if (reply === null) {
      if (!left() || !(detoured || inLine === oneTry)) return null;
      await sleep(pause);
      return undefined;
    }
    state.entered = true;
    this.#crowd(keys[0]);
    await this.#unparked(state);
    const { kind, text } = (await heard.next(left() + timeout / 2, signal)) ?? {};
    if (kind === 'granted') return this.#granted(state, text.split(' ')[0], -Infinity, 0);
    // Anybody may have sent it. The server's own time-out is not early; and after an error a release makes it true,
    // unless an older hold would go with it.
    if (kind === 'timeout' && left() < pause) {
      state.entered = false;
      return null;
    }
    if (kind === 'error') {
      state.entered = !held?.();
      throw translate(new Error(text));
    }
    if (kind) return undefined; // no longer subscribed, or not from the server
    // The message may have been lost. One try of the same owner tells. With the same id it is not counted again.
    const lastTry = acquireOf(keys, owner, lease, options, 0, notify);
    const last = await this.ask(keys[0], lastTry, how);
    return last.reply === null ? null : this.#granted(state, last.reply, last.sent, lease);
  }

  /** Waits on a connection of its own, which that blocks: for a session, or where messages are not allowed. */
  async #block(state) {
    const { keys, owner, request, options, timeout, left, end, asked } = state;
    const { lease, signal, onLost } = request;
    const args = () => acquireOf(keys, owner, lease, options, left());
    const patience = () => left() + timeout / 2; // so the server's time-out comes first
    const how = { asked, patience, end, signal, own: true, fresh: options.session };
    const { reply, sent, via } = await this.ask(keys[0], args, how);
    if (!options.session) return reply === null ? null : this.#granted(state, reply, sent, lease);
    let grant = null;
    try {
      if (reply !== null) grant = await this.#granted(state, reply, sent, lease);
      if (!grant) return null;
      let done = via.broken;
      if (done) throw new Unavailable('the connection of the session closed');
      via.onBreak(() => done || onLost?.('session'));
      grant.forget = () => {
        done = true;
        via.close();
      };
      return grant;
    } finally {
      if (!grant?.forget) via.close();
    }
  }

  /** The grant, if the owner still holds everything. */
  async #granted(state, token, sent, leased) {
    const { keys, owner, timeout, request } = state;
    const { lease, signal } = request;
    state.entered = true;
    let validFrom = sent;
    if (leased < lease || now() - sent > lease / 3) {
      // A message proves nothing, and of a slow answer we do not know when the lease began: begin it anew.
      const touched = await this.touch(keys, owner, lease, { timeout, signal });
      if (touched.count < keys.length) {
        if (touched.count) await this.release(keys, owner, { timeout });
        return undefined;
      }
      validFrom = touched.validFrom;
    }
    state.heard?.holds(token);
    const forget = () => this.#requests.delete(state.heard?.id);
    return { token: Number(token), validFrom, waited: Boolean(state.parked) || validFrom !== sent, forget };
  }

  /**
   * Ends the wait and gives up what may have been granted. It takes a round trip, and half of `timeout` at
   * most; what is not answered by then has a release behind it.
   */
  async #leaveNothing(state) {
    const { keys, owner, request, timeout, asked, notify, entered } = state;
    const { held, options = {}, lease } = request;
    const end = now() + timeout / 2;
    const alive = setTimeout(() => {}, timeout / 2); // the process does not end before, even if the client is closed
    const node = state.node ?? asked.find(({ via }) => via instanceof Node)?.via;
    const how = { patience: timeout / 4, end, closing: true, ...(this.closed && { own: true, node }) };
    let done = true;
    const release = () => this.release(keys, owner, how).then(() => (done = true), () => (done = false));
    if (!held?.()) {
      // A release stands behind each request, and gives up what the request brought before that. On another
      // connection it may overtake the request, and then ends no wait: so there is one more after each answer.
      let answered = asked.length === 0;
      const behind = asked.map(({ via, answer }) => (via instanceof Own ? via.send(releaseOf(keys, owner)) : answer));
      Promise.allSettled(behind).then(() => (answered = true));
      await release();
      while (!answered && now() < end) {
        await Promise.race([Promise.allSettled(behind), sleep(pause)]);
        await release();
      }
    } else if (options.reentrant) {
      // The owner holds the lock already, so the request is answered at once and counts one more.
      const counted = asked.map(async ({ answer }) => Number(await answer) > 0 && release());
      if (entered) counted.push(release());
      await within(end - now(), Promise.allSettled(counted)).catch(() => {});
    } else if (notify) {
      // An upgrade. A release would give up the older hold too. The same request takes over its own place, for 1 ms.
      const instead = acquireOf(keys, owner, lease, options, 1, notify);
      const granted = await this.ask(keys[0], instead, how).catch(() => undefined);
      if (Number(granted?.reply) > 0 && !held()) await release();
    } // else it ends with its connection
    clearTimeout(alive);
    if (!done) this.releaseLater(keys, owner, held);
  }

  /** A command that is not known means that the module is missing; but let the server say so. */
  async explained(error, key) {
    if (!/^ERR unknown command/i.test(error.message)) return error;
    const known = await this.send(key, ['COMMAND', 'INFO', 'LOCK.ACQUIRE']).catch(() => []);
    if (known?.[0]) return error;
    this.lacksModule = true;
    const advice = 'load it, or allow plain locks with the option fallback: true';
    return new ModuleMissing(`the server has not loaded the Turnstile module: ${advice}`, { cause: error });
  }
}

const sha1 = (text) => createHash('sha1').update(text).digest('hex');
const wrongType = (value) => (error) => {
  if (/WRONGTYPE/.test(error.message)) return value; // a lock of the module: not ours
  throw error;
};
const scripts = {
  release: "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0",
  touch: "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0",
};

/** Plain locks, for a server without the module. They know no token and no line, and who waits has to ask. */
class Plain extends Server {
  #native; // the promise of the command that deletes by comparison, if the server has one

  constructor(client, library) {
    super(client, library);
    if (library.resends && client.options.keyPrefix) {
      throw new Unsupported('plain locks do not go with keyPrefix: it would be put before their names, and not before other locks');
    }
  }

  async acquire(keys, owner, request) {
    const { lease, wait = 0, timeout = 2_000, signal, once, held } = request;
    this.#check(keys, request);
    const start = now();
    const left = () => start + wait - now();
    const asked = [];
    const how = { asked, timeout, end: start + wait + timeout, signal, once };
    const leave = async () => {
      if (held?.()) return;
      const answers = Promise.allSettled(asked.map(({ answer }) => answer));
      await within(timeout / 2, answers).catch(() => {}); // so that no release overtakes a request
      await this.abandon(keys, owner, { timeout });
    };
    let entered = false;
    try {
      for (let tries = 0; ; ++tries) {
        const set = ['SET', keys[0], owner, 'NX', 'PX', String(lease)];
        const { reply, sent, again } = await this.ask(keys[0], set, how);
        entered ||= reply !== null;
        if (entered && now() - sent < lease / 3) return { token: null, validFrom: sent, forget() {} };
        // The answer was slow; or an earlier one was lost; or the owner, who is the caller's, has held it before.
        if (entered || again || (held && tries === 0)) {
          const { count, validFrom } = await this.touch(keys, owner, lease, { timeout, signal });
          if (count) return { token: null, validFrom, forget() {} };
        }
        if (left() <= 0) break;
        const most = Math.min(200, 10 * 1.5 ** tries); // back off, and not all at the same moment
        await sleep(Math.min(left(), most * (0.5 + Math.random() / 2)), undefined, { signal }).catch(() => {});
        signal?.throwIfAborted();
      }
      if (entered || asked.length) await leave();
      return null;
    } catch (error) {
      if (entered || asked.length) await leave();
      throw error;
    } finally {
      for (const { via } of asked) if (via instanceof Own) via.close();
    }
  }

  async touch([key], owner, lease, how) {
    const ifEqual = ['SET', key, owner, 'IFEQ', owner, 'PX', String(lease)]; // came with the command that deletes
    return this.#compare(key, owner, (native) => native && ifEqual, [scripts.touch, String(lease)], how);
  }

  async release([key], owner, how) {
    const native = { DELEX: ['DELEX', key, 'IFEQ', owner], DELIFEQ: ['DELIFEQ', key, owner] };
    return this.#compare(key, owner, (name) => native[name], [scripts.release], how);
  }

  async abandon(keys, owner, { timeout = 2_000 } = {}) {
    const end = now() + timeout / 2;
    const how = { patience: timeout / 4, end, closing: true, own: this.closed };
    await this.release(keys, owner, how).catch(() => this.releaseLater(keys, owner));
  }

  async info(key, how) {
    const left = Number(await this.send(key, ['PTTL', key], how));
    return left === -2 ? null : { holding: 1, holders: [{ 'lease-left-ms': left }] };
  }

  async owns([key], owner, _token, how) {
    return (await this.send(key, ['GET', key], how).catch(wrongType(null))) === owner;
  }

  async fence() {
    throw new Unsupported('a plain lock has no token, so it cannot guard a command');
  }

  #check(keys, { options = {}, wait, without = [] }) {
    const { shared, limit, maxLine, linger, session, reentrant, floor } = options;
    const wanted = { token: true, line: wait > 0 || maxLine, modes: shared || limit, linger, session };
    const missing = Object.keys(wanted).filter((name) => wanted[name] && !without.includes(name));
    if (keys.length > 1) missing.push('also'); // nobody can do without these
    if (reentrant) missing.push('reentrant');
    if (floor) missing.push('floor');
    if (!missing.length) return;
    const say = `without: ['${missing.join("', '")}']`;
    throw new Unsupported(`a plain lock lacks ${missing.join(', ')}; where you can do without, say ${say}`);
  }

  /** Whether the value is the owner, and what is to be done then was done. */
  async #compare(key, owner, native, [script, ...args], how) {
    this.#native ??= this.send(key, ['COMMAND', 'INFO', 'DELEX', 'DELIFEQ'], how).then(
      (known) => ['DELEX', 'DELIFEQ'].find((_, i) => known[i]) ?? null,
    );
    const name = await this.#native.catch(() => (this.#native = undefined));
    const command = native(name) ?? ['EVALSHA', sha1(script), '1', key, owner, ...args];
    const answer = await this.ask(key, command, how)
      .catch((error) => {
        if (codeOf(error) !== 'NOSCRIPT') throw error;
        return this.ask(key, ['EVAL', script, '1', key, owner, ...args], how);
      })
      .catch(wrongType({ reply: 0, sent: now() }));
    const count = answer.reply === 'OK' ? 1 : Number(answer.reply ?? 0);
    return { count, validFrom: answer.sent, again: answer.again };
  }
}

/** The locks of this client's server or cluster. The defaults are for all its locks. */
export function turnstile(client, defaults = {}) {
  libraryOf(client); // throws if it is none
  return { lock: (key, options) => new Lock(client, key, { ...defaults, ...options }) };
}

const held = new Set(); // the holds under an owner of the caller's: other calls may use it too

export class Lock {
  #client;
  #keys;
  #options;
  #plain; // whether that is what it uses

  constructor(client, key, options) {
    const { lease = 10_000, wait = 0, renew = true, timeout = 2_000, also = [], maxHold, owner } = options;
    const { reentrant, session } = options;
    this.#client = client;
    this.#keys = [key, ...also];
    this.#options = Object.assign(options, { lease: Math.min(lease, maxHold ?? lease), wait, renew, timeout });
    // A session is bound to the connection of the last request: the inner of two holds would take
    // the outer one with it.
    if (reentrant && session) throw new TypeError('reentrant and session do not go together');
    // Counted holds belong to one owner; otherwise every hold has its own.
    if (reentrant && !owner) this.#options.owner = randomUUID();
    this.key = key;
  }

  get #server() {
    const { fallback } = this.#options;
    const server = serverOf(this.#client);
    this.#plain = fallback === 'always' || Boolean(fallback && server.lacksModule);
    return this.#plain ? serverOf(this.#client, { plain: true }) : server;
  }

  /** Does it with the server, and once more with plain locks if the module turns out to be missing. */
  async #with(work) {
    const server = this.#server;
    const isPlain = this.#plain;
    try {
      return await work(server, isPlain);
    } catch (caught) {
      const error = isPlain ? caught : await server.explained(caught, this.key);
      if (error instanceof ModuleMissing && this.#options.fallback) return work(this.#server, this.#plain);
      throw error;
    }
  }

  async acquire({ signal } = {}) {
    const hold = await this.#take(this.#options.wait, signal);
    if (!hold) throw await this.#busy();
    return hold;
  }

  tryAcquire({ signal } = {}) {
    return this.#take(0, signal);
  }

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

  async locked() {
    const info = await this.#with((server) => server.info(this.key, { timeout: this.#options.timeout }));
    return Number(info?.holding ?? 0) > 0;
  }

  adopt(owner, token = undefined) {
    return this.#with((server, isPlain) => this.#adopt(server, isPlain, owner, token));
  }

  async #adopt(server, isPlain, owner, token) {
    const { lease, timeout } = this.#options;
    const { count, validFrom } = await server.touch(this.#keys, owner, lease, { timeout });
    const its = (await server.info(this.key, { timeout }))?.holders.find((holder) => holder.owner === owner);
    const found = isPlain ? null : Number(its?.token ?? token); // a list of holders may not be complete
    if (count < this.#keys.length || (token !== undefined && found !== token) || Number.isNaN(found)) {
      throw new Lost(`${this.key} is not held by this owner, or not under this token`);
    }
    const cap = validFrom + Number(its?.['max-hold-left-ms'] ?? Infinity);
    const grant = { token: found, validFrom, forget() {} };
    return new Hold(server, this.#keys, owner, grant, { ...this.#options, owner }, cap);
  }

  async #take(wait, signal) {
    signal?.throwIfAborted();
    const { lease, timeout, maxHold, without } = this.#options;
    const owner = this.#options.owner ?? randomUUID();
    const keys = this.#keys;
    const server = this.#server;
    let hold = null;
    let lost; // it may be told before there is a hold
    const onLost = (reason) => {
      lost = `the server says: ${reason}`;
      hold?.lose(lost);
    };
    const known = this.#options.owner ? () => heldElsewhere(owner, keys) : undefined;
    const request = { lease, wait, timeout, options: this.#options, signal, onLost, held: known, without };
    const begin = now();
    let grant;
    try {
      grant = await server.acquire(keys, owner, request);
    } catch (error) {
      if (error instanceof ModuleMissing && this.#options.fallback) return this.#take(wait, signal);
      throw error;
    }
    if (!grant) return null;
    // The server counts a maximum from the first grant. We know when that was if we did not wait, and came first.
    let cap = maxHold ? grant.validFrom + maxHold : Infinity;
    if (maxHold && !this.#plain && (grant.waited || known)) cap = await this.#cap(server, owner).catch(() => begin + maxHold);
    hold = new Hold(server, keys, owner, grant, this.#options, cap);
    if (lost) hold.lose(lost);
    return hold;
  }

  /** When the server ends the hold, whoever renews it. */
  async #cap(server, owner) {
    const asked = now();
    const { holders } = await server.info(this.key, { timeout: this.#options.timeout });
    return asked + Number(holders.find((holder) => holder.owner === owner)['max-hold-left-ms'] ?? Infinity);
  }

  /** Says who holds the lock, as far as the server tells. The owner is a proof: it is not shown in full. */
  async #busy() {
    const { timeout } = this.#options;
    const info = await this.#server.info(this.key, { timeout: timeout / 2, once: true }).catch(() => null);
    const [first] = info?.holders ?? [];
    if (!first) return new NotAcquired(`${this.key} is held by somebody else`);
    const left = Number(first['lease-left-ms']);
    const proof = String(first.owner ?? '');
    const who = first.tag || (proof.length < 12 ? 'somebody' : `owner ${proof.slice(0, 6)}…`);
    const others = info.holding > 1 ? ` and ${info.holding - 1} more` : '';
    const line = info.waiting > 0 ? `; ${info.waiting} wait` : '';
    const time = left < 0 ? '' : `, for another ${left} ms if not renewed`;
    const error = new NotAcquired(`${this.key} is held by ${who}${others}${time}${line}`);
    return Object.assign(error, { holder: first.tag || undefined, leaseLeft: left, waiting: Number(info.waiting ?? 0) });
  }
}

/** Whether another call got one of the locks for the same owner, and its hold lasts. */
function heldElsewhere(owner, keys) {
  for (const hold of held) if (hold.owner === owner && hold.keys.some((key) => keys.includes(key))) return true;
  return false;
}

function clientEnded(server) {
  for (const hold of alarms) if (hold.server === server) hold.lose('its client was closed');
}

/** A lock that was obtained. Give `token` to whatever you write to, and stop at `signal`. */
export class Hold {
  #grant;
  #options;
  #lease;
  #until; // the lease does not end before, on our own clock
  #cap; // nor is it renewed beyond
  #renewal = Infinity; // when it is due
  #failure; // of the last renewal
  #lost; // why, if it is
  #released = false;
  #told; // made when somebody asks for it

  constructor(server, keys, owner, grant, options, cap) {
    this.server = server;
    this.keys = keys;
    this.#grant = grant;
    this.#options = options;
    this.#cap = cap;
    this.key = keys[0];
    this.owner = owner;
    this.token = grant.token; // below 2^53: exact
    if (options.owner) held.add(this);
    alarms.add(this);
    this.#extend(grant.validFrom, options.lease);
  }

  get signal() {
    this.#told ??= new AbortController();
    if (this.#lost) this.#told.abort(this.#lost);
    return this.#told.signal;
  }

  async touch(lease = this.#lease) {
    if (!alarms.has(this)) throw this.#lost ?? new Lost(`${this.key} was released`);
    const start = now();
    if (start + lease < this.#until) this.#extend(start, lease); // the answer may be lost
    const how = { patience: lease / 3, end: this.#until };
    const { count, validFrom } = await this.server.touch(this.keys, this.owner, lease, how).catch((error) => {
      throw this.#lost ?? error;
    });
    if (count < this.keys.length) throw this.lose('the server says so');
    this.#extend(validFrom, lease);
  }

  async owned() {
    if (this.#released || this.#lost) return false;
    return this.server.owns(this.keys, this.owner, this.token, { timeout: this.#options.timeout });
  }

  /** The server decides, not our clock. Of several locks it is the first that counts. */
  async run(...command) {
    const { timeout } = this.#options;
    try {
      return await this.server.fence(this.key, this.token, command, { timeout });
    } catch (error) {
      if (error instanceof Fenced && !this.#released) this.lose('a write was refused');
      throw error;
    }
  }

  async release() {
    if (this.#released) return;
    this.#released = true;
    this.#stop();
    const { owner, reentrant, timeout } = this.#options;
    try {
      if (this.#lost) {
        // Some of several locks, or a linger, may be left. Nobody has to wait for that.
        if (!owner && !this.server.closed) this.server.release(this.keys, this.owner, { timeout }).catch(() => {});
        throw this.#lost;
      }
      // What is counted must not be released twice: the second might be another's hold. So ioredis, which
      // might send it again, is not asked to.
      const how = { timeout, once: reentrant, own: reentrant && this.server.resends };
      const { count, again } = await this.server.release(this.keys, this.owner, how);
      // Asked again, 0 may mean that the first request did it; or, after the lease, that nothing was left.
      const done = again && now() < this.#until;
      if (count < this.keys.length && !done) throw this.lose('the server says so');
    } finally {
      this.#grant.forget();
    }
  }

  [Symbol.asyncDispose ?? Symbol.for('Symbol.asyncDispose')]() {
    return this.release();
  }

  // What follows is for this file.

  /** When the timer has to look after it. */
  get at() {
    return Math.min(this.#renewal, this.#until);
  }

  /** A renewal is a little early rather than alone. */
  isDue(time) {
    return this.#until <= time || this.#renewal - this.#lease / 30 <= time;
  }

  ring(corked) {
    if (this.#until > now()) {
      const stream = this.server.stream(this.key);
      if (stream && !corked.has(stream)) stream.cork();
      if (stream) corked.add(stream);
      this.#renew();
    } else if (this.#until === this.#cap) this.lose('it was held for its maximum');
    else this.lose('the lease may be over', this.#failure);
  }

  async #renew() {
    this.#renewal = Infinity;
    try {
      await this.touch();
    } catch (error) {
      // Only a 0 or the deadline ends a hold. A server that is being replaced may say no for a while.
      this.#failure = error;
      if (alarms.has(this)) wakeUp((this.#renewal = now() + this.#lease / 10));
    }
  }

  lose(why, cause = undefined) {
    if (this.#lost) return this.#lost;
    this.#lost = new Lost(`${this.key} is lost: ${why}`, { cause });
    this.#stop();
    if (!this.#released) this.#told?.abort(this.#lost);
    return this.#lost;
  }

  /** The lease began anew, at the earliest when the request was sent: from then on everything counts. */
  #extend(sent, lease) {
    this.#until = Math.min(sent + lease, this.#cap);
    this.#lease = lease;
    if (!alarms.has(this)) return; // nothing is revived
    this.#renewal = this.#options.renew && this.#until < this.#cap ? sent + lease / 3 : Infinity;
    wakeUp(this.at);
  }

  #stop() {
    held.delete(this);
    alarms.delete(this);
  }
}
