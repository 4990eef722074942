// The default policy: keep up the supply of what is asked for. See docs/PLACEMENT.md for the idea.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "policy.h"
#include "values.h"

namespace genie {

struct SupplyOptions {
  double gamma = 0.05;   // the weight of room for requests of several GPUs
  bool by_model = true;  // false: one pressure for all models (to see what that part does)
  int draws = 60;        // imagined arrivals a sequence at most; 1 looks one step ahead
};

class Supply final : public Policy {
 public:
  // From the last requests, the oldest first, those without GPUs too.
  Supply(const Cluster& cluster, const std::vector<RequestClass>& history, const SupplyOptions& options);
  // The same lesson, weighed by the supply of now.
  Supply(const Cluster& cluster, const Supply& other);

  std::optional<Candidate> judge(const Cluster& cluster, int number, const RequestClass& wanted,
                                 uint32_t tenant) override;
  // Whether some supply is so far from what it was that the weights do not tell the truth any more.
  bool is_stale(const Cluster& cluster);

 private:
  using Totals = std::array<Value, kModelsMax>;
  // Requests for so many GPUs of these models.
  struct Group {
    uint64_t models;
    int gpus;
    int64_t volume;      // asked for
    int64_t supply = 0;  // when the weights were made
  };
  struct Known {
    uint32_t version = 0;
    bool open = false;
    int model = 0;
    Value value;
    double worth = 0;
  };

  void gather(const Cluster& cluster, const std::vector<RequestClass>& history);
  void ask(uint64_t models, int gpus, int64_t volume);
  void weigh(const Cluster& cluster);
  int64_t supply_of(const Group& group) const;
  size_t index_of(int gpus) const;
  void recount(const Cluster& cluster, int number);
  void count(const Known& known, int sign);
  double worth(const Value& value, int model) const;
  Candidate candidate(const Node& node, const RequestClass& wanted, uint16_t gpus, double before);

  SupplyOptions options_;
  std::shared_ptr<Values> values_;
  std::vector<Group> groups_;
  Totals totals_{};
  std::vector<Known> known_;
  uint64_t read_ = 0;  // changes of the cluster that are in totals_
  std::array<double, kModelsMax> fill_weights_{};
  std::array<std::array<double, kSeveralMax>, kModelsMax> room_weights_{};
};

}  // namespace genie
