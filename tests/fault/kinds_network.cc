#include "fault/round.h"

namespace turnstile::fault {

std::vector<Kind> NetworkKinds() { return {}; }

}  // namespace turnstile::fault
