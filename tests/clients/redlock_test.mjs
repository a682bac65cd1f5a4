// node --test tests/clients/redlock_test.mjs
//
// client-examples/node/redlock.mjs, the drop-in for the package redlock, on one server and on three. The servers
// are described in tests/quorum/servers.mjs. Needs `npm ci --prefix client-examples/node`.

import assert from 'node:assert/strict';
import { once } from 'node:events';
import { after, before, describe, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import Redlock, { ExecutionError, Lock, ResourceLockedError } from '../../client-examples/node/redlock.mjs';
import { Redis, Server, createClient, until } from '../quorum/servers.mjs';

const slack = 400; // how late a busy machine may be, in ms
const quick = { retryCount: 2, retryDelay: 20, retryJitter: 10 };
let names = 0;
const newKey = () => `{redlock}:${++names}`;

/** The servers of one suite, and a client of each. */
class Fleet {
  constructor(size, ...options) {
    this.size = size;
    this.options = options;
  }

  async start() {
    this.servers = await Promise.all(Array.from({ length: this.size }, () => Server.start(...this.options)));
    this.clients = this.servers.map(({ url }) => new Redis(url, { retryStrategy: () => 20 }).on('error', () => {}));
    this.redlock = new Redlock(this.clients);
  }

  async stop() {
    for (const client of this.clients) client.disconnect();
    await Promise.all(this.servers.map((server) => server.stop()));
  }

  askAll(...command) {
    return Promise.all(this.servers.map((server) => server.ask(...command)));
  }

  /** What LOCK.INFO says of a lock: how many servers have which owner. */
  async owners(key) {
    const infos = await this.askAll('LOCK.INFO', key);
    return infos.map((info) => info && /"owner"[,:]"([^"]*)"/.exec(JSON.stringify(info))?.[1]);
  }

  async isFree(...keys) {
    for (const key of keys) assert.deepEqual(await this.owners(key), this.servers.map(() => null));
  }

  async isHeld(lock, ...keys) {
    for (const key of keys) assert.deepEqual(await this.owners(key), this.servers.map(() => lock.value));
  }
}

async function votes(error) {
  assert(error instanceof ExecutionError, error);
  return Promise.all(error.attempts);
}

/** Puts something between the client and its server. */
function replace(client, by) {
  const { call } = client;
  client.call = (...args) => by(() => call.apply(client, args), args);
}

/** The error that it rejects with, and how long it took. */
async function failure(promise) {
  const start = performance.now();
  const error = await promise.then(() => assert.fail('it did not fail'), (reason) => reason);
  return { error, ms: performance.now() - start };
}

