// See memory.h.
#include "memory.h"

#include <c10/core/CachingDeviceAllocator.h>

#include "errors.h"
#include "interrupts.h"
#include "roster.h"
#include "storage.h"

namespace genie {

namespace {

using c10::CachingDeviceAllocator::DeviceStats;

void set(c10::CachingAllocator::StatArray& stats, uint64_t current, uint64_t peak) {
  auto& all = stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  all.current = static_cast<int64_t>(current);
  all.peak = static_cast<int64_t>(peak);
}

// What an executor has cached beside the tensors is its own affair, so nothing is reserved but what is in
// use.
struct RemoteAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    return genie::allocate(*roster().connection(roster().current()), bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {
    raise("device.op_refused", "remote memory cannot be copied by its address");
  }

  bool initialized() override { return roster().count() > 0; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}  // there is one stream, and it is in order

  DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    DeviceStats stats;
    ExecutorCounters now = executor_counters(*roster().connection(index), /*forget_peak=*/false);
    for (auto* bytes :
         {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes, &stats.reserved_bytes}) {
      set(*bytes, now.bytes, now.bytes_peak);
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}  // nothing accumulates
  void resetPeakStats(c10::DeviceIndex index) override {
    executor_counters(*roster().connection(index), /*forget_peak=*/true);
  }
};

RemoteAllocator the_allocator;

}  // namespace

ExecutorCounters executor_counters(Connection& connection, bool forget_peak) {
  connection.check_not_recording("reading counters");
  Awaited awaited;
  {
    LetInterpreterGo go;
    Connection::Batch batch(connection);
    batch.records().record(Record::Stats, forget_peak);
    uint64_t number = batch.finish_ask(awaited);
    connection.await(number, awaited);
  }
  try {
    Reader in(awaited.payload.data(), awaited.payload.size());
    return {in.u64(), in.u64(), in.u64(), in.u64(), in.u64()};
  } catch (const ProtocolError& error) {
    connection.fail(error);
  }
}

c10::Allocator* allocator() { return &the_allocator; }

}  // namespace genie

namespace c10 {
REGISTER_ALLOCATOR(DeviceType::PrivateUse1, genie::allocator())
}  // namespace c10
