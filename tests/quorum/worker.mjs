// One competitor of tests/quorum/run: Node, with the client of client-examples/node.
//
// worker.mjs REGISTER_PORT LEASE_MS SERVER_URL...: asks the register what to do until it says stop.

import { Quorum } from '../../client-examples/node/quorum.mjs';
import { connectToRegister } from '../support/register.mjs';

/** The example's client on a network in which some servers are unreachable. */
class PartitionedQuorum extends Quorum {
  cut = new Set();

  async ask(server, command) {
    if (this.cut.has(this.servers.indexOf(server))) throw new Error('cut off');
    return super.ask(server, command);
  }
}

const [registerPort, lease, ...urls] = process.argv.slice(2);
const leaseMs = Number(lease);
const quorum = await PartitionedQuorum.open(urls);
const { tell, end } = await connectToRegister(registerPort, 'node');

// The register uses the same monotonic clock, but performance.now() has a different origin.
const endOf = (hold) =>
  Math.floor(Number(process.hrtime.bigint()) / 1e3 + (hold.until - performance.now()) * 1e3);

for (;;) {
  const [order, ...cut] = await tell('next');
  if (order === 'stop') break;
  quorum.cut = new Set(cut.map(Number));
  const hold = await quorum.acquire('quorum:register', { leaseMs, waitMs: 200, renew: false });
  if (!hold) continue;
  const [todo] = await tell('enter', hold.token, endOf(hold));
  if (todo === 'oversleep') {
    await tell('late-write', hold.token); // the register replies when another worker has written
  } else if (todo !== 'too-late') {
    if (todo === 'extend' && (await hold.extend(leaseMs))) {
      await tell('extended', hold.token, endOf(hold));
    }
    if (hold.valid()) await tell('write', hold.token);
    await tell('leave', hold.token);
  }
  await hold.release();
}
end();
quorum.close();