for (const size of [1, 3]) {
  describe(`on ${size === 1 ? 'one server' : `${size} servers`}`, () => {
    const fleet = new Fleet(size);
    let redlock;
    before(async () => {
      await fleet.start();
      redlock = fleet.redlock;
    });
    after(() => fleet.stop());

    test('acquires, extends and releases, under one token', async () => {
      const key = newKey();
      const start = Date.now();
      const lock = await redlock.acquire([key], 10_000);
      assert(lock instanceof Lock);
      assert.deepEqual(lock.resources, [key]);
      assert(lock.expiration > start + 9_000 && lock.expiration <= Date.now() + 10_000 - 102, lock.expiration - start);
      await fleet.isHeld(lock, key);
      const tokens = await fleet.askAll('LOCK.FENCE', key);
      assert(tokens.filter((token) => token === lock.fencingToken).length > size / 2, tokens);
      const [attempt] = await Promise.all(lock.attempts);
      assert.deepEqual([attempt.membershipSize, attempt.quorumSize], [size, Math.floor(size / 2) + 1]);
      assert(attempt.votesFor.size >= attempt.quorumSize);
      assert.equal(attempt.votesFor.size + attempt.votesAgainst.size, size);
      assert([...attempt.votesFor].every((client) => fleet.clients.includes(client)));

      const longer = await lock.extend(60_000);
      assert.equal(lock.expiration, 0);
      assert.equal(longer.value, lock.value);
      assert.equal(longer.fencingToken, lock.fencingToken);
      assert(longer.expiration > start + 50_000);
      for (const ttl of await fleet.askAll('PTTL', key)) assert(ttl > 50_000 && ttl <= 60_000, ttl);
      await assert.rejects(lock.extend(10_000), ExecutionError); // the old one

      const { attempts, start: released } = await longer.release();
      assert.equal((await attempts[0]).votesFor.size, size);
      assert(released >= start);
      assert.equal(longer.expiration, 0);
      await fleet.isFree(key);
      const next = await redlock.acquire([key], 10_000);
      assert(next.fencingToken > lock.fencingToken);
      await redlock.release(await redlock.extend(next, 5_000));
      await fleet.isFree(key);
    });

    test('several resources, all or none', async () => {
      const [a, b, c] = [newKey(), newKey(), newKey()];
      const lock = await redlock.acquire([a, b], 10_000);
      await fleet.isHeld(lock, a, b);
      const { error } = await failure(redlock.acquire([b, c], 10_000, quick));
      for (const { votesFor, votesAgainst } of await votes(error)) {
        assert.equal(votesFor.size, 0);
        for (const vote of votesAgainst.values()) {
          assert(vote instanceof ResourceLockedError);
          assert.equal(vote.message, 'The operation was applied to: 0 of the 2 requested resources.');
        }
      }
      await fleet.isFree(c);
      // Of what is left of it everything is released.
      await fleet.askAll('DEL', a);
      const lost = await failure(lock.release());
      const [{ votesAgainst }] = await votes(lost.error);
      assert.match([...votesAgainst.values()][0].message, /applied to: 1 of the 2/);
      await fleet.isFree(a, b);
    });

    test('a busy lock: as many attempts and as much time as the settings say', async () => {
      const key = newKey();
      const lock = await redlock.acquire([key], 60_000);
      const errors = [];
      const listener = (error) => errors.push(error);
      redlock.on('error', listener);
      const settings = { retryCount: 4, retryDelay: 100, retryJitter: 0 };
      const { error, ms } = await failure(redlock.acquire([key], 10_000, settings));
      assert.equal(error.name, 'ExecutionError');
      assert.equal((await votes(error)).length, 5);
      assert(ms > 395 && ms < 400 + slack, ms);
      const once = await failure(redlock.acquire([key], 10_000, { retryCount: 0 }));
      assert.equal((await votes(once.error)).length, 1);
      assert(once.ms < slack, once.ms);
      redlock.off('error', listener);
      assert(errors.length >= 2 && errors.every((each) => each instanceof ResourceLockedError), errors);
      await fleet.isHeld(lock, key);
      await lock.release();
      await fleet.isFree(key);
    });

    test('gets a lock that becomes free: released, or at its end', async () => {
      const key = newKey();
      const lock = await redlock.acquire([key], 60_000);
      const next = redlock.acquire([key], 300);
      setTimeout(() => lock.release(), 100);
      const second = await next;
      assert(second.fencingToken > lock.fencingToken);
      const third = await redlock.acquire([key], 60_000, { retryCount: -1, retryDelay: 50, retryJitter: 10 });
      assert(Date.now() >= second.expiration);
      assert.deepEqual(third.attempts, []);
      await fleet.isHeld(third, key);
      await third.release();
    });

    test('what is lost cannot be extended or released, and that is said at once', async () => {
      const key = newKey();
      for (const settings of [{}, { retryCount: -1 }]) {
        const lock = await redlock.acquire([key], 10_000);
        await fleet.askAll('DEL', key);
        const rival = await redlock.acquire([key], 10_000);
        const extension = await failure(lock.extend(20_000, settings));
        assert(extension.error instanceof ExecutionError);
        assert(extension.ms < slack, extension.ms);
        assert.equal(lock.expiration, 0);
        const release = await failure(redlock.release(lock, settings));
        assert(release.error instanceof ExecutionError);
        assert(release.ms < slack, release.ms);
        await fleet.isHeld(rival, key);
        await rival.release();
      }
      const expired = await redlock.acquire([key], 100);
      await until(() => Date.now() > expired.expiration, 'expired');
      const { error } = await failure(expired.extend(100));
      assert.match(error.message, /already-expired/);
      assert.deepEqual(error.attempts, []);
    });

    test('using: extends, hands out the token, releases', async () => {
      const key = newKey();
      const settings = { automaticExtensionThreshold: 200 };
      const result = await redlock.using([key], 500, settings, async (signal, lock) => {
        const [value] = await fleet.owners(key);
        assert.equal(value, lock.value);
        assert(lock.fencingToken > 0);
        await sleep(1_200);
        assert(!signal.aborted);
        assert.equal(signal.error, undefined);
        await fleet.isHeld(lock, key);
        return 'result';
      });
      assert.equal(result, 'result');
      await fleet.isFree(key);
      assert.equal(await redlock.using([key], 5_000, async () => 'short form'), 'short form');
      const own = new Error('its own');
      assert.equal((await failure(redlock.using([key], 5_000, () => Promise.reject(own)))).error, own);
      await fleet.isFree(key);
    });

    test('using: the signal says that the lock is lost', async () => {
      const key = newKey();
      const settings = { automaticExtensionThreshold: 300 };
      let seen;
      const routine = async (signal, lock) => {
        await fleet.askAll('SET', key, 'other', 'PX', 1_000);
        await once(signal, 'abort', { signal: AbortSignal.timeout(5_000) });
        assert(Date.now() < lock.expiration || lock.expiration === 0); // not first at its end
        assert(signal.error instanceof ExecutionError);
        assert.equal(signal.reason, signal.error);
        seen = true;
      };
      const { error } = await failure(redlock.using([key], 1_000, settings, routine)); // by its release
      assert(error instanceof ExecutionError, error);
      assert(seen);
      const own = new Error('its own');
      const fails = async () => {
        await fleet.askAll('DEL', key);
        throw own;
      };
      await fleet.askAll('DEL', key);
      assert.equal((await failure(redlock.using([key], 1_000, settings, fails))).error, own);
    });

    test('one inside at a time, and the tokens rise', async () => {
      const key = newKey();
      let inside = 0;
      let last = 0;
      let turns = 0;
      const settings = { retryCount: -1, retryDelay: 10, retryJitter: 10, automaticExtensionThreshold: 500 };
      const work = async () => {
        for (let i = 0; i < 10; i++) {
          await redlock.using([key], 2_000, settings, async (_signal, lock) => {
            assert.equal(++inside, 1);
            assert(lock.fencingToken > last);
            last = lock.fencingToken;
            await sleep(1);
            inside--;
            turns++;
          });
        }
      };
      await Promise.all(Array.from({ length: 5 }, work));
      assert.equal(turns, 50);
      await fleet.isFree(key);
    });

    test('shares its locks with who uses SET NX PX', async () => {
      const key = newKey();
      await fleet.askAll('SET', key, 'plain', 'NX', 'PX', 60_000);
      const { error } = await failure(redlock.acquire([key], 5_000, quick));
      for (const { votesAgainst } of await votes(error)) {
        assert([...votesAgainst.values()][0] instanceof ResourceLockedError);
      }
      const waiting = redlock.acquire([key], 5_000);
      await fleet.askAll('DEL', key);
      const lock = await waiting;
      assert(lock.fencingToken > 0);
      assert((await fleet.askAll('SET', key, 'plain', 'NX', 'PX', 60_000)).every((reply) => reply === null));
      await lock.release();
    });

    test('a keyPrefix belongs to the names, as in redlock', async (t) => {
      const key = newKey();
      const clients = fleet.servers.map(({ url }) => new Redis(url, { keyPrefix: 'app:' }));
      t.after(() => clients.forEach((client) => client.disconnect()));
      const lock = await new Redlock(clients).acquire([key], 5_000);
      assert.deepEqual(lock.resources, [key]);
      await fleet.isHeld(lock, `app:${key}`);
      await (await lock.extend(5_000)).release();
      await fleet.isFree(`app:${key}`);
    });

    test('with node-redis, and quit', async () => {
      const key = newKey();
      const clients = await Promise.all(fleet.servers.map(({ url }) => createClient({ url }).connect()));
      const other = new Redlock(clients);
      const lock = await redlock.acquire([key], 60_000);
      const waiting = other.acquire([key], 5_000, { retryCount: 100, retryDelay: 20, retryJitter: 5 });
      await lock.release();
      const next = await waiting;
      await next.extend(5_000);
      await other.release(new Lock(other, [key], next.value, [], next.expiration)); // as if from a store
      await fleet.isFree(key);
      await other.quit();
      assert(clients.every((client) => !client.isOpen));
    });

    test('mistakes are said at once', async () => {
      const key = newKey();
      await assert.rejects(redlock.acquire([key], 1.5), /integer/);
      await assert.rejects(redlock.using([key], 1.5, async () => {}), /integer/);
      await assert.rejects(redlock.using([key], 550, async () => {}), /automaticExtensionThreshold/);
      await assert.rejects(redlock.using([key], 5_000, {}), /function/);
      assert.throws(() => new Redlock([]), /at least one/);
      assert.throws(() => new Redlock([{}]), TypeError);
      assert.throws(() => new Redlock(fleet.clients, {}, { acquireScript: 'return 1' }), TypeError);
      const { error, ms } = await failure(redlock.acquire([key], 10 ** 14, { retryCount: -1 }));
      assert(error instanceof ExecutionError);
      assert(ms < slack, ms);
      const named = await failure(redlock.acquire([key], 10 ** 14));
      const [{ votesAgainst }] = await votes(named.error);
      assert.match([...votesAgainst.values()][0].message, /turnstile\.max-lease-ms/);
      await fleet.isFree(key);
    });

    test('a client that was closed', async () => {
      const clients = fleet.servers.map(({ url }) => new Redis(url, { retryStrategy: null }));
      await Promise.all(clients.map((client) => client.quit()));
      const { error } = await failure(new Redlock(clients).acquire([newKey()], 5_000, quick));
      const attempts = await votes(error);
      assert.equal(attempts.length, 3);
      for (const { votesAgainst } of attempts) {
        for (const vote of votesAgainst.values()) assert.equal(vote.message, 'Connection is closed.');
      }
    });
  });
}

