// What a server has written to its append-only files.

#ifndef TURNSTILE_TESTS_SUPPORT_AOF_H_
#define TURNSTILE_TESTS_SUPPORT_AOF_H_

#include <cstdint>
#include <string>
#include <vector>

#include "support/client.h"

namespace turnstile::testing {

// Every command of the AOF of the server whose folder is `dir`, in order, SELECT, MULTI and EXEC
// included: the base file (skipped if it is an RDB) and then the increments, as the manifest in
// appendonlydir/ lists them. Timestamps (#TS:) are left out. A file that ends inside a command, or
// is none, throws ProtocolError.
//
// While the server runs, use --appendfsync always: otherwise a write may still be on its way to the
// file when its client has been answered.
std::vector<Command> ReadAof(const std::string& dir);

// The last of them; empty if there is none.
Command LastInAof(const std::string& dir);

// All commands in the bytes of one file.
std::vector<Command> ParseAof(const std::string& bytes);

// The fact that somebody holds a lock, as it is told: LOCK.HELD key owner "token since-ms end-ms",
// and behind it its details.
struct HeldNumbers {
  int64_t token = 0;
  int64_t since = 0;
  int64_t end = 0;
};
Command HeldCommand(const std::string& key, const std::string& owner, const HeldNumbers& numbers,
                    const Command& details = {});

// The numbers in it. Throws ProtocolError if the command is no such fact.
HeldNumbers NumbersOf(const Command& held);

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_AOF_H_
