// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors

/** A connected client of node-redis (createClient, createCluster) or ioredis (Redis, Cluster). */
export interface Client {
  // The least that all have in common. What they are is found out at run time.
  sendCommand(command: any, ...rest: any[]): any;
  duplicate(...overrides: any[]): any;
}

export type Argument = string | number | Uint8Array;

export interface Options {
  /** How long the lock is held without a renewal, in ms. 10,000 by default. */
  lease?: number;
  /** How long acquire() and using() stand in line, in ms. 0, the default, is one try. */
  wait?: number;
  /** Renew at every third of the lease, in the background. True by default. */
  renew?: boolean;
  /** The hold ends so many ms after it was granted, whoever goes on renewing it, and the signal is aborted. */
  maxHold?: number;
  /**
   * How long to go on asking when the connection fails, beyond `wait`, and how long run() waits for its
   * reply, in ms. 2,000 by default.
   */
  timeout?: number;
  /** Readers together, writers alone. */
  shared?: boolean;
  /** Up to so many holders. */
  limit?: number;
  /** This hold counts as so many of `limit`. 1 by default. */
  weight?: number;
  /** Do not wait where so many wait already. */
  maxLine?: number;
  /** A public name of this holder, 1 to 64 printable characters: for LOCK.INFO and for the errors of others. */
  tag?: string;
  /**
   * Stand ready for the message that the hold was lost. Otherwise only a hold that was waited for by message (for
   * longer than a second, or by more than three at a time) is told at once; others notice at their next renewal.
   * Costs the subscriber's connection.
   */
  watch?: boolean;
  /**
   * Count the holds of this lock object: each is released by itself. One owner holds them all, so only
   * one call may wait at a time; the older is rejected with Superseded. An aborted call is not counted. After
   * a lost connection the count may be one too high, never too low: then the lease ends the hold.
   */
  reentrant?: boolean;
  /** The hold ends with its connection, which is opened for it: the only case with a connection for each hold. */
  session?: boolean;
  /** If the hold ends without a release, keep the lock closed for so many ms more. */
  linger?: number;
  /** More locks, all or none, under one token. In a cluster all must be in one slot. */
  also?: readonly string[];
  /**
   * Who holds the lock; a random string for every hold by default. One that you give must be unique to a
   * holder, never the name of a host or process: the same owner asking again gets the hold it has, with the same
   * token. If acquire() fails, what it may have got is released, unless another hold of this process has the
   * same owner and lock: that one is kept. So an aborted upgrade leaves the shared hold as it is; if the
   * upgrade was granted in the same moment, the hold is exclusive and has a new token.
   */
  owner?: string;
}

/** What a plain lock cannot do. `line`: waiting is polling, in no order. `modes`: shared and limit become exclusive. */
export type Missing = 'token' | 'line' | 'modes' | 'linger' | 'session';

export interface Defaults extends Options {
  /**
   * Without the module, use plain locks (SET NX PX): they exclude each other and, where the module is loaded, its
   * locks. 'always' uses them in any case. False, the default: acquire() rejects with ModuleMissing.
   */
  fallback?: boolean | 'always';
  /** What you can do without then. What is needed and not named here rejects with Unsupported. */
  without?: readonly Missing[];
}

export interface Cancel {
  /**
   * Leave the line. acquire() rejects when the server has confirmed that nothing is held and nobody waits; if
   * there is no answer, after half of `timeout`.
   */
  signal?: AbortSignal;
}

export interface Turnstile<Token = number> {
  lock(key: string, options?: Options): Lock<Token>;
}

/** The locks of this client's server or cluster. The defaults are for all its locks. */
export function turnstile(client: Client, defaults?: Defaults & { fallback?: false }): Turnstile<number>;
export function turnstile(client: Client, defaults: Defaults): Turnstile<number | null>;

export interface Lock<Token = number> {
  readonly key: string;
  /**
   * A hold, after waiting for it if need be. Rejects with NotAcquired if there is none in time, which says who
   * holds the lock and for how long.
   */
  acquire(cancel?: Cancel): Promise<Hold<Token>>;
  /** A hold, or null if the lock is not free now. */
  tryAcquire(cancel?: Cancel): Promise<Hold<Token> | null>;
  /**
   * Runs the work under the lock and releases it whatever happens. Rejects with the work's own error, else with
   * Lost if the hold was gone at the end.
   */
  using<Result>(work: (hold: Hold<Token>) => Result | Promise<Result>, cancel?: Cancel): Promise<Result>;
  /** Whether anybody holds it now. */
  locked(): Promise<boolean>;
  /**
   * The hold of an owner that was stored, by another process perhaps. Rejects with Lost if it has none, or another
   * token than this one. Its lease begins anew.
   */
  adopt(owner: string, token?: Token): Promise<Hold<Token>>;
}

