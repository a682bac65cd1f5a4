// Reads what a server has written to its append-only files.

#ifndef TURNSTILE_TESTS_SUPPORT_AOF_H_
#define TURNSTILE_TESTS_SUPPORT_AOF_H_

#include <cstdint>
#include <string>
#include <vector>

#include "support/client.h"

namespace turnstile::testing {

// Every command in the AOF of the server whose folder is `dir`, in order, including SELECT, MULTI
// and EXEC: the base file (skipped if it is an RDB) and then the increments, as listed by the
// manifest in appendonlydir/. Timestamps (#TS:) are skipped. Throws ProtocolError if a file ends
// inside a command or is not an AOF.
//
// While the server runs, use --appendfsync always: otherwise a write may not have reached the file
// when its client gets the reply.
std::vector<Command> ReadAof(const std::string& dir);

// The last of these commands; empty if there is none.
Command LastInAof(const std::string& dir);

// All commands in the bytes of one file.
std::vector<Command> ParseAof(const std::string& bytes);

// The fact that somebody holds a lock, as it is replicated: LOCK.HELD key owner "token since-ms
// end-ms", followed by its details.
struct HeldNumbers {
  int64_t token = 0;
  int64_t since = 0;
  int64_t end = 0;
};
Command HeldCommand(const std::string& key, const std::string& owner, const HeldNumbers& numbers,
                    const Command& details = {});

// The numbers in the command. Throws ProtocolError if it is not such a fact.
HeldNumbers NumbersOf(const Command& held);

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_AOF_H_
