// A set of nodes as a bit set.
#pragma once

#include <cstdint>
#include <vector>

namespace genie {

class NodeSet {
 public:
  // Nodes 0 to count - 1.
  static NodeSet first_nodes(size_t count) {
    NodeSet nodes;
    nodes.words_.assign(count / 64, ~uint64_t{0});
    if (count % 64 != 0) nodes.words_.push_back((uint64_t{1} << count % 64) - 1);
    return nodes;
  }
  void add(size_t node) {
    if (words_.size() <= node / 64) words_.resize(node / 64 + 1);
    words_[node / 64] |= uint64_t{1} << node % 64;
  }
  void remove(size_t node) {
    if (node / 64 < words_.size()) words_[node / 64] &= ~(uint64_t{1} << node % 64);
  }
  bool contains(size_t node) const { return (mask_of_block(node / 64) >> node % 64 & 1) != 0; }
  // Nodes 64 * number to 64 * number + 63.
  uint64_t mask_of_block(size_t number) const { return number < words_.size() ? words_[number] : 0; }

 private:
  std::vector<uint64_t> words_;
};

}  // namespace genie
