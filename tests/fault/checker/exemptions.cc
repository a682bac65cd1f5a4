#include "fault/checker/exemptions.h"

#include <algorithm>
#include <array>

namespace turnstile::fault {
namespace {

// name, the first seed that forces it, or else (0) the kind of the campaign that it is for; the
// checks that would be wrong; the reason.
//
// Seeds are of 300,000 schedules. They move when the core or the simulator makes other choices:
// tests/fault/checker/refresh-seeds puts in new ones.
constexpr std::array<ExemptionRow, kExemptions> kTable = {{
    // --- What is certain of a hold
    {Exemption::kStrangerMayEndHold, "StrangerMayEndHold", 8, "", "C1 C2 C6",
     "DEL, SET, RENAME and FLUSHALL end a hold, and nobody tells its owner."},
    {Exemption::kServerMayForgetHold, "ServerMayForgetHold", 43, "", "C2 C6",
     "A server that lost writes may not know a hold. It lets in nobody else before its end."},
    {Exemption::kStepMayEndLease, "StepMayEndLease", 96, "", "C1 C2 C6",
     "A lease ends earlier when the wall clock is set forward."},
    {Exemption::kLostCallMayShortenLease, "LostCallMayShortenLease", 103, "", "C1 C2 C6",
     "A call whose answer was lost may have set a shorter lease."},
    {Exemption::kLateCallMayShortenLease, "LateCallMayShortenLease", 0, "lost-replies", "C1 C2 C6",
     "A call whose answer was lost may come late, and shorten a lease that was set since."},
    {Exemption::kReplacedHoldMayBeRevived, "ReplacedHoldMayBeRevived", 0, "skewed-failover", "C1",
     "If a hold is lost, the one before it may be back, and live again by a clock that is behind."},
    {Exemption::kChangeOfModeMayBeLost, "ChangeOfModeMayBeLost", 13303, "", "C1 C4 C6",
     "Whose change between reading and writing was not answered may do the one or the other."},
    {Exemption::kChangeOfModeMayBeUndone, "ChangeOfModeMayBeUndone", 0, "lossy-failover",
     "C1 C4 C6", "Older data, or a lock that a stranger brought here, has the mode of that time."},
    {Exemption::kLostGrantMayCount, "LostGrantMayCount", 0, "lost-replies", "C4 C6",
     "A reentrant call whose answer was lost may have to be released too."},
    {Exemption::kLostReleaseMayCount, "LostReleaseMayCount", 25, "", "C1 C2",
     "A release whose answer was lost may have been the last one that was needed."},
    {Exemption::kCountOfOlderHold, "CountOfOlderHold", 17684, "", "C1 C2 C4",
     "Older data, or a lock that a stranger brought here, has the count of that time."},
    {Exemption::kLostReleaseMayEndLinger, "LostReleaseMayEndLinger", 89180, "", "C1",
     "A release that comes when the lease is over ends the linger, whatever the count."},
    // --- How long a hold may last, and which one it may be
    {Exemption::kStepMayProlongLease, "StepMayProlongLease", 83, "", "C2 C4",
     "A lease lasts longer, or is live again, when the wall clock is set back."},
    {Exemption::kLostCallMayRenew, "LostCallMayRenew", 331, "", "C2 C4",
     "A call whose answer was lost may have set a longer lease."},
    {Exemption::kLostCallMayWaitForServer, "LostCallMayWaitForServer", 0, "pause-server", "C2 C4",
     "A call may lie before a server that is paused, and is carried out when nobody expects it."},
    {Exemption::kLostCallMayGrant, "LostCallMayGrant", 2687, "", "C2 C6",
     "Who asked again and was not told may have a newer hold than it knows of."},
    {Exemption::kHeldBackCallMayGrant, "HeldBackCallMayGrant", 0, "lost-replies", "C2",
     "A call that was held back may be granted after what was asked since."},
    {Exemption::kLostUpgradeMayChangeToken, "LostUpgradeMayChangeToken", 0, "lost-replies",
     "C2 C4 C6", "A reader whose call to write was not answered may have the token of a writer."},
    {Exemption::kLostFloorMayChangeToken, "LostFloorMayChangeToken", 0, "lost-replies",
     "C2 C3 C4 C6", "A call with a floor that was not answered may have raised the token."},
    {Exemption::kTokenOfOlderHold, "TokenOfOlderHold", 0, "lossy-failover", "C2",
     "A hold that is back with older data has the token of that time; a touch does not tell it."},
    // --- C2
    {Exemption::kReplacedHoldMayBeBack, "ReplacedHoldMayBeBack", 32365, "", "C2",
     "Older data may have the hold that had been replaced."},
    {Exemption::kStrangerMayBringHoldBack, "StrangerMayBringHoldBack", 0, "other-commands", "C2",
     "RENAME and RESTORE may bring an older hold back, or one with another lease."},
    {Exemption::kLossMayBringHoldBack, "LossMayBringHoldBack", 1484, "", "C2",
     "Older data may have a longer lease than the one that was set since."},
    {Exemption::kRegisterKnowsNewerHold, "RegisterKnowsNewerHold", 0, "lossy-failover", "C2",
     "The register may know the token of a hold that was lost, and rightly refuses an older one."},
    // --- C3
    {Exemption::kGrantOfLostCall, "GrantOfLostCall", 25, "", "C3",
     "Who asks again may be told the token that a call of it got whose answer was lost."},
    {Exemption::kGrantOfOlderHold, "GrantOfOlderHold", 37247, "", "C3",
     "Who asks again may be told the token of a hold that is back with older data."},
    {Exemption::kFloorMayHaveBeenGiven, "FloorMayHaveBeenGiven", 0, "lossy-failover", "C3",
     "Who holds older data gets just the floor that it names, which others may have had since."},
    // --- C4
    {Exemption::kNoAnswerWhileUnavailable, "NoAnswerWhileUnavailable", 4658, "", "C4",
     "A server that is down, paused or cut off answers nobody."},
    {Exemption::kNoGrantWhileUnavailable, "NoGrantWhileUnavailable", 38, "", "C4",
     "A server that is down, paused or in its grace lets nobody in."},
    {Exemption::kReleaseMayBeLost, "ReleaseMayBeLost", 0, "lossy-failover", "C4",
     "A release may be lost with a server: the hold keeps others out until its lease is over."},
    {Exemption::kRenewalMayBeLost, "RenewalMayBeLost", 0, "lossy-failover", "C4",
     "A shorter lease may be lost with a server: the longer one before it keeps others out."},
    {Exemption::kStrangerMayHold, "StrangerMayHold", 95, "", "C4",
     "SET and RENAME put something in the place of the lock, which keeps others out."},
    {Exemption::kUntoldMayHold, "UntoldMayHold", 77, "", "C4",
     "Whose call was not answered may hold the lock."},
    {Exemption::kGrantMayBeHeldBack, "GrantMayBeHeldBack", 162, "", "C4",
     "A hold begins long before its owner is told if the answer is held back."},
    {Exemption::kWaiterMayBeHeldBack, "WaiterMayBeHeldBack", 67, "", "C4",
     "A request that is held back does not wait yet; an answer that is held back has been given."},
    {Exemption::kReaderMayWrite, "ReaderMayWrite", 14831, "", "C4",
     "Who reads for certain and perhaps writes keeps readers waiting."},
    // --- C5
    {Exemption::kRequestMayBeHeldBack, "RequestMayBeHeldBack", 3, "", "C5",
     "A request that is held back arrives later than others that were sent after it."},
    {Exemption::kRetryMayStandInLine, "RetryMayStandInLine", 14, "", "C5",
     "Who asks again is served in the place of its first call, which may still wait."},
    {Exemption::kNoOrderWhileUnavailable, "NoOrderWhileUnavailable", 38135, "", "C5",
     "Answers of one moment may be read far apart if a server or the driver pauses in between."},
    // --- C6
    {Exemption::kTokenMayBeOfOlderHold, "TokenMayBeOfOlderHold", 37247, "", "C6",
     "Who asks again may be told the token of a hold that is back with older data."},
    {Exemption::kReaderMayWriteAlready, "ReaderMayWriteAlready", 79, "", "C6",
     "Who perhaps writes keeps its token when it asks to write."},
    {Exemption::kUntoldGrantMayBeReleased, "UntoldGrantMayBeReleased", 0, "lost-replies", "C6",
     "A release may be that of a hold which the owner got by a call that was not answered."},
    {Exemption::kOlderHoldMayBeReleased, "OlderHoldMayBeReleased", 0, "lossy-failover", "C6",
     "A hold that was released may be back with older data, or be brought back by a stranger."},
    {Exemption::kStepMayLetReleaseAgain, "StepMayLetReleaseAgain", 0, "clock", "C6",
     "A hold that was over is live again when the wall clock is set back."},
    {Exemption::kBindingMayBeForgotten, "BindingMayBeForgotten", 0, "planned-failover", "C2 C4 C6",
     "A server that did not grant the hold does not know its channel, and counts once more."},
    // --- What only the simulator can tell (Simulator::IsExcused)
    {Exemption::kReturnedHoldIsUsed, "ReturnedHoldIsUsed", 200595, "", "C1 C2",
     "A hold that is back with older data is used by an owner that does not know it had lost it."},
}};

}  // namespace

std::span<const ExemptionRow> ExemptionTable() { return kTable; }

std::optional<Exemption> FindExemption(std::string_view name) {
  const auto row = std::find_if(kTable.begin(), kTable.end(),
                                [&](const ExemptionRow& it) { return it.name == name; });
  return row == kTable.end() ? std::nullopt : std::optional(row->exemption);
}

}  // namespace turnstile::fault