export interface Hold<Token = number> {
  readonly key: string;
  readonly owner: string;
  /** Larger than that of every earlier holder. Give it to whatever you write to. */
  readonly token: Token;
  /** Aborted, with a Lost error, when the hold is lost, `maxHold` is over or the client was closed. */
  readonly signal: AbortSignal;
  /** Lets the lease end that many ms from now. Rejects with Lost if the lock is lost. */
  touch(lease?: number): Promise<void>;
  /** Whether the server says that this is still held. */
  owned(): Promise<boolean>;
  /**
   * LOCK.FENCE … THEN: runs the command if this token holds the lock, else rejects with Fenced. Rejects with
   * Unavailable if there is no reply in `timeout`: then it may have run, or may run yet. ioredis sends it again
   * after a reconnect, so it may run twice: make it idempotent, or set autoResendUnfulfilledCommands: false.
   */
  run<Reply = unknown>(command: string, ...args: Argument[]): Promise<Reply>;
  /** Gives the lock up. Rejects with Lost if it was lost before. A second call does nothing. */
  release(): Promise<void>;
  [Symbol.asyncDispose](): Promise<void>;
}

// The part that talks, for those who build something else on it. It renews nothing and remembers no holds.

export interface Grant {
  /** Null for a plain lock. */
  readonly token: number | null;
  /** On performance.now(): the lease lasts at least until validFrom + lease. */
  readonly validFrom: number;
  /** Call it when you are done with the hold: no `onLost` any more, and the connection of a session is closed. */
  forget(): void;
}

export interface Ask {
  /** How long to go on asking when the connection fails, in ms. 2,000 by default. */
  timeout?: number;
  /** Ask only once. */
  once?: boolean;
  signal?: AbortSignal;
}

export interface AcquireRequest extends Ask {
  lease: number;
  /** How long to stand in line, in ms. 0, the default, is one try. */
  wait?: number;
  options?: Pick<
    Options,
    'shared' | 'limit' | 'weight' | 'maxLine' | 'tag' | 'reentrant' | 'session' | 'linger' | 'maxHold' | 'watch'
  > & { floor?: number };
  /** Called once, if a message says that the hold was lost (expired, forced, evicted, flushed, session). */
  onLost?(reason: string): void;
  /** Whether this process holds one of the locks under this owner already. That hold is not given up. */
  held?(): boolean;
  /** For plain locks: what the caller can do without. */
  without?: readonly Missing[];
}

/** One server or cluster. All keys of a call are in one slot; the first decides which node is asked. */
export class Server {
  /** Whether the client was closed. */
  readonly closed: boolean;
  /**
   * How long a wait may block one of three connections before a message is to tell of its end, in ms. 1,000 by
   * default, and a third of the lease at most; with 0 no connection is blocked. In a cluster none ever is.
   */
  park: number;
  /** A grant of all the keys, or null. If it rejects, the owner neither holds nor waits (see `held`). */
  acquire(keys: readonly string[], owner: string, request: AcquireRequest): Promise<Grant | null>;
  /** How many leases end that many ms after `validFrom`, at the earliest. */
  touch(keys: readonly string[], owner: string, lease: number, ask?: Ask): Promise<{ count: number; validFrom: number }>;
  /** How many were given up. With `again` the server may have been asked twice: then 0 may mean that it was done before. */
  release(keys: readonly string[], owner: string, ask?: Ask): Promise<{ count: number; again: boolean }>;
  /** Gives up what the owner holds or waits for. Never rejects; takes half of `timeout` at most. */
  abandon(keys: readonly string[], owner: string, ask?: Ask): Promise<void>;
  /** LOCK.INFO of the first key as an object, or null. */
  info(key: string, ask?: Ask): Promise<Record<string, any> | null>;
  /** Any command, to the node of this key. */
  send(key: string, args: readonly Argument[], ask?: Ask): Promise<unknown>;
}

/** The one Server of this client. With `plain` it uses plain locks, whether or not the module is loaded. */
export function serverOf(client: Client, how?: { plain?: boolean }): Server;

export class TurnstileError extends Error {}
/** The lock is busy, or the wait ran out. */
export class NotAcquired extends TurnstileError {
  /** The public name of a holder, if it has one and the server told. */
  readonly holder?: string;
  /** How long that holder's lease lasts without a renewal, in ms. */
  readonly leaseLeft?: number;
  /** How many wait. */
  readonly waiting?: number;
}
/** The hold is gone, or nobody can say any more that it is not. Stop working. */
export class Lost extends TurnstileError {}
/** A guarded write was refused: its token does not hold the lock. */
export class Fenced extends TurnstileError {}
/** Waiting would have closed a cycle of holders that wait for each other. */
export class Deadlock extends TurnstileError {}
/** The wait was ended: by a newer call or a release of the same owner. */
export class Superseded extends TurnstileError {}
/** Too many wait on this server. */
export class WaitLimit extends TurnstileError {}
/** This server is a replica. */
export class NotPrimary extends TurnstileError {}
/** The slot is elsewhere or on its way, and did not arrive in time. */
export class Moved extends TurnstileError {}
/** No answer: the connection failed, or the time was over. Its `cause` is the library's own error. */
export class Unavailable extends TurnstileError {}
/** The server has not loaded the module. */
export class ModuleMissing extends TurnstileError {}
/** A plain lock cannot do this, and the caller did not say that it can do without. */
export class Unsupported extends TurnstileError {}
