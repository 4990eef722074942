// See across.h.
#include "across.h"

#include <ATen/ops/empty.h>

#include "errors.h"
#include "storage.h"

namespace genie {

namespace {

using at::Tensor;

constexpr const char* WHAT = "a copy between two remote devices";

void check_dimensions(const Tensor& tensor) {
  if (tensor.dim() <= static_cast<int64_t>(DIMENSIONS_MAX)) return;
  raise("device.op_refused",
        "a tensor on remote_accelerator has at most 64 dimensions, not " + std::to_string(tensor.dim()));
}

std::string name_of(const Connection& connection) {
  const ConnectionOptions& options = connection.options();
  return (options.device_name + " (" + options.executor + ")").substr(0, HOST_BYTES_MAX);
}

uint64_t ship(Connection& from, const Tensor& source) {
  Connection::Batch batch(from);
  uint64_t parcel = batch.new_parcel();
  batch.records().record(Record::Ship);
  batch.records().u64(parcel);
  write_view(batch.records(), source);
  batch.finish_frame();
  return parcel;
}

void land(Connection& to, const Tensor& target, const ConnectionPtr& from, uint64_t parcel) {
  std::string token = from->token(parcel);
  uint64_t bytes = target.nbytes();
  Connection::Batch batch(to);
  batch.begin_frame();
  Writer& records = batch.records();
  records.record(Record::Land);
  write_view(records, target);
  records.u64(bytes);
  records.text(from->options().host);
  records.u32(from->options().port);
  records.text(from->options().server_name);
  records.u64(parcel);
  records.text(token);
  records.text(name_of(*from));
  batch.finish_land(from, parcel, bytes);
}

// A failure at the source is one at the target, too; it is raised once.
void synchronize(Connection& from, Connection& to) {
  try {
    from.synchronize();
  } catch (...) {
    try {
      to.synchronize();
    } catch (const std::exception&) {
      // the same, told by the other side
    }
    throw;
  }
  to.synchronize();
}

// `source` has the target's dtype and sizes.
//
// The Ship is written before the Land, always, and that is why executors that wait for each other never do so
// in a circle: a Land waits for a Ship that was written earlier, and everything that stands before that Ship
// in its executor's stream was written earlier still. Going from one wait to the next leads back in time.
void carry(const Tensor& target, const Tensor& source) {
  check_dimensions(source);
  check_dimensions(target);
  ConnectionPtr from = handle_of(source).connection, to = handle_of(target).connection;
  from->check_not_recording(WHAT);
  to->check_not_recording(WHAT);
  to->wait_landed(source.nbytes());
  uint64_t parcel = ship(*from, source);
  try {
    land(*to, target, from, parcel);
  } catch (...) {
    from->unship(parcel);
    throw;
  }
  if (to->options().blocking) synchronize(*from, *to);
}

}  // namespace

void copy_across(const Tensor& target, const Tensor& source) {
  Tensor same = source.scalar_type() == target.scalar_type() ? source : source.to(target.scalar_type());
  if (same.numel() == target.numel()) {
    carry(target, same.sizes() == target.sizes() ? same : same.expand(target.sizes()));
    return;
  }
  // Only what is there travels; it is spread out on the other side.
  Tensor staged = at::empty(same.sizes(), target.options().memory_format(at::MemoryFormat::Contiguous));
  carry(staged, same);
  target.copy_(staged);
}

}  // namespace genie
