// See parcel_fetches.h.
#include "parcel_fetches.h"

#include <utility>

#include "connection.h"

namespace genie {

namespace {

constexpr uint64_t PENDING_FETCH_BYTES_MAX = 256u << 20;
constexpr size_t PENDING_FETCHES_MAX = 256;

}  // namespace

bool ParcelFetches::has_space_for(uint64_t more_bytes) const {
  return pending_.empty() ||
         (pending_bytes_ + more_bytes <= PENDING_FETCH_BYTES_MAX && pending_.size() < PENDING_FETCHES_MAX);
}

void ParcelFetches::add(ParcelFetch fetch) {
  pending_bytes_ += fetch.bytes;
  pending_.push_back(std::move(fetch));
}

void ParcelFetches::complete(uint64_t frame_number) {
  while (!pending_.empty() && pending_.front().frame_number <= frame_number) {
    pending_bytes_ -= pending_.front().bytes;
    completed_.push_back(std::move(pending_.front()));
    pending_.pop_front();
  }
}

std::vector<ParcelFetch> ParcelFetches::take_completed() { return std::exchange(completed_, {}); }

}  // namespace genie
