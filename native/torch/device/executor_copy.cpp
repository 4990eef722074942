// See executor_copy.h.
#include "executor_copy.h"

#include <ATen/ops/empty.h>

#include "errors.h"
#include "storage.h"

namespace genie {

namespace {

using at::Tensor;

constexpr const char* OPERATION = "a copy between two remote devices";

std::string name_of(const Connection& connection) {
  const ConnectionOptions& options = connection.options();
  return (options.device_name + " (" + options.executor + ")").substr(0, HOST_BYTES_MAX);
}

uint64_t publish_parcel(Connection& from, const Tensor& source) {
  Connection::Batch batch(from);
  uint64_t parcel = batch.new_parcel();
  batch.records().record(Record::PublishParcel);
  batch.records().u64(parcel);
  write_view(batch.records(), source);
  batch.finish_frame();
  return parcel;
}

void fetch_parcel(Connection& to, const Tensor& target, const ConnectionPtr& from, uint64_t parcel) {
  std::string token = from->token(parcel);
  uint64_t bytes = target.nbytes();
  Connection::Batch batch(to);
  batch.begin_frame();
  Writer& records = batch.records();
  records.record(Record::FetchParcel);
  write_view(records, target);
  records.u64(bytes);
  const ConnectionOptions& source = from->options();
  write_origin(records, {source.host, source.port, source.server_name, parcel, token, name_of(*from)});
  batch.finish_fetch(from, parcel, bytes);
}

// An error at the source is also one at the target; it is raised once.
void synchronize(Connection& from, Connection& to) {
  try {
    from.synchronize();
  } catch (...) {
    try {
      to.synchronize();
    } catch (const std::exception&) {
      // the same error
    }
    throw;
  }
  to.synchronize();
}

// `source` has the target's dtype and sizes.
//
// PublishParcel is always written before FetchParcel, which rules out deadlocks between executors: a
// FetchParcel waits for a PublishParcel that was written earlier, and all records before that one in its
// stream were written earlier still, so a chain of waits cannot form a cycle.
void copy_tensor(const Tensor& target, const Tensor& source) {
  check_dimensions(source.dim());
  check_dimensions(target.dim());
  ConnectionPtr from = handle_of(source).connection, to = handle_of(target).connection;
  from->check_not_recording(OPERATION);
  to->check_not_recording(OPERATION);
  to->wait_for_fetch_window(source.nbytes());
  uint64_t parcel = publish_parcel(*from, source);
  try {
    fetch_parcel(*to, target, from, parcel);
  } catch (...) {
    from->drop_parcel(parcel);
    throw;
  }
  if (to->options().blocking) synchronize(*from, *to);
}

}  // namespace

void copy_between_executors(const Tensor& target, const Tensor& source) {
  Tensor converted = source.scalar_type() == target.scalar_type() ? source : source.to(target.scalar_type());
  if (converted.numel() == target.numel()) {
    copy_tensor(target, converted.sizes() == target.sizes() ? converted : converted.expand(target.sizes()));
    return;
  }
  // Only the unexpanded elements are sent; the target expands them.
  Tensor staged = at::empty(converted.sizes(), target.options().memory_format(at::MemoryFormat::Contiguous));
  copy_tensor(staged, converted);
  target.copy_(staged);
}

}  // namespace genie