describe('one server', () => {
  const fleet = new Fleet(1);
  let redlock;
  before(async () => {
    await fleet.start();
    redlock = fleet.redlock;
  });
  after(() => fleet.stop());

  test('a retry stands in line: in order of arrival, and without polling', async () => {
    const key = newKey();
    const [server] = fleet.servers;
    const asked = async () => {
      const [, calls] = /cmdstat_lock\.acquire:calls=(\d+)/i.exec(await server.ask('INFO', 'commandstats'));
      return Number(calls);
    };
    const lock = await redlock.acquire([key], 60_000);
    const before = await asked();
    const settings = { retryCount: 100, retryDelay: 100, retryJitter: 50 };
    const order = [];
    const all = [];
    for (let i = 0; i < 5; i++) {
      const acquired = redlock.acquire([key], 60_000, settings);
      all.push(
        acquired.then(async (next) => {
          order.push(i);
          await next.release();
        }),
      );
      const waiting = new RegExp(`"waiting"[,:]${i + 1}[,}]`);
      await until(async () => waiting.test(JSON.stringify(await server.ask('LOCK.INFO', key))), `${i + 1} in line`);
    }
    await sleep(500);
    await lock.release();
    await Promise.all(all);
    assert.deepEqual(order, [0, 1, 2, 3, 4]);
    const more = (await asked()) - before;
    assert(more <= 10, `${more} requests`); // one try and one place in line for each
  });

  test('a failed wait leaves the line', async () => {
    const key = newKey();
    const lock = await redlock.acquire([key], 60_000);
    await failure(redlock.acquire([key], 5_000, quick));
    assert.doesNotMatch(JSON.stringify(await fleet.servers[0].ask('LOCK.INFO', key)), /"waiting"[,:][1-9]/);
    await lock.release();
    await fleet.isFree(key);
  });

  test('a server that is away for a moment costs attempts, not the lock', async (t) => {
    const key = newKey();
    const [{ url }] = fleet.servers;
    const client = new Redis(url, { enableOfflineQueue: false, retryStrategy: () => 20 }).on('error', () => {});
    t.after(() => client.disconnect());
    await once(client, 'ready');
    await fleet.servers[0].kill();
    const waiting = new Redlock([client]).acquire([key], 5_000, { retryCount: 200, retryDelay: 50, retryJitter: 0 });
    await sleep(100);
    await fleet.servers[0].restart();
    const lock = await waiting;
    assert(lock.attempts.length > 1);
    await lock.release();
  });
});

