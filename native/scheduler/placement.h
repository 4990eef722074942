// The placement core: a cluster, a policy, and what the policy has learned. One writer; no locks.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cluster.h"
#include "dice.h"
#include "gang.h"
#include "policy.h"
#include "rows.h"
#include "supply.h"

namespace genie {

class Placement {
 public:
  Placement(const std::string& policy, uint64_t seed, std::vector<TypicalShape> typical,
            const SupplyOptions& options);

  Cluster& cluster() { return cluster_; }
  const Cluster& cluster() const { return cluster_; }
  // A request has arrived. Once each, however often it is tried.
  void observe(int request_class, uint32_t tenant);
  // `among` is a node set, as are `domains`; one of these must take all.
  std::optional<Choice> choose(int request_class, uint32_t tenant, std::optional<int> among);
  std::optional<Choice> place(int request_class, uint32_t tenant, std::optional<int> among);
  std::optional<std::vector<Choice>> place_gang(const Gang& gang,
                                                const std::optional<std::vector<int>>& domains,
                                                std::optional<int> among);
  void drop_class(int request_class);
  // Does ahead what the next decisions would have to do, `budget` judgements of it; true when all is done.
  bool refresh(int64_t budget);

 private:
  // What was learned and what follows from it.
  struct Lesson {
    std::unique_ptr<Policy> policy;
    Supply* supply = nullptr;  // the same object, when it is one that learns
    Rows rows;
  };

  bool is_lesson_due();
  std::unique_ptr<Lesson> learn();
  void learn_if_late();
  std::optional<Choice> choose_at_random(const RequestClass& wanted, uint32_t tenant, const NodeSet* among);

  Cluster cluster_;
  SupplyOptions options_;
  bool random_ = false;
  bool is_refreshed_ = false;  // somebody calls refresh(), so lessons are prepared there
  std::unique_ptr<Lesson> lesson_;
  std::unique_ptr<Lesson> next_;
  std::vector<RequestClass> history_;  // a ring; without their nodes and GPUs, which nobody learns from
  uint64_t observed_ = 0;
  uint64_t due_ = 0;
  Dice dice_;
};

}  // namespace genie
