// What a call that waits is answered, and what is published on a channel in place of an answer.

#ifndef TURNSTILE_CORE_NOTICE_H_
#define TURNSTILE_CORE_NOTICE_H_

#include <string>
#include <string_view>
#include <variant>

#include "core/decide.h"
#include "core/request.h"
#include "core/types.h"

namespace turnstile {

// Why a wait ended that was neither granted nor timed out.
enum class WaitEnd {
  kSuperseded,    // a newer call of the same owner took over its entries
  kCancelled,     // a LOCK.RELEASE of the same owner
  kWrongType,     // a key now holds another type
  kDisconnected,  // the connection that the wait was bound to closed
  kDemoted,       // this server is no longer a primary
};

// The answer to a waiting call: nothing (it timed out), a token, why the request cannot be granted,
// how the wait ended, or an error of the server.
using WaitAnswer = std::variant<std::monostate, Token, Outcome, WaitEnd, std::string>;

// A hold was lost that its owner had bound to a channel.
struct HoldLoss {
  Token token;
  Loss how;
};

// A message to whoever asked for it with NOTIFY. Views.
struct Notice {
  NotifyTarget to;
  std::string_view user;  // on whose behalf: it must still have the right to publish there
  std::string_view key;   // of the lock; of a wait for several, the first
  std::variant<WaitAnswer, HoldLoss> what;
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_NOTICE_H_
