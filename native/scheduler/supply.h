// The default policy: keep up the supply of what is asked for. See docs/PLACEMENT.md for the idea.
#pragma once

#include <memory>
#include <vector>

#include "policy.h"

namespace genie {

struct SupplyOptions {
  double gamma = 0.1;    // the weight of room for requests of several GPUs
  bool by_model = true;  // false: one pressure for all models (to see what that part does)
  int draws = 60;        // imagined arrivals a sequence; 1 looks one step ahead
};

// What the last requests (request classes, CPU-only ones among them) say about the next ones.
std::unique_ptr<Policy> make_supply(const Cluster& cluster, const std::vector<int>& history,
                                    const SupplyOptions& options);

}  // namespace genie
