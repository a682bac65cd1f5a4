/** A connected client of node-redis or ioredis; not one of their cluster clients. */
export interface Client {
  // The least that both have in common. What they are is found out at run time.
  sendCommand(command: any, ...rest: any[]): any;
  duplicate(overrides?: any): any;
}

export type Argument = string | number | Uint8Array;

export interface Options {
  /** How long the lock is held without a renewal, in ms. 10,000 by default. */
  lease?: number;
  /** How long acquire() and using() stand in line, in ms. 0, the default, is one try. */
  wait?: number;
  /** Renew at every third of the lease, in the background. True by default. */
  renew?: boolean;
  /** Stop renewing after so many ms, and abort the signal. The lease that is left is for finishing. */
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
  /**
   * Count the holds of this lock object: each is released by itself. One owner holds them all, so only
   * one call may wait at a time; the older is rejected with Superseded. An aborted call is not counted. After
   * a lost connection the count may be one too high, never too low: then the lease ends the hold.
   */
  reentrant?: boolean;
  /** The hold ends with its connection, which is opened for it. */
  session?: boolean;
  /** If the hold ends without a release, keep the lock closed for so many ms more. */
  linger?: number;
  /** More locks, all or none, under one token. */
  also?: readonly string[];
  /**
   * Who holds the lock; a random string for every hold by default. One that you give must be unique to a
   * holder. If acquire() fails, what it may have got is released, unless another hold of this process has the
   * same owner and lock: that one is kept. So an aborted upgrade leaves the shared hold as it is; if the
   * upgrade was granted in the same moment, the hold is exclusive and has a new token.
   */
  owner?: string;
}

export interface Cancel {
  /**
   * Leave the line. acquire() rejects when the server has confirmed that nothing is held and nobody waits; if
   * there is no answer, after half of `timeout`.
   */
  signal?: AbortSignal;
}

export interface Turnstile {
  lock(key: string, options?: Options): Lock;
}

export function turnstile(client: Client): Turnstile;

export interface Lock {
  readonly key: string;
  /** A hold, after waiting for it if need be. Rejects with NotAcquired if there is none in time. */
  acquire(cancel?: Cancel): Promise<Hold>;
  /** A hold, or null if the lock is not free now. */
  tryAcquire(): Promise<Hold | null>;
  /**
   * Runs the work under the lock and releases it whatever happens. Rejects with the work's own error, else with
   * Lost if the hold was gone at the end.
   */
  using<Result>(work: (hold: Hold) => Result | Promise<Result>, cancel?: Cancel): Promise<Result>;
}

export interface Hold {
  readonly key: string;
  readonly owner: string;
  /** Larger than that of every earlier holder. Give it to whatever you write to. */
  readonly token: number;
  /** Aborted, with a Lost error, when the hold is lost or maxHold is over. */
  readonly signal: AbortSignal;
  /** Lets the lease end that many ms from now. Rejects with Lost if the lock is lost. */
  touch(lease?: number): Promise<void>;
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

export class TurnstileError extends Error {}
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
