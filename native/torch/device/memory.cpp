// See memory.h.
#include "memory.h"

#include <c10/core/CachingDeviceAllocator.h>

#include "errors.h"
#include "interrupts.h"
#include "device_registry.h"
#include "storage.h"

namespace genie {

namespace {

using c10::CachingDeviceAllocator::DeviceStats;

void set_aggregate_stat(c10::CachingAllocator::StatArray& stats, uint64_t current, uint64_t peak) {
  auto& all = stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  all.current = static_cast<int64_t>(current);
  all.peak = static_cast<int64_t>(peak);
}

// Memory that an executor caches is not reported, so reserved equals allocated.
struct RemoteAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    return allocate_remote_storage(
        *device_registry().get_or_open_connection(device_registry().current_device()), bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {
    raise_python_error("device.op_refused", "remote memory cannot be copied by address");
  }

  bool initialized() override { return device_registry().device_count() > 0; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}  // there is one in-order stream

  DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    DeviceStats stats;
    StatsReply now =
        fetch_executor_counters(*device_registry().get_or_open_connection(index), /*reset_peak=*/false);
    for (auto* bytes :
         {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes, &stats.reserved_bytes}) {
      set_aggregate_stat(*bytes, now.bytes_allocated, now.bytes_allocated_peak);
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}  // nothing accumulates
  void resetPeakStats(c10::DeviceIndex index) override {
    fetch_executor_counters(*device_registry().get_or_open_connection(index), /*reset_peak=*/true);
  }
};

RemoteAllocator remote_allocator_instance;

}  // namespace

StatsReply fetch_executor_counters(Connection& connection, bool reset_peak) {
  connection.check_not_recording("reading counters");
  PendingReply reply;
  {
    GilRelease release;
    Connection::LockedRecordWriter writer(connection);
    writer.records().begin_record(RecordKind::Stats, reset_peak);
    uint64_t number = writer.finish_record_and_request_reply(reply);
    connection.wait_for_reply(number, reply);
  }
  try {
    WireReader in(reply.payload.data(), reply.payload.size());
    return in.read_value<StatsReply>();
  } catch (const ProtocolError& error) {
    connection.fail_session_and_raise(error);
  }
}

c10::Allocator* remote_allocator() { return &remote_allocator_instance; }

}  // namespace genie

namespace c10 {
REGISTER_ALLOCATOR(DeviceType::PrivateUse1, genie::remote_allocator())
}  // namespace c10
