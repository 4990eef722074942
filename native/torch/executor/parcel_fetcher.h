// Fetches a parcel from another executor into a tensor of this one.
//
// Runs on the serving thread, in the order of the client's records. The caller poisons the target if the
// fetch fails (session.cpp); genie/executor/parcel_connector.py connects.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

#include <ATen/core/Tensor.h>

#include "../stream.h"
#include "../wire.h"
#include "failure.h"
#include "staging.h"

namespace genie {

// Could not connect to the other executor, or was refused by it.
struct ParcelConnectError : std::runtime_error {
  ParcelConnectError(std::string error_code, const std::string& message, bool can_retry)
      : std::runtime_error(message), code(std::move(error_code)), retryable(can_retry) {}
  std::string code;
  bool retryable;
};
// Connects and sends the token; a TensorParcelHeader follows on the stream. ParcelConnectError. The connector
// may return a stream again that has not been shut down.
using ParcelConnector = std::function<std::shared_ptr<Stream>(const ParcelOrigin&)>;

class ParcelFetcher {
 public:
  // `connector` may be empty: then every fetch fails.
  ParcelFetcher(StagingBuffers& staging, ParcelConnector connector)
      : upload_(staging), connector_(std::move(connector)) {}

  // `staging_tensor` as in Upload::begin. Reconnects a limited number of times, then TransferFailed.
  // `keep_alive` is called periodically; its exceptions pass through, after which the same parcel may be
  // fetched again.
  void fetch(const ParcelOrigin& origin, const at::Tensor& target, const at::Tensor& staging_tensor,
             uint64_t bytes, const std::function<void()>& keep_alive);

 private:
  std::shared_ptr<Stream> connect_with_retries(const ParcelOrigin& origin,
                                               const std::function<void()>& keep_alive);
  void receive_parcel_contents(Stream& stream, uint64_t bytes, const std::function<void()>& keep_alive);

  Upload upload_;
  ParcelConnector connector_;
};

}  // namespace genie
