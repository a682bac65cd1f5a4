// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors

import { EventEmitter } from 'node:events';
import type { Client } from './turnstile.mjs';

export interface Settings {
  /** How far clocks may drift apart during a lock, as a part of its duration. 0.01 by default. */
  readonly driftFactor: number;
  /** How often to try again. 10 by default; -1: for ever. */
  readonly retryCount: number;
  /** The time between attempts in ms. 200 by default. With one server their sum is the time in its line. */
  readonly retryDelay: number;
  /** At most so many ms more or less between attempts. 100 by default. */
  readonly retryJitter: number;
  /** using() extends the lock when so many ms of it are left. 500 by default. */
  readonly automaticExtensionThreshold: number;
}

export interface ExecutionStats {
  readonly membershipSize: number;
  readonly quorumSize: number;
  readonly votesFor: Set<Client>;
  readonly votesAgainst: Map<Client, Error>;
}

export interface ExecutionResult {
  /** The votes of each attempt, when all servers have answered. Empty with retryCount -1. */
  readonly attempts: ReadonlyArray<Promise<ExecutionStats>>;
  readonly start: number;
}

/** Somebody else has one of the resources, or the owner does not have it any more. */
export class ResourceLockedError extends Error {}

/** No majority in time. */
export class ExecutionError extends Error {
  constructor(message: string, attempts: ReadonlyArray<Promise<ExecutionStats>>);
  readonly attempts: ReadonlyArray<Promise<ExecutionStats>>;
}

export class Lock {
  constructor(
    redlock: Redlock,
    resources: string[],
    value: string,
    attempts: ReadonlyArray<Promise<ExecutionStats>>,
    expiration: number,
    fencingToken?: number,
  );
  readonly redlock: Redlock;
  readonly resources: string[];
  /** The owner of the lock. */
  readonly value: string;
  readonly attempts: ReadonlyArray<Promise<ExecutionStats>>;
  /** By Date.now(); 0 when it was released, extended or lost. */
  expiration: number;
  /**
   * Larger than that of every earlier holder: give it to whatever you write to. Undefined only in a lock that you
   * made yourself.
   */
  readonly fencingToken: number | undefined;
  release(): Promise<ExecutionResult>;
  /** The lock with a new expiration. This one is not valid any more. */
  extend(duration: number, settings?: Partial<Settings>): Promise<Lock>;
  [Symbol.asyncDispose](): Promise<void>;
}

/** `error` says why it was aborted. */
export type RedlockAbortSignal = AbortSignal & { error?: Error };

type Routine<Result> = (signal: RedlockAbortSignal, lock: Lock) => Promise<Result>;

/** Locks over one server, or over the majority of several independent ones. Emits 'error' for each vote against. */
export default class Redlock extends EventEmitter {
  /** Scripts are not supported: a third argument that has any is an error. */
  constructor(clients: Iterable<Client>, settings?: Partial<Settings>, scripts?: Record<string, undefined>);
  readonly clients: Set<Client>;
  readonly settings: Settings;
  acquire(resources: string[], duration: number, settings?: Partial<Settings>): Promise<Lock>;
  extend(existing: Lock, duration: number, settings?: Partial<Settings>): Promise<Lock>;
  release(lock: Lock, settings?: Partial<Settings>): Promise<ExecutionResult>;
  /** Runs the routine while it extends the lock. The lock that the routine gets is there for its token. */
  using<Result>(resources: string[], duration: number, routine: Routine<Result>): Promise<Result>;
  using<Result>(
    resources: string[],
    duration: number,
    settings: Partial<Settings>,
    routine: Routine<Result>,
  ): Promise<Result>;
  /** Quits all clients. */
  quit(): Promise<void>;
}
