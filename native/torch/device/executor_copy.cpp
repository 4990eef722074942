// See executor_copy.h.
#include "executor_copy.h"

#include <ATen/ops/empty.h>

#include "errors.h"
#include "storage.h"

namespace genie {

namespace {

using at::Tensor;

constexpr const char* EXECUTOR_COPY_DESCRIPTION = "a copy between two remote devices";

std::string executor_description(const Connection& connection) {
  const ConnectionOptions& options = connection.options();
  return (options.device_name + " (" + options.executor_description + ")").substr(0, HOST_NAME_BYTES_MAX);
}

uint64_t publish_parcel(Connection& from, const Tensor& source) {
  Connection::LockedRecordWriter writer(from);
  uint64_t parcel = writer.assign_parcel_number();
  writer.records().begin_record(RecordKind::PublishParcel);
  writer.records().write_u64(parcel);
  write_storage_view(writer.records(), source);
  writer.finish_record_and_send_frame();
  return parcel;
}

void fetch_parcel(Connection& destination, const Tensor& target, const ConnectionPtr& from,
                  uint64_t parcel_number) {
  std::string token = from->make_fetch_token(parcel_number);
  uint64_t bytes = target.nbytes();
  Connection::LockedRecordWriter writer(destination);
  writer.finish_current_frame();
  WireWriter& records = writer.records();
  records.begin_record(RecordKind::FetchParcel);
  write_storage_view(records, target);
  records.write_u64(bytes);
  const ConnectionOptions& source = from->options();
  write_parcel_origin(records, {source.host, source.port, source.tls_server_name, parcel_number, token,
                                executor_description(*from)});
  writer.finish_fetch_parcel_record(from, parcel_number, bytes);
}

// An error at the source is also one at the target; it is raised once.
void synchronize_both(Connection& source, Connection& destination) {
  try {
    source.synchronize();
  } catch (...) {
    try {
      destination.synchronize();
    } catch (const std::exception&) {
      // the same error
    }
    throw;
  }
  destination.synchronize();
}

// `source` has the target's dtype and sizes.
//
// PublishParcel is always written before FetchParcel, which rules out deadlocks between executors: a
// FetchParcel waits for a PublishParcel that was written earlier, and all records before that one in its
// stream were written earlier still, so a chain of waits cannot form a cycle.
void copy_by_parcel(const Tensor& target, const Tensor& source) {
  check_tensor_can_be_sent(*source.unsafeGetTensorImpl());
  check_tensor_can_be_sent(*target.unsafeGetTensorImpl());
  ConnectionPtr from = storage_handle_of(source).connection, to = storage_handle_of(target).connection;
  from->check_not_recording(EXECUTOR_COPY_DESCRIPTION);
  to->check_not_recording(EXECUTOR_COPY_DESCRIPTION);
  to->wait_for_fetch_window(source.nbytes());
  uint64_t parcel = publish_parcel(*from, source);
  try {
    fetch_parcel(*to, target, from, parcel);
  } catch (...) {
    from->drop_parcel(parcel);
    throw;
  }
  if (to->options().waits_for_every_op) synchronize_both(*from, *to);
}

}  // namespace

void copy_between_executors(const Tensor& target, const Tensor& source) {
  Tensor converted = source.scalar_type() == target.scalar_type() ? source : source.to(target.scalar_type());
  if (converted.numel() == target.numel()) {
    copy_by_parcel(target,
                   converted.sizes() == target.sizes() ? converted : converted.expand(target.sizes()));
    return;
  }
  // Only the unexpanded elements are sent; the target expands them.
  Tensor staged = at::empty(converted.sizes(), target.options().memory_format(at::MemoryFormat::Contiguous));
  copy_by_parcel(staged, converted);
  target.copy_(staged);
}

}  // namespace genie
