#include "fault/round.h"

namespace turnstile::fault {

std::vector<Kind> ClusterKinds() { return {}; }

}  // namespace turnstile::fault
