// The one instance of everything. The server calls back without saying to whom: so there is one
// place to ask, defined in module.cc, for those who are called by the server (commands, callbacks,
// the type, INFO, CONFIG). Nobody below them knows it.

#ifndef TURNSTILE_REDIS_INSTANCE_H_
#define TURNSTILE_REDIS_INSTANCE_H_

#include "core/engine.h"
#include "redis/alarm.h"
#include "redis/redis_host.h"
#include "redis/slots.h"

namespace turnstile {

struct Instance {
  explicit Instance(const HostCallbacks& callbacks) : host(callbacks), engine(host), slots(engine) {
    host.Attach(engine.settings(), slots);
  }

  RedisHost host;
  Engine engine;
  Slots slots;
  Alarm alarm;
  int moved_from = 0;  // the database that the MOVE takes its key from, of which we are told now
};

Instance& TheInstance();

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_INSTANCE_H_
