// Loaded before a test server: whatever address it asks for, it listens on a
// free port of 127.0.0.1, and the port is written as a line to descriptor 3.
'use strict';
const fs = require('node:fs');
const net = require('node:net');

const listen = net.Server.prototype.listen;
net.Server.prototype.listen = function (...args) {
  const done = args.find((a) => typeof a === 'function');
  this.once('listening', () => fs.writeSync(3, `${this.address().port}\n`));
  return listen.call(this, { host: '127.0.0.1', port: 0 }, done);
};
