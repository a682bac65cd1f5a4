// What the checker does not call wrong because it cannot know better: an answer was lost, data may
// be older, a clock was moved, somebody else was at the lock, a message was held back. Each such
// case has a name and a row in the table of exemptions.cc, which says why it is there and which
// seed of the simulator forces it: something right would be called wrong without it. Tests hold the
// table to that: SimulatorTest.EveryExemptionIsForcedByItsSeed, and ExemptionsTest with a small
// history for each. What nothing forces is to be removed: an exemption is a hole in the checks.

#ifndef TURNSTILE_TESTS_FAULT_CHECKER_EXEMPTIONS_H_
#define TURNSTILE_TESTS_FAULT_CHECKER_EXEMPTIONS_H_

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace turnstile::fault {

enum class Exemption : uint8_t {
  // What is certain of a hold.
  kStrangerMayEndHold,
  kServerMayForgetHold,
  kStepMayEndLease,
  kLostCallMayShortenLease,
  kLateCallMayShortenLease,
  kReplacedHoldMayBeRevived,
  kChangeOfModeMayBeLost,
  kChangeOfModeMayBeUndone,
  kLostGrantMayCount,
  kLostReleaseMayCount,
  kCountOfOlderHold,
  kLostReleaseMayEndLinger,
  // How long a hold may last, and which one it may be.
  kStepMayProlongLease,
  kLostCallMayRenew,
  kLostCallMayWaitForServer,
  kLostCallMayGrant,
  kHeldBackCallMayGrant,
  kLostUpgradeMayChangeToken,
  kLostFloorMayChangeToken,
  kTokenOfOlderHold,
  // C2
  kReplacedHoldMayBeBack,
  kStrangerMayBringHoldBack,
  kLossMayBringHoldBack,
  kRegisterKnowsNewerHold,
  // C3
  kGrantOfLostCall,
  kGrantOfOlderHold,
  kFloorMayHaveBeenGiven,
  // C4
  kNoAnswerWhileUnavailable,
  kNoGrantWhileUnavailable,
  kReleaseMayBeLost,
  kRenewalMayBeLost,
  kStrangerMayHold,
  kUntoldMayHold,
  kGrantMayBeHeldBack,
  kWaiterMayBeHeldBack,
  kReaderMayWrite,
  // C5
  kRequestMayBeHeldBack,
  kRetryMayStandInLine,
  kNoOrderWhileUnavailable,
  // C6
  kTokenMayBeOfOlderHold,
  kReaderMayWriteAlready,
  kUntoldGrantMayBeReleased,
  kOlderHoldMayBeReleased,
  kStepMayLetReleaseAgain,
  kBindingMayBeForgotten,
  // What only the simulator can tell.
  kReturnedHoldIsUsed,

  kExemptions,
};
inline constexpr size_t kExemptions = static_cast<size_t>(Exemption::kExemptions);

struct ExemptionRow {
  Exemption exemption;
  std::string_view name;    // without the k
  uint64_t seed;            // the first schedule that forces it, or 0
  std::string_view kind;    // of the campaign, which is what it is for if there is no seed
  std::string_view checks;  // that would call wrong what is right
  std::string_view reason;
};

// In the order of the enumeration.
std::span<const ExemptionRow> ExemptionTable();
std::optional<Exemption> FindExemption(std::string_view name);

// Those that hold: all, unless some are taken away to see what they are for.
class Exemptions {
 public:
  bool Has(Exemption exemption) const { return !off_[static_cast<size_t>(exemption)]; }
  Exemptions Without(Exemption exemption) const {
    Exemptions rest = *this;
    rest.off_.set(static_cast<size_t>(exemption));
    return rest;
  }

 private:
  std::bitset<kExemptions> off_;
};

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_CHECKER_EXEMPTIONS_H_
