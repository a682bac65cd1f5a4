// A worker's side of the connection to the register of its test: one line per request and reply.

import { once } from 'node:events';
import net from 'node:net';
import readline from 'node:readline';

/** Connects and says what kind of worker this is. */
export async function connectToRegister(port, kind) {
  const connection = net.connect(Number(port), '127.0.0.1').setNoDelay();
  await once(connection, 'connect');
  connection.write(`${kind}\n`);
  const replies = readline.createInterface({ input: connection })[Symbol.asyncIterator]();
  return {
    async tell(...words) {
      connection.write(`${words.join(' ')}\n`);
      const { value, done } = await replies.next();
      if (done) throw new Error('the register is gone');
      return value.split(' ');
    },
    end: (then) => connection.end(then),
  };
}
