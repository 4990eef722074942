// Fetching a tensor from the shelf of another executor.
//
// Everything here happens on the thread that serves, in its turn among the client's records. Not for: what
// becomes of a target whose copy failed (session.cpp), and connecting (genie/agent/executor/fetching.py).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

#include <ATen/core/Tensor.h>

#include "../stream.h"
#include "../wire.h"
#include "copies.h"
#include "failure.h"

namespace genie {

// Where it is, as the client says.
struct Origin {
  std::string host;
  uint32_t port = 0;
  std::string server_name;
  uint64_t number = 0;
  std::string token;
  std::string source;  // how messages name it
};
// ProtocolError for what is no address.
Origin read_origin(Reader& in);

// Could not connect, or was turned away. `again`: another attempt may fare better.
struct FetchRefused : std::runtime_error {
  FetchRefused(std::string its_code, const std::string& message, bool again)
      : std::runtime_error(message), code(std::move(its_code)), again(again) {}
  std::string code;
  bool again;
};
// Connects and shows the token; what comes next is a ParcelHeader. FetchRefused. A stream that has not been
// shut down may be given again.
using Fetch = std::function<std::shared_ptr<Stream>(const Origin&)>;

class Landing {
 public:
  // `fetch` may be empty: then nothing can be fetched.
  Landing(Copies& copies, Fetch fetch) : upload_(copies), fetch_(std::move(fetch)) {}

  // `staged` as Upload::begin has it. A connection that breaks is made again, for a while; CopyFailed when
  // that is no use. `meanwhile` is called now and then, and what it throws goes through; the same may then
  // be asked for again.
  void run(const Origin& origin, const at::Tensor& target, const at::Tensor& staged, uint64_t bytes,
           const std::function<void()>& meanwhile);

 private:
  std::shared_ptr<Stream> connect(const Origin& origin, const std::function<void()>& meanwhile);
  void receive(Stream& stream, uint64_t bytes, const std::function<void()>& meanwhile);

  Upload upload_;
  Fetch fetch_;
};

}  // namespace genie
