// The parcels that the executor of a connection fetches from other executors. The mutex of the connection
// guards it. Does not issue the copies (executor_copy.cpp).
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include <c10/util/intrusive_ptr.h>

namespace genie {

class Connection;
using ConnectionPtr = c10::intrusive_ptr<Connection>;

// A FetchParcel. The executor acknowledges its frame when the fetch has ended, successfully or not.
struct ParcelFetch {
  uint64_t frame_number;
  ConnectionPtr source_connection;
  uint64_t parcel_number;
  uint64_t bytes;
};

class ParcelFetches {
 public:
  // Whether `more_bytes` may be fetched now: pending parcels use memory on other executors.
  bool has_space_for(uint64_t more_bytes) const;
  // In the order of their frames.
  void add(ParcelFetch fetch);
  // The executor has acknowledged the frames up to this number.
  void complete(uint64_t frame_number);
  // Fetches that have ended, whose parcels the caller drops at their source.
  std::vector<ParcelFetch> take_completed();

 private:
  std::deque<ParcelFetch> pending_;
  uint64_t pending_bytes_ = 0;
  std::vector<ParcelFetch> completed_;
};

}  // namespace genie