describe('three servers', () => {
  let fleet, redlock;
  before(async () => {
    fleet = new Fleet(3);
    await fleet.start();
    redlock = fleet.redlock;
  });
  after(() => fleet.stop());

  test('a minority that others hold is left as it is', async () => {
    const key = newKey();
    await fleet.servers[2].ask('SET', key, 'other');
    const lock = await redlock.acquire([key], 10_000);
    const longer = await lock.extend(10_000);
    await longer.release();
    assert.deepEqual(await fleet.owners(key), [null, null, 'other']);
    await fleet.servers[1].ask('SET', key, 'other');
    const { error } = await failure(redlock.acquire([key], 10_000, quick));
    for (const { votesFor, votesAgainst } of await votes(error)) {
      assert.deepEqual([votesFor.size, votesAgainst.size], [1, 2]);
    }
    assert.deepEqual(await fleet.owners(key), [null, 'other', 'other']); // nothing is left
  });

  test('a minority that hangs holds nobody up', async (t) => {
    const key = newKey();
    const { process: hung } = fleet.servers[1];
    hung.kill('SIGSTOP');
    t.after(() => hung.kill('SIGCONT'));
    const start = performance.now();
    const lock = await redlock.acquire([key], 10_000);
    const longer = await lock.extend(10_000);
    await longer.release();
    assert(performance.now() - start < slack, performance.now() - start);
    hung.kill('SIGCONT');
    const [{ votesFor }] = await Promise.all(lock.attempts);
    assert.equal(votesFor.size, 2);
    // What the server was asked meanwhile leaves no lock behind.
    await until(async () => (await fleet.owners(key)).every((owner) => owner === null), 'free');
  });

  test('a lock outlasts the restart of every server, one after another', async () => {
    const key = newKey();
    await redlock.using([key], 1_000, { automaticExtensionThreshold: 700 }, async (signal, lock) => {
      for (const [i, server] of fleet.servers.entries()) {
        await server.restart();
        await until(async () => signal.aborted || (await fleet.owners(key))[i] === lock.value, 'held there again');
      }
      assert(!signal.aborted, signal.error);
      await failure(redlock.acquire([key], 1_000, quick));
    });
    await fleet.isFree(key);
  });

  test('beside a server that has just started the lock is obtained at the first attempt', async (t) => {
    const key = newKey();
    const margin = 1_000;
    const old = new Fleet(3, '--turnstile.token-margin-ms', margin);
    await old.start();
    t.after(() => old.stop());
    const uptime = async (server) => Number(/uptime_in_seconds:(\d+)/.exec(await server.ask('INFO', 'server'))[1]);
    // From then on they refuse a floor that is half a margin ahead.
    await until(async () => (await uptime(old.servers[2])) > 1 + (1.5 * margin) / 1_000, 'no longer new');
    await old.servers[0].restart();
    await until(() => old.clients[0].status === 'ready', 'connected');
    replace(old.clients[2], async (call) => {
      await sleep(5); // the new one and one of the old ones answer first
      return call();
    });
    const lock = await old.redlock.acquire([key], 5_000, { retryCount: 0 });
    assert((await old.servers[0].token(key)) > lock.fencingToken); // it was not followed
    await lock.release();
  });

  test('a server that answers with a larger token does not count', async (t) => {
    const key = newKey();
    const [overtaken, ...others] = fleet.servers.map(({ url }) => new Redis(url));
    t.after(() => [overtaken, ...others].forEach((client) => client.disconnect()));
    replace(overtaken, async (call, args) => {
      const floor = Number(args[args.indexOf('FLOOR') + 1]);
      if (args.includes('FLOOR')) {
        // The hold is lost between the two rounds, and somebody else was there.
        await overtaken.del(key);
        await fleet.servers[0].ask('LOCK.ACQUIRE', key, 'rival', 'PX', 1_000, 'FLOOR', floor + 1);
        await overtaken.del(key);
      }
      return call();
    });
    await fleet.servers[2].ask('SET', key, 'other');
    const { error } = await failure(new Redlock([overtaken, ...others]).acquire([key], 5_000, { retryCount: 0 }));
    const [{ votesAgainst }] = await votes(error);
    assert.match(votesAgainst.get(overtaken).message, /token/);
    assert.deepEqual(await fleet.owners(key), [null, null, 'other']);
  });

  test('a grant that comes when the attempt has failed is given up', async (t) => {
    const key = newKey();
    const clients = fleet.servers.map(({ url }) => new Redis(url));
    t.after(() => clients.forEach((client) => client.disconnect()));
    for (const server of fleet.servers.slice(1)) await server.ask('SET', key, 'other');
    let answer;
    const answered = new Promise((resolve) => (answer = resolve));
    replace(clients[0], async (call, args) => {
      const reply = await call();
      if (args[0] === 'LOCK.ACQUIRE') await answered;
      return reply;
    });
    const { error } = await failure(new Redlock(clients).acquire([key], 60_000, { retryCount: 0 }));
    assert(error instanceof ExecutionError);
    assert.notEqual(await fleet.servers[0].token(key), null);
    answer();
    await until(async () => (await fleet.servers[0].token(key)) === null, 'given up', 2_000);
  });

  test('a release counts each server once, however many attempts it takes', async (t) => {
    const key = newKey();
    const clients = fleet.servers.map(({ url }) => new Redis(url));
    t.after(() => clients.forEach((client) => client.disconnect()));
    const lock = await new Redlock(clients, quick).acquire([key], 60_000);
    let failures = 0;
    const away = (limit) => (call, args) =>
      args[0] === 'LOCK.RELEASE' && failures++ < limit ? Promise.reject(new Error('away')) : call();
    replace(clients[1], away(1));
    replace(clients[2], away(Infinity));
    const { attempts } = await lock.release(); // by the first, then the second
    assert.equal(attempts.length, 2);
    await fleet.servers[2].ask('DEL', key);
  });

  test('using: the signal comes at the end of the lock when a majority is away', async () => {
    const key = newKey();
    const settings = { automaticExtensionThreshold: 500, ...quick };
    const routine = async (signal, lock) => {
      for (const server of fleet.servers.slice(1)) server.process.kill('SIGSTOP');
      await once(signal, 'abort', { signal: AbortSignal.timeout(10_000) });
      return Date.now() - (lock.expiration || Date.now());
    };
    // The release of what a majority cannot confirm is an error, as in redlock.
    let late;
    const start = performance.now();
    const observed = (signal, lock) => routine(signal, lock).then((ms) => (late = ms));
    await failure(new Redlock(fleet.clients, quick).using([key], 1_500, settings, observed));
    assert(late < slack, late);
    assert(performance.now() - start < 15_000);
  });
});
