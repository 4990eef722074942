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
    nodes.node_bits_.assign(count / 64, ~uint64_t{0});
    if (count % 64 != 0) nodes.node_bits_.push_back((uint64_t{1} << count % 64) - 1);
    return nodes;
  }
  void add(size_t node) {
    if (node_bits_.size() <= node / 64) node_bits_.resize(node / 64 + 1);
    node_bits_[node / 64] |= uint64_t{1} << node % 64;
  }
  void remove(size_t node) {
    if (node / 64 < node_bits_.size()) node_bits_[node / 64] &= ~(uint64_t{1} << node % 64);
  }
  bool contains(size_t node) const { return (mask_of_block(node / 64) >> node % 64 & 1) != 0; }
  // Nodes 64 * number to 64 * number + 63.
  uint64_t mask_of_block(size_t number) const { return number < node_bits_.size() ? node_bits_[number] : 0; }

 private:
  std::vector<uint64_t> node_bits_;
};

}  // namespace genie
